"""torch.save in a run of several ranks: ranks that save one path leave a whole file.

A program for one device calls torch.save without `if is_main()`, so that each rank calls it.

    version         n, for the n-th save of a path by a rank
    temporary file  what a rank has written beside the target; a rename replaces the target by it

Each rank writes a temporary file, so that no reader finds half a file. Then it renames the file, or
removes it:

    rank 0          always renames, so that rank 0's file stays
    another rank    renames if no rank of its machine has renamed this version or a later one, so
                    that each rank finds a file where it has saved one. Otherwise it removes its
                    file, so that a slow rank does not bring back an older version.

The ranks of a machine share the versions in a file in memory:

    memory file     (path, version), (path, version), ...
      ^       ^
    rank 0  rank 1  each of them: lock, read what is new, rename or not, append, unlock

The memory file has no name, so that nothing is left of it, even after a kill. The store of the
process group would keep a key for each save.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import socket
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallelize.torch_patches.private import replace_attribute
from parallelize.torch_patches.whole_file import TemporaryFile, temporary_file

# An entry of the memory file: the digest of a path, and a version.
_VERSION = struct.Struct("<16sq")
_NAME = "parallelize-saves"


class _SharedVersions:
    """The latest version of each path for which a rank of this machine has renamed a file.

    Args:
        store: the store of all ranks, which gets two keys for each machine.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store, self._key = store, f"saves/{socket.gethostname()}"
        self._latest: dict[bytes, int] = {}
        # A lock of the file does not keep two threads of one process apart.
        self._thread_lock = threading.Lock()
        # The position in the file up to which this process has read.
        self._end = 0
        # The first rank on this machine makes the file. The others open it now, and not at their
        # first save: then, the first rank may have ended its run, and closed the file.
        if store.add(self._key, 1) == 1:
            self._descriptor = _memory_file()
            store.set(f"{self._key}/file", f"{os.getpid()} {self._descriptor}")
        else:
            self._descriptor = self._open()

    def rename(self, temporary: TemporaryFile, version: int, *, is_rank_0: bool) -> None:
        """Let a temporary file replace its target, if its version is new on this machine.

        Args:
            temporary: the file that this rank has written.
            version: how often this rank has saved the target, from 1.
            is_rank_0: whether this is rank 0, whose file always replaces the target.
        """
        path = os.fsencode(temporary.target)
        digest = hashlib.blake2b(path, digest_size=16).digest()
        with self._thread_lock, self._locked():
            latest = self._read().get(digest, 0)
            if is_rank_0 or version > latest:
                temporary.replace_target()
            if version > latest:
                os.pwrite(self._descriptor, _VERSION.pack(digest, version), self._end)

    def close(self) -> None:
        """Close the file; it is gone when all ranks of the machine have closed it."""
        os.close(self._descriptor)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file for this process in the context."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _open(self) -> int:
        """Return a descriptor of the machine's memory file, or of a new one that nobody shares.

        A rank that shares no file renames each file that it saves.
        """
        # The store may be lost by now. And some systems hide a process from the other processes of
        # its user.
        with contextlib.suppress(dist.DistError, RuntimeError, OSError, ValueError):
            process, descriptor = map(int, self._store.get(f"{self._key}/file").split())
            return _opened_memory_file(process, descriptor)
        return _memory_file()

    def _read(self) -> dict[bytes, int]:
        """Read what the ranks have appended since the last call; return digest -> version."""
        size = os.fstat(self._descriptor).st_size
        appended = os.pread(self._descriptor, size - self._end, self._end)
        self._latest.update(_VERSION.iter_unpack(appended))
        self._end += len(appended)
        return self._latest


def _memory_file() -> int:
    """Make a file that has no name, and return its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(_NAME)
    # This is not Linux. Other processes cannot open the file, so that each rank renames each file
    # that it saves.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _opened_memory_file(process: int, descriptor: int) -> int:
    """Open the memory file of another process of this user.

    The numbers come from the store. A stranger may have written the numbers of another file there,
    which must not be written to: the kernel tells whether `memfd_create` has made the file.

    Args:
        process: id of the process.
        descriptor: number of the file in that process.

    Raises:
        OSError: there is no such memory file.
    """
    link = Path(f"/proc/{process}/fd/{descriptor}")
    _require_memory_file(link)
    opened = os.open(link, os.O_RDWR)
    try:
        # Between the check and `os.open`, the other process may have closed the file and opened
        # another one with the same number.
        _require_memory_file(Path(f"/proc/self/fd/{opened}"))
    except OSError:
        os.close(opened)
        raise
    return opened


def _require_memory_file(link: Path) -> None:
    """Raise an error unless a link of /proc leads to a file that `_memory_file` has made."""
    if not str(link.readlink()).startswith(f"/memfd:{_NAME}"):
        raise FileNotFoundError(link)


@contextlib.contextmanager
def atomic_saves(store: dist.Store, rank: int) -> Iterator[None]:
    """In the context, let torch.save replace files as a whole.

    Args:
        store: a store of all ranks that only this run uses.
        rank: the rank of this process.
    """
    original, process = torch.save, os.getpid()
    versions, counts = _SharedVersions(store), Counter[Path]()

    @functools.wraps(original)
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        path = Path(f).resolve() if isinstance(f, (str, os.PathLike)) else None
        # A forked process, such as a worker of a DataLoader, is no rank: it has no versions.
        if path is None or os.getpid() != process or not _is_replaceable(path):
            original(obj, f, *args, **kwargs)
            return
        counts[path] += 1
        version = counts[path]
        with temporary_file(path) as temporary:
            # torch.save gets the open file, because it would store the name of a path in the file:
            # the names of temporary files differ, and so would the bytes of equal states.
            original(obj, temporary.file, *args, **kwargs)
            versions.rename(temporary, version, is_rank_0=rank == 0)

    with contextlib.closing(versions), replace_attribute(torch, "save", save):
        yield


def _is_replaceable(path: Path) -> bool:
    """Whether a rename may replace a path: a file, or a new name in a folder, not /dev/null."""
    return path.is_file() or (path.parent.is_dir() and not path.exists())
