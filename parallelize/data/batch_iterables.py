"""Source for a list or another iterable of ready-made batches: each of W processes takes every W-th batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from parallelize.cluster.world import World
from parallelize.data.epoch_order import stream_order
from parallelize.data.epoch_shards import Fetch, IndexedShard, StreamShard
from parallelize.data.loader_options import LoaderOptions, fraction_without_length_error
from parallelize.data.sample_fingerprint import sample_fingerprint
from parallelize.data.sampler_arithmetic import EpochSplit
from parallelize.data.source import EpochListeners, EpochShard, Position, Source
from parallelize.errors import ConfigError

__all__ = ["BatchIterableSource"]

T = TypeVar("T")

_MAX_COMPARED_BATCHES = 16


class BatchIterableSource(Source[T]):
    """Source for an iterable of batches; if it is a sequence, only this process's batches are accessed.

    Args:
        batches: the user's iterable.
        options: the options of `shard_loader`.
        world: rank and world size of this process.
        occurrence: number of loaders that the same line of code has made before in this run; added to the seed.

    Raises:
        ConfigError: an option is set that only a DataLoader supports.
    """

    can_change_world_size = True

    def __init__(self, batches: Iterable[T], *, options: LoaderOptions, world: World, occurrence: int) -> None:
        _check(batches, options)
        self.loader = batches
        self._options, self._world = options, world
        self._is_sequence = hasattr(batches, "__getitem__") and hasattr(batches, "__len__")
        self._seed = (options.seed or 0) + occurrence
        self._listeners = EpochListeners([batches])

    def shard(self, position: Position) -> EpochShard[T]:
        """Return this process's shard of an epoch, from a position on."""
        self._listeners.set_epoch(position.epoch)
        split, rank = self._split(position.start), self._world.rank
        if not self._is_sequence:
            stream = stream_order(self.loader, seed=self._seed, epoch=position.epoch, chunk_size=1)
            return StreamShard(_unchanged, split=split, stream=stream, rank=rank, is_grouped=False)
        order = range(len(self.loader))
        return _SequenceShard(self._fetch, split=split, order=order, rank=rank, batches=self.loader)

    def steps(self, position: Position) -> int | None:
        """Count this process's batches from a position on; None if the iterable has no length."""
        return self._split(position.start).steps(self._world.rank) if hasattr(self.loader, "__len__") else None

    def identity(self) -> dict[str, Any]:
        """Return the seed that is set while a stream is iterated; empty for a sequence."""
        return {} if self._is_sequence else {"seed": self._seed}

    def _split(self, start: int) -> EpochSplit:
        total = len(self.loader) if hasattr(self.loader, "__len__") else None
        size, options = self._world.world_size, self._options
        return EpochSplit.limited(
            total, limit=options.limit, start=start, world_size=size, group=size, tail=options.tail
        )

    def _fetch(self, indices: Iterable[Any], _steps: int | None) -> Iterator[T]:
        sequence: Sequence[T] = self.loader
        return (sequence[index] for index in indices)


class _SequenceShard(IndexedShard[T]):
    def __init__(self, fetch: Fetch[T], *, split: EpochSplit, order: range, rank: int, batches: Sequence[T]) -> None:
        super().__init__(fetch, split=split, order=order, rank=rank, is_grouped=False)
        self._batches = batches

    def fingerprint(self) -> str:
        # Lists are compared, as each rank may shuffle its own. Other sequences may make a new batch at each access.
        first = self._batches[:_MAX_COMPARED_BATCHES] if isinstance(self._batches, (list, tuple)) else ()
        return sample_fingerprint([super().fingerprint(), sample_fingerprint(first)])


def _unchanged(batches: Iterable[Any], _steps: int | None) -> Iterator[Any]:
    return iter(batches)


def _check(batches: Iterable[Any], options: LoaderOptions) -> None:
    name = type(batches).__name__
    if options.tail == "weighted":
        raise ConfigError(
            f"tail='weighted' with a {name} of batches",
            why="the number of samples of a batch is unknown before the batch is made",
            fix="use a DataLoader, or tail='pad'",
        )
    if options.batch == "global":
        raise ConfigError(
            f"batch='global' with a {name} of batches",
            why="the batches are already made, and are not split between processes",
            fix="use batch='per_process': each process takes full batches",
        )
    if isinstance(options.limit, float) and not hasattr(batches, "__len__"):
        raise fraction_without_length_error(options.limit, name)
