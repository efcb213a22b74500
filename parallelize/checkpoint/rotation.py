"""checkpoints: a run that is killed goes on from the last of a few files.

enter        the newest file that is whole ── nothing there: from the beginning
step()       every so many steps or minutes: one more file, the oldest removed
exit         one more file; after an exception none, the last one was between steps
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parallelize.checkpoint.atomic_write import clear_leftovers
from parallelize.checkpoint.background_save import Background, Copies
from parallelize.checkpoint.file_format import Checkpoint, is_archive, read
from parallelize.checkpoint.loading import load_into
from parallelize.checkpoint.rendezvous import Meeting
from parallelize.checkpoint.save_schedule import Timetable, timetable
from parallelize.checkpoint.saving import completed, line_of, take, write_taken
from parallelize.checkpoint.sharded_folder import Share, is_broken_off, remove
from parallelize.checkpoint.state_dicts import needs_all_ranks, state_of
from parallelize.errors import ConfigError, ParallelizeError, SyncError
from parallelize.runtime import context

__all__ = ["Checkpoints", "checkpoints"]

_NAME = re.compile(r"step-(\d{9,})(\.pt)?")
_OWN = "_checkpoints"
"""Under this name a file holds the number of steps and the values given to `step`."""

_FILE = "file "
"""So begins what rank 0 tells of the file that it has chosen."""

_log = logging.getLogger("parallelize")


class Checkpoints:
    """The files of one run, as `checkpoints` yields them.

    Args:
        folder: where they are.
        keep: how many.
        things: what is saved.
        when: asked after every step.
        line: of the program, by which ranks find each other.
        in_background: whether files are written while the loop goes on.
        sharded: whether each is a folder, as `save` has it.

    Attributes:
        steps: calls of `step`, those of the runs before this one included.
        values: what `step` was given last, by name.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        things: Mapping[str, Any],
        when: Timetable,
        line: str,
        in_background: bool,
        sharded: bool | None,
    ) -> None:
        self._keep, self._things, self._when, self._line = keep, things, when, line
        # The program may go to another directory, and did not mean to take the rest of its files along.
        self._named, self._folder = folder, folder.absolute()
        self._is_sharded = any(map(needs_all_ranks, things.values())) if sharded is None else sharded
        self._background, self._copies = Background(), Copies() if in_background else None
        self.steps: int = 0
        self.values: dict[str, Any] = {}

    def step(self, **values: Any) -> None:
        """A step of the run has ended: save if it is time. Call it on every rank, after `optimizer.step()`.

        Args:
            **values: plain values that go along, such as best=best; they are in `values` when the run goes on.

        Raises:
            SyncError: the other ranks do not save after the same step.
        """
        self.steps += 1
        self.values.update(values)
        if self._when.is_due(self.steps):
            self.save()

    def save(self) -> None:
        """Save now, on every rank; the oldest files beyond `keep` are removed.

        A file of the same number of steps is replaced: what is saved may have changed without a step.
        """
        self.wait()  # for the one before: its copy is overwritten
        meeting, path = Meeting.of(f"checkpoints at {self._line}"), self._path(self.steps)
        own = {_OWN: {"steps": self.steps, "values": self.values}}
        with completed(meeting):
            things = {**self._things, **own}
            named = self._named / path.name
            taken = take(path, things, meeting, named=named, together_s=float("inf"), sharded=self._is_sharded)
            if self._copies is not None:
                copied = self._copies.of(*taken)
                self._background.start(functools.partial(self._write, path, *copied, meeting))
            else:
                self._write(path, *taken, meeting)

    def wait(self) -> None:
        """Until what is written in the background is on the disk.

        Raises:
            ParallelizeError: the file system has refused.
        """
        self._background.wait()

    def _write(self, path: Path, checkpoint: Checkpoint, share: Share | None, meeting: Meeting) -> None:
        write_taken(path, checkpoint, share, meeting)
        if meeting.rank != 0:
            return
        # A newer file is one that was passed over when the run went on: it is nobody's past.
        past = [each for each in self._files() if _number(each) <= _number(path) and each != path]
        # One of the same number has the other form, that of another backend, and is older than this one.
        replaced = [each for each in past if _number(each) == _number(path)]
        for each in replaced + past[len(replaced) + self._keep - 1 :]:
            remove(each)

    def resume(self) -> None:
        """Go on from the newest file that is whole, if there is one; rank 0 says which."""
        passed_over: set[str] = set()
        while True:
            meeting = Meeting.of(f"checkpoints at {self._line} (resuming)")
            meeting.bring(b"")
            chosen = self._chosen(passed_over, meeting)
            if not chosen or self._goes_on_from(self._folder / chosen, meeting):
                return
            passed_over.add(chosen)

    def _goes_on_from(self, path: Path, meeting: Meeting) -> bool:
        """Whether it could be loaded; False, on all ranks, where parts of it are damaged."""
        try:
            values = load_into(path, self._things, rng=True, what=f"{meeting.what} together")
        except (ConfigError, SyncError):
            raise
        except ParallelizeError as exc:
            if not path.is_dir():  # a file was read in full before it was chosen
                raise
            if meeting.rank == 0:
                _passed_over(exc)
            return False
        own = values[_OWN]
        self.steps, self.values = own["steps"], dict(own["values"])
        if meeting.rank == 0:
            _log.info("going on from %s, after %d steps", path, self.steps)
        return True

    def _chosen(self, passed_over: set[str], meeting: Meeting) -> str:
        """The name of the newest file that is whole, as rank 0 sees it; "": there is none."""
        if meeting.rank != 0:
            told = meeting.outcome()
            if told.startswith(_FILE):
                return told.removeprefix(_FILE)
            what = f"{meeting.what} failed on rank 0: {told}"
            raise SyncError(what, why="it chooses for all", fix="see its error", is_echo=True)
        told = "it ended by an exception"
        try:
            chosen = self._newest(passed_over)
            told = f"{_FILE}{chosen}"
        except ConfigError as exc:
            told = str(exc)
            raise
        finally:
            meeting.tell(told)
        return chosen

    def _newest(self, passed_over: set[str]) -> str:
        refusal: ConfigError | None = None
        for path in self._files():
            try:
                if path.name not in passed_over and _OWN in read(path).entries:
                    return path.name
            except ParallelizeError as exc:
                _passed_over(exc)
                if isinstance(exc, ConfigError) and is_archive(path):
                    refusal = refusal or exc
        if refusal is not None:
            raise ConfigError(
                f"checkpoints({str(self._named)!r}): {refusal.faults[0].what}",
                why="no file in the folder can be gone on from, and this one is not damaged: to begin anew would "
                "replace it",
                fix="to begin anew, name another folder or remove the files; to go on, " + refusal.faults[0].fix,
            ) from refusal
        return ""

    def _files(self) -> list[Path]:
        """Newest first."""
        if not self._folder.is_dir():
            return []
        named = (each for each in self._folder.iterdir() if _NAME.fullmatch(each.name))
        return sorted((each for each in named if not is_broken_off(each)), key=_number, reverse=True)

    def _path(self, steps: int) -> Path:
        return self._folder / f"step-{steps:09d}{'' if self._is_sharded else '.pt'}"


@contextlib.contextmanager
def checkpoints(
    folder: str | os.PathLike[str],
    /,
    *,
    every: int | str = "10min",
    keep: int = 3,
    in_background: bool = False,
    sharded: bool | None = None,
    **things: Any,
) -> Iterator[Checkpoints]:
    """Save a run as it goes, and go on from the last file when it is started again.

        with parallel_model(model), checkpoints("runs/a", model=model, optimizer=optimizer, loader=loader) as saved:
            for epoch in range(loader.epoch, epochs):
                for x, y in loader:
                    ...
                    optimizer.step()
                    saved.step()

    A run that is killed anywhere and started again with as many processes ends with bitwise the same weights as one
    that is not, where the arithmetic itself is repeatable. With `@distributed(max_restarts=3)` it starts itself again.
    Random numbers that a dataset draws in worker processes, or under `seed=`, are others in the rest of the epoch that
    was broken off.

    Enter it on every rank, inside the `parallel_model` block. An epoch that is gone on with gives the batches that are
    left of it: `loader.epoch` says which it is.

    Args:
        folder: of this run alone; with several nodes one that all of them share. A relative one is where it is when the
            block is entered.
        every: a number of steps, or a time by rank 0's clock, such as "10min".
        keep: how many files.
        in_background: write from a copy in memory, while the loop goes on; the step that saves then takes as long as
            copying. A failure raises at the next save. Rank 0 copies the state; sharded, each rank its parts.
        sharded: whether each checkpoint is a folder with a file of every rank, as for `save`; None: under fsdp.
        **things: as for `save`, but for plain values, which `step` takes.

    Yields:
        What counts the steps.

    Raises:
        ConfigError: options without a meaning; files of things that are made differently.
        SyncError: ranks that do not save after the same step.
    """
    if type(keep) is not int or keep < 1:
        raise ConfigError(f"keep={keep!r}", why="at least the last file is needed to go on", fix="use keep=3")
    if not things:
        raise ConfigError(f"checkpoints({str(folder)!r})", why="there is nothing to save", fix="name it: model=model")
    for name, thing in things.items():
        if state_of(thing) is None:
            raise ConfigError(
                f"checkpoints({name}={thing!r:.80})",
                why="it has no state that could be put back",
                fix=f"give plain values to step({name}=...), and find them in `values` when the run goes on",
            )
    # Two frames up: contextlib's own is in between.
    line = line_of(sys._getframe(2))
    store = dist.distributed_c10d._get_default_store() if _is_connected() else None
    when = timetable(every, store=store, rank=context.rank())
    saved = Checkpoints(
        Path(folder), keep=keep, things=things, when=when, line=line, in_background=in_background, sharded=sharded
    )
    if context.rank() == 0:
        _clear(Path(folder))
    saved.resume()
    try:
        yield saved
        saved.save()
    finally:
        saved.wait()


def _clear(folder: Path) -> None:
    """Remove what the runs before have not ended."""
    clear_leftovers(folder, _NAME)
    for each in folder.iterdir() if folder.is_dir() else ():
        if _NAME.fullmatch(each.name) and is_broken_off(each):
            remove(each)


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _passed_over(exc: ParallelizeError) -> None:
    _log.warning("passed over: %s", str(exc).replace("\n", ";"))


def _is_connected() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
