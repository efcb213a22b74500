"""What a block changes of DataLoader: who is told of its batches, and what its workers see.

    for batch in loader:             DataLoader.__iter__    watcher.on_iter(loader, iterator)
        loss.backward()              iterator.__next__      watcher.before_batch(iterator)

The iterators are torch's own objects. `iter`, `next`, enumerate, zip, itertools and generators of
the user all end in these two methods. A loader whose class replaces __iter__ and does not call
torch's, as torchdata's StatefulDataLoader, is not watched.
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
    """Is called when a DataLoader is iterated."""

    def on_iter(self, loader: DataLoader[Any], iterator: Any) -> None:
        """A loader has made an iterator, or has begun its persistent one anew; not if unwatched."""

    def before_batch(self, iterator: Any) -> None:
        """An iterator is asked for its next batch, of which it may have none; also if unwatched."""


class Unwatched(threading.local):
    """A context in which this thread reads loaders that no watcher is told about.

    It is of a thread, because a sharded loader may read ahead in another one.

    Attributes:
        depth: number of such contexts that this thread is in.
    """

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_exc: object) -> None:
        self.depth -= 1

    def batches(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches; the DataLoaders that are read for them are not watched."""
        iterator = iter(batches)
        while True:
            # Not while a batch is used: the loop may read other loaders. `with` takes twice as
            # long.
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
    """Tell a watcher of the DataLoaders that are iterated in the context.

    Args:
        watcher: is told.
        unwatched: the context in which it is not told.
    """
    begin = DataLoader.__iter__
    draw = _BaseDataLoaderIter.__next__
    before_batch = watcher.before_batch

    @functools.wraps(begin)
    def watched_iter(loader: DataLoader[Any]) -> Any:
        iterator = begin(loader)
        if not unwatched.depth:
            watcher.on_iter(loader, iterator)
        return iterator

    @functools.wraps(draw)
    def watched_next(iterator: _BaseDataLoaderIter) -> Any:
        before_batch(iterator)
        return draw(iterator)

    with (
        replace_attribute(DataLoader, "__iter__", watched_iter),
        replace_attribute(_BaseDataLoaderIter, "__next__", watched_next),
    ):
        yield


@contextlib.contextmanager
def shown_worker_info(info: Any) -> Iterator[None]:
    """Let torch.utils.data.get_worker_info() return `info` in the block.

    Args:
        info: an object with the attributes of torch's; None: the process is no worker.
    """
    previous = get_worker_info()
    set_worker_info(info)
    try:
        yield
    finally:
        set_worker_info(previous)


def set_worker_info(info: Any) -> None:
    """Let torch.utils.data.get_worker_info() return `info` from now on.

    Raises:
        ConfigError: torch keeps its worker info elsewhere.
    """
    torch_worker: Any = _utils.worker
    previous = torch_worker._worker_info
    torch_worker._worker_info = info
    if get_worker_info() is not info:
        torch_worker._worker_info = previous
        raise unsupported(
            "shard_loader of an iterable dataset", instead="use a dataset with __getitem__"
        )
