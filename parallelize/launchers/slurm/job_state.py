"""Queries the state of a Slurm job with squeue, scontrol and sacct."""

from __future__ import annotations

import re
from dataclasses import dataclass

from parallelize.launchers.slurm.commands import query

__all__ = ["JobState", "query_state"]

_END_STATES = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)


@dataclass(frozen=True)
class JobState:
    """A job's state.

    Args:
        name: Slurm's name of the state, such as "PENDING".
        reason: Slurm's reason for waiting or ending; "" if it gives none.
    """

    name: str
    reason: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended."""
        return self.name in _END_STATES

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


def query_state(job_id: str) -> JobState | None:
    """Return the state of a job, "12" or "12_3"; None: Slurm has no record of the job, or does not respond.

    squeue is queried first: sacct lags behind, and may still report the attempt before a requeue. scontrol shows an
    ended job for some minutes. sacct shows it forever, but needs accounting, which not every cluster has.

    Source: https://slurm.schedmd.com/squeue.html#SECTION_JOB-STATE-CODES
    """
    return _from_squeue(job_id) or _from_scontrol(job_id) or _from_sacct(job_id)


def _from_squeue(job_id: str) -> JobState | None:
    output = query("squeue", "--noheader", "--array", "--states=all", "--format=%T|%r", f"--jobs={job_id}")
    return None if not output else _parse(*output.splitlines()[0].split("|", 1))


def _from_scontrol(job_id: str) -> JobState | None:
    output = query("scontrol", "show", "job", job_id, "--oneliner")
    match = re.search(r"\bJobState=(\S+) Reason=(\S+)", output or "")
    return None if match is None else _parse(match[1], match[2])


def _from_sacct(job_id: str) -> JobState | None:
    output = query("sacct", "--allocations", "--noheader", "--parsable2", "--format=State", f"--jobs={job_id}")
    # the output may be "CANCELLED by 1000"
    return None if not output else _parse(*(output.splitlines()[0].split(" ", 1)))


def _parse(name: str, reason: str = "") -> JobState:
    return JobState(name, "" if reason in ("None", "(null)") else reason)
