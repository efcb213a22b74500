"""EpochShard: one process's shard of an epoch, of an order known in advance or of a stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from parallelize.data.epoch_order import Permutation, order_fingerprint
from parallelize.data.gather_results import gather_in_dataset_order, indices_of
from parallelize.data.sample_fingerprint import sample_fingerprint
from parallelize.data.sampler_arithmetic import EpochSplit
from parallelize.errors import ConfigError

__all__ = ["EpochShard", "Position"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position in the data, at which an epoch shard starts.

    Args:
        epoch: number of the epoch, from 0.
        start: number of units of that epoch that are already consumed; each `Source` class defines its unit.
    """

    epoch: int = 0
    start: int = 0


@dataclass(eq=False, kw_only=True)
class EpochShard(Generic[T]):
    """One process's shard of the rest of one epoch.

    Args:
        fetch: function that makes batches from the units of each step, which may be iterated again.
        split: how the units are sharded; the number of a stream's units may be an estimate.
        rank: rank of this process.
        order: all units of the epoch; None if they are not known in advance.
        stream: the units of an epoch without `order`, from its beginning.
        is_grouped: whether a step takes a list of units; if false, it takes a single unit.
        data: text that identifies the data, for `fingerprint`.
        own_fingerprint: replacement for `fingerprint`.
    """

    fetch: Callable[[Iterable[Any]], Iterator[T]]
    split: EpochSplit
    rank: int = 0
    order: Sequence[Any] | None = None
    stream: Iterable[Any] = ()
    is_grouped: bool = False
    data: str = ""
    own_fingerprint: Callable[[], str] | None = None

    _first_units = ""  # hash of those of the stream, once they are drawn

    @property
    def units(self) -> int | None:
        """Number of units of the full epoch; None: unknown."""
        return None if self.order is None else len(self.order)

    def facts(self) -> dict[str, Any]:
        """Return what is saved of an interrupted epoch: its number of units, or the hash of the first of a stream.

        That hash is comparable where all processes together take as many units in a step.
        """
        if self.order is not None:
            return {"units": len(self.order)}
        return {"first": [self.split.group, self.fingerprint()]} if self.fingerprint() else {}

    def batches(self) -> Iterator[T]:
        """Return an iterator over this process's batches, as the user's loader makes them; call it only once."""
        return self.fetch(self)

    def __iter__(self) -> Iterator[Any]:
        """Yield the unit or the list of units of each step."""
        batches: Iterable[Sequence[Any]]
        if self.order is None:
            stream = self.stream if self.own_fingerprint else self._hashed_stream()
            batches = self.split.batches_of_stream(stream, self.rank)
        else:
            batches = self.split.batches(self.order, self.rank)
        return map(list, batches) if self.is_grouped else (batch[0] for batch in batches)

    def _hashed_stream(self) -> Iterator[Any]:
        stream = iter(self.stream)
        # As many units as rank 0 draws for its first batch, because it takes every W-th unit. Other ranks draw more.
        first = list(itertools.islice(stream, self.split.group - self.split.world_size + 1))
        self._first_units = sample_fingerprint(first) + self.data
        yield from first
        del first
        yield from stream

    def steps(self) -> int | None:
        """Count this process's batches; None if unknown."""
        return self.split.known_steps(self.rank)

    def start_after(self, steps: int) -> int:
        """Return the `Position.start` at which to resume after every process has taken `steps` batches."""
        if self.order is None:
            return self.split.start + steps * self.split.group
        return self.split.start_after(steps)

    def fingerprint(self) -> str:
        """Return a hash of the order, which processes compare; "" if the order is unknown."""
        if self.own_fingerprint is not None:
            return self.own_fingerprint()
        return self._first_units if self.order is None else order_fingerprint(self.order) + self.data

    def release(self) -> None:
        """Free the indices of a shuffled order; they are drawn again when they are needed."""
        if isinstance(self.order, Permutation):
            self.order.release()

    def gather(self, results: Any, *, steps: int) -> Any:
        """Gather the results of all processes for the first `steps` steps, in dataset order; a collective."""
        if self.order is None:
            raise ConfigError(
                "gather on a loader without indices",
                why="results are ordered by the indices that were iterated",
                fix="use parallelize.all_gather",
            )
        return gather_in_dataset_order(results, split=self.split, order=self.order, rank=self.rank, steps=steps)

    def samples(self, step: int | None = None) -> int | None:
        """Count the samples that all processes take in a step, or in all steps, without padding; None if unknown."""
        split = self.split
        if self.order is None:
            return None
        if step is not None:
            return self._samples_at(split.global_positions(step))
        return self._samples_at(range(split.start, min(split.start_after(split.steps(0)), split.total)))

    def weight(self, step: int) -> float:
        """Return the weight of this process's gradients in a step, for which they average to the mean over samples.

        It is this process's fraction of the step's samples, times the world size: 1 if the shards are equal.
        """
        if self.order is None or self.split.tail != "weighted":
            return 1.0
        local, all_positions = self.split.unique_positions(self.rank, step), self.split.global_positions(step)
        return self._samples_at(local) * self.split.world_size / self._samples_at(all_positions)

    def _samples_at(self, positions: range) -> int:
        if self.order is None or self.is_grouped:
            return len(positions)
        return sum(len(indices_of(self.order[position])) for position in positions)
