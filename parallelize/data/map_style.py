"""Source for a DataLoader over a map-style dataset: its indices are sharded before any sample is fetched."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader

from parallelize.cluster.world import World
from parallelize.data.epoch_order import draw_order, sampler_seed, stream_order
from parallelize.data.epoch_shards import IndexedShard, StreamShard
from parallelize.data.loader_copy import LoaderCopy
from parallelize.data.loader_options import LoaderOptions, fraction_without_length_error
from parallelize.data.sampler_arithmetic import EpochSplit
from parallelize.data.source import EpochListeners, EpochShard, Position, Source
from parallelize.errors import ConfigError

__all__ = ["MapStyleSource", "SamplerUnits"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SamplerUnits:
    """The units that a loader's sampler yields: indices, or batches of indices.

    Args:
        sampler: the sampler or batch sampler that yields the units.
        batch_size: number of units in a batch; None: each unit is a batch, or the loader does not make batches.
        drop_last: whether the loader leaves out a smaller last batch.
    """

    sampler: Any
    batch_size: int | None
    drop_last: bool = False

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> SamplerUnits:
        """Return a loader's units: indices if torch's BatchSampler groups them, else the items of its sampler."""
        batches = loader.batch_sampler
        if type(batches) is BatchSampler:
            return cls(sampler=batches.sampler, batch_size=batches.batch_size, drop_last=batches.drop_last)
        return cls(sampler=loader.sampler if batches is None else batches, batch_size=None)

    @property
    def length(self) -> int | None:
        """Number of units in an epoch; None: unknown."""
        try:
            return len(self.sampler)
        except TypeError:
            return None


class MapStyleSource(Source[T]):
    """Source for a DataLoader over a map-style dataset.

    Args:
        loader: the user's loader.
        copy: the copy of that loader.
        options: the options of `shard_loader`.
        world: rank and world size of this process.

    Raises:
        ConfigError: the loader does not support the options.
    """

    can_change_world_size = True
    _copy: LoaderCopy[T]

    def __init__(self, loader: DataLoader[T], *, copy: LoaderCopy[T], options: LoaderOptions, world: World) -> None:
        self._copy, self._options, self._world = copy, options, world
        self._units = SamplerUnits.of(loader)
        _check(self._units, options)
        self._seed = sampler_seed(self._units.sampler, options.seed or 0)
        self._group = _group_size(self._units, options, processes=world.world_size)
        sampler = self._units.sampler
        self._listeners = EpochListeners([sampler, getattr(sampler, "sampler", None), loader.dataset])
        self._sampler = copy.replace_sampler()
        self.loader = copy.loader

    def shard(self, position: Position) -> EpochShard[T]:
        """Return this process's shard of an epoch, from a position on."""
        sampler, fetch = self._units.sampler, functools.partial(self._fetch, position)
        rank, is_grouped = self._world.rank, self._units.batch_size is not None
        self._listeners.set_epoch(position.epoch)
        if self._units.length is None:
            split = self._split(None, position.start)
            stream = stream_order(sampler, seed=self._seed, epoch=position.epoch, chunk_size=split.group)
            return StreamShard(fetch, split=split, stream=stream, rank=rank, is_grouped=is_grouped)
        order = draw_order(sampler, seed=self._seed, epoch=position.epoch)
        split = self._split(len(order), position.start)
        return IndexedShard(fetch, split=split, order=order, rank=rank, is_grouped=is_grouped)

    def steps(self, position: Position) -> int | None:
        """Count this process's batches from a position on; None if the sampler has no length."""
        length = self._units.length
        return None if length is None else self._split(length, position.start).steps(self._world.rank)

    def identity(self) -> dict[str, Any]:
        """Return the number of units and the seed of their order."""
        return {"units": self._units.length, "seed": self._seed}

    def batch_summary(self) -> str:
        """Return a description of the batch size per process and the global one."""
        per_process = self._group / self._world.world_size
        unit = "" if self._units.batch_size is not None else " of the sampler's batches"
        return f"{per_process:g} x {self._world.world_size} processes = {self._group} global{unit}"

    def _split(self, total: int | None, start: int) -> EpochSplit:
        return EpochSplit.limited(
            total,
            limit=self._options.limit,
            start=start,
            world_size=self._world.world_size,
            group=self._group,
            tail=self._options.tail,
            drop_last=self._units.drop_last,
        )

    def _fetch(self, position: Position, units: Iterable[Any], steps: int | None) -> Iterator[T]:
        self._sampler.set_units(units, steps)
        return self._copy.iterate_shard(self._sampler, position)


def _check(units: SamplerUnits, options: LoaderOptions) -> None:
    """Raise a ConfigError for options that the sampler does not support."""
    if units.drop_last and options.tail == "exact":
        raise ConfigError(
            "tail='exact' with DataLoader(drop_last=True)",
            why="tail='exact' yields each sample once, and drop_last=True leaves out the last ones",
            fix="use DataLoader(drop_last=False), or tail='drop'",
        )
    if units.length is not None:
        return
    name = type(units.sampler).__name__
    if options.tail == "weighted":
        raise ConfigError(
            f"tail='weighted' with {name}, which has no length",
            why="the weight of a process's last batch depends on the number of samples",
            fix=f"give {name} a __len__, or use tail='pad'",
        )
    if isinstance(options.limit, float):
        raise fraction_without_length_error(options.limit, name)


def _group_size(units: SamplerUnits, options: LoaderOptions, *, processes: int) -> int:
    """Return the number of units that all processes together take in a step."""
    size = units.batch_size
    if options.batch == "per_process":
        return (size or 1) * processes
    if size is None:
        raise ConfigError(
            "batch='global' with a loader that has no batch size",
            why="its sampler makes the batches, which are not split between processes",
            fix="use batch='per_process', or DataLoader(batch_size=...)",
        )
    may_be_uneven = options.tail in ("exact", "weighted") and units.length is not None
    if size < processes or (size % processes and not may_be_uneven):
        near = max(size // processes, 1) * processes
        raise ConfigError(
            f"batch='global' with batch_size={size} on {processes} processes",
            why="it does not divide evenly: gradients of unequal batches would be averaged as if they were equal",
            fix=f"use batch_size={near}, or tail='weighted' to weight gradients by the number of samples",
        )
    return size
