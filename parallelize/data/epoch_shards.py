"""One process's share of one epoch: of units that are counted, and of units that come as they come."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from parallelize.data.gather_results import in_dataset_order, indices_of
from parallelize.data.sample_fingerprint import likeness
from parallelize.data.sampler_arithmetic import Split, share
from parallelize.data.source import Reading

__all__ = ["CountedReading", "Fetch", "StreamReading", "lazily"]

T = TypeVar("T")
Fetch = Callable[[Iterable[Any], int | None], Iterator[T]]
"""Makes batches of what it is fed with, a step's at a time; is also told how many there will be, None: unknown."""


class CountedReading(Reading[T]):
    """A share of units whose order is known from the first to the last.

    Args:
        fetch: makes batches of units.
        split: how the units are divided.
        order: all of them.
        rank: this process.
        is_grouped: whether a step takes a list of units, or one unit as it is.
    """

    def __init__(self, fetch: Fetch[T], *, split: Split, order: Sequence[Any], rank: int, is_grouped: bool) -> None:
        self.split, self.order = split, order
        self._fetch, self._rank, self._is_grouped = fetch, rank, is_grouped

    def batches(self) -> Iterator[T]:
        """The batches, fetched by the user's loader."""
        return self._fetch(lazily(self._units), self.split.steps(self._rank))

    def _units(self) -> Iterator[Any]:
        for batch in self.split.batches(self.order, self._rank):
            yield list(batch) if self._is_grouped else batch[0]

    def position(self, given: int) -> int:
        """Units of the epoch that are consumed after so many batches."""
        return self.split.after(given)

    def samples(self, step: int) -> int:
        """New samples in a step, of all processes together."""
        return self._samples_at(self.split.taken(step))

    def all_samples(self) -> int:
        """New samples in all steps, of all processes together."""
        split = self.split
        return self._samples_at(range(split.start, min(split.after(split.steps(0)), split.total)))

    def fingerprint(self) -> str:
        """A short form of the order."""
        return hashlib.blake2b(repr(self.order).encode(), digest_size=4).hexdigest()

    def gather(self, results: Any, *, steps: int) -> Any:
        """Results of all processes for the samples of so many steps, in the order of the dataset; a collective."""
        return in_dataset_order(results, split=self.split, order=self.order, rank=self._rank, steps=steps)

    def weight(self, step: int) -> float:
        """The share of this process's samples among those of the step, 1 where all have as many."""
        if self.split.tail != "weighted":
            return 1.0
        own, taken = self.split.own(self._rank, step), self.split.taken(step)
        return self._samples_at(own) * self.split.world_size / self._samples_at(taken)

    def _samples_at(self, positions: range) -> int:
        if self._is_grouped:
            return len(positions)
        return sum(len(indices_of(self.order[position])) for position in positions)


class StreamReading(Reading[T]):
    """A share of units that nobody has counted.

    Args:
        fetch: makes batches of units.
        split: how they are divided; its `total` is not used.
        stream: all units from the beginning of the epoch.
        rank: this process.
        is_grouped: whether a step takes a list of units, or one unit as it is.
    """

    def __init__(self, fetch: Fetch[T], *, split: Split, stream: Iterable[Any], rank: int, is_grouped: bool) -> None:
        self._fetch, self._split, self._stream = fetch, split, stream
        self._rank, self._is_grouped = rank, is_grouped
        self._likeness = ""

    def batches(self) -> Iterator[T]:
        """The batches, fetched by the user's loader."""
        return self._fetch(lazily(self._units), None)

    def fingerprint(self) -> str:
        """A short form of what came first."""
        return self._likeness

    def _units(self) -> Iterator[Any]:
        split = self._split
        own = share(
            self._noted(),
            reader=self._rank,
            readers=split.world_size,
            tail=split.tail,
            start=split.start,
            limit=split.limit,
        )
        if not self._is_grouped:
            yield from own
            return
        size = split.group // split.world_size
        while batch := list(itertools.islice(own, size)):
            if len(batch) == size or not split.drop_last:
                yield batch

    def _noted(self) -> Iterator[Any]:
        stream = iter(self._stream)
        # What rank 0 has to read for a first batch: every W-th unit is its own. The others read more.
        first = list(itertools.islice(stream, self._split.group - self._split.world_size + 1))
        self._likeness = likeness(first)
        yield from first
        del first
        yield from stream

    def position(self, given: int) -> int:
        """Units of the epoch that are consumed after so many batches."""
        return self._split.start + given * self._split.group


@dataclass(frozen=True)
class _Lazily:
    make: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.make()


def lazily(make: Callable[[], Iterator[Any]]) -> Iterable[Any]:
    """An iterable that makes a new iterator each time it is asked for one."""
    return _Lazily(make)
