"""checkpoints(): save a run periodically, rotate old checkpoints, and resume from the newest one.

    enter     load the newest readable checkpoint, if one exists
    step()    save if one is due; remove the oldest beyond `keep`
    exit      save once more, except after an exception: the block may have stopped in the middle of
              a step

A save in the background:

    main thread     wait for the save before   copy the content        train on ...
    its thread                                                 write   remove old checkpoints
    main thread     at the next step() or save: raise the error of the thread
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
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from parallelize.checkpoint.exchange import Request, exchange, gather_values, rank, together
from parallelize.checkpoint.files import MAIN_FILE, SHARD_PREFIX, reading, remove
from parallelize.checkpoint.loading import LoadOptions, load_into
from parallelize.checkpoint.record import not_of_save
from parallelize.checkpoint.safe_types import to_safe_types
from parallelize.checkpoint.saving import prepare_save
from parallelize.checkpoint.state_handler import Named, ObjectKind
from parallelize.checkpoint.states import handler_for, is_sharded, states_of
from parallelize.config.options import DURATION_UNITS_S, duration
from parallelize.errors import ConfigError, ParallelizeError
from parallelize.plugins.options import flag
from parallelize.run import context
from parallelize.run.surroundings import surroundings
from parallelize.run.threads import begin_on
from parallelize.run.user_line import user_stacklevel
from parallelize.torch_patches.whole_file import remove_unused

_NAME = re.compile(r"step-(\d{9,})(\.pt)?")
_PROGRESS = "_checkpoints"
"""Name of the entry with the number of steps and the values passed to `step`."""

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
    """Says after which steps to save, with the same result on all ranks.

    A duration is measured by rank 0's clock, for which the ranks have to ask: after each of the
    first steps, and later whenever the steps since the latest save are 5 % more.

    Args:
        every: a number of steps, or a duration.
    """

    def __init__(self, every: Any) -> None:
        self._steps = 0
        self._period_s = 0.0
        if type(every) is int:
            self._steps = every
        else:
            self._period_s = _seconds(every)
        if self._steps <= 0 and self._period_s <= 0:
            raise ConfigError(
                f"every={every!r}",
                why="it is neither a number of steps nor a duration",
                fix="use every=1000 for steps, or every='10min' with one of the units "
                f"{', '.join(DURATION_UNITS_S)}",
            )
        self._steps_since_save = 0
        self._steps_of_next_question = 1
        self._saved_s = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step, from 1."""
        if self._steps:
            return step % self._steps == 0
        self._steps_since_save += 1
        if self._steps_since_save < self._steps_of_next_question:
            return False
        now_s = time.monotonic()
        answers = gather_values(now_s - self._saved_s >= self._period_s)
        is_due = bool(answers[0])
        if is_due:
            self._steps_since_save = 0
            self._saved_s = now_s
        steps_to_wait = max(1, self._steps_since_save // 20)
        self._steps_of_next_question = self._steps_since_save + steps_to_wait
        return is_due


def _seconds(every: Any) -> float:
    """Return a duration in seconds; 0 if it is none."""
    period = every
    if not isinstance(every, timedelta):
        period = duration(every)
    if not period:
        return 0.0
    seconds: float = period.total_seconds()
    return seconds


class _BackgroundThread:
    """The thread that writes the checkpoints of one block, one after the other.

    Two blocks of a run may save to different folders, and their threads send in one process group.
    So a save waits for the latest save of all blocks of the run.
    """

    def __init__(self) -> None:
        run = context.active()
        begin = None
        self._saves_of_run: list[Future[None]] = []
        if run is not None:
            begin = functools.partial(begin_on, run.device)
            self._saves_of_run = run.background_saves
        self._executor = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="parallelize-checkpoint", initializer=begin
        )
        # The save that this block has begun, until its error was raised.
        self._save: Future[None] | None = None
        # torch's, which keeps the memory of the copies for the next ones; None before the first.
        self._stager: Any = None

    def stage(self, content: dict[str, Any]) -> Any:
        """Return a copy of a content in memory, which the next copy overwrites."""
        if self._stager is None:
            self._stager = _new_stager()
        return self._stager.stage(content)

    def wait_for_run(self) -> None:
        """Wait until no thread of the run writes; raise nothing."""
        wait(self._saves_of_run)

    def submit(self, save: Callable[[], None]) -> None:
        """Run a save in the thread; call `wait` and `wait_for_run` before."""
        self._save = self._executor.submit(save)
        self._saves_of_run[:] = [self._save]

    def raise_if_failed(self) -> None:
        """Raise the error of a save that has ended with one; do not wait."""
        if self._save is not None and self._save.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the save is on disk, or raise its ParallelizeError."""
        save = self._save
        self._save = None
        if save is not None:
            save.result()

    def close(self) -> None:
        """Wait for the save, end the thread, free the copies, and raise the error of the save."""
        try:
            with self._executor:
                self.wait()
        finally:
            if self._stager is not None:
                self._stager.close()


def _new_stager() -> Any:
    """Return what copies contents to memory of the CPU, which is pinned in a run on GPUs."""
    # The import takes a second.
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    # Pinned memory is the driver's: a run on the CPU that took some would make a context on the
    # machine's GPU.
    has_gpu = context.current().device.type == "cuda"
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=has_gpu,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=has_gpu,
        )
    )


@dataclass(frozen=True)
class _Options:
    """The options of `checkpoints`, checked."""

    schedule: _Schedule
    keep: int
    sharded: bool
    in_background: bool


class Checkpoints:
    """The checkpoints of one run, as yielded by `checkpoints`.

    Attributes:
        steps: number of `step` calls, including those before the run was resumed.
        values: the latest values passed to `step`, by name.
    """

    steps: int = 0

    def __init__(self, folder: Path, objects: Named, options: _Options) -> None:
        self._call = f"checkpoints({str(folder)!r})"
        # The program may change its working directory; all files stay in this folder.
        self._folder = folder.absolute()
        self._objects = objects
        self._options = options
        self._thread = _BackgroundThread()
        self.values: dict[str, Any] = {}

    def step(self, **values: Any) -> None:
        """Count a step and save if a checkpoint is due.

        Call it on every rank, after `optimizer.step()`.

        Args:
            **values: plain values to save too, such as best=best; after a resume they are in the
                attribute `values`.

        Raises:
            ConfigError: a value could only be loaded by running code from the file.
            ParallelizeError: the last save in the background has failed.
            SyncError: ranks do not save after the same step.
        """
        self._thread.raise_if_failed()
        self.steps += 1
        for name, value in values.items():
            self.values[name] = to_safe_types(value, name)
        self._replay()
        if self._options.schedule.is_due(self.steps):
            self.save()

    def save(self) -> None:
        """Save now, on every rank, and remove the oldest checkpoints beyond `keep`.

        A checkpoint with the same number of steps is replaced: state may have changed without a
        step.
        """
        self._save(in_background=self._options.in_background)

    def _save(self, *, in_background: bool) -> None:
        if surroundings().replay is not None:
            return
        suffix = ".pt"
        if self._options.sharded:
            suffix = ""
        path = self._folder / f"step-{self.steps:09d}{suffix}"
        objects = {**self._objects, _PROGRESS: {"steps": self.steps, "values": self.values}}
        # If the previous save has failed on a rank, all ranks raise.
        together(self._call, self.wait)
        stage = None
        if in_background:
            stage = self._thread.stage
        write = prepare_save(self._call, path, objects, sharded=self._options.sharded, stage=stage)
        # All ranks wait here, so that the threads of all blocks send in one order.
        self._thread.wait_for_run()
        complete = functools.partial(self._complete, path, write)
        if in_background:
            self._thread.submit(complete)
        else:
            # The writer copies on the current stream of this thread, which has computed the values.
            together(self._call, complete)

    def wait(self) -> None:
        """Wait until the background save is on disk, or raise its ParallelizeError."""
        self._thread.wait()

    def _complete(self, path: Path, write: Callable[[], None]) -> None:
        """Write a checkpoint, and remove the oldest ones beyond `keep`."""
        write()
        if rank() != 0:
            return
        # Another backend may have saved the same step in the other form.
        other_suffix = ".pt"
        if path.suffix:
            other_suffix = ""
        remove(path.with_suffix(other_suffix))
        # Newer files were skipped as damaged when the run resumed: they do not count, and are not
        # removed.
        until_this = [file for file in self._files() if _steps(file) <= _steps(path)]
        for file in until_this[self._options.keep :]:
            remove(file)

    def _paths(self) -> list[Path]:
        """Return the paths of checkpoints, whether they are complete or not."""
        if not self._folder.is_dir():
            return []
        return [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]

    def _files(self) -> list[Path]:
        """Return the complete checkpoints, the newest first."""
        complete = filter(_is_complete, self._paths())
        return sorted(complete, key=_steps, reverse=True)

    def _resume(self) -> None:
        """Remove what killed runs have left, and load the newest checkpoint that is not damaged."""
        replies = exchange(self._call, self._resume_request)
        options = LoadOptions(check_values=_check_progress)
        for name in replies[0].names:
            path = self._folder / name
            try:
                values = load_into(path, self._objects, options, call=self._call)
            except ParallelizeError as exc:
                # The message on every rank says so.
                if "is damaged" not in str(exc):
                    raise
                _log.warning("skipped checkpoint: %s", str(exc).replace("\n", ";"))
                continue
            progress = values[_PROGRESS]
            self.steps = progress["steps"]
            self.values = dict(progress["values"])
            _log.info("resuming from %s, after %d steps", path, self.steps)
            self._replay(is_resumed=True)
            return

    def _resume_request(self) -> _ResumeRequest:
        with reading(self._folder):
            if rank() == 0:
                self._remove_incomplete()
            paths = self._files()
        replay = surroundings().replay
        if replay is not None:
            paths = [replay.path]
        return _ResumeRequest(statement="resume", names=[path.name for path in paths])

    def _remove_incomplete(self) -> None:
        """Remove what killed saves have left; what is being written is kept."""
        remove_unused(self._folder, ".step-")
        for path in self._paths():
            if path.is_dir():
                remove_unused(path, f".{MAIN_FILE}.")
                has_only_shards = all(
                    entry.name.startswith(SHARD_PREFIX) for entry in path.iterdir()
                )
                if has_only_shards:
                    remove(path)

    def _replay(self, *, is_resumed: bool = False) -> None:
        """Stop before the step that is replayed, and end after it."""
        replay = surroundings().replay
        if replay is None:
            return
        command = f"parallelize replay --step {replay.step}"
        if is_resumed and self.steps >= replay.step:
            raise ConfigError(
                command,
                why=f"{replay.path.name} is of step {self.steps}",
                fix="use an older checkpoint",
            )
        if context.current().config.logical is None:
            raise ConfigError(
                command,
                why="the run has no logical=, so one process computes other bits",
                fix="use @distributed(logical=...) in the run",
            )
        if self.steps == replay.step:
            raise StepReplayed
        if replay.debugs and self.steps == replay.step - 1:
            frame = sys._getframe(user_stacklevel() - 1)
            pdb.Pdb(skip=["parallelize.*", "contextlib"]).set_trace(frame)


@dataclass(frozen=True)
class _ResumeRequest(Request):
    """What a rank tells the others before a run resumes.

    Args:
        statement: equal on all ranks.
        names: on rank 0, the names of the checkpoints that may be loaded, the newest first.
    """

    names: list[str]


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

        objects = {"model": model, "optimizer": optimizer, "loader": loader}
        with parallel_model(model), checkpoints("runs/a", **objects) as saved:
            for epoch in range(loader.epoch, epochs):
                for x, y in loader:
                    ...
                    optimizer.step()
                    saved.step()

    A run that is killed at any point and restarted with the same number of processes ends with
    bitwise the same weights as an uninterrupted run, if the computation itself is deterministic.
    `@distributed(max_restarts=3)` restarts it automatically. In the rest of the interrupted epoch,
    random numbers that a dataset draws in DataLoader workers, or under `seed=`, differ.

    Enter the block on every rank, inside the `parallel_model` block. After a resume, `loader.epoch`
    is the number of the interrupted epoch, and the loader yields the remaining batches of that
    epoch.

    Args:
        folder: folder for this run alone; with several nodes, one that all of them share. A
            relative path is resolved when the block is entered.
        every: a number of steps, or a duration by rank 0's clock, such as "10min" or a timedelta.
        keep: how many checkpoints to keep.
        in_background: whether a thread writes, from a copy in memory, while training continues. A
            saving step is delayed only by the copy: of the full state on rank 0, or of its shards
            on each rank. A write error is raised at the next step. The last save, at the end of the
            block, is not in the background.
        sharded: whether each checkpoint is a folder with one file per rank, as for `save`; None:
            only under fsdp.
        **objects: as for `save`, but not plain values: pass those to `step`.

    Yields:
        The `Checkpoints` of the run; call its `step` after each optimizer step.

    Raises:
        ConfigError: an option is invalid, or the checkpoints were saved from objects constructed
            differently.
        SyncError: ranks do not save after the same step.
    """
    _check_options(folder, keep, objects)
    if sharded is None:
        sharded = any(map(is_sharded, objects.values()))
    options = _Options(
        _Schedule(every), keep, flag("sharded", sharded), flag("in_background", in_background)
    )
    saved = Checkpoints(Path(folder), objects, options)
    try:
        saved._resume()
        yield saved
        saved._save(in_background=False)
    finally:
        saved._thread.close()


def _check_options(folder: str | os.PathLike[str], keep: int, objects: Named) -> None:
    """Raise a ConfigError for options or objects with which no run could be saved."""
    if type(keep) is not int or keep < 1:
        raise ConfigError(
            f"keep={keep!r}", why="resuming needs at least one checkpoint", fix="use keep=3"
        )
    if not objects:
        raise ConfigError(
            f"checkpoints({str(folder)!r})",
            why="there is nothing to save",
            fix="pass model=model",
        )
    unsharded = {}
    for name, obj in objects.items():
        if handler_for(obj).kind == ObjectKind.VALUE:
            raise ConfigError(
                f"checkpoints({name}={obj!r:.80})",
                why="it has no state_dict() and load_state_dict(), which restore an object",
                fix=f"pass plain values to step({name}=...); a resumed run finds them in `values`",
            )
        if not is_sharded(obj):
            unsharded[name] = obj
    # Types that are not safe are refused now, and not at the first save.
    states_of(unsharded)


def _check_progress(path: Path, values: Named) -> None:
    """Raise a ConfigError for a checkpoint without the progress that `Checkpoints.save` adds."""
    progress = values.get(_PROGRESS)
    if progress is None:
        raise ConfigError(
            f"{path} is not of checkpoints()",
            why="another call or program wrote it",
            fix="use another folder; load() reads this file",
        )
    steps = None
    if isinstance(progress, dict) and isinstance(progress.get("values"), dict):
        steps = progress.get("steps")
    if type(steps) is not int or steps < 0:
        raise not_of_save(path, f"the number of steps is {reprlib.repr(steps)}")


def _steps(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _is_complete(path: Path) -> bool:
    return not path.is_dir() or (path / MAIN_FILE).exists()
