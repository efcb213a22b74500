"""Atomic file replacement: a process killed at any moment leaves the old file or the new one.

.name.<host>.<pid>.tmp    written and fsynced; removed by the next writer if its own writer was killed
name                      the same file after a rename, which is fsynced too
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

__all__ = ["early_writeback", "fsync", "remove_stale_temp_files", "replace_file"]

_WRITEBACK_EVERY_S = 0.02
_SYNC_FILE_RANGE_WRITE = 2
_ABANDONED_AFTER_S = 3600.0
_TEMPORARY = re.compile(r"\.(?P<name>[^.]+(\.(pt|safetensors))?)\.(?P<host>.+)\.(?P<pid>\d+)\.tmp")


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a new file and move it to `path` atomically.

    Args:
        path: the target; its folder exists. If it is a symbolic link, the file that it points to is replaced.
        write: writes the new content to the path that it is called with: a temporary file in the same folder.

    Raises:
        OSError: writing failed; the previous file is still at `path`.
    """
    path = path.resolve() if path.is_symlink() else path
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        remove_stale_temp_files(path.parent, re.compile(re.escape(path.name)), now_s=temporary.stat().st_mtime)
        with early_writeback(temporary):
            write(temporary)
        fsync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    # The rename changes the folder: it survives a power failure only after this fsync.
    fsync(path.parent)


@contextlib.contextmanager
def early_writeback(path: Path) -> Iterator[None]:
    """Start writeback of a file while the block writes it, so that the final fsync is short; Linux only.

    By default Linux starts writeback at fsync, or when dirty pages fill a tenth of the memory.

    Source: https://man7.org/linux/man-pages/man2/sync_file_range.2.html
    """
    sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if sync_file_range is None:
        yield
        return
    has_ended = threading.Event()

    def start_writeback() -> None:
        while not has_ended.wait(_WRITEBACK_EVERY_S):
            with contextlib.suppress(OSError):  # the file does not exist yet
                descriptor = os.open(path, os.O_WRONLY)
                sync_file_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)
                os.close(descriptor)

    thread = threading.Thread(target=start_writeback, name="parallelize-writeback", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def remove_stale_temp_files(folder: Path, names: re.Pattern[str], *, now_s: float) -> None:
    """Remove the temporary files of killed writers.

    A file of another host, whose processes are unknown here, is removed an hour after its last change.

    Args:
        folder: the folder of the files.
        names: pattern of the final names whose temporary files are removed.
        now_s: the time by the clock of the file system, which may be a server's.
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
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
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
