"""Changes of torch's DataLoader: a watcher is called in loops, and workers see other numbers.

    for batch in loader:
        once, at the start       DataLoader.__iter__, then watcher.on_iter(loader, iterator)
        before each batch        watcher.before_batch(iterator), then iterator.__next__

`iter`, `next`, enumerate, zip, itertools and the user's generators all end in these two methods of
torch. A loader whose class replaces __iter__ and does not call torch's, such as torchdata's
StatefulDataLoader, is not watched.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

from torch.utils.data import DataLoader, _utils, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from parallelize.torch_patches.private import replace_attribute, unsupported

T = TypeVar("T")


class LoaderWatcher(Protocol):
    """An object that `watching_loaders` calls when any DataLoader is iterated."""

    def on_iter(self, loader: DataLoader[Any], iterator: Any) -> None:
        """Called after a loop over a loader has begun, except in an `Unwatched` context.

        A loader with persistent workers has the same iterator in each loop.
        """

    def before_batch(self, iterator: Any) -> None:
        """Called before an iterator returns its next batch, or has none left.

        This is called in `Unwatched` contexts, too. A watcher that ignores these batches has to
        look at `Unwatched.depth` itself.
        """


class Unwatched(threading.local):
    """A context in which this library itself reads loaders, which no watcher should notice.

    The depth belongs to a thread: while one thread reads ahead for a sharded loader, the user's
    thread may read other loaders.

    Attributes:
        depth: the number of these contexts around the code that this thread runs.
    """

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_exc: object) -> None:
        self.depth -= 1

    def batches(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches, and do not watch the DataLoaders that are read for them."""
        iterator = iter(batches)
        while True:
            # The context ends before the yield, because the user's loop may read other loaders
            # while it uses a batch. This takes half the time of `with self`.
            self.depth += 1
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self.depth -= 1
            yield batch


@contextlib.contextmanager
def watching_loaders(watcher: LoaderWatcher, unwatched: Unwatched) -> Iterator[None]:
    """Call a watcher when any DataLoader is iterated in the context.

    Args:
        watcher: is called.
        unwatched: the run's context in which `on_iter` is not called.
    """
    original_iter = DataLoader.__iter__
    original_next = _BaseDataLoaderIter.__next__
    before_batch = watcher.before_batch

    @functools.wraps(original_iter)
    def watched_iter(loader: DataLoader[Any]) -> Any:
        iterator = original_iter(loader)
        if not unwatched.depth:
            watcher.on_iter(loader, iterator)
        return iterator

    @functools.wraps(original_next)
    def watched_next(iterator: _BaseDataLoaderIter) -> Any:
        before_batch(iterator)
        return original_next(iterator)

    with (
        replace_attribute(DataLoader, "__iter__", watched_iter),
        replace_attribute(_BaseDataLoaderIter, "__next__", watched_next),
    ):
        yield


@contextlib.contextmanager
def shown_worker_info(info: Any) -> Iterator[None]:
    """Let torch.utils.data.get_worker_info() return `info` in the context.

    Args:
        info: an object with the attributes of torch's WorkerInfo; None: this process shall not look
            like a worker of a DataLoader.

    Raises:
        ConfigError: this torch keeps its worker info elsewhere.
    """
    previous = get_worker_info()
    set_worker_info(info)
    try:
        yield
    finally:
        set_worker_info(previous)


def set_worker_info(info: Any) -> None:
    """Let torch.utils.data.get_worker_info() return `info` from now on.

    An iterable dataset reads the number of workers there, to read a part of its samples. With the
    workers of all ranks in `info`, each rank reads another part.

    Args:
        info: as for `shown_worker_info`.

    Raises:
        ConfigError: this torch keeps its worker info elsewhere.
    """
    torch_worker: Any = _utils.worker
    previous = torch_worker._worker_info
    torch_worker._worker_info = info
    if get_worker_info() is not info:
        torch_worker._worker_info = previous
        raise unsupported(
            "shard_loader of an iterable dataset", instead="use a dataset with __getitem__"
        )
