"""What Slurm says about a job: from its accounting, its queue or its memory, whichever answers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from parallelize.launchers.slurm.commands import query

__all__ = ["ENDED", "State", "look_up"]

ENDED = frozenset(
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
class State:
    """A job's state.

    Args:
        name: Slurm's word, such as "PENDING".
        reason: why it waits or ended, in Slurm's words; "" if Slurm gives none.
    """

    name: str
    reason: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come of the job."""
        return self.name in ENDED

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


def look_up(job_id: str) -> State | None:
    """The state of a job, "12" or "12_3"; None: nobody knows it any more.

    The queue is asked first: accounting, where a cluster has it, lags behind and may still tell of the attempt before a
    requeue. The controller remembers an ended job for some minutes, accounting for ever.

    Source: https://slurm.schedmd.com/squeue.html#SECTION_JOB-STATE-CODES
    """
    return _queue(job_id) or _controller(job_id) or _accounting(job_id)


def _queue(job_id: str) -> State | None:
    said = query("squeue", "--noheader", "--array", "--states=all", "--format=%T|%r", f"--jobs={job_id}")
    return None if not said else _of(*said.splitlines()[0].split("|", 1))


def _controller(job_id: str) -> State | None:
    said = query("scontrol", "show", "job", job_id, "--oneliner")
    found = re.search(r"\bJobState=(\S+) Reason=(\S+)", said or "")
    return None if found is None else _of(found[1], found[2])


def _accounting(job_id: str) -> State | None:
    said = query("sacct", "--allocations", "--noheader", "--parsable2", "--format=State", f"--jobs={job_id}")
    # "CANCELLED by 1000"
    return None if not said else _of(*(said.splitlines()[0].split(" ", 1)))


def _of(name: str, reason: str = "") -> State:
    return State(name, "" if reason in ("None", "(null)") else reason)
