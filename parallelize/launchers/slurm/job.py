"""A call submitted to Slurm: its state, output and return value.

The folder of a submission is on a file system that the login node and the job's nodes share:

    <folder>/train-k3x9/      only this user can access it, since its files are unpickled
        job.sh, rank.sh       the scripts
        call.0, call.1, ...   the calls: one, or one per element of a job array
        12_0.log              output of job 12_0, also of its requeues
        12_0.1/               what the ranks write after the first requeue; stop in it asks them to stop
        result.12_0           exit code, number of ranks and last folder, once the job will not be requeued
    <folder>/12               link to the submission, by job ID
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
from parallelize.launchers.failures import caller_exception, ended, is_cause
from parallelize.launchers.output import OutputTail, read_output
from parallelize.worker.main import outcome_paths

R = TypeVar("R")

_COMMAND_TIMEOUT_S = 60.0
_POLL_EVERY_S = 0.2
_QUERY_EVERY_S = 2.0  # each query puts load on the cluster's controller
_RESULT_DELAY_S = (
    15.0  # a network file system may show a result later than Slurm shows the end of its job
)
_TAIL_LINES = 20

# Variables that Slurm sets in a job. `sbatch` and `srun` would read most of them as options of the new job.
_JOB_VARIABLE = re.compile(r"(SLURM_(?!CONF$)|SLURMD_|SBATCH_|SRUN_)")
# State that ends a job, before any rank can say why -> what to do.
_FIX_BY_STATE = {
    "CANCELLED": "submit it again",
    "NODE_FAIL": "a node failed: submit it again without that node: sbatch={'exclude': '<node>'}",
    "OUT_OF_MEMORY": "request more with mem=, or use less",
    "TIMEOUT": "request more with time=, or return when should_stop() is true: the job is then requeued",
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

    "UNKNOWN": Slurm answers, and has no record of the job any more. "UNREACHABLE (...)": Slurm does not answer.

    squeue is asked first: sacct lags behind, and may still report the attempt before a requeue. sacct shows an ended
    job for longer, but needs accounting, which not every cluster has.

    Source: https://slurm.schedmd.com/squeue.html#SECTION_JOB-STATE-CODES
    """
    try:
        found = _run(
            "squeue",
            "--noheader",
            "--array",
            "--states=all",
            "--format=%T (%r)",
            f"--jobs={job_id}",
        )
        if found.returncode and "Invalid job id" not in found.stderr:
            return f"UNREACHABLE ({found.stderr.strip()})"
    except LaunchError as error:
        return f"UNREACHABLE ({error.faults[0].what})"
    if not found.stdout.strip():
        with contextlib.suppress(LaunchError):
            found = _run(
                "sacct",
                "--allocations",
                "--noheader",
                "--parsable2",
                "--format=State",
                f"--jobs={job_id}",
            )
    return found.stdout.partition("\n")[0].strip().removesuffix(" (None)") or "UNKNOWN"


def submit_script(script: Path, *options: str, environ: Mapping[str, str]) -> str:
    """Submit a job script with sbatch; return the job ID.

    Raises:
        LaunchError: sbatch is not installed, or does not end in time.
        ConfigError: Slurm refuses the job; the error contains its message.
    """
    done = _run(
        "sbatch", "--parsable", *options, str(script), environ=without_job_variables(environ)
    )
    if done.returncode != 0:
        message = done.stderr.strip().removeprefix("sbatch: error: ")
        raise ConfigError(
            f"Slurm refuses the job script {script}",
            why=message or f"sbatch ended with exit code {done.returncode}",
            fix="correct the options of SlurmLauncher; `sinfo` lists partitions, `sacctmgr show assoc` accounts",
        )
    return done.stdout.strip().partition(";")[0]  # "12;cluster" if there are several clusters


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
            start_new_session=True,  # Ctrl-C must not interrupt a submission
        )
    except FileNotFoundError:
        what = f"this machine has no {command[0]!r}"
        fix = "run it on a login node of the cluster, or write the job with sbatch_script() and copy it there"
        raise LaunchError(
            what, why="the Slurm launcher runs Slurm's own commands", fix=fix
        ) from None
    except subprocess.TimeoutExpired:
        what = f"`{' '.join(command)}` did not end within {_COMMAND_TIMEOUT_S:g} s"
        raise LaunchError(
            what, why="Slurm's controller is busy or down", fix="try it again later"
        ) from None


class Job(BatchJob[R]):
    """A call that Slurm queues or runs; it continues when this process ends.

    An outage of Slurm's controller is waited out.

    Args:
        job_id: Slurm's job ID, "12", or "12_3" for an element of an array.
        folder: folder of the submission.
        all_ranks: whether `result` returns the list of all ranks' values instead of rank 0's value.
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
            folder: `folder=` of the launcher, or the folder beside a script written by `sbatch_script`.

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
            fix="pass the folder= of the launcher that submitted it, or the folder beside the job script",
        )

    def __repr__(self) -> str:
        return f"Job({self.id!r}, {str(self._folder)!r})"

    @property
    def log(self) -> Path:
        """Path of the file with the job's output."""
        return self._folder / f"{self.id}.log"

    @property
    def state(self) -> str:
        """Slurm's name of the job's state, such as "PENDING"; "UNREACHABLE" while Slurm's controller does not answer.

        Once Slurm has no record of the job, the state is inferred from its result; "UNKNOWN" without one.
        """
        name, found = query_state(self.id).split()[0], self._read_result()
        return (
            name
            if name != "UNKNOWN" or found is None
            else "COMPLETED"
            if isinstance(found, list)
            else "FAILED"
        )

    def done(self) -> bool:
        """Return whether the job has a result or has ended without one."""
        return self._read_result() is not None or query_state(self.id).split()[0] in _END_STATES

    def logs(self) -> str:
        """Return the job's output so far, of all nodes and attempts."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def cancel(self) -> None:
        """Cancel the job, queued or running; do nothing if it has ended.

        Raises:
            LaunchError: scancel failed.
        """
        done = _run("scancel", self.id)
        if done.returncode != 0:
            raise LaunchError(
                f"`scancel {self.id}` failed",
                why=done.stderr.strip() or f"exit code {done.returncode}",
                fix="run it by hand; `squeue` shows the job",
            )

    def follow(self) -> list[Outcome]:
        """Wait for the job while showing its state on stderr and its output on stdout; return its outcomes.

        The first Ctrl-C prints how to cancel the job and keeps waiting; the second cancels it.

        Raises:
            BaseException: as `result` does.
            KeyboardInterrupt: at the second Ctrl-C; the job is cancelled.
        """
        try:
            try:
                return self._wait(shows=True)
            except KeyboardInterrupt:  # from here on, a second Ctrl-C cancels the job
                how = f"`scancel {self.id}` or Ctrl-C again cancels it"
                self._tell(f"continues without this process; {how}")
                return self._wait(shows=True)
        except KeyboardInterrupt:
            self.cancel()
            self._tell("cancelled")
            raise
        finally:
            self._tail.forward(is_last=True)

    def _wait(self, timeout_s: float | None = None, *, shows: bool = False) -> list[Outcome]:
        """Wait for the outcomes of all ranks, or of rank 0, and return them. Raises the same errors as `result`."""
        state, queried_at, alive_at = "", float("-inf"), time.monotonic()
        end = float("inf") if timeout_s is None else alive_at + timeout_s
        while (found := self._read_result()) is None:
            now = time.monotonic()
            if now > end:
                raise TimeoutError(
                    f"job {self.id} has no result after {timeout_s:g} s; it is {self.state}"
                )
            if now - queried_at > _QUERY_EVERY_S:
                last, state, queried_at = state, query_state(self.id), now
                if state != last and (shows or state.startswith("UNREACHABLE")):
                    self._tell(state)
            name = state.split()[0]
            if name not in _END_STATES:
                alive_at = now
            elif now - alive_at > (_QUERY_EVERY_S if name in _FIX_BY_STATE else _RESULT_DELAY_S):
                what = f"job {self.id} " + (
                    "is unknown to Slurm" if name == "UNKNOWN" else f"ended as {state}"
                )
                why, fix = (
                    "none of its processes says why",
                    _FIX_BY_STATE.get(name, "see its output"),
                )
                found = WorkerError(f"{what} and left no result", why=why, fix=fix)
                break
            if shows:
                self._tail.forward(is_last=False)
            time.sleep(_POLL_EVERY_S)
        if isinstance(found, list):
            return found
        tail = "\n".join(self.logs().splitlines()[-_TAIL_LINES:])
        add_note(
            found,
            f"Slurm job {self.id}; its output is in {self.log}"
            + (tail and f" and ends with:\n{tail}"),
        )
        raise found

    def _tell(self, text: str) -> None:
        sys.stderr.write(f"slurm job {self.id}: {text}\n")
        sys.stderr.flush()

    def _read_result(self) -> list[Outcome] | BaseException | None:
        """Return the outcomes, or the exception of the first rank to fail; None: not known, or no rank says why."""
        with contextlib.suppress(OSError):
            list(self._folder.iterdir())  # refreshes the directory cache of a network file system
        path = self._folder / f"result.{self.id}"
        if not path.exists():
            return None
        code, size, run = json.loads(path.read_text())
        if code:
            return _failure(self._folder / run, size)
        ranks = range(size if self._all_ranks else 1)
        return [Outcome.read(outcome_paths(self._folder / run, rank)[0]) for rank in ranks]


def _failure(run: Path, size: int) -> BaseException | None:
    """Return the exception of the first rank to fail; None: the ranks were stopped, or lost each other.

    Args:
        run: folder in which the ranks have written.
        size: number of ranks.
    """
    outcomes = []
    for rank in range(size):
        outcome, exited = (
            next(filter(Path.exists, outcome_paths(run, rank)), None),
            run / f"exit.{rank}",
        )
        if outcome is not None:
            outcomes.append(Outcome.read(outcome))
        elif exited.exists():
            found = json.loads(exited.read_text())
            if found["exitcode"] != -signal.SIGTERM:  # it was stopped before it could handle it
                outcomes.append(ended(**found, output=read_output(run, rank)))
    return caller_exception(outcomes, world_size=size) if any(map(is_cause, outcomes)) else None
