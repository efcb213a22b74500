"""Atomic file replacement: a process killed at any moment leaves the old file or the new one.

.name.<host>.<pid>.tmp    written and fsynced; removed by the next writer if its own writer was killed
name                      the same file after a rename, which is fsynced too
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

__all__ = ["fsync", "remove_stale_temp_files", "replace_file"]

_ABANDONED_AFTER_S = 3600.0
_TEMPORARY = re.compile(r"\.(?P<name>[^.]+(\.(pt|safetensors))?)\.(?P<host>.+)\.(?P<pid>\d+)\.tmp")


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a new file and move it to `path` atomically; of a symbolic link, replace the file that it points to.

    `write` writes the content to the path that it is called with: a temporary file in the same, existing folder.
    """
    path = path.resolve() if path.is_symlink() else path
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        remove_stale_temp_files(path.parent, re.compile(re.escape(path.name)), now_s=temporary.stat().st_mtime)
        write(temporary)
        fsync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    # The rename changes the folder: it survives a power failure only after this fsync.
    fsync(path.parent)


def remove_stale_temp_files(folder: Path, names: re.Pattern[str], *, now_s: float) -> None:
    """Remove the temporary files of killed writers.

    A file of another host, whose processes are unknown here, is removed an hour after its last change, by the clock of
    the file system, which may be a server's. `names` is the pattern of the final names.
    """
    for each in folder.iterdir() if folder.is_dir() else ():
        match = _TEMPORARY.fullmatch(each.name)
        if match is None or not names.fullmatch(match["name"]):
            continue
        with contextlib.suppress(FileNotFoundError):  # another rank may remove it at the same time
            is_ours = match["host"] == socket.gethostname()
            if not _is_alive(int(match["pid"])) if is_ours else now_s - each.stat().st_mtime > _ABANDONED_AFTER_S:
                each.unlink()


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(PermissionError):  # another user's process
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Some network file systems do not support fsync of folders; their server decides when a rename is durable.
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
