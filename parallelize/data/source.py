"""Source: adapter for one kind of loader, from which `ShardedLoader` gets this process's shard of an epoch."""

from __future__ import annotations

import abc
import contextlib
import functools
import sys
from collections.abc import Iterable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from parallelize.cluster.world import World
from parallelize.data.dataset_states import DatasetStates
from parallelize.data.epoch_shard import EpochShard, Position
from parallelize.data.loader_options import LoaderOptions
from parallelize.data.sampler_arithmetic import EpochSplit

__all__ = ["EpochListeners", "Source", "length_of"]

T = TypeVar("T")

# Sampler or dataset -> the epoch that a loader has set last: two loaders may share it.
_set_by_a_loader: WeakKeyDictionary[Any, int | None] = WeakKeyDictionary()


class Source(abc.ABC, Generic[T]):
    """Adapter for one kind of loader; it replaces only the source of the loader's indices or samples."""

    loader: Any
    """Object on which attributes are looked up: the user's loader, or its copy that makes the batches."""
    copy: Any = None
    """The LoaderCopy that makes the batches, if the loader is a DataLoader."""
    states: DatasetStates[T] | None = None
    """Goes on from states of the dataset, if that has states."""
    listeners: EpochListeners
    drop_last = False
    """Whether an incomplete last step is left out."""

    def __init__(self, options: LoaderOptions, world: World, *, is_own: bool = False) -> None:
        # is_own: each process has units of its own.
        self.options, self.world, self.is_own = options, world, is_own
        self.rank, self.shards = (0, 1) if is_own else (world.rank, world.world_size)
        self.group = self.shards  # number of units that all shards together take in a step

    def shard(self, position: Position) -> EpochShard[T]:
        """Return this process's shard of an epoch, from a position on; runs no collective."""
        self.listeners.set_epoch(position.epoch)
        fields = self.units(position.epoch)
        order = fields.get("order")  # it tells the number of units
        split = self.split(position, None if order is None else len(order))
        return EpochShard(position=position, split=split, rank=self.rank, is_own=self.is_own, **fields)

    @abc.abstractmethod
    def units(self, epoch: int) -> dict[str, Any]:
        """Return the fields of an epoch's EpochShard that tell its units, and how its batches are made of them."""

    @property
    @abc.abstractmethod
    def length(self) -> int | None:
        """Number of units of an epoch, as the data tells; None: unknown."""

    @abc.abstractmethod
    def identity(self, *, is_within_epoch: bool) -> dict[str, Any]:
        """Return the values that a saved state, within an epoch or between two, must match, as plain data."""

    def split(self, position: Position, length: int | None = None) -> EpochSplit:
        """Return how the units of an epoch, from a position on, are sharded; `length`: their number, if counted."""
        length = self.length if length is None else length
        return EpochSplit(
            total=sys.maxsize if length is None else length,
            start=position.start,
            world_size=self.shards,
            group=self.group,
            tail=self.options.tail,
            drop_last=self.drop_last,
        ).limited(self.options.limit)

    def batch_summary(self) -> str:
        """Return a description of the batch size per process and the global one, for logs; may be empty."""
        return ""

    def close(self) -> None:
        """Shut down the loader's persistent workers."""
        if self.copy is not None:
            self.copy.close()


class EpochListeners:
    """The samplers and datasets among the candidates that have a `set_epoch` method.

    Mosaic's StreamingDataset has a property `next_epoch` instead.
    """

    def __init__(self, candidates: Iterable[Any]) -> None:
        unique = {id(each): each for each in candidates if callable(_setter(each))}
        self._last_set = [(each, _epoch_of(each)) for each in unique.values()]

    def __bool__(self) -> bool:
        return bool(self._last_set)

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of every sampler and dataset."""
        for each, _ in self._last_set:
            _setter(each)(epoch)
        self._last_set = [(each, _epoch_of(each)) for each, _ in self._last_set]
        for each, current in self._last_set:
            with contextlib.suppress(TypeError):  # it cannot be hashed, or referenced weakly
                _set_by_a_loader[each] = current

    def epoch_set_by_user(self) -> int | None:
        """Return the epoch that the user has set on a sampler or dataset since the last `set_epoch` here, or None."""
        for each, last_set in self._last_set:
            current, by_another = _epoch_of(each), None
            with contextlib.suppress(TypeError):
                by_another = _set_by_a_loader.get(each)
            if current not in (None, last_set, by_another):
                return current
        return None


def _epoch_of(listener: Any) -> int | None:
    epoch = getattr(listener, "epoch", None)
    return epoch if isinstance(epoch, int) else None


def _setter(listener: Any) -> Any:
    if isinstance(getattr(type(listener), "next_epoch", None), property):
        return functools.partial(setattr, listener, "next_epoch")
    return getattr(listener, "set_epoch", None)


def length_of(sized: Any) -> int | None:
    """Return the length of a dataset or sampler; None if it has or knows none."""
    try:
        return len(sized)
    except Exception:  # noqa: BLE001 - TypeError, ValueError (PyG's samplers), NotImplementedError
        return None
