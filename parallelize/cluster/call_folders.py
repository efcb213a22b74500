"""The folders of calls: private ones in the temporary folder, where every user may write.

    <temporary folder>/parallelize-call-<host>-<random>     mode 0700, locked by the caller

Who removes the folder, and what happens to its lock:

    a call begins                    the caller makes the folder and locks it
      its value is there             the caller removes the folder
      the caller is killed           the kernel frees the lock; the fork server of the caller ends
                                     the workers, then removes the folder
        the fork server, too         the next call of this user on this host finds a folder that is
                                     a minute old and that it can lock, and removes it

A folder that is locked belongs to a call that runs. A younger folder without a lock may belong to
a call that has made it and is about to lock it.

The name has the host, because several hosts may share the disk, and on some disks a lock holds on
its own host alone. Another user may put anything under such a name: a FIFO, whose opening waits
for a writer, a link, a device, or a folder. Nothing of that is opened.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import socket
import stat
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

CALL_FOLDER_PREFIX = "parallelize-call-"

_ABANDONED_AFTER_S = 60.0
# The path of a socket in the folder has at most 107 bytes (103 on macOS, of which the temporary
# folder takes 49).
_HOST_CHARACTERS = 16


@contextlib.contextmanager
def call_folder() -> Iterator[Path]:
    """Make the folder of a call, for the block; remove folders that killed programs have left."""
    _remove_abandoned_folders()
    folder = Path(tempfile.mkdtemp(prefix=_prefix_of_this_host()))
    try:
        folder.chmod(stat.S_IRWXU)  # the umask may have taken rights of this user, too
        with _opened(folder) as descriptor:
            with contextlib.suppress(OSError):  # a disk without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def own_call_folders() -> list[Path]:
    """Return the folders of this user's calls on this host, those of killed programs too."""
    temporary = Path(tempfile.gettempdir())
    own_name = re.compile(re.escape(_prefix_of_this_host()) + "[a-z0-9_]+")
    try:
        names = os.listdir(temporary)  # noqa: PTH208 - names are compared, not paths
    except OSError:  # whoever may write there need not be allowed to list it
        return []
    folders = [temporary / name for name in names if own_name.fullmatch(name)]
    return [folder for folder in folders if _is_own_folder(folder)]


def remove_call_folder(folder: Path) -> None:
    """Remove a folder that its caller may have removed; another user may have the name since."""
    if _is_own_folder(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned_folders() -> None:
    """Remove the folders of this user's calls on this host that no process has locked."""
    for folder in own_call_folders():
        with contextlib.suppress(OSError), _opened(folder) as descriptor:
            if time.time() - os.fstat(descriptor).st_mtime > _ABANDONED_AFTER_S:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_call_folder(folder)


def _prefix_of_this_host() -> str:
    """Return how the names of this host's folders begin; what follows has no "-"."""
    host = urllib.parse.quote(os.fsencode(socket.gethostname()), safe="")
    if len(host) > _HOST_CHARACTERS:
        digest = hashlib.sha256(host.encode()).hexdigest()[:8]
        host = f"{host[: _HOST_CHARACTERS - len(digest) - 1]}~{digest}"
    return f"{CALL_FOLDER_PREFIX}{host}-"


def _is_own_folder(path: Path) -> bool:
    """Return whether a path is a folder of this user, and not a link to one; nothing is opened."""
    try:
        about = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Open a folder, and nothing that another user has put under its name meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
