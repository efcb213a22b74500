"""Source that merges the batches of several ranks, in rank order, for the run with one process of `train.compare`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from parallelize.cluster.world import World
from parallelize.data.epoch_shard import EpochShard, Position
from parallelize.data.loader_options import LoaderOptions
from parallelize.data.sample_fingerprint import sample_fingerprint
from parallelize.data.select_source import select_source
from parallelize.data.source import Source
from parallelize.errors import ConfigError
from parallelize.runtime.containers import leaves, map_leaves
from parallelize.runtime.context import Runtime

__all__ = ["MergedRanks", "source_for"]

T = TypeVar("T")

_merged_ranks: ContextVar[MergedRanks | None] = ContextVar("parallelize_merged_ranks", default=None)


@dataclass(frozen=True)
class MergedRanks:
    """The ranks whose batches this process reads: all of them in a run with one process, else its own.

    `on_batch` is called for each batch of any loader, with the hash of each rank's samples.
    """

    ranks: Sequence[int]
    world_size: int
    on_batch: Callable[[tuple[str, ...]], None]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let shard_loader read the batches of these ranks inside the context."""
        token = _merged_ranks.set(self)
        try:
            yield
        finally:
            _merged_ranks.reset(token)


def source_for(loader: Any, *, options: LoaderOptions, run: Runtime, occurrence: int) -> Source[Any]:
    """Return the `Source` for a loader, as `select_source` does; it merges ranks while a MergedRanks is active.

    A loader with tail="exact" is not merged: it is for evaluation, and its results may be gathered.

    Raises:
        ConfigError: as `select_source`, or the batches of other ranks cannot be read.
    """
    merged = _merged_ranks.get()
    if merged is None or options.tail == "exact":
        return select_source(loader, options=options, run=run, occurrence=occurrence)
    loaders = itertools.tee(loader, len(merged.ranks)) if isinstance(loader, Iterator) else itertools.repeat(loader)
    sources: list[Source[Any]] = []
    for rank, each in zip(merged.ranks, loaders, strict=False):
        # local rank 0: this process's device
        world = World(rank=rank, world_size=merged.world_size, local_world_size=merged.world_size)
        rank_run = run if run.world.world_size > 1 else dataclasses.replace(run, world=world)
        sources.append(select_source(each, options=options, run=rank_run, occurrence=occurrence))
        if len(merged.ranks) > 1 and (options.divides == "processes" or sources[0].is_sharded_by_user):
            raise ConfigError(
                f"compare with a {type(loader).__name__} that is sharded outside of shard_loader",
                why="one process cannot read the batches of all ranks from it",
                fix="remove its own sharding, such as a DistributedSampler: shard_loader shards the loader itself",
            )
    return _MergedSource(sources, merged.on_batch)


class _MergedSource(Source[T]):
    """Merges the batches of several sources, one per rank.

    If the loader collates samples, its collate function is called once on the samples of all ranks, so that padding is
    that of the merged batch. Ready-made batches are concatenated.
    """

    def __init__(self, sources: Sequence[Source[T]], on_batch: Callable[[tuple[str, ...]], None]) -> None:
        self._sources, self._on_batch, first = sources, on_batch, sources[0]
        self.loader, self.listeners = first.loader, first.listeners
        self._collate: Any = None
        if first.copy is not None and self.loader.batch_sampler is not None:
            self._collate = first.copy.loader.collate_fn
            for each in sources:
                each.copy.set_attributes(collate_fn=list)

    def shard(self, position: Position) -> EpochShard[T]:
        shards = [each.shard(position) for each in self._sources]
        fingerprint = shards[0].fingerprint  # of the units that it draws
        return dataclasses.replace(shards[0], fetch=lambda _own: self._batches(shards), own_fingerprint=fingerprint)

    def _batches(self, shards: Sequence[EpochShard[T]]) -> Iterator[T]:
        for step, batches in enumerate(itertools.zip_longest(*(each.batches() for each in shards))):
            self._on_batch(tuple(sample_fingerprint([each]) for each in batches))
            # tail="weighted" gives a rank without samples a batch of weight 0, which one process does not read.
            ranks: Any = zip(batches, shards, strict=True)
            held = [each for each, shard in ranks if each is not None and (len(shards) == 1 or shard.weight(step) > 0)]
            if self._collate is not None:
                yield self._collate(list(itertools.chain.from_iterable(held)))
            else:
                yield held[0] if len(held) == 1 else _concatenate(held)

    def steps(self, position: Position) -> int | None:
        return self._sources[0].steps(position)

    def identity(self, *, is_within_epoch: bool) -> dict[str, Any]:
        return self._sources[0].identity(is_within_epoch=is_within_epoch)

    def batch_summary(self) -> str:
        return self._sources[0].batch_summary()

    def close(self) -> None:
        for each in self._sources:
            each.close()


def _concatenate(batches: Sequence[Any]) -> Any:
    """Concatenate the tensors of ready-made batches, leaf by leaf; other leaves must be equal."""
    joined = iter([_join_leaves(column) for column in zip(*map(leaves, batches), strict=True)])
    return map_leaves(lambda _leaf: next(joined), batches[0])


def _join_leaves(column: Sequence[Any]) -> Any:
    first = column[0]
    if isinstance(first, torch.Tensor) and first.ndim and len({each.shape[1:] for each in column}) == 1:
        return torch.cat(list(column))
    if not hasattr(first, "shape") and all(each == first for each in column):
        return first
    raise ConfigError(
        f"compare with ready-made batches that contain a {type(first).__name__} for each rank",
        why="only tensors of equal sample shapes can be concatenated to the batch of one process",
        fix="pass shard_loader a DataLoader(dataset, batch_size=...), which collates samples",
    )
