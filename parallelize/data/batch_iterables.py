"""Source for a list or another iterable of ready-made batches: each of W processes takes every W-th batch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from parallelize.cluster.world import World
from parallelize.data.epoch_order import stream_rng
from parallelize.data.epoch_shards import IndexedShard, LocalBatchesShard, StreamShard
from parallelize.data.loader_copy import with_rng
from parallelize.data.loader_options import Divides, LoaderOptions, check_iterable_options
from parallelize.data.sample_fingerprint import sample_fingerprint
from parallelize.data.sampler_arithmetic import EpochSplit, limit_in_steps
from parallelize.data.source import EpochListeners, EpochShard, Position, Source
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

    can_change_world_size = True

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
        self.loader = batches
        self._options, self._world = options, world
        self._is_own = divides == "processes"
        self._is_sequence = hasattr(batches, "__getitem__") and self._has_length
        self._seed = (options.seed or 0) + occurrence
        self._listeners = EpochListeners([batches])

    def shard(self, position: Position) -> EpochShard[T]:
        """Return this process's shard of an epoch, from a position on."""
        self._listeners.set_epoch(position.epoch)
        if self._is_own:
            return LocalBatchesShard(functools.partial(self._own_batches, position), start=position.start)
        split, rank = self._split(position.start), self._world.rank
        if not self._is_sequence:
            rng = stream_rng(self.loader, seed=self._seed, epoch=position.epoch)
            return StreamShard(
                lambda units, _: with_rng(iter(units), rng),
                split=split,
                stream=self.loader,
                rank=rank,
                is_grouped=False,
            )
        order = range(len(self.loader))
        return _SequenceShard(self._fetch, split=split, order=order, rank=rank, is_grouped=False, sequence=self.loader)

    def steps(self, position: Position) -> int | None:
        """Count this process's batches from a position on; None if the iterable has no length."""
        if not self._has_length:
            return None
        if not self._is_own:
            return self._split(position.start).steps(self._world.rank)
        total = len(self.loader)
        limit = total if self._options.limit is None else limit_in_steps(self._options.limit, total)
        return max(limit - position.start, 0)

    def identity(self) -> dict[str, Any]:
        """Return the seed that is set while a stream is iterated, or the world size if the iterable shards itself."""
        if self._is_own:
            return {"world_size": self._world.world_size}
        return {} if self._is_sequence else {"seed": self._seed}

    def _split(self, start: int) -> EpochSplit:
        total = len(self.loader) if self._has_length else None
        size, options = self._world.world_size, self._options
        return EpochSplit.limited(
            total, limit=options.limit, start=start, world_size=size, group=size, tail=options.tail
        )

    def _fetch(self, indices: Iterable[Any], _steps: int | None) -> Iterator[T]:
        sequence: Sequence[T] = self.loader
        return (sequence[index] for index in indices)

    def _own_batches(self, position: Position) -> Iterator[T]:
        steps, limit = self.steps(position), self._options.limit
        end = limit if steps is None else position.start + steps
        return itertools.islice(self.loader, position.start, None if end is None else int(end))


@dataclass(eq=False, kw_only=True)
class _SequenceShard(IndexedShard[T]):
    sequence: Sequence[T]

    def fingerprint(self) -> str:
        # Lists are compared, as each rank may shuffle its own. Other sequences may make a new batch at each access.
        first = self.sequence[:_MAX_COMPARED_BATCHES] if isinstance(self.sequence, (list, tuple)) else ()
        return sample_fingerprint([super().fingerprint(), sample_fingerprint(first)])
