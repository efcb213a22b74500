"""Source for a list or another iterable of ready-made batches: each of W processes takes every W-th batch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from parallelize.cluster.world import World
from parallelize.data.epoch_order import stream_rng
from parallelize.data.epoch_shard import EpochShard, Position
from parallelize.data.loader_options import Divides, LoaderOptions, check_iterable_options
from parallelize.data.rng import with_rng
from parallelize.data.sample_fingerprint import sample_fingerprint
from parallelize.data.sampler_arithmetic import EpochSplit
from parallelize.data.source import EpochListeners, Source
from parallelize.errors import ConfigError

__all__ = ["BatchIterableSource"]

T = TypeVar("T")

_MAX_COMPARED_BATCHES = 16


class BatchIterableSource(Source[T]):
    """Source for an iterable of batches; if it is a sequence, only this process's batches are accessed.

    With divides="processes" all of its batches are for this process. `occurrence`, the number of loaders that the same
    line of code has made before in this run, is added to the seed.

    Raises:
        ConfigError: an option is set that only a DataLoader supports.
    """

    def __init__(
        self, batches: Iterable[T], *, divides: Divides | None, options: LoaderOptions, world: World, occurrence: int
    ) -> None:
        self._has_length = hasattr(batches, "__len__")
        name = type(batches).__name__
        check_iterable_options(options, f"a {name} of batches", has_length=self._has_length)
        if divides == "workers":
            raise ConfigError(
                f"divides='workers' with a {name} of batches",
                why="it is iterated in this process, which has no workers",
                fix="use divides='processes' if it shards its batches over the processes, or divides='nothing'",
            )
        self.loader: Any = batches
        self._options, self._world = options, world
        self._is_own = divides == "processes"
        self._is_sequence = not self._is_own and hasattr(batches, "__getitem__") and self._has_length
        self._seed = (options.seed or 0) + occurrence
        self.listeners = EpochListeners([batches])

    def shard(self, position: Position) -> EpochShard[T]:
        """Return this process's shard of an epoch, from a position on."""
        self.listeners.set_epoch(position.epoch)
        split, loader, rank = self._split(position), self.loader, self._world.rank
        if self._is_own:
            return EpochShard(fetch=iter, split=split, stream=loader, own_fingerprint=str)
        if not self._is_sequence:
            rng = stream_rng(loader, seed=self._seed, epoch=position.epoch)
            return EpochShard(fetch=lambda units: with_rng(iter(units), rng), split=split, stream=loader, rank=rank)
        # Lists are compared, as each rank may shuffle its own. Other sequences may make a new batch at each access.
        first = (
            loader[:_MAX_COMPARED_BATCHES] if isinstance(loader, (list, tuple)) and self._world.world_size > 1 else ()
        )
        return EpochShard(
            fetch=self._fetch, split=split, order=range(len(loader)), rank=rank, data=sample_fingerprint(first)
        )

    def steps(self, position: Position) -> int | None:
        """Count this process's batches from a position on; None if the iterable has no length."""
        return self._split(position).known_steps(0 if self._is_own else self._world.rank)

    def identity(self, *, is_within_epoch: bool) -> dict[str, Any]:  # noqa: ARG002 - the same for both
        """Return the seed that is set while a stream is iterated, or the world size if the iterable shards itself."""
        if self._is_own:
            return {"world_size": self._world.world_size}
        return {} if self._is_sequence else {"seed": self._seed}

    def _split(self, position: Position) -> EpochSplit:
        total = len(self.loader) if self._has_length else sys.maxsize
        size = 1 if self._is_own else self._world.world_size
        split = EpochSplit(total=total, start=position.start, world_size=size, group=size, tail=self._options.tail)
        return split.limited(self._options.limit)

    def _fetch(self, indices: Iterable[Any]) -> Iterator[T]:
        return (self.loader[index] for index in indices)
