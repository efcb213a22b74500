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
from parallelize.data.loader_options import LoaderOptions
from parallelize.data.map_style import PreShardedSource
from parallelize.data.sample_fingerprint import sample_fingerprint
from parallelize.data.select_source import select_source
from parallelize.data.source import EpochShard, Position, Source
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
    sources = []
    for rank, each in zip(merged.ranks, loaders, strict=False):
        world = run.world if run.world.world_size > 1 else _world_of(rank, merged.world_size)
        rank_run = dataclasses.replace(run, world=world)
        sources.append(select_source(each, options=options, run=rank_run, occurrence=occurrence))
        if len(merged.ranks) > 1 and (options.divides == "processes" or isinstance(sources[0], PreShardedSource)):
            raise ConfigError(
                f"compare with a {type(loader).__name__} that is sharded outside of shard_loader",
                why="one process cannot read the batches of all ranks from it",
                fix="remove its own sharding, such as a DistributedSampler: shard_loader shards the loader itself",
            )
    return _MergedSource(sources, merged.on_batch)


def _world_of(rank: int, world_size: int) -> World:
    return World(rank=rank, world_size=world_size, local_world_size=world_size)  # local rank 0: this process's device


class _MergedSource(Source[T]):
    """Merges the batches of several sources, one per rank.

    If the loader collates samples, its collate function is called once on the samples of all ranks, so that padding is
    that of the merged batch. Ready-made batches are concatenated.
    """

    def __init__(self, sources: Sequence[Source[T]], on_batch: Callable[[tuple[str, ...]], None]) -> None:
        self._sources, self._on_batch = sources, on_batch
        self.loader = sources[0].loader
        self._collate: Any = None
        if sources[0]._copy is not None and self.loader.batch_sampler is not None:
            self._collate = sources[0]._copy.loader.collate_fn
            for source in sources:
                source._copy.set_attributes(collate_fn=list)

    def shard(self, position: Position) -> EpochShard[T]:
        return _MergedShard([each.shard(position) for each in self._sources], join=self._join, on_batch=self._on_batch)

    def _join(self, batches: Sequence[Any]) -> Any:
        if self._collate is not None:
            return self._collate(list(itertools.chain.from_iterable(batches)))
        return batches[0] if len(batches) == 1 else _concatenate(batches)

    def steps(self, position: Position) -> int | None:
        return self._sources[0].steps(position)

    def epoch_set_by_user(self) -> int | None:
        return self._sources[-1].epoch_set_by_user()

    def identity(self) -> dict[str, Any]:
        return self._sources[0].identity()

    def batch_identity(self) -> dict[str, Any]:
        return self._sources[0].batch_identity()

    def batch_summary(self) -> str:
        return self._sources[0].batch_summary()

    def close(self) -> None:
        for each in self._sources:
            each.close()


class _MergedShard(EpochShard[T]):
    def __init__(
        self, shards: Sequence[EpochShard[T]], *, join: Any, on_batch: Callable[[tuple[str, ...]], None]
    ) -> None:
        self._shards, self._join, self._on_batch, self.units = shards, join, on_batch, shards[0].units

    def batches(self) -> Iterator[T]:
        for step, batches in enumerate(itertools.zip_longest(*(each.batches() for each in self._shards))):
            self._on_batch(tuple(sample_fingerprint([each]) for each in batches))
            # tail="weighted" gives a rank without samples a batch of weight 0, which one process does not read.
            held = [
                batch
                for batch, shard in zip(batches, self._shards, strict=True)
                if batch is not None and (len(batches) == 1 or shard.weight(step) > 0)
            ]
            yield self._join(held)

    def steps(self) -> int | None:
        return self._shards[0].steps()

    def release(self) -> None:
        for each in self._shards:
            each.release()

    def start_after(self, steps: int) -> int:
        return self._shards[0].start_after(steps)

    def samples(self, step: int) -> int | None:
        return self._shards[0].samples(step)

    def all_samples(self) -> int | None:
        return self._shards[0].all_samples()

    def fingerprint(self) -> str:
        return self._shards[0].fingerprint()

    def weight(self, step: int) -> float:
        return self._shards[0].weight(step) if len(self._shards) == 1 else 1.0


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
