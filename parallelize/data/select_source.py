"""Selection of the `Source` for a user's loader, or of several ranks' merged for the one process of `train.compare`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from parallelize.cluster.world import World
from parallelize.data.epoch_shard import EpochShard, Position
from parallelize.data.iterable_style import BatchIterableSource, IterableStyleSource
from parallelize.data.loader_copy import LoaderCopy
from parallelize.data.loader_options import LoaderOptions
from parallelize.data.map_style import MapStyleSource, find_querying_sampler
from parallelize.data.sample_fingerprint import sample_fingerprint
from parallelize.data.self_sharding import own_sharding
from parallelize.data.source import Source
from parallelize.errors import ConfigError
from parallelize.runtime.containers import leaves, map_leaves
from parallelize.runtime.context import Runtime

__all__ = ["MergedRanks", "source_for"]

_merged_ranks: ContextVar[MergedRanks | None] = ContextVar("parallelize_merged_ranks", default=None)


@dataclass(frozen=True)
class MergedRanks:
    """The ranks whose batches this process reads: all of them in a run with one process, else its own."""

    ranks: Sequence[int]
    world_size: int
    on_batch: Callable[[tuple[str, ...]], None]  # called with the hash of each rank's samples

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let shard_loader read the batches of these ranks inside the context."""
        token = _merged_ranks.set(self)
        try:
            yield
        finally:
            _merged_ranks.reset(token)


def source_for(loader: Any, *, options: LoaderOptions, run: Runtime, occurrence: int) -> Any:
    """Return the `Source` for a loader; it merges ranks while a MergedRanks is active.

    A loader with tail="exact" is not merged: it is for evaluation, and its results may be gathered. `occurrence` counts
    the loaders that the same line of code has made before in this run.
    """
    merged = _merged_ranks.get()
    if merged is None or options.tail == "exact":
        return _source_of(loader, options=options, run=run, occurrence=occurrence)
    loaders = itertools.tee(loader, len(merged.ranks)) if isinstance(loader, Iterator) else itertools.repeat(loader)
    sources: list[Source[Any]] = []
    for rank, each in zip(merged.ranks, loaders, strict=False):
        # local rank 0: this process's device
        world = World(rank=rank, world_size=merged.world_size, local_world_size=merged.world_size)
        rank_run = run if run.world.world_size > 1 else dataclasses.replace(run, world=world)
        sources.append(_source_of(each, options=options, run=rank_run, occurrence=occurrence))
        is_sharded_by_sampler = isinstance(sources[0], MapStyleSource) and sources[0].is_own
        if len(merged.ranks) > 1 and (options.divides == "processes" or is_sharded_by_sampler):
            raise ConfigError(
                f"compare with a {type(loader).__name__} that is sharded outside of shard_loader",
                why="one process cannot read the batches of all ranks from it",
                fix="remove its own sharding, such as a DistributedSampler: shard_loader shards the loader itself",
            )
    return _MergedSource(sources, merged.on_batch)


def _source_of(loader: Any, *, options: LoaderOptions, run: Runtime, occurrence: int) -> Source[Any]:
    is_loader = isinstance(loader, DataLoader)
    if not is_loader:
        _check_is_loader(loader)
    data, divides = loader.dataset if is_loader else loader, options.divides
    is_indexed = is_loader and not isinstance(data, IterableDataset)
    if is_indexed and divides is not None and not (divides == "nothing" and find_querying_sampler(loader)):
        raise ConfigError(
            f"divides={divides!r} with {type(data).__name__}",
            why="it is not an iterable dataset: shard_loader shards its indices",
            fix="remove divides=; it is for iterable datasets and iterables of batches",
        )
    if not is_indexed and divides is None:
        data, divides = own_sharding(data, run.world)
    if not is_loader:
        return BatchIterableSource(data, divides=divides, options=options, world=run.world, occurrence=occurrence)
    counted = None if is_indexed else run.world if divides in (None, "workers") else World()
    # The run's seed is used for workers only, which are seeded in every epoch: parallel_model seeds this process.
    seed = run.config.seed if options.seed is None and loader.num_workers else options.seed
    copy = LoaderCopy(loader, seed=seed, rank=run.world.rank, counted=counted)
    if options.to_device and loader.num_workers == 0 and run.device.type not in ("cpu", "mps"):
        copy.set_attributes(pin_memory=False)  # move_batches pins, in the same thread
    if is_indexed:
        return MapStyleSource(loader, copy=copy, options=options, world=run.world)
    copy.set_attributes(dataset=data)
    return IterableStyleSource(loader, copy=copy, divides=divides, options=options, run=run)


def _check_is_loader(loader: Any) -> None:
    """Raise a ConfigError for what is not an iterable of batches."""
    kind, stages = type(loader).__name__, getattr(loader, "pipeline", None)
    # WebDataset's WebLoader is a Dataset: a pipeline that starts with a DataLoader.
    is_pipeline = isinstance(stages, list) and any(isinstance(stage, DataLoader) for stage in stages)
    if isinstance(loader, (Dataset, torch.Tensor)) and not is_pipeline:
        raise ConfigError(
            f"shard_loader of a {kind}",
            why="it contains samples, not batches",
            fix="use shard_loader(DataLoader(...))",
        )
    if isinstance(loader, (list, tuple)) and any(isinstance(each, DataLoader) for each in loader):
        raise ConfigError(
            f"shard_loader of a {kind} of DataLoaders",
            why="it contains loaders, not batches: each process would get some of them, with all of their batches",
            fix="use [shard_loader(each) for each in loaders]",
        )
    is_iterable = isinstance(loader, Iterable) or (hasattr(loader, "__getitem__") and isinstance(loader, Sized))
    if isinstance(loader, (Mapping, str, bytes)) or not is_iterable:
        raise ConfigError(
            f"shard_loader of a {kind}",
            why="it is not an iterable of batches",
            fix="pass a DataLoader, or a list or another iterable of batches",
        )


class _MergedSource:
    """Merges the batches of several sources, one per rank; all else is that of the first."""

    def __init__(self, sources: Sequence[Source[Any]], on_batch: Callable[[tuple[str, ...]], None]) -> None:
        self._sources, self._on_batch, self._first = sources, on_batch, sources[0]
        self._collate: Any = None
        # It is called once on the samples of all ranks, so that padding is that of the merged batch.
        if self._first.copy is not None and self._first.loader.batch_sampler is not None:
            self._collate = self._first.copy.loader.collate_fn
            for each in sources:
                each.copy.set_attributes(collate_fn=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)

    def shard(self, position: Position) -> EpochShard[Any]:
        """Return the shards of an epoch, merged."""
        shards = [each.shard(position) for each in self._sources]
        return dataclasses.replace(shards[0], fetch=lambda merged: self._batches(merged, shards))

    def _batches(self, merged: EpochShard[Any], shards: Sequence[EpochShard[Any]]) -> Iterator[Any]:
        for step, batches in enumerate(itertools.zip_longest(*(each.fetch(each) for each in shards))):
            merged.first = shards[0].first
            self._on_batch(tuple(sample_fingerprint([each]) for each in batches))
            # tail="weighted" gives a rank without samples a batch of weight 0, which one process does not read.
            ranks: Any = zip(batches, shards, strict=True)
            held = [each for each, shard in ranks if each is not None and (len(shards) == 1 or shard.weight(step) > 0)]
            if self._collate is not None:
                yield self._collate(list(itertools.chain.from_iterable(held)))
            else:
                yield held[0] if len(held) == 1 else _concatenate(held)

    def close(self) -> None:
        """Shut down the loaders' persistent workers."""
        for each in self._sources:
            each.close()


def _concatenate(batches: Sequence[Any]) -> Any:
    """Concatenate the tensors of ready-made batches, leaf by leaf; other leaves must be equal."""
    columns = iter(list(zip(*map(leaves, batches), strict=True)))

    def join(first: Any) -> Any:
        column = next(columns)
        if isinstance(first, torch.Tensor) and first.ndim and len({each.shape[1:] for each in column}) == 1:
            return torch.cat(column)
        if not hasattr(first, "shape") and all(each == first for each in column):
            return first
        raise ConfigError(
            f"compare with ready-made batches that contain a {type(first).__name__} for each rank",
            why="only tensors of equal sample shapes can be concatenated to the batch of one process",
            fix="pass shard_loader a DataLoader(dataset, batch_size=...), which collates samples",
        )

    return map_leaves(join, batches[0])
