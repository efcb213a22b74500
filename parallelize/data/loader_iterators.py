"""The iterators of a sharded loader, of which one goes on: its position is that of the loader."""

from __future__ import annotations

import warnings
from typing import Any, Generic, TypeVar

from parallelize.data.epoch_shard import EpochShard, Position
from parallelize.runtime.rank_consistency import ConsistencyCheck
from parallelize.runtime.weighted_backward import BatchWeight

__all__ = ["EpochProgress", "LoaderIterators"]

T = TypeVar("T")


class EpochProgress(Generic[T]):
    """The progress of one iterator through its epoch."""

    def __init__(self, shard: EpochShard[T], position: Position) -> None:
        self.shard, self.position = shard, position
        self.weight = BatchWeight()
        self.facts: dict[str, Any] = {}  # see EpochShard.facts
        self.check: ConsistencyCheck | None = None
        self.summary: object = None
        self.steps = 0  # batches that were yielded
        self.is_exhausted = self.is_closed = False  # closed: exhausted, or abandoned before its end
        self.time = 0  # of the latest batch: a count of the batches of all iterators

    @property
    def is_loop(self) -> bool:
        """Whether it is more than a look at the first batch."""
        return self.is_exhausted or self.steps > 1


class LoaderIterators(Generic[T]):
    """The iterators since an epoch or a state was set, of which one goes on: its position is the loader's."""

    def __init__(self) -> None:
        self._open: list[EpochProgress[T]] = []  # by their latest batch
        self._has_warned = False
        self._closed: EpochProgress[T] | None = None  # the latest loop, or else the latest look at a first batch
        self._time = 0

    def advance(self, progress: EpochProgress[T]) -> None:
        """Record that an iterator is about to yield a batch."""
        self._time += 1
        progress.time = self._time
        if not self._open or self._open[-1] is not progress:
            self._open = [*(each for each in self._open if each is not progress), progress]
        if progress.steps == 2:  # iterators without a batch since the last loop, the second one since, are left
            self._open = [each for each in self._open if each.time > self._closed_loop_time]

    def close(self, progress: EpochProgress[T]) -> None:
        """Record that an iterator has ended, or was left."""
        progress.is_closed = True
        # Ranks do not compare an evaluation that they have left.
        progress.check = progress.summary = None
        if progress.steps and progress not in self._open:  # it is left, or an epoch or a state was set
            return
        self._open = [each for each in self._open if each is not progress]
        if progress.is_loop or self._closed is None or not self._closed.is_loop:
            self._closed = progress

    def release(self) -> None:
        """Free the indices of a closed iterator before those of another epoch are drawn."""
        if self._closed is not None:
            self._closed.shard.release()

    @property
    def latest_loop(self) -> EpochProgress[T] | None:
        """The loop with the latest batch; the epoch after it is the next one."""
        loops = [each for each in (self._closed, *self._open) if each is not None and each.is_loop]
        return max(loops, key=lambda each: each.time, default=None)

    @property
    def current(self) -> EpochProgress[T] | None:
        """The iterator that goes on: the open loop with the latest batch, else the latest loop.

        A loop over the same loader inside of it, and a look at a first batch, do not end it.
        """
        loops = [each for each in self._open if each.is_loop]
        looks = [each for each in self._open if each.time > self._closed_loop_time]
        return loops[-1] if loops else looks[-1] if looks else self._closed

    @property
    def _closed_loop_time(self) -> int:
        return self._closed.time if self._closed is not None and self._closed.is_loop else 0

    def warn_if_ambiguous(self) -> None:
        """Warn, once, if it is unknown whether the current iterator goes on, because a later one has ended."""
        current, closed = self.current, self._closed
        if current is None or closed is None or self._has_warned:
            return
        if current.is_loop and not current.is_closed and closed.is_loop and closed.time > current.time:
            self._has_warned = True
            warnings.warn(
                f"state_dict() is the position of an iterator over epoch {current.position.epoch} that was begun "
                "before the latest loop over this loader, and is still open. If it is never continued, close or delete "
                "it before that loop.",
                stacklevel=3,
            )
