"""Runs Slurm's commands (sbatch, scancel, scontrol, ...) and raises errors if they fail."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from parallelize.errors import ConfigError, LaunchError

__all__ = ["cancel", "query", "requeue", "submit_script", "without_job_variables"]

_TIMEOUT_S = 60.0

# Variables that Slurm sets in a job. `sbatch` and `srun` would read most of them as options of the new job.
_JOB_VARIABLE = re.compile(r"(SLURM_(?!CONF$)|SLURMD_|SBATCH_|SRUN_)")


def without_job_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that Slurm sets if this process runs in a job."""
    return {name: value for name, value in environ.items() if not _JOB_VARIABLE.match(name)}


def submit_script(script: Path, *, options: Sequence[str] = (), environ: Mapping[str, str]) -> str:
    """Submit a job script with sbatch; return the job ID.

    Args:
        script: path of the script.
        options: options of sbatch.
        environ: environment variables for the job; those of a Slurm job around this process are removed.

    Raises:
        LaunchError: sbatch is not installed, or does not end in time.
        ConfigError: Slurm refuses the job; the error contains its message.
    """
    command = ["sbatch", "--parsable", *options, str(script)]
    done = _run(command, environ=without_job_variables(environ))
    if done.returncode != 0:
        message = done.stderr.strip().removeprefix("sbatch: error: ")
        raise ConfigError(
            f"Slurm refuses the job script {script}",
            why=message or f"sbatch ended with exit code {done.returncode}",
            fix="correct the options of SlurmLauncher; `sinfo` lists partitions, `sacctmgr show assoc` accounts",
        )
    return done.stdout.strip().partition(";")[0]  # "12;cluster" if there are several clusters


def query(*command: str) -> str | None:
    """Return the stdout of a command, or None if the command is not installed, times out or fails."""
    with contextlib.suppress(LaunchError):
        done = _run(command)
        if done.returncode == 0:
            return done.stdout.strip()
    return None


def cancel(job_id: str) -> None:
    """Cancel a queued or running job; do nothing if it has ended. Raises LaunchError if scancel fails."""
    _run_or_raise("scancel", job_id)


def requeue(job_id: str) -> None:
    """Put a running job back into the queue. Raises LaunchError if scontrol fails."""
    _run_or_raise("scontrol", "requeue", job_id)


def _run_or_raise(*command: str) -> None:
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
            start_new_session=True,  # Ctrl-C must not interrupt a submission
        )
    except FileNotFoundError:
        raise LaunchError(
            f"this machine has no {command[0]!r}",
            why="the Slurm launcher runs Slurm's own commands",
            fix="run it on a login node of the cluster, or write the job with sbatch_script() and copy it there",
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"`{' '.join(command)}` did not end within {_TIMEOUT_S:g} s",
            why="Slurm's controller is busy or down",
            fix="try `scontrol ping`, and again later",
        ) from None
