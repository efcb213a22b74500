"""Doctor check: the limits on open files, locked memory and processes (ulimit, cgroup)."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from parallelize.cli.findings import Check, Finding, warning

__all__ = ["CHECK", "Limits", "gather", "judge"]

_FEW_FILES = 1024
_FEW_PROCESSES = 512
_INFINIBAND = Path("/sys/class/infiniband")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of this process, which its workers inherit; None: unlimited or unknown.

    Args:
        files: maximum number of open files (ulimit -n).
        most_files: hard limit of open files.
        locked_bytes: maximum size of locked memory (ulimit -l).
        processes: processes and threads that this user can still start (ulimit -u minus those running).
        container_processes: processes and threads that can still be started in this container.
        infiniband: names of InfiniBand devices, which need locked memory.
    """

    files: int | None = None
    most_files: int | None = None
    locked_bytes: int | None = None
    processes: int | None = None
    container_processes: int | None = None
    infiniband: tuple[str, ...] = ()


def gather(_environ: Mapping[str, str]) -> Limits:
    """Read the limits of this process; Windows has no such limits."""
    if sys.platform == "win32":
        return Limits()
    import resource  # not on Windows

    def soft_and_hard(number: int) -> tuple[int | None, int | None]:
        soft, hard = resource.getrlimit(number)
        return None if soft == resource.RLIM_INFINITY else soft, None if hard == resource.RLIM_INFINITY else hard

    files, most_files = soft_and_hard(resource.RLIMIT_NOFILE)
    processes, _ = soft_and_hard(resource.RLIMIT_NPROC)
    return Limits(
        files=files,
        most_files=most_files,
        locked_bytes=soft_and_hard(resource.RLIMIT_MEMLOCK)[0],
        processes=None if processes is None or os.geteuid() == 0 else processes - _count_threads(os.getuid()),
        container_processes=_free_pids_of_cgroup(),
        infiniband=tuple(sorted(path.name for path in _INFINIBAND.glob("*"))),
    )


def _count_threads(user: int) -> int:
    count = 0
    for tasks in Path("/proc").glob("[0-9]*/task"):
        with contextlib.suppress(OSError):  # the process has ended
            count += len(list(tasks.iterdir())) if tasks.stat().st_uid == user else 0
    return count


def _free_pids_of_cgroup() -> int | None:
    limit, current = _CGROUP / "pids.max", _CGROUP / "pids.current"
    if not limit.exists() or not current.exists() or limit.read_text().strip() == "max":
        return None
    return int(limit.read_text()) - int(current.read_text())


def judge(facts: Limits) -> Iterator[Finding]:
    """Yield a warning for each limit that a large run would reach."""
    if facts.files is not None and facts.files < _FEW_FILES:
        yield warning(
            "few-files",
            f"{facts.files} files can be open in a process",
            why="DataLoader workers and connections between ranks use file descriptors: a run fails at the limit",
            fix=f"ulimit -n {min(65536, facts.most_files or 65536)}",
        )
    if facts.processes is not None and facts.processes < _FEW_PROCESSES:
        yield warning(
            "few-processes",
            f"{facts.processes} more processes and threads can be started by this user",
            why="a rank starts dozens of threads, and so does each of its DataLoader workers",
            fix="ulimit -u 65536, or end other processes",
        )
    if facts.container_processes is not None and facts.container_processes < _FEW_PROCESSES:
        yield warning(
            "few-processes-in-container",
            f"{facts.container_processes} more processes and threads can be started in this container",
            why="a rank starts dozens of threads, and so does each of its DataLoader workers",
            fix="start the container with a higher --pids-limit",
        )
    if facts.infiniband and facts.locked_bytes is not None:
        yield warning(
            "locked-memory",
            f"{facts.locked_bytes >> 10} KiB of memory can be locked, on a machine with {', '.join(facts.infiniband)}",
            why="NCCL has to lock its buffers for InfiniBand; if it cannot, it fails or uses TCP",
            fix="ulimit -l unlimited (docker: --ulimit memlock=-1); under Slurm, PropagateResourceLimitsExcept=MEMLOCK",
        )


def _summary(facts: Limits) -> str:
    locked = "unlimited" if facts.locked_bytes is None else f"{facts.locked_bytes >> 10} KiB"
    limits = [each for each in (facts.processes, facts.container_processes) if each is not None]
    processes = f", {min(limits)} more processes" if limits else ""
    return f"{facts.files or 'unlimited'} open files, {locked} locked memory{processes}"


CHECK = Check("limits", gather, _summary, judge)
