"""Doctor check: how this system starts processes."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallelize.cli.findings import Check, Finding, warning
from parallelize.launchers.elastic.worker_environment import available_cores

__all__ = ["CHECK", "ProcessStart", "gather", "judge"]


@dataclass(frozen=True, kw_only=True)
class ProcessStart:
    """The ways in which this system can start processes, and the cores for them.

    Args:
        system: value of sys.platform.
        methods: the start methods that multiprocessing supports.
        cores: number of CPU cores that this process may use.
        omp_threads: value of OMP_NUM_THREADS; None: not set.
    """

    system: str = "linux"
    methods: tuple[str, ...] = ("fork", "spawn", "forkserver")
    cores: int = 1
    omp_threads: str | None = None


def gather(environ: Mapping[str, str]) -> ProcessStart:
    """Query Python about the system."""
    return ProcessStart(
        system=sys.platform,
        methods=tuple(multiprocessing.get_all_start_methods()),
        cores=available_cores(),
        omp_threads=environ.get("OMP_NUM_THREADS") or None,
    )


def judge(facts: ProcessStart) -> Iterator[Finding]:
    """Yield a warning for a system that is not tested, or that starts processes slowly."""
    if not facts.system.startswith("linux"):
        yield warning(
            "system-untried",
            f"system {facts.system}",
            why="only Linux is tested: other systems start processes by spawn, and detect the end of the caller later",
            fix="use Linux in production; if the last line of this table is ok, calls work",
        )
    if "forkserver" not in facts.methods:
        yield warning(
            "no-forkserver",
            f"Python starts processes by {', '.join(facts.methods)} only",
            why="without a fork server every rank of every call imports torch: seconds instead of milliseconds",
            fix="use a system with fork, such as Linux",
        )


def _summary(facts: ProcessStart) -> str:
    threads = f", OMP_NUM_THREADS={facts.omp_threads}" if facts.omp_threads else ""
    method = "forkserver" if "forkserver" in facts.methods else "spawn"
    return f"by {method}, {facts.cores} cores{threads}"


CHECK = Check("starting", gather, _summary, judge)
