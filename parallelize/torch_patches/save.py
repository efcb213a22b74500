"""torch.save in a run of several ranks, which single-device programs call without `if is_main()`.

Each rank writes a temporary file beside the target and renames it, so no reader meets half a file.
Of the ranks of a machine, the first to have its n-th version of a path ready renames it, and after
it rank 0, whose version stays. The others rename nothing, so that a slow rank does not bring back
an older version; each of them finds a file where it has saved one.

    rank 0's memory file       (path, version), (path, version), ...
        ^          ^
      rank 0     rank 1        lock it, read what is new, rename or not, append, unlock

Which versions are there is written in a file in memory that the ranks of the machine share. It has
no name, so nothing is left of it, not even after a kill. A store would keep a key for each save.
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

_VERSION = struct.Struct("<16sq")  # digest of a path, and how often it was saved
_NAME = "parallelize-saves"


class _SharedVersions:
    """The latest version of each path that a rank of this machine has renamed.

    Args:
        store: of all ranks; it gets two keys for each machine, here and not later.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store, self._key = store, f"saves/{socket.gethostname()}"
        self._descriptor: int | None = None
        self._latest: dict[bytes, int] = {}
        self._thread = threading.Lock()  # flock does not part the threads of one process
        self._end = 0
        if store.add(self._key, 1) == 1:
            self._descriptor = _memory_file()
            store.set(f"{self._key}/file", f"{os.getpid()} {self._descriptor}")

    def rename(self, temporary: TemporaryFile, version: int, *, is_rank_0: bool) -> None:
        """Let a file replace its target, unless a file of this version or a later one has done so.

        Args:
            temporary: what this rank has written.
            version: how often this rank has saved the target, from 1.
            is_rank_0: whether the file replaces one of the same version.
        """
        path = os.fsencode(temporary.target)
        digest = hashlib.blake2b(path, digest_size=16).digest()
        with self._thread, self._locked() as descriptor:
            latest = self._read(descriptor).get(digest, 0)
            if is_rank_0 or version > latest:
                temporary.replace_target()
            if version > latest:
                os.pwrite(descriptor, _VERSION.pack(digest, version), self._end)

    def close(self) -> None:
        """Close the file, which is gone when its last rank has done so."""
        if self._descriptor is not None:
            os.close(self._descriptor)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        if self._descriptor is None:
            self._descriptor = self._open()
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield self._descriptor
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _open(self) -> int:
        # The store is lost after a failure, when a user's `finally` block saves. Some systems hide
        # a process from others of the same user. Such a rank renames each file that it saves.
        with contextlib.suppress(dist.DistError, RuntimeError, OSError, ValueError):
            process, descriptor = map(int, self._store.get(f"{self._key}/file").split())
            return _opened_memory_file(process, descriptor)
        return _memory_file()

    def _read(self, descriptor: int) -> dict[bytes, int]:
        """Return the versions, after reading what ranks have appended since the last time."""
        appended = os.pread(descriptor, os.fstat(descriptor).st_size - self._end, self._end)
        self._latest.update(_VERSION.iter_unpack(appended))
        self._end += len(appended)
        return self._latest


def _memory_file() -> int:
    """Return a descriptor of a new file that has no name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(_NAME)
    # Not Linux: no other process can open it, so that each rank renames each file that it saves.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _opened_memory_file(process: int, descriptor: int) -> int:
    """Open the memory file of another process of this user.

    The numbers are from a store, where a stranger may have written others: those of a file that
    must not be written to. The kernel shows the name that only `memfd_create` gives.

    Raises:
        OSError: there is no such file.
    """
    link = Path(f"/proc/{process}/fd/{descriptor}")
    _require_memory_file(link)
    opened = os.open(link, os.O_RDWR)
    try:
        # Between the two lines the number may have become another file's.
        _require_memory_file(Path(f"/proc/self/fd/{opened}"))
    except OSError:
        os.close(opened)
        raise
    return opened


def _require_memory_file(link: Path) -> None:
    if not str(link.readlink()).startswith(f"/memfd:{_NAME}"):
        raise FileNotFoundError(link)


@contextlib.contextmanager
def atomic_saves(store: dist.Store, rank: int) -> Iterator[None]:
    """Let torch.save replace files as a whole in the block.

    Args:
        store: of all ranks, and of this run alone.
        rank: of this process.
    """
    original, process = torch.save, os.getpid()
    versions, counts = _SharedVersions(store), Counter[Path]()

    @functools.wraps(original)
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        # A forked process, as of a DataLoader, is no rank of its own.
        path = Path(f).resolve() if isinstance(f, (str, os.PathLike)) else None
        if path is None or os.getpid() != process or not _is_replaceable(path):
            original(obj, f, *args, **kwargs)
            return
        counts[path] += 1
        version = counts[path]
        with temporary_file(path) as temporary:
            # Given a path, torch.save stores the file's name in the file, so equal states under
            # temporary names would not be equal bytes.
            original(obj, temporary.file, *args, **kwargs)
            versions.rename(temporary, version, is_rank_0=rank == 0)

    with contextlib.closing(versions), replace_attribute(torch, "save", save):
        yield


def _is_replaceable(path: Path) -> bool:
    """Return whether a path is that of a file, or of a new one; not such as /dev/null."""
    return path.is_file() or (path.parent.is_dir() and not path.exists())
