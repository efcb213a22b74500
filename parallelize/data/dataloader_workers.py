"""DataLoader worker processes: their worker_init_fn, worker info across processes, and the location of errors."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import _utils, get_worker_info

from parallelize.torch_private import unsupported

__all__ = ["GlobalWorkerInfo", "WorkerInit", "add_data_location"]


@dataclass(frozen=True)
class WorkerInit:
    """The worker_init_fn of a copied loader: adds data locations to errors, and calls the user's worker_init_fn.

    Args:
        user_init: the user's worker_init_fn.
        rank: rank of the process that the worker belongs to.
        world_size: number of processes.
        has_global_info: whether get_worker_info() counts the workers of all processes (see `GlobalWorkerInfo`).
    """

    user_init: Callable[[int], None] | None
    rank: int
    world_size: int
    has_global_info: bool = False

    def __call__(self, worker_id: int) -> None:
        """Initialize a worker process."""
        # These patches are never undone: the worker process belongs to the loader and ends with it.
        fetchers: tuple[Any, ...] = (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher)
        for fetcher in fetchers:
            fetcher.fetch = _with_data_location(fetcher.fetch, f"rank {self.rank}, worker {worker_id}")
        if self.has_global_info:
            info = GlobalWorkerInfo(get_worker_info(), rank=self.rank, world_size=self.world_size)
            torch_worker: Any = _utils.worker
            torch_worker._worker_info = info
            if id(get_worker_info()) != id(info):
                raise unsupported("shard_loader with workers", instead="use num_workers=0")
            worker_id = info.shard_index
        if self.user_init is not None:
            self.user_init(worker_id)


class GlobalWorkerInfo:
    """Replacement for torch's worker info that counts the workers of all processes as if one process had them all.

    With it, a dataset that shards itself by get_worker_info() shards over all processes; one without workers
    counts as one. It records what the dataset reads, because that tells how the dataset shards itself: without it,
    each process would have to iterate the data of all processes, and discard the part of the others.
    """

    def __init__(self, info: Any, *, rank: int, world_size: int) -> None:
        self._info = info
        local_id, local_workers = (0, 1) if info is None else (info.id, info.num_workers)
        self.shard_index = local_id * world_size + rank
        self.num_shards = local_workers * world_size
        self.read: set[str] = set()

    def of_this_process(self) -> GlobalWorkerInfo | None:
        """Return an info that counts the workers of this process only; None if it has none, as torch does."""
        return None if self._info is None else GlobalWorkerInfo(self._info, rank=0, world_size=1)

    @property
    def id(self) -> int:
        """Index of the worker among those of all processes."""
        self.read.add("id")
        return self.shard_index

    @property
    def num_workers(self) -> int:
        """Number of workers of all processes; a dataset that reads it is assumed to shard itself by it."""
        self.read.add("num_workers")
        return self.num_shards

    @property
    def dataset(self) -> Any:
        """The user's dataset, without the wrapper that shards it."""
        dataset = getattr(self._info, "dataset", None)
        return getattr(dataset, "unsharded", dataset)

    @property
    def seed(self) -> int:
        """Seed of the worker."""
        return torch.initial_seed() if self._info is None else int(self._info.seed)


def add_data_location(error: BaseException, where: str) -> None:
    """Add the rank, worker and index to an error of the user's dataset or collate_fn, as a note."""
    note = f"in the data of {where}{_index_text(error.__traceback__)}"
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def _index_text(traceback: types.TracebackType | None) -> str:
    """Return text with the index that torch's fetcher was fetching, from the locals of its frames; may be empty."""
    text, indices = "", []
    while traceback is not None:
        code, names = traceback.tb_frame.f_code, traceback.tb_frame.f_locals
        if code.co_filename == _utils.fetch.__file__:
            if "idx" in names:
                return f", index {names['idx']!r}"
            if "possibly_batched_index" in names:
                requested = names["possibly_batched_index"]
                text, indices = f", indices {requested!r}", requested if isinstance(requested, list) else []
        elif code.co_name == "__getitem__":
            # Since Python 3.12 the fetcher's comprehension has no frame: use the argument of dataset.__getitem__.
            index = [names[name] for name in code.co_varnames[1:2] if name in names]
            return f", index {index[0]!r}" if index and any(index[0] is each for each in indices) else text
        traceback = traceback.tb_next
    return text


def _with_data_location(fetch: Callable[[Any, Any], Any], where: str) -> Callable[[Any, Any], Any]:
    @functools.wraps(fetch)
    def fetch_with_location(self: Any, possibly_batched_index: Any) -> Any:
        try:
            return fetch(self, possibly_batched_index)
        except StopIteration:
            raise
        except Exception as exc:
            add_data_location(exc, where)
            raise

    return fetch_with_location
