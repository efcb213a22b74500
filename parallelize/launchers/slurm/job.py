"""A queued call: its state, its output, its value."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from parallelize.call.task import Outcome
from parallelize.errors import WorkerError
from parallelize.launchers.slurm import commands
from parallelize.launchers.slurm.job_folder import JobFolder
from parallelize.launchers.slurm.job_state import State, look_up

__all__ = ["Job"]

R = TypeVar("R")

_LOOK_EVERY_S = 0.2
_ASK_EVERY_S = 2.0  # every answer costs the cluster's controller something
_ARRIVES_WITHIN_S = 15.0  # a network file system may show a file later than the queue shows the end of its job
_TAIL_LINES = 20

_FIXES = {
    "CANCELLED": "somebody has cancelled it: submit it again",
    "NODE_FAIL": "a node failed: submit it again, leaving it out by sbatch={'exclude': '<node>'}",
    "OUT_OF_MEMORY": "ask for more by mem=, or use less",
    "TIMEOUT": "ask for more by time=, or stop when should_stop() says so: the job then goes on by itself",
}


class Job(Generic[R]):
    """A call that Slurm queues or runs; it lives on when this process ends.

    Args:
        job_id: Slurm's number, "12", or "12_3" for one of an array.
        folder: where it leaves its output and its value.
        all_ranks: whether its value is the list of every rank's.
    """

    def __init__(self, job_id: str, folder: JobFolder, *, all_ranks: bool = False) -> None:
        self.id = job_id
        self._folder = folder
        self._all_ranks = all_ranks

    @classmethod
    def attach(cls, job_id: str | int, folder: str | Path = "slurm_jobs") -> Job[Any]:
        """A job that another process has submitted, maybe long ago.

        Args:
            job_id: Slurm's number.
            folder: that of the launcher, or the one beside a script of `sbatch_script`.

        Raises:
            LaunchError: there is no such job in the folder.
        """
        return cls(str(job_id), JobFolder.of(str(job_id), Path(folder).expanduser()))

    def __repr__(self) -> str:
        return f"Job({self.id!r}, {str(self._folder.path)!r})"

    @property
    def log(self) -> Path:
        """The file with its output."""
        return self._folder.log(self.id)

    @property
    def state(self) -> str:
        """Slurm's word for its state, such as "PENDING" or "RUNNING"; by what it left where Slurm has forgotten it."""
        known = look_up(self.id)
        return self._by_result() if known is None else known.name

    def _by_result(self) -> str:
        outcomes = self._folder.outcomes(self.id)
        if outcomes is None:
            return "UNKNOWN"
        return "FAILED" if outcomes[0].error is not None else "COMPLETED"

    def done(self) -> bool:
        """Whether there is a value or an error, or will never be one."""
        if self._folder.outcomes(self.id) is not None:
            return True
        state = look_up(self.id)
        return state is None or state.has_ended

    def logs(self) -> str:
        """What it has printed so far, on all nodes and in all attempts."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def cancel(self) -> None:
        """End it, queued or running.

        Raises:
            LaunchError: Slurm does not do it.
        """
        commands.cancel(self.id)

    def result(self, timeout_s: float | None = None) -> R:
        """Its value, waited for.

        Args:
            timeout_s: how long; None: as long as it takes.

        Raises:
            TimeoutError: there is none yet.
            BaseException: whatever the call has raised, with job, place and traceback as notes.
            WorkerError: the job has ended without a value.
        """
        outcomes = self.outcomes(timeout_s=timeout_s)
        value: Any = [each.value for each in outcomes] if self._all_ranks else outcomes[0].value
        return value  # type: ignore[no-any-return]  # the value has travelled as an object

    def outcomes(
        self, *, timeout_s: float | None = None, watch: Callable[[State | None], None] | None = None
    ) -> list[Outcome]:
        """What came of the ranks whose values are wanted; raises as `result` does.

        Args:
            timeout_s: how long to wait; None: as long as it takes.
            watch: called again and again with the state as last known.
        """
        end = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        state, asked, ended = None, 0.0, None
        while (outcomes := self._folder.outcomes(self.id)) is None:
            now = time.monotonic()
            if now > end:
                raise TimeoutError(f"job {self.id} has no result after {timeout_s:g} s; it is {self.state}")
            if now - asked > _ASK_EVERY_S:
                state, asked = look_up(self.id), now
                ended = None if state is not None and not state.has_ended else ended or now
            if ended is not None and now - ended > (_ARRIVES_WITHIN_S if state is None else _ASK_EVERY_S):
                raise self._ended(state)
            if watch is not None:
                watch(state)
            time.sleep(_LOOK_EVERY_S)
        if outcomes[0].error is not None:
            raise self._noted(outcomes[0].error)
        return outcomes

    def _ended(self, state: State | None) -> BaseException:
        how = "is unknown to Slurm" if state is None else f"ended as {state}"
        fix = _FIXES.get("" if state is None else state.name, "read its output")
        return self._noted(
            WorkerError(f"job {self.id} {how} and left no result", why="no process of it has come to its end", fix=fix)
        )

    def _noted(self, error: BaseException) -> BaseException:
        tail = "\n".join(self.logs().splitlines()[-_TAIL_LINES:])
        note = f"Slurm job {self.id}; its output is in {self.log}" + (f" and ends with:\n{tail}" if tail else "")
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:  # Python 3.10 prints no notes, but whoever looks finds them where 3.11 keeps them
            error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]  # as add_note does
        return error
