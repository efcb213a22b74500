"""The kinds of epoch shard: for an order known in advance, for a stream of units, and for batches already sharded."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

from parallelize.data.epoch_order import Permutation, order_fingerprint
from parallelize.data.gather_results import gather_in_dataset_order, indices_of
from parallelize.data.sample_fingerprint import sample_fingerprint
from parallelize.data.sampler_arithmetic import EpochSplit, shard_stream
from parallelize.data.source import EpochShard

__all__ = ["IndexedShard", "LocalBatchesShard", "StreamShard"]

T = TypeVar("T")
_Fetch = Callable[[Iterable[Any], int | None], Iterator[T]]
"""Function that makes batches. Arguments: the units of each step, which may be iterated again; their number or None."""


@dataclass(eq=False)
class _UnitsShard(EpochShard[T]):
    """A shard of an epoch's units, from which the user's loader makes batches.

    Args:
        fetch: function that makes batches from units.
        split: how the units are sharded.
        rank: rank of this process.
        is_grouped: whether a step takes a list of units; if false, it takes a single unit.
        data: text that identifies the data, for `fingerprint`.
    """

    fetch: _Fetch[T]
    _: KW_ONLY
    split: EpochSplit
    rank: int
    is_grouped: bool
    data: str = ""

    def batches(self) -> Iterator[T]:
        """Return an iterator over the batches that the user's loader makes from this shard."""
        return self.fetch(self, self.steps())

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Yield the unit or the list of units of each step."""


@dataclass(eq=False, kw_only=True)
class IndexedShard(_UnitsShard[T]):
    """A shard of an epoch whose `order`, all of its units, is known in advance."""

    order: Sequence[Any]

    def __post_init__(self) -> None:
        self.units = len(self.order)

    def steps(self) -> int:
        """Count this process's batches."""
        return self.split.steps(self.rank)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.split.batches(self.order, self.rank):
            yield list(batch) if self.is_grouped else batch[0]

    def start_after(self, steps: int) -> int:
        """Count the units of the epoch that are consumed after `steps` steps."""
        return self.split.start_after(steps)

    def samples(self, step: int) -> int:
        """Count the samples that all processes take in a step, without padding."""
        return self._samples_at(self.split.global_positions(step))

    def all_samples(self) -> int:
        """Count the samples that all processes take in all steps, without padding."""
        split = self.split
        return self._samples_at(range(split.start, min(split.start_after(split.steps(0)), split.total)))

    def fingerprint(self) -> str:
        """Return a hash of the order."""
        return order_fingerprint(self.order) + self.data

    def release(self) -> None:
        """Free the indices of a shuffled order; they are drawn again when they are needed."""
        if isinstance(self.order, Permutation):
            self.order.release()

    def gather(self, results: Any, *, steps: int) -> Any:
        """Gather the results of all processes for the first `steps` steps, in dataset order; a collective."""
        return gather_in_dataset_order(results, split=self.split, order=self.order, rank=self.rank, steps=steps)

    def weight(self, step: int) -> float:
        """Return this process's fraction of the step's samples, times the world size: 1 if the shards are equal."""
        if self.split.tail != "weighted":
            return 1.0
        local, all_positions = self.split.unique_positions(self.rank, step), self.split.global_positions(step)
        return self._samples_at(local) * self.split.world_size / self._samples_at(all_positions)

    def _samples_at(self, positions: range) -> int:
        if self.is_grouped:
            return len(positions)
        return sum(len(indices_of(self.order[position])) for position in positions)


@dataclass(eq=False, kw_only=True)
class StreamShard(_UnitsShard[T]):
    """A shard of a stream of units of unknown length, from its beginning; the `total` of its split is not used."""

    stream: Iterable[Any]

    _fingerprint = ""

    def fingerprint(self) -> str:
        """Return a hash of the first units of the stream; empty until they are drawn."""
        return self._fingerprint

    def __iter__(self) -> Iterator[Any]:
        split = self.split
        units = shard_stream(
            self._fingerprinted_stream(),
            shard_index=self.rank,
            num_shards=split.world_size,
            tail=split.tail,
            start=split.start,
            limit=split.limit,
        )
        if not self.is_grouped:
            yield from units
            return
        size = split.group // split.world_size
        while batch := list(itertools.islice(units, size)):
            if len(batch) == size or not split.drop_last:
                yield batch

    def _fingerprinted_stream(self) -> Iterator[Any]:
        stream = iter(self.stream)
        # As many units as rank 0 draws for its first batch, because it takes every W-th unit. Other ranks draw more.
        first = list(itertools.islice(stream, self.split.group - self.split.world_size + 1))
        self._fingerprint = sample_fingerprint(first) + self.data
        yield from first
        del first
        yield from stream

    def start_after(self, steps: int) -> int:
        """Count the units of the epoch that are consumed after `steps` steps."""
        return self.split.start + steps * self.split.group


class LocalBatchesShard(EpochShard[T]):
    """A shard whose batches are already those of this process; `Position.start` counts them."""

    def __init__(
        self, make_batches: Callable[[], Iterator[T]], *, start: int, fingerprint: Callable[[], str] = str
    ) -> None:
        self._make_batches, self._start, self._make_fingerprint = make_batches, start, fingerprint

    def fingerprint(self) -> str:
        """Return a hash of the order; empty if it is unknown."""
        return self._make_fingerprint()

    def batches(self) -> Iterator[T]:
        """Return an iterator over the batches of this process."""
        return self._make_batches()

    def start_after(self, steps: int) -> int:
        """Count this process's batches of the epoch that are consumed after `steps` steps."""
        return self._start + steps
