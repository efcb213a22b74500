"""Sources for a DataLoader over a map-style dataset: its indices are sharded before any sample is fetched."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset

from parallelize.cluster.world import World
from parallelize.data.epoch_order import (
    MAX_LISTED,
    draw_order,
    is_exactly,
    order_fingerprint,
    sampler_seed,
    stream_order,
)
from parallelize.data.epoch_shards import IndexedShard, StreamShard
from parallelize.data.loader_copy import LoaderCopy
from parallelize.data.loader_options import LoaderOptions, fraction_without_length_error
from parallelize.data.sample_fingerprint import sample_fingerprint
from parallelize.data.sampler_arithmetic import EpochSplit
from parallelize.data.self_sharding import NUM_SHARDS_ATTRIBUTES
from parallelize.data.source import EpochListeners, EpochShard, Position, Source
from parallelize.errors import ConfigError

__all__ = ["MapStyleSource", "PreShardedSource", "SamplerUnits", "find_distributed_sampler"]

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
        batches: Any = loader.batch_sampler
        if is_exactly(batches, BatchSampler):
            return cls(sampler=batches.sampler, batch_size=batches.batch_size, drop_last=batches.drop_last)
        return cls.of_batches(loader)

    @classmethod
    def of_batches(cls, loader: DataLoader[Any]) -> SamplerUnits:
        """Return a loader's batches as its units."""
        return cls(sampler=loader.sampler if loader.batch_sampler is None else loader.batch_sampler, batch_size=None)

    @property
    def length(self) -> int | None:
        """Number of units in an epoch; None: unknown."""
        try:
            return len(self.sampler)
        except Exception:  # noqa: BLE001 - samplers raise TypeError, ValueError (PyG's) or NotImplementedError
            return None


class MapStyleSource(Source[T]):
    """Source for a DataLoader over a map-style dataset.

    Raises:
        ConfigError: the loader does not support the options.
    """

    can_change_world_size = True
    _copy: LoaderCopy[T]

    def __init__(
        self,
        loader: DataLoader[T],
        *,
        copy: LoaderCopy[T],
        options: LoaderOptions,
        world: World,
        units: SamplerUnits | None = None,
    ) -> None:
        self._copy, self._options, self._world = copy, options, world
        self._units = SamplerUnits.of(loader) if units is None else units
        _check(self._units, options)
        sampler, seed = self._units.sampler, options.seed or 0
        # torchdata gives its RandomSampler a generator with a random seed, another one on each process.
        has_random_seed = loader.generator is None and is_exactly(sampler, RandomSampler)
        self._seed = seed if has_random_seed else sampler_seed(sampler, seed)
        self._group = _group_size(self._units, options, processes=world.world_size)
        inner = getattr(sampler, "sampler", None)
        self._samplers = EpochListeners([sampler, inner])
        self._listeners = EpochListeners([sampler, inner, loader.dataset])
        self._sampler = copy.replace_sampler()
        self._data = _dataset_text(loader.dataset)
        self.loader = copy.loader

    def shard(self, position: Position) -> EpochShard[T]:
        """Return this process's shard of an epoch, from a position on."""
        sampler, fetch, rank = self._units.sampler, functools.partial(self._fetch, position), self._world.rank
        is_grouped, order = self._units.batch_size is not None, None
        self._listeners.set_epoch(position.epoch)
        if self._units.length is not None:
            max_listed = MAX_LISTED if self._options.tail in ("pad", "drop") else 2**31
            order = draw_order(sampler, seed=self._seed, epoch=position.epoch, max_listed=max_listed)
        if order is not None:
            split = self._split(len(order), position.start)
            return IndexedShard(fetch, split=split, order=order, rank=rank, is_grouped=is_grouped, data=self._data)
        if self._options.tail == "weighted":
            raise _weighted_error(f"the endless {type(sampler).__name__}")
        split = self._split(self._units.length, position.start)
        stream = stream_order(sampler, seed=self._seed, epoch=position.epoch, chunk_size=split.group)
        return StreamShard(fetch, split=split, stream=stream, rank=rank, is_grouped=is_grouped, data=self._data)

    def steps(self, position: Position) -> int | None:
        """Count this process's batches from a position on; None if the sampler has no length."""
        with self._samplers.at(position.epoch):
            length = self._units.length
        return None if length is None else self._split(length, position.start).steps(self._world.rank)

    def identity(self) -> dict[str, Any]:
        """Return the seed of the order, and the number of indices; that of batches may depend on the epoch."""
        is_of_batches = self._units.batch_size is None and self._copy.loader.batch_sampler is not None
        return {"seed": self._seed} if is_of_batches else {"units": self._units.length, "seed": self._seed}

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
        return self._copy.iterate_shard(self._sampler, position, units_per_step=self._group)


class PreShardedSource(MapStyleSource[T]):
    """Source for a DataLoader whose sampler already shards it; `Position.start` counts this process's batches.

    Raises:
        ConfigError: an option is set that determines how to shard.
    """

    can_change_world_size = False

    def __init__(self, loader: DataLoader[T], *, copy: LoaderCopy[T], sampler: Any, options: LoaderOptions) -> None:
        self._sampler_name = type(sampler).__name__
        _check_pre_sharded(options, self._sampler_name)
        alone = World(rank=0, world_size=1, local_world_size=1)
        super().__init__(loader, copy=copy, options=options, world=alone, units=SamplerUnits.of_batches(loader))
        self._listeners = EpochListeners([self._units.sampler, sampler, loader.dataset])

    def shard(self, position: Position) -> EpochShard[T]:
        """Return the batches of an epoch that the sampler yields, from a position on."""
        self._listeners.set_epoch(position.epoch)
        split, fetch = self._split(self._units.length, position.start), functools.partial(self._fetch, position)
        return _PreShardedShard(fetch, split=split, stream=self._units.sampler, rank=0, is_grouped=False)

    def identity(self) -> dict[str, Any]:
        """Return nothing: the sampler decides on the order."""
        return {}

    def batch_identity(self) -> dict[str, Any]:
        """Return the sampler's batch size, which may be None."""
        return {"batch_size": getattr(self._units.sampler, "batch_size", None)}

    def batch_summary(self) -> str:
        """Return text for logs that names the sampler that shards the loader."""
        return f"already sharded by its {self._sampler_name}: left as it is"


class _PreShardedShard(StreamShard[T]):
    def steps(self) -> int | None:
        return self.split.steps(0) if self.split.total else None

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.stream), self.split.start, self.split.limit)

    def fingerprint(self) -> str:
        return ""  # each process has other batches


def find_distributed_sampler(loader: DataLoader[Any], world: World) -> Any | None:
    """Return the sampler that already shards a loader over the processes, or None.

    Raises:
        ConfigError: the sampler's number of shards is not the world size, or it has the shard of another rank.
    """
    batches = loader.batch_sampler
    for sampler in (batches, loader.sampler, getattr(batches, "sampler", None)):
        for name in NUM_SHARDS_ATTRIBUTES:
            size = getattr(sampler, name, None)
            if not isinstance(size, int):
                continue
            if size != world.world_size:
                raise ConfigError(
                    f"{type(sampler).__name__}({name}={size}) in a world of {world.world_size}",
                    why="some samples would be repeated, or left out",
                    fix="remove the sampler: shard_loader shards the loader itself",
                )
            rank = getattr(sampler, "rank", world.rank)
            if isinstance(rank, int) and rank != world.rank:  # as the local rank of a process on another node
                raise ConfigError(
                    f"{type(sampler).__name__}(rank={rank}) on rank {world.rank}",
                    why="it yields the samples of another process",
                    fix="remove the sampler: shard_loader shards the loader itself",
                )
            return sampler
    return None


def _dataset_text(dataset: Any) -> str:
    """Return text for processes to compare: hashes of the indices of Subsets, and of the first rows of `datasets`."""
    text = ""
    while isinstance(dataset, Subset):
        text += f" of the subset {order_fingerprint(dataset.indices)}"
        dataset = dataset.dataset
    if hasattr(dataset, "formatted_as"):  # without the user's transforms, which may draw random numbers
        with dataset.formatted_as("arrow"):
            text += f" of the dataset {sample_fingerprint(dataset[:4].to_pylist())}"
    return text


def _check_pre_sharded(options: LoaderOptions, sampler_name: str) -> None:
    for option, default in (("tail", "pad"), ("batch", "per_process")):
        value = getattr(options, option)
        if value != default:
            raise ConfigError(
                f"{option}={value!r} with a loader that {sampler_name} already shards",
                why="the loader is left as it is: its sampler decides which samples are repeated or left out",
                fix=f"remove {sampler_name}: shard_loader shards the loader itself",
            )


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
        raise _weighted_error(f"{name}, which has no length")
    if isinstance(options.limit, float):
        raise fraction_without_length_error(options.limit, name)


def _weighted_error(sampler: str) -> ConfigError:
    return ConfigError(
        f"tail='weighted' with {sampler}",
        why="the weight of a process's last batch depends on the number of samples",
        fix="give the sampler a __len__ that bounds its samples, or use tail='pad'",
    )


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
