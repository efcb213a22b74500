"""A call submitted to Slurm: its state, output and return value."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from parallelize.call.task import Outcome
from parallelize.call.traceback_folding import folded_traceback
from parallelize.errors import WorkerError, add_note
from parallelize.launchers.slurm import commands
from parallelize.launchers.slurm.job_folder import JobFolder
from parallelize.launchers.slurm.job_state import JobState, query_state

__all__ = ["Job"]

R = TypeVar("R")

_POLL_EVERY_S = 0.2
_QUERY_EVERY_S = 2.0  # each query puts load on the cluster's controller
_RESULT_DELAY_S = 15.0  # a network file system may show a result later than Slurm shows the end of its job
_TAIL_LINES = 20

_FIX_BY_STATE = {
    "CANCELLED": "submit it again",
    "NODE_FAIL": "a node failed: submit it again without that node: sbatch={'exclude': '<node>'}",
    "OUT_OF_MEMORY": "request more with mem=, or use less",
    "TIMEOUT": "request more with time=, or return when should_stop() is true: the job is then requeued",
}


class Job(Generic[R]):
    """A call that Slurm queues or runs; it continues when this process ends.

    Args:
        job_id: Slurm's job ID, "12", or "12_3" for an element of an array.
        folder: folder of the job's output and result.
        all_ranks: whether `result` returns the list of all ranks' values instead of rank 0's value.
    """

    def __init__(self, job_id: str, folder: JobFolder, *, all_ranks: bool = False) -> None:
        self.id = job_id
        self._folder = folder
        self._all_ranks = all_ranks

    @classmethod
    def attach(cls, job_id: str | int, folder: str | Path = "slurm_jobs") -> Job[Any]:
        """Return a job that another process has submitted.

        Args:
            job_id: Slurm's job ID.
            folder: `folder=` of the launcher, or the folder beside a script written by `sbatch_script`.

        Raises:
            LaunchError: the folder contains no such job.
        """
        return cls(str(job_id), JobFolder.find(str(job_id), Path(folder).expanduser()))

    def __repr__(self) -> str:
        return f"Job({self.id!r}, {str(self._folder.path)!r})"

    @property
    def log(self) -> Path:
        """Path of the file with the job's output."""
        return self._folder.log_file(self.id)

    @property
    def state(self) -> str:
        """Slurm's name of the job's state, such as "PENDING"; inferred from its result once Slurm has no record."""
        known = query_state(self.id)
        return self._state_from_result() if known is None else known.name

    def _state_from_result(self) -> str:
        outcomes = self._folder.outcomes(self.id)
        if outcomes is None:
            return "UNKNOWN"
        return "FAILED" if outcomes[0].error is not None else "COMPLETED"

    def done(self) -> bool:
        """Return whether the job has a result or has ended without one."""
        if self._folder.outcomes(self.id) is not None:
            return True
        state = query_state(self.id)
        return state is None or state.has_ended

    def logs(self) -> str:
        """Return the job's output so far, of all nodes and attempts."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def cancel(self) -> None:
        """Cancel the job, queued or running.

        Raises:
            LaunchError: scancel failed.
        """
        commands.cancel(self.id)

    def result(self, timeout_s: float | None = None) -> R:
        """Wait for the call to end and return its value.

        Args:
            timeout_s: seconds to wait; None: no limit.

        Raises:
            TimeoutError: the job has no result in time.
            BaseException: the exception that the call raised, with job, rank and traceback as notes.
            WorkerError: the job ended without a result.
        """
        with folded_traceback:
            outcomes = self.outcomes(timeout_s=timeout_s)
        value: Any = [each.value for each in outcomes] if self._all_ranks else outcomes[0].value
        return value  # type: ignore[no-any-return]  # the value was pickled

    def outcomes(
        self, *, timeout_s: float | None = None, watch: Callable[[JobState | None], None] | None = None
    ) -> list[Outcome]:
        """Wait for the outcomes of all ranks, or of rank 0, and return them. Raises the same errors as `result`.

        Args:
            timeout_s: seconds to wait; None: no limit.
            watch: called several times a second with the last known state of the job.
        """
        end = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        state, queried_at, ended_at = None, 0.0, None
        while (outcomes := self._folder.outcomes(self.id)) is None:
            now = time.monotonic()
            if now > end:
                raise TimeoutError(f"job {self.id} has no result after {timeout_s:g} s; it is {self.state}")
            if now - queried_at > _QUERY_EVERY_S:
                state, queried_at = query_state(self.id), now
                ended_at = None if state is not None and not state.has_ended else ended_at or now
            if ended_at is not None and now - ended_at > (_RESULT_DELAY_S if state is None else _QUERY_EVERY_S):
                raise self._no_result_error(state)
            if watch is not None:
                watch(state)
            time.sleep(_POLL_EVERY_S)
        if outcomes[0].error is not None:
            raise self._with_note(outcomes[0].error)
        return outcomes

    def _no_result_error(self, state: JobState | None) -> BaseException:
        how = "is unknown to Slurm" if state is None else f"ended as {state}"
        fix = _FIX_BY_STATE.get("" if state is None else state.name, "see its output")
        return self._with_note(
            WorkerError(f"job {self.id} {how} and left no result", why="none of its processes finished", fix=fix)
        )

    def _with_note(self, error: BaseException) -> BaseException:
        tail = "\n".join(self.logs().splitlines()[-_TAIL_LINES:])
        note = f"Slurm job {self.id}; its output is in {self.log}" + (f" and ends with:\n{tail}" if tail else "")
        add_note(error, note)
        return error
