"""Files that are there whole or not at all, whenever the writer is killed.

.name.<host>.<pid>.tmp    written, then forced to the disk
name                      the same file, by a rename that is forced to the disk too
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["clear_leftovers", "force", "replace_file", "writing_out"]


_PUSH_EVERY_S = 0.02
_SYNC_FILE_RANGE_WRITE = 2


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Put a new file at `path`: a kill at any moment leaves the old one or the new one.

    Args:
        path: where; its folder exists. Of a link, what it leads to is replaced, as by any program that writes to it.
        write: writes the file at the path it is given, in the same folder.

    Raises:
        OSError: the file system refuses; what was at `path` is still there.
    """
    path = path.resolve() if path.is_symlink() else path
    clear_leftovers(path.parent, re.compile(re.escape(path.name)))
    beside = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with writing_out(beside):
            write(beside)
        force(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    # A rename is an entry of the folder: only now does it outlive a power failure.
    force(path.parent)


@contextlib.contextmanager
def writing_out(path: Path) -> Iterator[None]:
    """A file that is written meanwhile goes to the disk meanwhile, where the system can be asked to: `force` is short.

    Left alone, Linux begins when it is told to wait for the file, or when a tenth of the memory is unwritten.

    Source: https://man7.org/linux/man-pages/man2/sync_file_range.2.html
    """
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if begin is None:
        yield
        return
    has_ended = threading.Event()

    def push() -> None:
        while not has_ended.wait(_PUSH_EVERY_S):
            with contextlib.suppress(OSError):  # not there yet
                descriptor = os.open(path, os.O_WRONLY)
                begin(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)
                os.close(descriptor)

    thread = threading.Thread(target=push, name="parallelize-writing-out", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


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
