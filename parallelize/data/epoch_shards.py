"""The kinds of epoch shard: for an order known in advance, for a stream of units, and for batches already sharded."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from parallelize.data.gather_results import gather_in_dataset_order, indices_of
from parallelize.data.sample_fingerprint import sample_fingerprint
from parallelize.data.sampler_arithmetic import EpochSplit, shard_stream
from parallelize.data.source import EpochShard

__all__ = ["Fetch", "IndexedShard", "LocalBatchesShard", "Reiterable", "StreamShard"]

T = TypeVar("T")
Fetch = Callable[[Iterable[Any], int | None], Iterator[T]]
"""Function that makes batches; arguments: an iterable of the units of each step, and its length (None: unknown)."""


class IndexedShard(EpochShard[T]):
    """A shard of an epoch whose order of units is known in advance.

    Args:
        fetch: function that makes batches from units.
        split: how the units are sharded.
        order: all units of the epoch, in order.
        rank: rank of this process.
        is_grouped: whether a step takes a list of units; if false, it takes a single unit.
    """

    def __init__(
        self, fetch: Fetch[T], *, split: EpochSplit, order: Sequence[Any], rank: int, is_grouped: bool
    ) -> None:
        self.split, self.order = split, order
        self._fetch, self._rank, self._is_grouped = fetch, rank, is_grouped

    def batches(self) -> Iterator[T]:
        """Return an iterator over the batches that the user's loader makes from this shard."""
        return self._fetch(Reiterable(self._units), self.split.steps(self._rank))

    def _units(self) -> Iterator[Any]:
        for batch in self.split.batches(self.order, self._rank):
            yield list(batch) if self._is_grouped else batch[0]

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
        return hashlib.blake2b(repr(self.order).encode(), digest_size=4).hexdigest()

    def gather(self, results: Any, *, steps: int) -> Any:
        """Gather the results of all processes for the first `steps` steps, in dataset order; a collective."""
        return gather_in_dataset_order(results, split=self.split, order=self.order, rank=self._rank, steps=steps)

    def weight(self, step: int) -> float:
        """Return this process's fraction of the step's samples, times the world size: 1 if the shards are equal."""
        if self.split.tail != "weighted":
            return 1.0
        local, all_positions = self.split.unique_positions(self._rank, step), self.split.global_positions(step)
        return self._samples_at(local) * self.split.world_size / self._samples_at(all_positions)

    def _samples_at(self, positions: range) -> int:
        if self._is_grouped:
            return len(positions)
        return sum(len(indices_of(self.order[position])) for position in positions)


class StreamShard(EpochShard[T]):
    """A shard of a stream of units of unknown length.

    Args:
        fetch: function that makes batches from units.
        split: how the units are sharded; its `total` is not used.
        stream: all units of the epoch, from its beginning.
        rank: rank of this process.
        is_grouped: whether a step takes a list of units; if false, it takes a single unit.
    """

    def __init__(
        self, fetch: Fetch[T], *, split: EpochSplit, stream: Iterable[Any], rank: int, is_grouped: bool
    ) -> None:
        self._fetch, self._split, self._stream = fetch, split, stream
        self._rank, self._is_grouped = rank, is_grouped
        self._fingerprint = ""

    def batches(self) -> Iterator[T]:
        """Return an iterator over the batches that the user's loader makes from this shard."""
        return self._fetch(Reiterable(self._units), None)

    def fingerprint(self) -> str:
        """Return a hash of the first units of the stream; empty until they are drawn."""
        return self._fingerprint

    def _units(self) -> Iterator[Any]:
        split = self._split
        units = shard_stream(
            self._fingerprinted_stream(),
            shard_index=self._rank,
            num_shards=split.world_size,
            tail=split.tail,
            start=split.start,
            limit=split.limit,
        )
        if not self._is_grouped:
            yield from units
            return
        size = split.group // split.world_size
        while batch := list(itertools.islice(units, size)):
            if len(batch) == size or not split.drop_last:
                yield batch

    def _fingerprinted_stream(self) -> Iterator[Any]:
        stream = iter(self._stream)
        # As many units as rank 0 draws for its first batch, because it takes every W-th unit. Other ranks draw more.
        first = list(itertools.islice(stream, self._split.group - self._split.world_size + 1))
        self._fingerprint = sample_fingerprint(first)
        yield from first
        del first
        yield from stream

    def start_after(self, steps: int) -> int:
        """Count the units of the epoch that are consumed after `steps` steps."""
        return self._split.start + steps * self._split.group


class LocalBatchesShard(EpochShard[T]):
    """A shard whose batches are already those of this process; `Position.start` counts them.

    Args:
        make_batches: function that returns the batches of this process from `start` on.
        start: number of this process's batches in the epoch that are already consumed.
    """

    def __init__(self, make_batches: Callable[[], Iterator[T]], *, start: int) -> None:
        self._make_batches, self._start = make_batches, start

    def batches(self) -> Iterator[T]:
        """Return an iterator over the batches of this process."""
        return self._make_batches()

    def start_after(self, steps: int) -> int:
        """Count this process's batches of the epoch that are consumed after `steps` steps."""
        return self._start + steps


@dataclass(frozen=True)
class Reiterable:
    """An iterable that calls `make_iterator` each time it is iterated."""

    make_iterator: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.make_iterator()
