"""Slurm's commands: run, answered as text, their refusals as errors."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from parallelize.errors import ConfigError, LaunchError

__all__ = ["cancel", "outer_environ", "query", "queue", "requeue"]

_TIMEOUT_S = 60.0

# What a job sees of itself. `sbatch` and `srun` would take most of it for options of the new job.
_OF_A_JOB = re.compile(r"(SLURM_(?!CONF$)|SLURMD_|SBATCH_|SRUN_)")


def outer_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without those of a job that this process may be in."""
    return {name: value for name, value in environ.items() if not _OF_A_JOB.match(name)}


def queue(script: Path, *, options: Sequence[str] = (), environ: Mapping[str, str]) -> str:
    """Queue a job script; the job's number.

    Args:
        script: its path.
        options: of sbatch, before the script.
        environ: the job gets these, less what belongs to a job around this process.

    Raises:
        LaunchError: this machine has no sbatch, or it does not answer.
        ConfigError: Slurm refuses the job; its words are in the error.
    """
    command = ["sbatch", "--parsable", *options, str(script)]
    done = _run(command, environ=outer_environ(environ))
    if done.returncode != 0:
        said = done.stderr.strip().removeprefix("sbatch: error: ")
        raise ConfigError(
            f"Slurm refuses the job script {script}",
            why=said or f"sbatch ended with exit code {done.returncode}",
            fix="correct the options of SlurmLauncher; `sinfo` lists partitions, `sacctmgr show assoc` accounts",
        )
    return done.stdout.strip().partition(";")[0]  # "12;cluster" where there are several


def query(*command: str) -> str | None:
    """What a command says; None: it is not there, does not answer, or does not know."""
    with contextlib.suppress(LaunchError):
        done = _run(command)
        if done.returncode == 0:
            return done.stdout.strip()
    return None


def cancel(job_id: str) -> None:
    """End a job, queued or running; one that has ended is left alone.

    Raises:
        LaunchError: Slurm does not do it.
    """
    _checked("scancel", job_id)


def requeue(job_id: str) -> None:
    """Put a running job back into the queue.

    Raises:
        LaunchError: Slurm does not do it.
    """
    _checked("scontrol", "requeue", job_id)


def _checked(*command: str) -> None:
    done = _run(command)
    if done.returncode != 0:
        raise LaunchError(
            f"`{' '.join(command)}` failed",
            why=done.stderr.strip() or f"exit code {done.returncode}",
            fix="run it by hand; `squeue` shows the job",
        )


def _run(command: Sequence[str], environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the caller: it must not cut a submission in half
        )
    except FileNotFoundError:
        raise LaunchError(
            f"this machine has no {command[0]!r}",
            why="the Slurm launcher hands calls to Slurm's own commands",
            fix="run it on a login node of the cluster, or write the job with sbatch_script() and take it there",
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"`{' '.join(command)}` gave no answer for {_TIMEOUT_S:g} s",
            why="Slurm's controller is busy or down",
            fix="try `scontrol ping`, and again later",
        ) from None
