"""How much of what the system counts one user may have: files, locked memory, processes."""

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
    """Limits of this process, which its workers inherit; None: unlimited, or nobody counts.

    Args:
        files: open files (ulimit -n).
        most_files: what the user may raise that to.
        locked_bytes: memory that may be locked (ulimit -l).
        processes: processes and threads of this user that may still be started (ulimit -u, less those there are).
        container_processes: processes and threads that may still be started in this container.
        infiniband: network cards that need locked memory.
    """

    files: int | None = None
    most_files: int | None = None
    locked_bytes: int | None = None
    processes: int | None = None
    container_processes: int | None = None
    infiniband: tuple[str, ...] = ()


def gather(_environ: Mapping[str, str]) -> Limits:
    """Ask the system; Windows counts none of these."""
    if sys.platform == "win32":
        return Limits()
    import resource  # only where there is one

    def soft_and_hard(number: int) -> tuple[int | None, int | None]:
        soft, hard = resource.getrlimit(number)
        return None if soft == resource.RLIM_INFINITY else soft, None if hard == resource.RLIM_INFINITY else hard

    files, most_files = soft_and_hard(resource.RLIMIT_NOFILE)
    processes, _ = soft_and_hard(resource.RLIMIT_NPROC)
    return Limits(
        files=files,
        most_files=most_files,
        locked_bytes=soft_and_hard(resource.RLIMIT_MEMLOCK)[0],
        processes=None if processes is None or os.geteuid() == 0 else processes - _threads_of(os.getuid()),
        container_processes=_left_in_container(),
        infiniband=tuple(sorted(path.name for path in _INFINIBAND.glob("*"))),
    )


def _threads_of(user: int) -> int:
    found = 0
    for tasks in Path("/proc").glob("[0-9]*/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += len(list(tasks.iterdir())) if tasks.stat().st_uid == user else 0
    return found


def _left_in_container() -> int | None:
    most, now = _CGROUP / "pids.max", _CGROUP / "pids.current"
    if not most.exists() or not now.exists() or most.read_text().strip() == "max":
        return None
    return int(most.read_text()) - int(now.read_text())


def judge(facts: Limits) -> Iterator[Finding]:
    """Limits that a run of some size meets."""
    if facts.files is not None and facts.files < _FEW_FILES:
        yield warning(
            "few-files",
            f"{facts.files} files may be open in a process",
            why="each worker of a loader and each peer of a rank takes some: 'Too many open files' comes late in a run",
            fix=f"ulimit -n {min(65536, facts.most_files or 65536)}",
        )
    if facts.processes is not None and facts.processes < _FEW_PROCESSES:
        yield warning(
            "few-processes",
            f"{facts.processes} more processes and threads may be started by this user",
            why="a rank starts dozens of threads, and each worker of its loaders as many",
            fix="ulimit -u 65536, or end some",
        )
    if facts.container_processes is not None and facts.container_processes < _FEW_PROCESSES:
        yield warning(
            "few-processes-in-container",
            f"{facts.container_processes} more processes and threads may be started in this container",
            why="a rank starts dozens of threads, and each worker of its loaders as many",
            fix="start the container with a higher --pids-limit",
        )
    if facts.infiniband and facts.locked_bytes is not None:
        yield warning(
            "locked-memory",
            f"{facts.locked_bytes >> 10} KiB may be locked, on a machine with {', '.join(facts.infiniband)}",
            why="NCCL's way over InfiniBand locks its buffers, and fails or falls back to TCP where it cannot",
            fix="ulimit -l unlimited (docker: --ulimit memlock=-1); under Slurm, PropagateResourceLimitsExcept=MEMLOCK",
        )


def _summary(facts: Limits) -> str:
    locked = "unlimited" if facts.locked_bytes is None else f"{facts.locked_bytes >> 10} KiB"
    known = [each for each in (facts.processes, facts.container_processes) if each is not None]
    processes = f", {min(known)} more processes" if known else ""
    return f"{facts.files or 'any number of'} open files, {locked} locked memory{processes}"


CHECK = Check("limits", gather, _summary, judge)
