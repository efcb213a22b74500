"""How Slurm writes times and sizes, and what Python values mean there."""

from __future__ import annotations

import re
from datetime import timedelta

from parallelize.errors import Fault

__all__ = ["memory", "time_limit"]

# minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]
_TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)


def time_limit(value: object) -> str | Fault:
    """sbatch's --time.

    Args:
        value: Slurm's text ("4:00:00", "1-02:00:00"; "15:00" are minutes and seconds, "15" is minutes), whole minutes,
            or a timedelta, rounded up to a second.

    Source: https://slurm.schedmd.com/sbatch.html#OPT_time
    """
    if isinstance(value, timedelta) and value > timedelta(0):
        seconds = -(-value // timedelta(seconds=1))
        return f"{seconds // 86400}-{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return str(value)
    if isinstance(value, str) and _TIME.fullmatch(value.strip()):
        return value.strip()
    return Fault(
        f"time={value!r}", "it is no time limit of Slurm's", "use '4:00:00', '1-02:00:00', minutes or a timedelta"
    )


def memory(value: object) -> str | Fault:
    """sbatch's --mem, for each node.

    Args:
        value: Slurm's text ("64G", "2000M"), or whole megabytes, as --mem takes a bare number.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return str(value)
    if isinstance(value, str) and _MEMORY.fullmatch(value.strip()):
        return value.strip()
    return Fault(f"mem={value!r}", "it is no size of Slurm's", "use '64G', or megabytes as a number")
