"""Sampler arithmetic: which units of an epoch each process gets, and in which batches.

A unit is one item of the user's sampler: an index, or a batch of indices. All processes have the same order of units;
process `r` of `W` takes every W-th unit from position `r` on, as torch's DistributedSampler does. An example with W=2,
batches of 2 units, and 7 units (`.` is a unit, `:` is padding, a unit repeated from the beginning):

    position     0 1 2 3 | 4 5 6 7
    step         0 . . . | 1 . . :        a step takes group = W * batch size positions
    rank         0 1 0 1 | 0 1 0 1        so a rank's shard of a step is a slice with stride W

    pad          r0: 0 2, 4 6    r1: 1 3, 5 0      equal lengths, some units are repeated
    drop         r0: 0 2, 4      r1: 1 3, 5        equal lengths, the last units are left out
    exact        r0: 0 2, 4 6    r1: 1 3, 5        each unit is taken once
    weighted     as exact, but a rank without a batch in the last step repeats units there, with weight 0

Nothing here communicates: every process can compute the shards of all processes from a few numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from parallelize.errors import ConfigError

__all__ = ["TAILS", "EpochSplit", "Tail"]

Tail = Literal["pad", "drop", "exact", "weighted"]
TAILS: tuple[Tail, ...] = get_args(Tail)

T = TypeVar("T")

_CHUNK = 2**12


@dataclass(frozen=True, kw_only=True)
class EpochSplit:
    """The shards of one epoch, or of the rest of it, on all processes.

    Args:
        total: number of units of the full epoch; sys.maxsize: unknown.
        group: number of units that all processes together take in one step.
        drop_last: whether to leave out an incomplete last step, as DataLoader(drop_last=True) does.
        start: number of units of the epoch that are already consumed.
        limit: the maximum number of units of the epoch to consume; None: all.
    """

    total: int = sys.maxsize
    world_size: int
    group: int
    tail: Tail = "pad"
    drop_last: bool = False
    start: int = 0
    limit: int | None = None

    def limited(self, limit: float | None) -> EpochSplit:
        """Return this split with a limit: a number of steps of the full epoch, or a fraction of them, rounded down."""
        if limit is None:
            return self
        steps = dataclasses.replace(self, start=0).steps(0)
        # An endless sampler may have the length sys.maxsize, of which a fraction is taken, too.
        allowed = limit if isinstance(limit, int) else int(limit * steps)  # a length, and with it `steps`, may be wrong
        if allowed == 0 and steps > 0:
            raise ConfigError(
                f"limit={limit!r} of {steps} batches",
                why="that is less than one batch",
                fix="use limit=1 for a single batch, or a larger fraction",
            )
        return dataclasses.replace(self, limit=min(allowed * self.group, sys.maxsize))

    @property
    def end(self) -> int:
        """The end (exclusive) of the positions that processes take; positions from `total` on repeat units."""
        stop = self.total if self.limit is None else min(self.total, self.limit)
        left = max(stop - self.start, 0)
        if self.tail == "pad":
            left = -(-left // self.world_size) * self.world_size
        elif self.tail == "drop":
            left = left // self.world_size * self.world_size
        return self.start + left

    def steps(self, rank: int) -> int:
        """Count the batches of a process; all processes have equally many unless the tail is "exact"."""
        left = self.end - self.start
        if self.drop_last:
            return left // self.group
        if self.tail == "exact":
            left -= rank
        return max(-(-left // self.group), 0)

    def known_steps(self, rank: int) -> int | None:
        """Count the batches of a process; None if the number of units is unknown."""
        return None if self.total == sys.maxsize else self.steps(rank)

    def positions(self, rank: int, step: int) -> range:
        """Return the positions that a process takes in a step; positions from `total` on repeat the first units."""
        first, end = self.start + step * self.group, self.end
        positions = range(first + rank, min(first + self.group, end), self.world_size)
        if positions or self.tail != "weighted":
            return positions
        # These units get weight 0. They fill the batch, because batch norm refuses a single sample.
        return range(first + rank, first + self.group, self.world_size)

    def unique_positions(self, rank: int, step: int) -> range:
        """Return the positions that a process takes in a step, without those that repeat a unit."""
        return self.global_positions(step)[rank :: self.world_size]

    def global_positions(self, step: int) -> range:
        """Return the positions that all processes together take in a step, without those that repeat a unit."""
        first = self.start + step * self.group
        return range(first, min(first + self.group, self.end, self.total))

    def start_after(self, steps: int) -> int:
        """Count the units of the epoch that are consumed after `steps` steps of every process."""
        return min(self.start + steps * self.group, max(self.end, self.start))

    def batches(self, order: Sequence[T], rank: int) -> Iterator[Sequence[T]]:
        """Yield each batch of a process, as a sequence of units."""
        size, is_uneven = divmod(self.group, self.world_size)
        full_steps = 0 if is_uneven else max(min(self.end, self.total) - self.start, 0) // self.group
        stride = max(_CHUNK // size, 1)
        for step in range(0, full_steps, stride):  # units of many steps at once: a slice of a tensor takes 2 us
            first, end = (self.start + each * self.group for each in (step, min(step + stride, full_steps)))
            units = order[first + rank : end : self.world_size]
            for position in range(0, len(units), size):
                yield units[position : position + size]
        for step in range(full_steps, self.steps(rank)):
            positions = self.positions(rank, step)
            if positions.stop <= self.total:
                yield order[positions.start : positions.stop : positions.step]
            else:
                yield [order[position % self.total] for position in positions]

    def batches_of_stream(self, stream: Iterable[T], rank: int) -> Iterator[list[T]]:
        """Yield each batch of a process, from units whose number is unknown."""
        units, size = self.units_of_stream(stream, rank), self.group // self.world_size
        while batch := list(itertools.islice(units, size)):
            if len(batch) == size or not self.drop_last:
                yield batch

    def units_of_stream(self, stream: Iterable[T], rank: int) -> Iterator[T]:
        """Yield the units of a process, from those of an epoch, whose number is unknown, from its beginning.

        Those of the other processes in a step are drawn first: a stream that is left goes on at the same unit on all.
        """
        counter = itertools.count()
        units = zip(itertools.islice(stream, self.limit), counter, strict=False)
        first = [unit for unit, _ in itertools.islice(units, rank)]  # those that may pad this rank's
        others = self.world_size - 1 - rank
        for unit, _ in itertools.islice(units, self.start, None, rank + 1):
            drawn = sum(1 for _ in itertools.islice(units, others))
            if self.tail == "drop" and drawn < others:
                return
            yield unit
        total = next(counter)
        missing = (self.start - total) % self.world_size if total > self.start else 0
        if self.tail == "pad" and rank >= self.world_size - missing:
            yield first[(rank - (self.world_size - missing)) % len(first)]
