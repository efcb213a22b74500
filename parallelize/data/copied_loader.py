"""The copy of the user's DataLoader that makes the batches of one process.

The user's loader is not changed.

user's loader         the copy's attribute
dataset, collate_fn,
workers, ...          shared: the same objects, also those that the user sets later
samplers              replaced by a stand-in, which yields this process's units
its iterator, and     of its own
in_order, pin_memory
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from parallelize.errors import ConfigError

# What the copy has of its own, whatever the user sets. torch would warn about a length that it has
# noted earlier.
_NOT_SHARED = frozenset({"in_order", "pin_memory", "_iterator", "_IterableDataset_len_called"})


class StandIn:
    """Stands in the place of a sampler in the copied loader, and yields this process's units.

    Attributes that a subclass of DataLoader reads, as `batch_sampler.sampler`, are those of the
    user's sampler.

    Args:
        replaced: the user's sampler.
        units: returns the units of a pass, indices or lists of indices; the pass begins when the
            first one is taken.
        length: returns their number.
    """

    def __init__(
        self, replaced: Any, units: Callable[[], Iterator[Any]], length: Callable[[], int]
    ) -> None:
        self._replaced, self._units, self._length = replaced, units, length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_replaced":  # copy and pickle look before there is one
            raise AttributeError(name)
        return getattr(self._replaced, name)

    def __iter__(self) -> Iterator[Any]:
        # torch calls iter() twice for one pass (_MultiProcessingDataLoaderIter._reset), and before
        # the loader draws its workers' seed: nothing may begin here.
        return self._units()

    def __len__(self) -> int:
        return self._length()


class CopiedLoader:
    """A copy of a loader, made without its constructor.

    Args:
        loader: the user's.
        replaced: attributes that differ, such as the sampler.
        not_shared: more names of attributes that do not follow the user's.

    Attributes:
        loader: the copy, of the user's class.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        replaced: dict[str, Any],
        not_shared: frozenset[str] = frozenset(),
    ) -> None:
        self.loader = copy_of(loader, **replaced)
        self._not_shared = _NOT_SHARED | not_shared | replaced.keys()
        self._shared = dict(vars(loader))
        # Subclasses as yolov5's InfiniteDataLoader keep an iterator that their constructor has
        # made, in an attribute. It reads all samples: the copy makes one over its own sampler.
        self._unmade_iterators: list[str] = []
        self._kept_iterators: list[str] = []
        for name, value in self._shared.items():
            if name != "_iterator" and isinstance(value, _BaseDataLoaderIter):
                self._unmade_iterators.append(name)

    @property
    def _attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = vars(self.loader)
        return attributes

    def set(self, name: str, value: Any) -> None:
        """Set an attribute of the copy."""
        self._attributes[name] = value

    def follow(self, loader: Any) -> None:
        """Give the copy what the user has set on the loader since the last call."""
        before, now = self._shared, dict(vars(loader))
        self._shared = now
        deleted = before.keys() - now.keys()
        for name in deleted - self._not_shared:
            self._attributes.pop(name, None)
        for name in now.keys() - self._not_shared:
            is_new = name not in before or now[name] is not before[name]
            if is_new and isinstance(now[name], _BaseDataLoaderIter):
                self._unmade_iterators.append(name)
            elif is_new:
                self._attributes[name] = now[name]

    def iterate(self, workers_seed: int | None, has_begun: Callable[[], bool]) -> Iterator[Any]:
        """Return the batches, as `iter()` of the user's loader does: workers start now.

        Args:
            workers_seed: seed of the workers; None: the loader draws it, as in one process.
            has_begun: whether the copy has asked for the units of this pass.

        Raises:
            ConfigError: the loader gets its indices elsewhere.
        """
        generator = self._shared.get("generator")
        if workers_seed is not None:
            generator = torch.Generator().manual_seed(workers_seed)
        self.set("generator", generator)
        while self._unmade_iterators:
            name = self._unmade_iterators.pop()
            self.set(name, DataLoader.__iter__(self.loader))
            self._kept_iterators.append(name)
        return self._checked(iter(self.loader), has_begun)

    def _checked(self, batches: Any, has_begun: Callable[[], bool]) -> Iterator[Any]:
        """Yield batches; raise if they come without the copy's sampler; at the end, end workers."""
        try:
            for batch in batches:
                if not has_begun():
                    raise ConfigError(
                        f"{type(self.loader).__name__} does not use its sampler when it is "
                        "iterated",
                        why="its indices come from elsewhere, so every process would get all of "
                        "them",
                        fix="pass shard_loader a DataLoader that creates its iterator in __iter__",
                    )
                yield batch
        finally:
            if not self.loader.persistent_workers:
                self._shut_down(batches)

    def close(self) -> None:
        """Shut down persistent workers, and those of iterators that are kept."""
        self._shut_down(self.loader._iterator)
        while self._kept_iterators:
            name = self._kept_iterators.pop()
            self._shut_down(self._attributes[name])
            self._unmade_iterators.append(name)

    def _shut_down(self, batches: Any) -> None:
        # Garbage collection may be late: a traceback may hold the iterator, as StatefulDataLoader.
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()
        self.set("_iterator", None)


def copy_of(loader: DataLoader[Any], **changes: Any) -> Any:
    """Return a copy of a loader, made without its constructor, without its iterator and workers."""
    copied = object.__new__(type(loader))
    # DataLoader.__setattr__ forbids changes after construction. States, weights and gather() need
    # batches in order, whatever in_order= the loader has.
    vars(copied).update(vars(loader), _iterator=None, in_order=True, **changes)
    return copied


def view_of(loader: DataLoader[Any]) -> Any:
    """Return an object with a loader's class and its very attributes, also those set later.

    It does not keep the loader alive, as a reference would.
    """
    view = object.__new__(type(loader))
    object.__setattr__(view, "__dict__", vars(loader))
    return view


def find_batch_sampler(batches: Any) -> BatchSampler | None:
    """Return torch's BatchSampler that groups the indices of a loader; None: there is none.

    It may be inside of wrappers that repeat it without end, as those of yolov5 and timm: these have
    no length, and their sampler in `sampler`.
    """
    while not is_exactly(batches, BatchSampler):
        if batches is None or hasattr(type(batches), "__len__"):
            return None
        batches = getattr(batches, "sampler", None)
    found: BatchSampler = batches
    return found


def with_stand_in(batches: Any, stand_in: StandIn) -> Any:
    """Return the user's sampler of batches with a stand-in for torch's BatchSampler.

    Wrappers around it are copied.
    """
    if is_exactly(batches, BatchSampler):
        return stand_in
    wrapper = copy.copy(batches)
    wrapper.sampler = with_stand_in(batches.sampler, stand_in)
    return wrapper


def is_exactly(sampler: object, sampler_class: type) -> bool:
    """Whether a sampler is of a class of torch, or torchdata's of that name, and no subclass."""
    name = type(sampler).__module__, type(sampler).__name__
    of_torchdata = ("torchdata.stateful_dataloader.sampler", sampler_class.__name__)
    return type(sampler) is sampler_class or name == of_torchdata
