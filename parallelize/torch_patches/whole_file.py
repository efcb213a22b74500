"""Replaces a file as a whole: a temporary file is written beside the target, and then renamed.

    .last.pt.gpu1.5f0c9a7e12345678.tmp    the temporary file of one save, locked until its end
             ^    ^
             |    token, which no other save has
             machine
    last.pt                               the target: the same file after the rename

A run that is killed at any moment leaves the old target or the new one. Two saves of one path write
two temporary files, so that the target is a whole file in any case. A killed save leaves its
temporary file. The next save of the path removes it, if it can lock the file: then no process
writes the file any more.
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
        path: the path of the temporary file, in the folder of `target`.
        file: the temporary file, open for reading and writing.
        target: the path of the file to replace, which need not exist.
    """

    path: Path
    file: IO[bytes]
    target: Path

    def replace_target(self) -> None:
        """Rename the file to the target; if the target exists, keep the target's permissions."""
        self.file.flush()
        # Some file systems have no permissions to set.
        with contextlib.suppress(OSError):
            permissions = _permissions(self.target)
            if permissions is not None:
                os.fchmod(self.file.fileno(), permissions)
        self.path.replace(self.target)


@contextlib.contextmanager
def temporary_file(target: Path, token: str = "") -> Iterator[TemporaryFile]:
    """Make a temporary file beside `target`, for one save.

    The caller writes the file and calls `replace_target`. A file that has replaced nothing is
    removed at the end of the context.

    Args:
        target: the file to replace, not a link: the rename would replace the link.
        token: the last part of the temporary name; "": a random one.

    Yields:
        The open file, empty, and locked until the end of the context.

    Raises:
        OSError: the folder does not exist, or this user may not write to it.
    """
    # To list a folder may take long. Without a target, no save of the path has ended yet, so that a
    # file of a killed one is unlikely.
    if target.exists():
        remove_unused(target.parent, f".{_name_of(target)}.")
    temporary = _create(target, token)
    try:
        yield temporary
    finally:
        # The file is still there after an exception, and if another rank's file has replaced the
        # target.
        temporary.path.unlink(missing_ok=True)
        temporary.file.close()


def _create(target: Path, token: str) -> TemporaryFile:
    """Create and lock a temporary file for a target."""
    permissions = _permissions(target)
    # The writer may read and write its file, whatever the permissions of the target are.
    mode = 0o666 if permissions is None else permissions & 0o666 | 0o600
    while True:
        name = f".{_name_of(target)}.{_host()}.{token or secrets.token_hex(8)}{SUFFIX}"
        path = target.with_name(name)
        # With O_EXCL, a file or a link that somebody has put there is neither opened nor followed.
        # `os.open` applies the umask to the permissions of a new file, as `open` does. mkstemp does
        # not, and the umask cannot be read without a change of it.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        file = os.fdopen(descriptor, "w+b")
        if _locks(descriptor) and os.fstat(descriptor).st_nlink > 0:
            return TemporaryFile(path, file, target)
        # Between `os.open` and the lock, another save has taken this file for that of a killed
        # save, and has locked or removed it.
        path.unlink(missing_ok=True)
        file.close()


def _permissions(target: Path) -> int | None:
    """Return the permission bits of a file, or None if it does not exist."""
    try:
        return target.stat().st_mode & 0o777
    except FileNotFoundError:
        return None


def _locks(descriptor: int) -> bool:
    """Try to lock a file; return False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # On a file system without locks, no other process can take this file for an unused one.
        return True
    return True


def remove_unused(folder: Path, prefix: str) -> None:
    """Remove temporary files that killed saves of this user have left, and keep files in use.

    Args:
        folder: the folder with the files; folders in it are not searched.
        prefix: the beginning of the files' names, such as ".last.pt.".
    """
    with contextlib.suppress(OSError):
        names = os.listdir(folder)  # noqa: PTH208 - a folder may hold 100,000 files
        candidates = [name for name in names if name.startswith(prefix) and name.endswith(SUFFIX)]
        for name in candidates:
            # The file is in use, or another process has just removed it.
            with contextlib.suppress(OSError):
                _remove_if_unused(folder / name)


def _remove_if_unused(path: Path) -> None:
    """Remove a temporary file if nobody writes it.

    Raises:
        OSError: a process has locked the file, or the file cannot be opened or removed.
    """
    if not _shows_use_by_lock(path.lstat(), path.name):
        return
    # O_NONBLOCK and O_NOFOLLOW: somebody may have put a FIFO or a link in place of the file since
    # `lstat`. To open a FIFO would wait for a reader.
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(descriptor)


def _shows_use_by_lock(status: os.stat_result, name: str) -> bool:
    """Whether the lock of a file tells if the file is in use, and this user has written it.

    Args:
        status: the status of the file, without following a link.
        name: the name of the file.
    """
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return False
    # On some file systems, a lock is not seen on other machines. The file of another machine counts
    # as unused when nobody has written to it for a day.
    return f".{_host()}." in name or time.time() - status.st_mtime > _DAY_S


def _host() -> str:
    """Return the name of this machine in the form that temporary names contain."""
    return socket.gethostname().partition(".")[0].replace("/", "-")[:40]


def _name_of(target: Path) -> str:
    """Return the name of a target, cut so that the temporary name is not too long for a folder."""
    # What the temporary name adds; a token has 16 characters.
    added = len(f"..{_host()}.{SUFFIX}") + 2 * 8
    return os.fsdecode(os.fsencode(target.name)[: _MAX_NAME_BYTES - added])


def fsync(path: Path) -> None:
    """Write a file, or the list of files in a folder, to disk, so that a power cut loses nothing.

    After a rename, the folder has to be written, too. Not all file systems can do that; there, the
    function returns without an error.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
