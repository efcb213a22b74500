"""A call submitted to Slurm: its state, output and return value.

The folder of a submission is on a file system that the login node and the job's nodes share:

    <folder>/train-k3x9/      only this user can access it, since its files are unpickled
        job.sh, rank.sh       the scripts
        call.0, call.1, ...   the calls: one, or one per element of a job array
        12_0.log              output of job 12_0, also of its requeues
        12_0.1/               what the ranks write after the first requeue; stop in it asks them to
                              stop
        result.12_0           exit code, number of ranks and last folder, once the job will not be
                              requeued
    <folder>/12               link to the submission, by job ID

The life of a job, as `result` sees it:

    PENDING ──> RUNNING ──> the script writes result.<id>      result returns, or raises what a rank
       ^           │                                           has raised
       └─ requeue ─┘

    an end state, and no result     the script was killed: WorkerError, as soon as a network file
                                    system must have shown a result
    UNREACHABLE                     Slurm's controller does not answer: result waits
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from parallelize.call.outcome import Outcome
from parallelize.cluster.launcher_variables import without_launcher
from parallelize.errors import ConfigError, LaunchError, WorkerError, add_note
from parallelize.launchers.batch_launcher import BatchJob
from parallelize.launchers.failures import caller_exception, is_cause, outcome_of_dead_worker
from parallelize.launchers.output import OutputTail, read_output
from parallelize.worker.setup import outcome_paths

R = TypeVar("R")

_COMMAND_TIMEOUT_S = 60.0
_POLL_EVERY_S = 0.2
# Each query puts load on the cluster's controller.
_QUERY_EVERY_S = 2.0
# A network file system may show a result later than Slurm shows the end of its job.
_RESULT_DELAY_S = 15.0
_TAIL_LINES = 20

USERS_DEFAULTS = ("account", "partition", "qos", "reservation")
"""Options of sbatch for which clusters advise to export a default, such as SBATCH_ACCOUNT."""

# Variables that Slurm sets in a job. `sbatch` and `srun` would read most of them as options of the
# new job.
_JOB_VARIABLE = re.compile(
    rf"SLURM_(?!CONF$)|SLURMD_|SRUN_|SBATCH_(?!({'|'.join(USERS_DEFAULTS).upper()})$)"
)
# State that ends a job, before any rank can say why -> what to do.
_FIX_BY_STATE = {
    "CANCELLED": "submit it again",
    "NODE_FAIL": "a node failed: submit it again without that node: sbatch={'exclude': '<node>'}",
    "OUT_OF_MEMORY": "request more with mem=, or use less",
    "TIMEOUT": "request more with time=, or return when should_stop() is true: the job is then "
    "requeued",
}
_END_STATES = {
    *_FIX_BY_STATE,
    "BOOT_FAIL",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "PREEMPTED",
    "REVOKED",
    "UNKNOWN",
}


def query_state(job_id: str) -> str:
    """Return the state of a job, "12" or "12_3", with Slurm's reason, as in "PENDING (Resources)".

    squeue is asked first: sacct lags behind, and may still report the attempt before a requeue.
    sacct shows an ended job for longer, but needs accounting, which not every cluster has.

    Returns:
        "UNKNOWN": Slurm answers, and has no record of the job any more. "UNREACHABLE (...)": Slurm
        does not answer.

    Source: https://slurm.schedmd.com/squeue.html#SECTION_JOB-STATE-CODES
    """
    squeue = ("squeue", "--noheader", "--array", "--states=all", "--format=%T (%r)")
    sacct = ("sacct", "--allocations", "--noheader", "--parsable2", "--format=State")
    try:
        answer = _run(*squeue, f"--jobs={job_id}")
    except LaunchError as error:
        return f"UNREACHABLE ({error.faults[0].what})"
    if answer.returncode != 0 and "Invalid job id" not in answer.stderr:
        return f"UNREACHABLE ({answer.stderr.strip()})"
    if not answer.stdout.strip():
        with contextlib.suppress(LaunchError):
            answer = _run(*sacct, f"--jobs={job_id}")
    first_line = answer.stdout.partition("\n")[0].strip()
    return first_line.removesuffix(" (None)") or "UNKNOWN"


def _name_of_state(state: str) -> str:
    """Return PENDING of "PENDING (Resources)", and CANCELLED of "CANCELLED by 1000"."""
    return state.partition(" ")[0]


def submit_script(script: Path, *options: str, environ: Mapping[str, str]) -> str:
    """Submit a job script with sbatch; return the job ID.

    Raises:
        LaunchError: sbatch is not installed, or does not end in time.
        ConfigError: Slurm refuses the job; the error contains its message.
    """
    command = ("sbatch", "--parsable", *options, str(script))
    answer = _run(*command, environ=without_job_variables(environ))
    if answer.returncode != 0:
        message = answer.stderr.strip().removeprefix("sbatch: error: ")
        raise ConfigError(
            f"Slurm refuses the job script {script}",
            why=message or f"sbatch ended with exit code {answer.returncode}",
            fix="correct the options of SlurmLauncher; `sinfo` lists partitions, "
            "`sacctmgr show assoc` accounts",
        )
    # It is "12;cluster" if there are several clusters.
    return answer.stdout.strip().partition(";")[0]


def without_job_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that describe this process, in a job or as a rank."""
    variables = without_launcher(environ)
    return {name: text for name, text in variables.items() if not _JOB_VARIABLE.match(name)}


def _run(
    *command: str, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            env=environ,
            stdin=subprocess.DEVNULL,
            # Ctrl-C must not interrupt a submission.
            start_new_session=True,
        )
    except FileNotFoundError:
        raise LaunchError(
            f"this machine has no {command[0]!r}",
            why="the Slurm launcher runs Slurm's own commands",
            fix="run it on a login node of the cluster, or write the job with sbatch_script() and "
            "copy it there",
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"`{' '.join(command)}` did not end within {_COMMAND_TIMEOUT_S:g} s",
            why="Slurm's controller is busy or down",
            fix="try it again later",
        ) from None


class _Watch:
    """Asks Slurm for the state of a job, and not more often than every _QUERY_EVERY_S seconds.

    Args:
        job_id: Slurm's job ID.

    Attributes:
        state: the latest state; "": it was not asked for yet.
    """

    def __init__(self, job_id: str) -> None:
        self.state = ""
        self._job_id = job_id
        self._queried_at_s = float("-inf")
        self._seen_alive_at_s = time.monotonic()

    def query(self) -> bool:
        """Ask Slurm, if it is time to; return whether the state has changed."""
        now_s = time.monotonic()
        has_changed = False
        if now_s - self._queried_at_s > _QUERY_EVERY_S:
            state = query_state(self._job_id)
            has_changed = state != self.state
            self.state = state
            self._queried_at_s = now_s
        if not self._is_at_end():
            self._seen_alive_at_s = now_s
        return has_changed

    def is_late(self) -> bool:
        """Whether the job has ended for so long that a result would have been seen."""
        delay_s = _RESULT_DELAY_S
        if _name_of_state(self.state) in _FIX_BY_STATE:
            # Slurm has killed the script, so it has written no result.
            delay_s = _QUERY_EVERY_S
        return self._is_at_end() and time.monotonic() - self._seen_alive_at_s > delay_s

    def _is_at_end(self) -> bool:
        return _name_of_state(self.state) in _END_STATES


class Job(BatchJob[R]):
    """A call that Slurm queues or runs; it continues when this process ends.

    An outage of Slurm's controller is waited out.

    Args:
        job_id: Slurm's job ID, "12", or "12_3" for an element of an array.
        folder: folder of the submission.
        all_ranks: whether `result` returns the list of all ranks' values instead of rank 0's.
    """

    def __init__(self, job_id: str, folder: Path, *, all_ranks: bool = False) -> None:
        super().__init__(job_id, all_ranks=all_ranks)
        self._folder = folder
        self._tail = OutputTail(self.log, sys.stdout)

    @classmethod
    def attach(cls, job_id: str | int, folder: str | Path = "slurm_jobs") -> Job[Any]:
        """Return a job that another process has submitted.

        Args:
            job_id: Slurm's job ID.
            folder: `folder=` of the launcher, or the folder beside a script written by
                `sbatch_script`.

        Raises:
            LaunchError: the folder contains no such job.
        """
        parent = Path(folder).expanduser()
        for path in (parent / str(job_id).partition("_")[0], parent):
            if (path / "call.0").exists():
                return cls(str(job_id), path.resolve())
        raise LaunchError(
            f"no job {job_id} in {parent}",
            why="the launcher's folder contains a link for each submitted job, named by its ID",
            fix="pass the folder= of the launcher that submitted it, or the folder beside the job "
            "script",
        )

    def __repr__(self) -> str:
        return f"Job({self.id!r}, {str(self._folder)!r})"

    @property
    def log(self) -> Path:
        """Path of the file with the job's output."""
        return self._folder / f"{self.id}.log"

    @property
    def state(self) -> str:
        """Slurm's name of the job's state, such as "PENDING".

        It is "UNREACHABLE" while Slurm's controller does not answer. Once Slurm has no record of
        the job, the state is inferred from its result, and is "UNKNOWN" without one.
        """
        name = _name_of_state(query_state(self.id))
        if name != "UNKNOWN":
            return name
        match self._read_result():
            case None:
                return "UNKNOWN"
            case list():
                return "COMPLETED"
            case _:
                return "FAILED"

    def done(self) -> bool:
        """Return whether the job has a result or has ended without one."""
        if self._read_result() is not None:
            return True
        return _name_of_state(query_state(self.id)) in _END_STATES

    def logs(self) -> str:
        """Return the job's output so far, of all nodes and attempts."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def cancel(self) -> None:
        """Cancel the job, queued or running; do nothing if it has ended.

        Raises:
            LaunchError: scancel failed.
        """
        answer = _run("scancel", self.id)
        if answer.returncode != 0:
            raise LaunchError(
                f"`scancel {self.id}` failed",
                why=answer.stderr.strip() or f"exit code {answer.returncode}",
                fix="run it by hand; `squeue` shows the job",
            )

    def follow(self) -> list[Outcome]:
        """Wait for the outcomes of the job; show its state on stderr, and its output on stdout.

        The first Ctrl-C prints how to cancel the job and keeps waiting; the second cancels it.

        Raises:
            BaseException: as `result` does.
            KeyboardInterrupt: at the second Ctrl-C; the job is cancelled.
        """
        try:
            try:
                return self._wait(shows=True)
            except KeyboardInterrupt:  # from here on, a second Ctrl-C cancels the job
                self._tell(
                    "continues without this process; "
                    f"`scancel {self.id}` or Ctrl-C again cancels it"
                )
                return self._wait(shows=True)
        except KeyboardInterrupt:
            self.cancel()
            self._tell("cancelled")
            raise
        finally:
            self._tail.forward(is_last=True)

    def _wait(self, timeout_s: float | None = None, *, shows: bool = False) -> list[Outcome]:
        """Wait for the outcomes of all ranks, or of rank 0, and return them.

        Args:
            timeout_s: as for `result`.
            shows: whether to show each state and the output.

        Raises:
            BaseException: as `result` does.
        """
        end_s = float("inf")
        if timeout_s is not None:
            end_s = time.monotonic() + timeout_s
        watch = _Watch(self.id)
        while (result := self._read_result()) is None:
            if time.monotonic() > end_s:
                raise TimeoutError(
                    f"job {self.id} has no result after {timeout_s:g} s; it is {self.state}"
                )
            if watch.query() and (shows or watch.state.startswith("UNREACHABLE")):
                self._tell(watch.state)
            if watch.is_late():
                result = self._error_without_result(watch.state)
                break
            if shows:
                self._tail.forward(is_last=False)
            time.sleep(_POLL_EVERY_S)
        if isinstance(result, list):
            return result
        note = f"Slurm job {self.id}; its output is in {self.log}"
        last_lines = "\n".join(self.logs().splitlines()[-_TAIL_LINES:])
        if last_lines:
            note += f" and ends with:\n{last_lines}"
        add_note(result, note)
        raise result

    def _error_without_result(self, state: str) -> WorkerError:
        name = _name_of_state(state)
        end = f"ended as {state}"
        if name == "UNKNOWN":
            end = "is unknown to Slurm"
        return WorkerError(
            f"job {self.id} {end} and left no result",
            why="none of its processes says why",
            fix=_FIX_BY_STATE.get(name, "see its output"),
        )

    def _tell(self, text: str) -> None:
        sys.stderr.write(f"slurm job {self.id}: {text}\n")
        sys.stderr.flush()

    def _read_result(self) -> list[Outcome] | BaseException | None:
        """Return the outcomes, or the exception of the first rank to fail.

        Returns:
            None: there is no result yet, or no rank says why the job has failed.
        """
        with contextlib.suppress(OSError):
            # Refreshes what a network file system remembers of the folder.
            list(self._folder.iterdir())
        path = self._folder / f"result.{self.id}"
        if not path.exists():
            return None
        exit_code, number_of_ranks, name_of_run = json.loads(path.read_text())
        run = self._folder / name_of_run
        if exit_code != 0:
            return _failure(run, number_of_ranks)
        outcomes = []
        for rank in range(number_of_ranks if self._all_ranks else 1):
            path_of_value, _ = outcome_paths(run, rank)
            outcomes.append(Outcome.read(path_of_value))
        return outcomes


def _failure(run: Path, number_of_ranks: int) -> BaseException | None:
    """Return the exception of the first rank to fail.

    Args:
        run: folder in which the ranks have written.
        number_of_ranks: number of ranks.

    Returns:
        None: the ranks were stopped, or lost each other.
    """
    outcomes = []
    for rank in range(number_of_ranks):
        outcome = _outcome_of(run, rank)
        if outcome is not None:
            outcomes.append(outcome)
    if not any(map(is_cause, outcomes)):
        return None
    return caller_exception(outcomes, world_size=number_of_ranks)


def _outcome_of(run: Path, rank: int) -> Outcome | None:
    """Return what a rank has written, or how its process has ended; None: it was stopped."""
    for path in outcome_paths(run, rank):
        if path.exists():
            return Outcome.read(path)
    path_of_exit = run / f"exit.{rank}"
    if not path_of_exit.exists():
        return None
    process = json.loads(path_of_exit.read_text())
    if process["exitcode"] == -signal.SIGTERM:  # it was stopped before it could handle it
        return None
    return outcome_of_dead_worker(**process, output=read_output(run, rank))
