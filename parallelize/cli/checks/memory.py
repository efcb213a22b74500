"""Doctor check: free space in /dev/shm, for DataLoader batches, and in the temporary folder, for data of calls."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from parallelize.cli.findings import Check, Finding, fault, warning

__all__ = ["CHECK", "Memory", "gather", "judge"]

_SHM = Path("/dev/shm")  # noqa: S108 - only measured, never written
_MIB = 1 << 20
_LOW_SHM_BYTES = 256 * _MIB
_LOW_TMP_BYTES = 1024 * _MIB
# The fork server listens on <folder>/pymp-xxxxxxxx/listener-xxxxxxxx; a socket path has at most 107 bytes.
_MAX_TMP_NAME_BYTES = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Sizes and free space of shared memory and of the temporary folder.

    Args:
        system: value of sys.platform.
        shm_bytes: size of /dev/shm; None: it does not exist.
        shm_free_bytes: free space in /dev/shm.
        folder: the folder for temporary files (TMPDIR); None: none is writable.
        folder_free_bytes: free space in that folder.
    """

    system: str = "linux"
    shm_bytes: int | None = None
    shm_free_bytes: int = 0
    folder: str | None = None
    folder_free_bytes: int = 0


def gather(_environ: Mapping[str, str]) -> Memory:
    """Read the free space of /dev/shm and of the temporary folder."""
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
    """Yield a finding if /dev/shm or the temporary folder is missing or nearly full."""
    if facts.system == "linux":
        yield from _judge_shared_memory(facts)
    if facts.folder is None:
        yield fault(
            "no-temporary-folder",
            "no writable folder for temporary files",
            why="the arguments and results of a call are written to a file there",
            fix="export TMPDIR=<a folder on a local disk>",
        )
        return
    if len(facts.folder.encode()) > _MAX_TMP_NAME_BYTES:
        yield fault(
            "temporary-folder-long",
            f"the path of the temporary folder has {len(facts.folder.encode())} bytes: {facts.folder}",
            why=f"the fork server needs a socket in it, which allows at most {_MAX_TMP_NAME_BYTES} bytes",
            fix="export TMPDIR=/tmp, or another short path",
        )
    if facts.folder_free_bytes < _LOW_TMP_BYTES:
        yield warning(
            "temporary-folder-full",
            f"{facts.folder_free_bytes // _MIB} MiB are free in {facts.folder}",
            why="the arguments and results of a call, models included, are written to a file there",
            fix="free some space, or export TMPDIR=<a folder on a larger disk>",
        )


def _judge_shared_memory(facts: Memory) -> Iterator[Finding]:
    if facts.shm_bytes is None:
        yield fault(
            "no-shared-memory",
            f"{_SHM} does not exist",
            why="DataLoader workers and NCCL send data through it",
            fix="mount -t tmpfs tmpfs /dev/shm; or use num_workers=0",
        )
    elif facts.shm_free_bytes < _LOW_SHM_BYTES:
        yield warning(
            "little-shared-memory",
            f"{facts.shm_free_bytes // _MIB} of {facts.shm_bytes // _MIB} MiB are free in /dev/shm",
            why="DataLoader workers and NCCL send data through it: a process is killed by SIGBUS when it is full",
            fix="start the container with --shm-size=8g (or --ipc=host); else delete stale files in /dev/shm",
        )


def _summary(facts: Memory) -> str:
    shm = "missing" if facts.shm_bytes is None else f"{facts.shm_free_bytes // _MIB} MiB free"
    return f"{_SHM} {shm}, {facts.folder} {facts.folder_free_bytes // _MIB} MiB free"


CHECK = Check("shared memory", gather, _summary, judge)
