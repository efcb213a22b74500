"""Shared memory, by which loaders' batches come, and the folder in which a call's data lies."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from parallelize.cli.findings import Check, Finding, fault, warning

__all__ = ["CHECK", "Memory", "gather", "judge"]

_SHM = Path("/dev/shm")  # noqa: S108 - it is measured, nothing is put there
_MIB = 1 << 20
_LITTLE_SHM = 256 * _MIB
_LITTLE_TMP = 1024 * _MIB
# The fork server listens at a socket <folder>/pymp-xxxxxxxx/listener-xxxxxxxx; a socket's name has 107 bytes at most.
_LONGEST_TMP = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Places that processes share.

    Args:
        system: as in sys.platform.
        shm_bytes: size of /dev/shm; None: it is not there.
        shm_free_bytes: what is free of it.
        folder: the folder for temporary files (TMPDIR); None: none can be written.
        folder_free_bytes: free space there.
    """

    system: str = "linux"
    shm_bytes: int | None = None
    shm_free_bytes: int = 0
    folder: str | None = None
    folder_free_bytes: int = 0


def gather(_environ: Mapping[str, str]) -> Memory:
    """Ask the file systems."""
    shm = shutil.disk_usage(_SHM) if _SHM.is_dir() else None
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        folder = None
    return Memory(
        system=sys.platform,
        shm_bytes=None if shm is None else shm.total,
        shm_free_bytes=0 if shm is None else shm.free,
        folder=folder,
        folder_free_bytes=0 if folder is None else shutil.disk_usage(folder).free,
    )


def judge(facts: Memory) -> Iterator[Finding]:
    """Too little of either, or none."""
    if facts.system == "linux":
        yield from _shared(facts)
    if facts.folder is None:
        yield fault(
            "no-temporary-folder",
            "no folder for temporary files can be written",
            why="a call's arguments and results lie in a file there",
            fix="export TMPDIR=<a folder on a local disk>",
        )
        return
    if len(facts.folder.encode()) > _LONGEST_TMP:
        yield fault(
            "temporary-folder-long",
            f"the folder for temporary files has a name of {len(facts.folder.encode())} bytes: {facts.folder}",
            why=f"the fork server listens at a socket in it, whose name is short: {_LONGEST_TMP} bytes are left",
            fix="export TMPDIR=/tmp, or another short name",
        )
    if facts.folder_free_bytes < _LITTLE_TMP:
        yield warning(
            "temporary-folder-full",
            f"{facts.folder_free_bytes // _MIB} MiB are free in {facts.folder}",
            why="a call's arguments and results, models included, lie in a file there",
            fix="make room, or export TMPDIR=<a folder on a larger disk>",
        )


def _shared(facts: Memory) -> Iterator[Finding]:
    if facts.shm_bytes is None:
        yield fault(
            "no-shared-memory",
            "there is no /dev/shm",
            why="batches of a DataLoader with workers, and NCCL's between GPUs, travel through it",
            fix="mount -t tmpfs tmpfs /dev/shm; or num_workers=0",
        )
    elif facts.shm_free_bytes < _LITTLE_SHM:
        yield warning(
            "little-shared-memory",
            f"{facts.shm_free_bytes // _MIB} of {facts.shm_bytes // _MIB} MiB are free in /dev/shm",
            why="batches of a DataLoader with workers, and NCCL's between GPUs, travel through it: "
            "a process that finds none is ended by SIGBUS",
            fix="start the container with --shm-size=8g (or --ipc=host); else remove stale files there",
        )


def _summary(facts: Memory) -> str:
    shm = "none" if facts.shm_bytes is None else f"{facts.shm_free_bytes // _MIB} MiB free"
    return f"{_SHM} {shm}, {facts.folder} {facts.folder_free_bytes // _MIB} MiB free"


CHECK = Check("shared memory", gather, _summary, judge)
