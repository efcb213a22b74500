"""Which units of an epoch each process gets, and in which batches.

A unit is what the user's sampler yields: an index, or a whole batch of its own making. All processes know the same
order of the units; process `r` of `W` takes every W-th one, as torch's DistributedSampler does. Here W=2, batches of 2,
N=7 (`.` is a unit of the order, `:` one that padding repeats from its beginning):

    position     0 1 2 3 | 4 5 6 7
    step         0 . . . | 1 . . :        a step takes group = W * batch size positions
    rank         0 1 0 1 | 0 1 0 1        so a step's share of one rank is a slice with stride W

    pad          r0: 0 2, 4 6    r1: 1 3, 5 0      equal lengths, some units twice
    drop         r0: 0 2, 4      r1: 1 3, 5        equal lengths, the last units never
    exact        r0: 0 2, 4 6    r1: 1 3, 5        each unit once
    weighted     as exact, but a rank without a batch in the last step repeats units there, with weight 0

Nothing here knows torch.distributed: everything follows from a few numbers, so that every process can compute what
every other one does.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from parallelize.errors import ConfigError

__all__ = ["TAILS", "Split", "Tail", "as_steps", "reader_steps", "share"]

Tail = Literal["pad", "drop", "exact", "weighted"]
TAILS: tuple[Tail, ...] = ("pad", "drop", "exact", "weighted")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Split:
    """One epoch, or what is left of it, divided over the processes.

    Args:
        total: units of the whole epoch.
        world_size: processes.
        group: units that all processes together take in one step.
        tail: what happens where `total` does not divide.
        drop_last: whether a step that is not full is left out, as DataLoader(drop_last=True) does.
        start: units of the epoch that were consumed before.
        limit: the most units of the epoch that may be consumed; None: all.
    """

    total: int
    world_size: int
    group: int
    tail: Tail = "pad"
    drop_last: bool = False
    start: int = 0
    limit: int | None = None

    @classmethod
    def limited(cls, total: int | None, *, limit: float | None, start: int, **shape: Any) -> Split:
        """The split of units of which somebody may know how many there are, up to a limit.

        Args:
            total: units of the whole epoch; None: nobody knows.
            limit: the most steps of the whole epoch, or a fraction of them; None: all.
            start: units of the epoch that were consumed before.
            **shape: what else a Split takes.

        Raises:
            ConfigError: a fraction of less than one step.
        """
        whole = cls(total=total or 0, **shape)
        if limit is None:
            return dataclasses.replace(whole, start=start)
        steps = int(limit) if total is None else as_steps(limit, whole.steps(0))
        return dataclasses.replace(whole, start=start, limit=steps * whole.group)

    @property
    def end(self) -> int:
        """The position behind the last one that any process takes; beyond `total` they are repeats."""
        stop = self.total if self.limit is None else min(self.total, self.limit)
        left = max(stop - self.start, 0)
        if self.tail == "pad":
            left = -(-left // self.world_size) * self.world_size
        elif self.tail == "drop":
            left = left // self.world_size * self.world_size
        return self.start + left

    def steps(self, rank: int) -> int:
        """Batches that a process yields; with every tail but "exact" the same number on all of them."""
        left = self.end - self.start
        if self.drop_last:
            return left // self.group
        if self.tail == "exact":
            left -= rank
        return max(-(-left // self.group), 0)

    def positions(self, rank: int, step: int) -> range:
        """Positions that a process takes in a step; where they pass `total`, the order begins again."""
        first, end = self.start + step * self.group, self.end
        share = range(first + rank, min(first + self.group, end), self.world_size)
        if share or self.tail != "weighted":
            return share
        # Of weight 0. A whole batch, for layers that refuse a single sample (batch norm).
        return range(first + rank, first + self.group, self.world_size)

    def taken(self, step: int) -> range:
        """Positions that all processes together consume in a step, without repeats."""
        first = self.start + step * self.group
        return range(first, min(first + self.group, self.end, self.total))

    def own(self, rank: int, step: int) -> range:
        """Those of `positions` that are no repeats."""
        first = self.start + step * self.group
        return range(first + rank, min(first + self.group, self.end, self.total), self.world_size)

    def after(self, steps: int) -> int:
        """Units of the epoch that are consumed when every process has made so many steps."""
        return min(self.start + steps * self.group, max(self.end, self.start))

    def batch(self, order: Sequence[T], rank: int, step: int) -> Sequence[T]:
        """The units a process takes in a step."""
        positions = self.positions(rank, step)
        if positions.stop <= self.total or not positions:
            return order[positions.start : positions.stop : positions.step]
        return [order[position % self.total] for position in positions]

    def batches(self, order: Sequence[T], rank: int) -> Iterator[Sequence[T]]:
        """Everything a process takes, a batch at a time.

        Args:
            order: `total` units; a slice of it is a sequence of units.
            rank: the process.
        """
        steps = self.steps(rank)
        full = max(min((min(self.end, self.total) - self.start) // self.group, steps), 0)
        for first in range(self.start, self.start + full * self.group, self.group):
            yield order[first + rank : first + self.group : self.world_size]
        for step in range(full, steps):
            yield self.batch(order, rank, step)


def as_steps(limit: float, steps: int) -> int:
    """The steps that a limit allows of an epoch that has `steps`.

    Args:
        limit: an int is a number of steps, a float a fraction of them, rounded down.
        steps: of the whole epoch.

    Raises:
        ConfigError: a fraction of less than one step.
    """
    allowed = min(limit, steps) if isinstance(limit, int) else int(limit * steps)
    if allowed == 0 and steps > 0:
        raise ConfigError(
            f"limit={limit!r} of {steps} batches",
            why="it leaves not even one",
            fix="use limit=1 for a single batch, or a larger fraction",
        )
    return allowed


def share(
    stream: Iterable[T], *, reader: int, readers: int, tail: Tail = "pad", start: int = 0, limit: int | None = None
) -> Iterator[T]:
    """One reader's units of a stream whose end nobody knows, a unit at a time: what `Split` gives where it is known.

    Args:
        stream: the units of an epoch from its beginning, the same for every reader.
        reader: number of this one, from 0.
        readers: how many divide the stream among them.
        tail: "pad", "drop" or "exact"; the weights of "weighted" cannot be told before the end.
        start: units of the epoch that were consumed before.
        limit: the most units of the epoch that may be consumed; None: all.
    """
    first: list[T] = []
    held: list[T] = []
    total = start
    for total, unit in enumerate(itertools.islice(stream, limit), start=1):
        if len(first) < readers:
            first.append(unit)
        if total <= start:
            continue
        turn = (total - 1 - start) % readers
        if turn == reader:
            held.append(unit)
        # Only "drop" has to see that all readers get a unit before it gives one.
        if held and (tail != "drop" or turn == readers - 1):
            yield held.pop()
    missing = (start - total) % readers if total > start else 0
    if tail == "pad" and missing and reader >= readers - missing:
        yield first[(reader - (readers - missing)) % len(first)]


def reader_steps(total: int, *, readers: int, reader: int, batch_size: int | None, drop_last: bool, tail: Tail) -> int:
    """Batches that one reader of a shared stream makes of its units.

    Args:
        total: units of the stream.
        readers: how many divide it among them.
        reader: number of this one, from 0.
        batch_size: units in a batch; None: each is one.
        drop_last: whether a smaller last batch is left out.
        tail: as for `share`.
    """
    units = Split(total=total, world_size=readers, group=readers, tail=tail).steps(reader)
    size = batch_size or 1
    return units // size if drop_last else -(-units // size)
