"""A file that is replaced as a whole: written beside the target under another name, then renamed.

    .last.pt.gpu1.5f0c9a7e12345678.tmp    made for this save alone, and locked while it is written
    last.pt                               the same file after the rename

A run that is killed at any moment leaves the old file or the new one. Two saves of one path write
two temporary files, so each of them leaves a whole file. What a killed save leaves is removed by
the next save of the path: the lock says that nobody writes it any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

SUFFIX = ".tmp"
_DAY_S = 24 * 3600.0
_MAX_NAME_BYTES = 255


@dataclass(frozen=True)
class TemporaryFile:
    """An open file that is to replace `target`.

    Attributes:
        path: its name, in the folder of `target`.
        file: open for reading and writing.
        target: the file that it replaces; it need not exist.
    """

    path: Path
    file: IO[bytes]
    target: Path

    def replace_target(self) -> None:
        """Rename the file to the target, whose permissions it gets if the target exists."""
        self.file.flush()
        with contextlib.suppress(OSError):  # some file systems have no permissions to set
            permissions = _permissions(self.target)
            if permissions is not None:
                os.fchmod(self.file.fileno(), permissions)
        self.path.replace(self.target)


@contextlib.contextmanager
def temporary_file(target: Path, token: str = "") -> Iterator[TemporaryFile]:
    """Make a file beside `target` for this block alone; it is removed if it replaces nothing.

    Args:
        target: the file to replace, not a link.
        token: the last part of the temporary name; "": a random one.

    Yields:
        The open file, empty, and locked until the end of the block.

    Raises:
        OSError: the folder does not exist, or this user may not write to it.
    """
    if target.exists():  # else there was no save that could have left a file; listing may take long
        remove_unused(target.parent, f".{_name_of(target)}.")
    temporary = _create(target, token)
    try:
        yield temporary
    finally:
        # Still there after an exception, and where another rank's version of the target stays.
        temporary.path.unlink(missing_ok=True)
        temporary.file.close()


def _create(target: Path, token: str) -> TemporaryFile:
    permissions = _permissions(target)
    # The writer may read and write its file, whatever the permissions of the target are.
    mode = 0o666 if permissions is None else permissions & 0o666 | 0o600
    while True:
        name = f".{_name_of(target)}.{_host()}.{token or secrets.token_hex(8)}{SUFFIX}"
        path = target.with_name(name)
        # O_EXCL: a file or a link that somebody has put there is neither opened nor followed. The
        # umask applies, which mkstemp does not ask for, and which only a change of it returns.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        file = os.fdopen(descriptor, "w+b")
        if _locks(descriptor) and os.fstat(descriptor).st_nlink > 0:
            return TemporaryFile(path, file, target)
        # Between the two lines another save took it for the file of a killed one.
        path.unlink(missing_ok=True)
        file.close()


def _permissions(target: Path) -> int | None:
    """Return the permission bits of a file, or None if it does not exist."""
    try:
        return target.stat().st_mode & 0o777
    except FileNotFoundError:
        return None


def _locks(descriptor: int) -> bool:
    """Lock a file, and return False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, on which nobody else gets one either
        return True
    return True


def remove_unused(folder: Path, prefix: str) -> None:
    """Remove temporary files that killed saves of this user have left; files in use are kept.

    Args:
        folder: whose files are looked at, not those of folders in it.
        prefix: of the names, such as ".last.pt.".
    """
    with contextlib.suppress(OSError):
        names = os.listdir(folder)  # noqa: PTH208 - a folder may hold 100,000 files
        left = [name for name in names if name.startswith(prefix) and name.endswith(SUFFIX)]
        for name in left:
            with contextlib.suppress(OSError):  # in use, or just removed
                _remove_if_unused(folder / name)


def _remove_if_unused(path: Path) -> None:
    if not _is_left(path.lstat(), path.name):
        return
    # O_NONBLOCK: a FIFO that takes its place meanwhile stops nobody.
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(descriptor)


def _is_left(status: os.stat_result, name: str) -> bool:
    """Return whether this user has written a file whose lock tells if it is in use."""
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return False
    # Some file systems keep a lock on one machine: there, one of another machine is not seen.
    return f".{_host()}." in name or time.time() - status.st_mtime > _DAY_S


def _host() -> str:
    """Return the name of this machine, as a part of a file name."""
    return socket.gethostname().partition(".")[0].replace("/", "-")[:40]


def _name_of(target: Path) -> str:
    """Return the name of a file, cut so that a temporary name is not too long for a folder."""
    added = len(f"..{_host()}.{SUFFIX}") + 2 * 8
    return os.fsdecode(os.fsencode(target.name)[: _MAX_NAME_BYTES - added])


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk; some file systems cannot do the latter."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
