"""checkpoints(): save a run periodically, rotate old checkpoints, and resume from the newest one.

enter     load the newest readable checkpoint, if one exists
step()    save if one is due; remove the oldest beyond `keep`
exit      save once more, except after an exception: the block may have stopped in the middle of a step
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from parallelize.checkpoint.atomic_write import remove_stale_temp_files
from parallelize.checkpoint.background_save import BackgroundWriter
from parallelize.checkpoint.file_format import is_incomplete, is_zip_file, read_file, remove_checkpoint
from parallelize.checkpoint.loading import load_into
from parallelize.checkpoint.rendezvous import Rendezvous, store_of_ranks
from parallelize.checkpoint.safe_types import to_safe_types
from parallelize.checkpoint.save_schedule import SaveSchedule
from parallelize.checkpoint.saving import call_site_of, prepare_save, states_of
from parallelize.checkpoint.state_dicts import handler_for, needs_all_ranks
from parallelize.errors import ConfigError, ParallelizeError, SyncError
from parallelize.runtime import context

__all__ = ["Checkpoints", "checkpoints"]

_NAME = re.compile(r"step-(\d{9,})(\.pt)?")
_PROGRESS = "_checkpoints"  # name of the entry with the number of steps and the values passed to `step`
_open_blocks: defaultdict[str, set[int]] = defaultdict(set)  # numbers of the open blocks, by call site
_log = logging.getLogger("parallelize")


class Checkpoints:
    """The checkpoints of one run, as yielded by `checkpoints`.

    Attributes:
        steps: number of `step` calls, including those before the run was resumed.
        values: the latest values passed to `step`, by name.
    """

    def __init__(self, folder: Path, objects: Mapping[str, Any], call_site: str, every: Any, keep: int) -> None:
        self._objects, self._call_site, self._keep = objects, call_site, keep
        self._schedule = SaveSchedule(every, store=store_of_ranks(), rank=context.rank())
        # The program may change its working directory; all files stay in this folder.
        self._user_folder, self._folder = folder, folder.absolute()
        self._is_sharded = any(map(needs_all_ranks, objects.values()))
        self._writer, self._in_background = BackgroundWriter(), True
        self.steps: int = 0
        self.values: dict[str, Any] = {}

    def step(self, **values: Any) -> None:
        """Count a step and save if a checkpoint is due. Call it on every rank, after `optimizer.step()`.

        Args:
            **values: plain values to save too, such as best=best; after a resume they are in the attribute `values`.

        Raises:
            ConfigError: a value could only be loaded by running code from the file.
            ParallelizeError: the last save in the background has failed.
            SyncError: ranks do not save after the same step.
        """
        self._writer.raise_failure()
        self.steps += 1
        self.values.update({name: to_safe_types(each, where=name) for name, each in values.items()})
        if self._schedule.is_due(self.steps):
            self.save()

    def save(self) -> None:
        """Save now, on every rank, and remove the oldest checkpoints beyond `keep`.

        A checkpoint with the same number of steps is replaced: state may have changed without a step.
        """
        rendezvous = Rendezvous(f"checkpoints at {self._call_site}")
        path = self._folder / f"step-{self.steps:09d}{'' if self._is_sharded else '.pt'}"
        objects = {**self._objects, _PROGRESS: {"steps": self.steps, "values": self.values}}
        submit = self._writer.submit if self._in_background else functools.partial
        where: Any = {"user_path": self._user_folder / path.name, "sharded": self._is_sharded}
        with rendezvous.publishing_outcome():
            self.wait()  # the next snapshot overwrites the previous one; if its save has failed, all ranks raise
            complete = prepare_save(path, objects, rendezvous, submit, wait_s=float("inf"), **where)
            job = functools.partial(self._complete, path, complete, rendezvous.rank)
            if self._in_background:
                self._writer.complete(job)
            else:
                job()

    def wait(self) -> None:
        """Wait until the background save is on disk, or raise its ParallelizeError."""
        self._writer.wait()

    def _complete(self, path: Path, complete: Callable[[], object], rank: int) -> None:
        complete()
        if rank != 0:
            return
        # Newer files were skipped as damaged when the run resumed: they do not count and are not removed.
        older = [each for each in self._files() if _steps_of(each) <= _steps_of(path) and each != path]
        # Another backend may have saved the same step in the other form (file or folder).
        replaced = [each for each in older if _steps_of(each) == _steps_of(path)]
        for each in replaced + older[len(replaced) + self._keep - 1 :]:
            remove_checkpoint(each)

    def resume(self) -> None:
        """Load the newest readable checkpoint, if one exists; rank 0 chooses it for all ranks."""
        skipped: set[str] = set()
        while True:
            rendezvous = Rendezvous(f"checkpoints at {self._call_site} (resuming)")
            rendezvous.post(("",))
            with rendezvous.publishing_outcome():
                if rendezvous.rank == 0:
                    rendezvous.post(self._newest_readable(skipped), "chosen")
            chosen = rendezvous.posted(0, "chosen")
            if not chosen or self._load_from(self._folder / chosen, rendezvous):
                return
            skipped.add(chosen)

    def _load_from(self, path: Path, rendezvous: Rendezvous) -> bool:
        """Load a checkpoint; return False, on all ranks, if its shards are damaged."""
        try:
            progress = load_into(path, self._objects, rng=True, name=f"{rendezvous.call}: load")[_PROGRESS]
        except ParallelizeError as exc:
            # A single file was verified in full before it was chosen.
            if isinstance(exc, (ConfigError, SyncError)) or not path.is_dir():
                raise
            if rendezvous.rank == 0:
                _log_skipped(exc)
            return False
        self.steps, self.values = progress["steps"], dict(progress["values"])
        if rendezvous.rank == 0:
            _log.info("resuming from %s, after %d steps", path, self.steps)
        return True

    def _newest_readable(self, skipped: set[str]) -> str:
        """Return the name of the newest checkpoint that rank 0 can read, or "" if none exists."""
        refusal: ConfigError | None = None
        for path in self._files():
            try:
                if path.name in skipped:
                    continue
                if _PROGRESS in read_file(path).states:
                    return path.name
                what, why = f"{path} is not a checkpoint of checkpoints()", "another call or program wrote it"
                raise ConfigError(what, why=why, fix="load() reads it")
            except ParallelizeError as exc:
                _log_skipped(exc)
                if isinstance(exc, ConfigError) and is_zip_file(path):
                    refusal = refusal or exc
        if refusal is not None:
            raise ConfigError(
                f"checkpoints({str(self._user_folder)!r}): {refusal.faults[0].what}",
                why=f"{refusal.faults[0].why}; no other checkpoint in the folder can be loaded, and a new run would "
                "replace this one",
                fix="for a new run, use another folder or remove the files; to resume, " + refusal.faults[0].fix,
            ) from refusal
        return ""

    def _files(self) -> list[Path]:
        """Return the complete checkpoints in the folder, newest first."""
        if not self._folder.is_dir():
            return []
        matching = (each for each in self._folder.iterdir() if _NAME.fullmatch(each.name))
        return sorted((each for each in matching if not is_incomplete(each)), key=_steps_of, reverse=True)


@contextlib.contextmanager
def checkpoints(
    folder: str | os.PathLike[str],
    /,
    *,
    every: int | str | timedelta = "10min",
    keep: int = 3,
    in_background: bool = True,
    sharded: bool | None = None,
    **objects: Any,
) -> Iterator[Checkpoints]:
    """Save a run periodically, and resume it from the newest checkpoint when it is started again.

        with parallel_model(model), checkpoints("runs/a", model=model, optimizer=optimizer, loader=loader) as saved:
            for epoch in range(loader.epoch, epochs):
                for x, y in loader:
                    ...
                    optimizer.step()
                    saved.step()

    A run that is killed at any point and restarted with the same number of processes ends with bitwise the same weights
    as an uninterrupted run, if the computation itself is deterministic. `@distributed(max_restarts=3)` restarts it
    automatically. In the rest of the interrupted epoch, random numbers that a dataset draws in DataLoader workers, or
    under `seed=`, differ.

    Enter the block on every rank, inside the `parallel_model` block. After a resume, `loader.epoch` is the number of
    the interrupted epoch, and the loader yields the remaining batches of that epoch.

    Args:
        folder: folder for this run alone; with several nodes, one that all of them share. A relative path is resolved
            when the block is entered.
        every: a number of steps, or a duration by rank 0's clock, such as "10min" or a timedelta.
        keep: how many checkpoints to keep.
        in_background: whether another process writes, from a copy in shared memory, while training continues. A saving
            step is delayed only by the copy: of the full state on rank 0, or of its shards on each rank. A write error
            is raised at the next step. The last save, at the end of the block, is not in the background.
        sharded: whether each checkpoint is a folder with one file per rank, as for `save`; None: only under fsdp.
        **objects: as for `save`, but not plain values: pass those to `step`.

    Yields:
        The `Checkpoints` of the run; call its `step` after each optimizer step.

    Raises:
        ConfigError: an option is invalid, or the checkpoints were saved from objects constructed differently.
        SyncError: ranks do not save after the same step.
    """
    if type(keep) is not int or keep < 1:
        raise ConfigError(f"keep={keep!r}", why="resuming needs at least one checkpoint", fix="use keep=3")
    if not objects:
        raise ConfigError(f"checkpoints({str(folder)!r})", why="there is nothing to save", fix="pass model=model")
    for name, obj in objects.items():
        if handler_for(obj) is None:
            raise ConfigError(
                f"checkpoints({name}={obj!r:.80})",
                why="it has no state_dict() and load_state_dict(), which restore an object",
                fix=f"pass plain values to step({name}=...); a resumed run finds them in `values`",
            )
    states_of({name: obj for name, obj in objects.items() if not needs_all_ranks(obj)})  # refuses unsafe types now
    call_site = call_site_of(sys._getframe(2))  # two frames up: one of them is contextlib's
    # Two blocks on one line, as for two folders, save at the same time.
    number = next(each for each in itertools.count() if each not in _open_blocks[call_site])
    _open_blocks[call_site].add(number)
    saved = Checkpoints(Path(folder), objects, f"{call_site}{f' ({number})' * bool(number)}", every, keep)
    saved._is_sharded = saved._is_sharded if sharded is None else sharded
    saved._in_background = in_background
    try:
        if context.rank() == 0:
            try:
                _remove_leftovers(Path(folder))
            except OSError as exc:
                fix = "let this user read and write the folder, or use another one"
                raise ConfigError(f"checkpoints({str(folder)!r})", why=str(exc), fix=fix) from exc
        saved.resume()
        yield saved
        saved._in_background = False
        saved.save()
    finally:
        _open_blocks[call_site].remove(number)
        saved._writer.close()


def _remove_leftovers(folder: Path) -> None:
    """Remove incomplete checkpoints and temporary files of killed runs."""
    remove_stale_temp_files(folder, _NAME, now_s=time.time())
    for each in folder.iterdir() if folder.is_dir() else ():
        if _NAME.fullmatch(each.name) and is_incomplete(each):
            remove_checkpoint(each)


def _steps_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _log_skipped(exc: ParallelizeError) -> None:
    _log.warning("skipped checkpoint: %s", str(exc).replace("\n", ";"))
