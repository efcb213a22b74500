"""What happens in a loader's worker processes before the user's code, and where it fails."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import _utils, get_worker_info

__all__ = ["WideInfo", "WorkerStart", "explain"]


@dataclass(frozen=True)
class WorkerStart:
    """The worker_init_fn of a copied loader: makes failures tell where they are, then runs the user's own.

    Args:
        init: the user's worker_init_fn.
        rank: of the process the worker works for.
        world_size: processes.
        is_wide: whether the worker is to see itself as one of those of all processes (see `WideInfo`).
    """

    init: Callable[[int], None] | None
    rank: int
    world_size: int
    is_wide: bool = False

    def __call__(self, worker_id: int) -> None:
        """Run in a worker process.

        Args:
            worker_id: its number among those of its process.
        """
        # This process is the loader's own and ends with it: there is nobody to give these back to.
        fetchers: tuple[Any, ...] = (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher)
        for fetcher in fetchers:
            fetcher.fetch = _explained(fetcher.fetch, f"rank {self.rank}, worker {worker_id}")
        if self.is_wide:
            info = WideInfo(get_worker_info(), rank=self.rank, world_size=self.world_size)
            torch_worker: Any = _utils.worker
            torch_worker._worker_info = info
            worker_id = info.id
        if self.init is not None:
            self.init(worker_id)


class WideInfo:
    """What a dataset that divides itself by get_worker_info() sees: the workers of all processes as those of one.

    Args:
        info: torch's; None in a process without workers, which then counts as its own only one.
        rank: of the process.
        world_size: processes.
    """

    def __init__(self, info: Any, *, rank: int, world_size: int) -> None:
        self._info = info
        own, workers = (0, 1) if info is None else (info.id, info.num_workers)
        self.id = own * world_size + rank
        self.of_all = workers * world_size
        self.was_asked = False

    @property
    def num_workers(self) -> int:
        """Workers of all processes; who asks for their number divides something by it."""
        self.was_asked = True
        return self.of_all

    @property
    def dataset(self) -> Any:
        """The user's dataset, not what stands around it."""
        dataset = getattr(self._info, "dataset", None)
        return getattr(dataset, "undivided", dataset)

    @property
    def seed(self) -> int:
        """Of this worker."""
        return torch.initial_seed() if self._info is None else int(self._info.seed)


def explain(error: BaseException, where: str) -> None:
    """Add to an error of the user's dataset or collate function where it happened, and at which index.

    Args:
        error: as it was caught, with its traceback.
        where: the process and worker.
    """
    note = f"in the data of {where}{_index(error.__traceback__)}"
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def _index(traceback: types.TracebackType | None) -> str:
    """The index that torch's fetcher was fetching, as far as its frames tell."""
    found, indices = "", []
    while traceback is not None:
        code, names = traceback.tb_frame.f_code, traceback.tb_frame.f_locals
        if code.co_filename == _utils.fetch.__file__:
            if "idx" in names:
                return f", index {names['idx']!r}"
            if "possibly_batched_index" in names:
                asked = names["possibly_batched_index"]
                found, indices = f", indices {asked!r}", asked if isinstance(asked, list) else []
        elif code.co_name == "__getitem__":
            # Since Python 3.12 the fetcher's comprehension has no frame of its own: the dataset was given the index.
            index = [names[name] for name in code.co_varnames[1:2] if name in names]
            return f", index {index[0]!r}" if index and any(index[0] is each for each in indices) else found
        traceback = traceback.tb_next
    return found


def _explained(fetch: Callable[[Any, Any], Any], where: str) -> Callable[[Any, Any], Any]:
    @functools.wraps(fetch)
    def fetch_or_explain(self: Any, possibly_batched_index: Any) -> Any:
        try:
            return fetch(self, possibly_batched_index)
        except StopIteration:
            raise
        except Exception as exc:
            explain(exc, where)
            raise

    return fetch_or_explain
