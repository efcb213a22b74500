"""checkpoints(): save a run periodically, rotate old checkpoints, and resume from the newest one.

    enter     load the newest readable checkpoint, if one exists
    step()    save if one is due; remove the oldest beyond `keep`
    exit      save once more, except after an exception: the block may have stopped in the middle of a step

In the background a thread writes a copy, which torch's stager makes in memory that it keeps, pinned if there is CUDA.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pdb
import re
import reprlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from parallelize.checkpoint.files import MAIN_FILE, SHARD_PREFIX, reading, remove
from parallelize.checkpoint.record import not_of_save
from parallelize.checkpoint.save_load import gather, load_into, prepare_save, rank, together
from parallelize.checkpoint.states import (
    VALUE,
    Named,
    handler_for,
    is_sharded,
    states_of,
    to_safe_types,
)
from parallelize.config.options import DURATION_UNITS_S, duration
from parallelize.errors import ConfigError, ParallelizeError
from parallelize.plugins.options import flag
from parallelize.run import context
from parallelize.run.surroundings import surroundings
from parallelize.run.threads import begin_on
from parallelize.run.user_line import user_stacklevel
from parallelize.torch_patches.whole_file import remove_unused

__all__ = ["Checkpoints", "Replay", "StepReplayed", "checkpoints"]

_NAME = re.compile(r"step-(\d{9,})(\.pt)?")
_PROGRESS = "_checkpoints"  # name of the entry with the number of steps and the values passed to `step`
_log = logging.getLogger("parallelize")


class StepReplayed(BaseException):
    """Ends the script after the step; not an Exception, so that user code does not catch it."""


class Replay(NamedTuple):
    """A step that runs again in one process.

    Args:
        path: a checkpoint before it.
        step: its number, from 1.
        debugs: whether pdb stops before it.
    """

    path: Path
    step: int
    debugs: bool


class _Schedule:
    """Every number of steps, or every duration by rank 0's clock; with the same result on all ranks.

    Ranks ask for rank 0's clock after each step, and later whenever the steps since the last save are 5 % more.
    """

    def __init__(self, every: Any) -> None:
        period = every if isinstance(every, timedelta) else duration(every)
        self._steps = every if type(every) is int else 0
        self._period_s = period.total_seconds() if period else 0.0
        if self._steps <= 0 and self._period_s <= 0:
            raise ConfigError(
                f"every={every!r}",
                why="it is neither a number of steps nor a duration",
                fix=f"use every=1000 for steps, or every='10min' with one of the units {', '.join(DURATION_UNITS_S)}",
            )
        self._passed, self._next, self._saved_s = 0, 1, time.monotonic()

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step, from 1."""
        if self._steps:
            return step % self._steps == 0
        self._passed += 1
        if self._passed < self._next:
            return False
        now_s = time.monotonic()
        is_due = bool(gather(now_s - self._saved_s >= self._period_s)[0])
        if is_due:
            self._passed, self._saved_s = 0, now_s
        self._next = self._passed + max(1, self._passed // 20)
        return is_due


class Checkpoints:
    """The checkpoints of one run, as yielded by `checkpoints`.

    Attributes:
        steps: number of `step` calls, including those before the run was resumed.
        values: the latest values passed to `step`, by name.
    """

    steps: int = 0

    def __init__(self, folder: Path, objects: Named, schedule: _Schedule, keep: int) -> None:
        self._objects, self._keep, self._schedule = objects, keep, schedule
        # The program may change its working directory; all files stay in this folder.
        self._folder, self._call = folder.absolute(), f"checkpoints({str(folder)!r})"
        run = context.active()
        begin = None if run is None else functools.partial(begin_on, run.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parallelize-checkpoint", initializer=begin)
        self._job: Future[None] | None = None
        # Two blocks of a run may save to different folders, and their threads send in one process group.
        self._saves_of_run: list[Future[None]] = [] if run is None else run.background_saves
        self._sharded = self._in_background = False
        self.values: dict[str, Any] = {}

    def step(self, **values: Any) -> None:
        """Count a step and save if a checkpoint is due. Call it on every rank, after `optimizer.step()`.

        Args:
            **values: plain values to save too, such as best=best; after a resume they are in the attribute
                `values`.

        Raises:
            ConfigError: a value could only be loaded by running code from the file.
            ParallelizeError: the last save in the background has failed.
            SyncError: ranks do not save after the same step.
        """
        if self._job is not None and self._job.done():
            self.wait()
        self.steps += 1
        self.values.update({name: to_safe_types(each, name) for name, each in values.items()})
        self._replay()
        if self._schedule.is_due(self.steps):
            self.save()

    def save(self) -> None:
        """Save now, on every rank, and remove the oldest checkpoints beyond `keep`.

        A checkpoint with the same number of steps is replaced: state may have changed without a step.
        """
        if surroundings().replay is not None:
            return
        path = self._folder / f"step-{self.steps:09d}{'' if self._sharded else '.pt'}"
        objects = {**self._objects, _PROGRESS: {"steps": self.steps, "values": self.values}}
        with together(self._call):  # if the previous save has failed on a rank, all ranks raise
            self.wait()
        stage = self._stager.stage if self._in_background else None
        write = prepare_save(self._call, path, objects, sharded=self._sharded, stage=stage)
        wait(self._saves_of_run)  # as on all ranks, so that these send in one order
        if self._in_background:
            self._job = self._thread.submit(self._complete, path, write)
            self._saves_of_run[:] = [self._job]
        else:  # the writer copies on the current stream of this thread, which has computed the values
            with together(self._call):
                self._complete(path, write)

    def wait(self) -> None:
        """Wait until the background save is on disk, or raise its ParallelizeError."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    @functools.cached_property
    def _stager(self) -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # takes a second

        # Pinned memory is the driver's: a run on the CPU that took some would make a context on the machine's GPU.
        has_gpu = context.current().device.type == "cuda"
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=has_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=has_gpu,
            )
        )

    def _complete(self, path: Path, write: Callable[[], None]) -> None:
        write()
        if rank() == 0:
            remove(path.with_suffix("" if path.suffix else ".pt"))  # of another backend, of the same step
            # Newer files were skipped as damaged when the run resumed: they do not count and are not removed.
            for each in [each for each in self._files() if _steps(each) <= _steps(path)][self._keep :]:
                remove(each)

    def _paths(self) -> list[Path]:
        """Return the paths of checkpoints, whether they are complete or not."""
        found = self._folder.iterdir() if self._folder.is_dir() else ()
        return [path for path in found if _NAME.fullmatch(path.name)]

    def _files(self) -> list[Path]:
        """Return the complete checkpoints, the newest first."""
        complete = [path for path in self._paths() if not path.is_dir() or (path / MAIN_FILE).exists()]
        return sorted(complete, key=_steps, reverse=True)

    def _resume(self) -> None:
        """Remove what killed runs have left, and load the newest checkpoint that is not damaged."""
        with together(self._call) as found, reading(self._folder):
            if rank() == 0:
                self._remove_incomplete()
            replay = surroundings().replay
            names = [each.name for each in ([replay.path] if replay is not None else self._files())]
            found += ["resume", names]
        for name in found[0][1]:
            path = self._folder / name
            try:
                values = load_into(path, self._objects, call=self._call, check=_check_progress)
            except ParallelizeError as exc:
                if "is damaged" not in str(exc):  # in the message on every rank
                    raise
                _log.warning("skipped checkpoint: %s", str(exc).replace("\n", ";"))
                continue
            progress = values[_PROGRESS]
            self.steps, self.values = progress["steps"], dict(progress["values"])
            _log.info("resuming from %s, after %d steps", path, self.steps)
            self._replay(is_resumed=True)
            return

    def _remove_incomplete(self) -> None:
        """Remove what killed saves have left; what is being written is kept."""
        remove_unused(self._folder, ".step-")
        for path in self._paths():
            if path.is_dir():
                remove_unused(path, f".{MAIN_FILE}.")
                if all(part.name.startswith(SHARD_PREFIX) for part in path.iterdir()):
                    remove(path)

    def _replay(self, *, is_resumed: bool = False) -> None:
        """Stop before the step that is replayed, and end after it."""
        replay = surroundings().replay
        if replay is None:
            return
        asked, is_late = f"parallelize replay --step {replay.step}", is_resumed and self.steps >= replay.step
        if is_late:
            raise ConfigError(asked, why=f"{replay.path.name} is of step {self.steps}", fix="use an older checkpoint")
        if context.current().config.logical is None:
            why = "the run has no logical=, so one process computes other bits"
            raise ConfigError(asked, why=why, fix="use @distributed(logical=...) in the run")
        if self.steps == replay.step:
            raise StepReplayed
        if replay.debugs and self.steps == replay.step - 1:
            pdb.Pdb(skip=["parallelize.*", "contextlib"]).set_trace(sys._getframe(user_stacklevel() - 1))


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

    A run that is killed at any point and restarted with the same number of processes ends with bitwise the
    same weights as an uninterrupted run, if the computation itself is deterministic.
    `@distributed(max_restarts=3)` restarts it automatically. In the rest of the interrupted epoch, random
    numbers that a dataset draws in DataLoader workers, or under `seed=`, differ.

    Enter the block on every rank, inside the `parallel_model` block. After a resume, `loader.epoch` is the
    number of the interrupted epoch, and the loader yields the remaining batches of that epoch.

    Args:
        folder: folder for this run alone; with several nodes, one that all of them share. A relative path is
            resolved when the block is entered.
        every: a number of steps, or a duration by rank 0's clock, such as "10min" or a timedelta.
        keep: how many checkpoints to keep.
        in_background: whether a thread writes, from a copy in memory, while training continues. A saving
            step is delayed only by the copy: of the full state on rank 0, or of its shards on each rank. A
            write error is raised at the next step. The last save, at the end of the block, is not in the
            background.
        sharded: whether each checkpoint is a folder with one file per rank, as for `save`; None: only under
            fsdp.
        **objects: as for `save`, but not plain values: pass those to `step`.

    Yields:
        The `Checkpoints` of the run; call its `step` after each optimizer step.

    Raises:
        ConfigError: an option is invalid, or the checkpoints were saved from objects constructed
            differently.
        SyncError: ranks do not save after the same step.
    """
    if type(keep) is not int or keep < 1:
        raise ConfigError(f"keep={keep!r}", why="resuming needs at least one checkpoint", fix="use keep=3")
    if not objects:
        raise ConfigError(f"checkpoints({str(folder)!r})", why="there is nothing to save", fix="pass model=model")
    for name, obj in objects.items():
        if handler_for(obj).kind == VALUE:
            raise ConfigError(
                f"checkpoints({name}={obj!r:.80})",
                why="it has no state_dict() and load_state_dict(), which restore an object",
                fix=f"pass plain values to step({name}=...); a resumed run finds them in `values`",
            )
    states_of({name: obj for name, obj in objects.items() if not is_sharded(obj)})  # refuses unsafe types now
    saved = Checkpoints(Path(folder), objects, _Schedule(every), keep)
    if sharded is None:
        sharded = any(map(is_sharded, objects.values()))
    saved._sharded = flag("sharded", sharded)
    saved._in_background = flag("in_background", in_background)
    try:
        saved._resume()
        yield saved
        saved._in_background = False
        saved.save()
    finally:
        with saved._thread:  # waits for the last job
            saved.wait()


def _check_progress(path: Path, values: Named) -> None:
    """Raise a ConfigError for a checkpoint without the progress that `Checkpoints.save` adds."""
    progress = values.get(_PROGRESS)
    if progress is None:
        why = "another call or program wrote it"
        raise ConfigError(f"{path} is not of checkpoints()", why=why, fix="use another folder; load() reads this file")
    steps = progress.get("steps") if isinstance(progress, dict) else None
    if type(steps) is not int or steps < 0 or not isinstance(progress.get("values"), dict):
        raise not_of_save(path, f"the number of steps is {reprlib.repr(steps)}")


def _steps(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))
