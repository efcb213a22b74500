"""How this system starts processes."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallelize.cli.findings import Check, Finding, warning

__all__ = ["CHECK", "Starting", "gather", "judge"]


@dataclass(frozen=True, kw_only=True)
class Starting:
    """Ways to start a process.

    Args:
        system: as in sys.platform.
        methods: what multiprocessing offers.
        has_pidfd: whether workers hear at once that their caller is gone.
        cores: processor cores that this process may use.
        omp_threads: OMP_NUM_THREADS; None: not set.
    """

    system: str = "linux"
    methods: tuple[str, ...] = ("fork", "spawn", "forkserver")
    has_pidfd: bool = True
    cores: int = 1
    omp_threads: str | None = None


def gather(environ: Mapping[str, str]) -> Starting:
    """Ask Python."""
    return Starting(
        system=sys.platform,
        methods=tuple(multiprocessing.get_all_start_methods()),
        has_pidfd=hasattr(os, "pidfd_open"),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        omp_threads=environ.get("OMP_NUM_THREADS") or None,
    )


def judge(facts: Starting) -> Iterator[Finding]:
    """What makes starting slow, or is not tried."""
    if not facts.system.startswith("linux"):
        yield warning(
            "system-untried",
            f"system {facts.system}",
            why="only Linux is tried: elsewhere processes start by spawn, and have nobody who watches them as closely",
            fix="use Linux for what matters; if the last line of this table is ok, calls work",
        )
    if "forkserver" not in facts.methods:
        yield warning(
            "no-forkserver",
            f"Python starts processes by {', '.join(facts.methods)} only",
            why="without a fork server every call imports torch anew in every rank: seconds instead of milliseconds",
            fix="none on this system",
        )


def _summary(facts: Starting) -> str:
    threads = f", OMP_NUM_THREADS={facts.omp_threads}" if facts.omp_threads else ""
    method = "forkserver" if "forkserver" in facts.methods else "spawn"
    return f"by {method}, {facts.cores} cores{threads}"


CHECK = Check("starting", gather, _summary, judge)
