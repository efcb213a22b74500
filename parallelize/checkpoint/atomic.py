"""Files that are there whole or not at all, whenever the writer is killed.

.name.<host>.<pid>.tmp    written, then forced to the disk
name                      the same file, by a rename that is forced to the disk too
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

__all__ = ["clear_leftovers", "force", "replace_file"]


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Put a new file at `path`: a kill at any moment leaves the old one or the new one.

    Args:
        path: where; its folder exists.
        write: writes the file at the path it is given, in the same folder.

    Raises:
        OSError: the file system refuses; what was at `path` is still there.
    """
    clear_leftovers(path.parent, re.compile(re.escape(path.name)))
    beside = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        write(beside)
        force(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    # A rename is an entry of the folder: only now does it outlive a power failure.
    force(path.parent)


def clear_leftovers(folder: Path, names: re.Pattern[str]) -> None:
    """Remove what writers on this host have left that were killed.

    Args:
        folder: where they wrote.
        names: of the files that they were to become.
    """
    left = re.compile(rf"\.(.+)\.{re.escape(socket.gethostname())}\.(\d+)\.tmp")
    for each in folder.iterdir() if folder.is_dir() else ():
        found = left.fullmatch(each.name)
        if found and names.fullmatch(found[1]) and not _is_alive(int(found[2])):
            each.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def force(path: Path) -> None:
    """Wait until what was written to a file, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Some network file systems have no such thing for folders; their renames are as durable as their server.
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
