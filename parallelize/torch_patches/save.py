"""torch.save in a run of several ranks, which single-device programs call without `if is_main()`.

Each rank writes a file of its own beside the target and renames it, so that no reader meets half a file. Of the ranks
of a machine, the first to have its n-th version of a path ready renames it, and after it rank 0, whose version stays.
The others wait for the first, so that each finds a file where it has saved one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallelize.torch_patches.private import replace_attribute

__all__ = ["atomic_saves"]

_RENAMING = timedelta(seconds=5)  # a rank that takes longer was killed


def atomic_saves(store: dist.Store, rank: int) -> contextlib.AbstractContextManager[None]:
    """Return a context in which torch.save replaces files as a whole; `store` is that of all ranks."""
    original, counts, host, process = torch.save, Counter[Path](), socket.gethostname(), os.getpid()

    @functools.wraps(original)
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        path = Path(f).resolve() if isinstance(f, (str, os.PathLike)) else None
        is_file = path is not None and (path.is_file() or not path.exists())  # not such as /dev/null
        if path is None or not is_file or os.getpid() != process:  # a forked process shares the store's connection
            return original(obj, f, *args, **kwargs)
        temporary = path.with_name(f".{path.name}.{rank}.tmp")
        key = f"parallelize/save/{host}/{path}/{counts[path]}"
        renamed = f"{key}/renamed"
        counts[path] += 1
        # The store is lost after a failure, when a user's `finally` block saves: then each rank renames its file.
        lost = contextlib.suppress(dist.DistError, RuntimeError)
        try:
            original(obj, temporary, *args, **kwargs)
            is_first = True
            with lost:
                is_first = store.add(key, 1) == 1
                if not is_first:
                    store.wait([renamed], _RENAMING)
            if rank == 0 or is_first:
                temporary.replace(path)
                with lost:
                    store.set(renamed, "")
        finally:
            temporary.unlink(missing_ok=True)

    return replace_attribute(torch, "save", save)
