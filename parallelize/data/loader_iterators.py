"""The iterators of a sharded loader, of which one goes on: its position is that of the loader.

And the line of code that makes loaders, over which epochs are counted.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from parallelize.data.epoch_order import Permutation
from parallelize.data.epoch_shard import EpochShard
from parallelize.runtime.batch_weights import BatchWeight
from parallelize.runtime.rank_consistency import ConsistencyCheck

__all__ = ["EpochProgress", "LineOfCode", "LoaderIterators"]

T = TypeVar("T")

_MAX_LOOKS = 4


class EpochProgress(Generic[T]):
    """The progress of one iterator through its epoch."""

    def __init__(self, shard: EpochShard[T]) -> None:
        self.shard, self.position = shard, shard.position
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

    def warn_of_another_order(self, name: str) -> None:
        """Warn if an epoch that is resumed has another order, or another beginning, than when its state was saved."""
        facts = (self.position.facts, self.facts)
        saved, now = (each.get("first", [0, ""]) for each in facts)
        saved_order, order = (each.get("order") for each in facts)
        epoch = f"the resumed epoch {self.position.epoch} of {name}"
        if saved != now and saved[0] == now[0]:
            text = (
                f"{epoch} begins with other samples than when its state was saved, so that samples may be repeated or "
                "skipped, unless only their augmentation differs: the data draws from generators that are not seeded. "
                "Use shard_loader(loader, seed=0), or seed its generators."
            )
        elif saved_order and saved_order != order:
            text = (
                f"{epoch} has another order or other data than when its state was saved, so that samples may be "
                "repeated or skipped. A sampler that counts its epochs itself has to have a method set_epoch(epoch), "
                "generators and random splits have to be seeded, and lists of files sorted."
            )
        else:
            return
        warnings.warn(text, stacklevel=4)


class LoaderIterators(Generic[T]):
    """The iterators since an epoch or a state was set, of which one goes on: its position is the loader's."""

    def __init__(self) -> None:
        # Those that are open, and one that is closed: the latest loop, or else the latest look at a first batch.
        self._known: list[EpochProgress[T]] = []
        self._time, self._has_warned = 0, False
        self._looks = 0  # iterators in a row that were left after their first batch

    def advance(self, progress: EpochProgress[T]) -> None:
        """Record that an iterator is about to yield a batch."""
        if progress.steps <= 2 and progress.shard.is_shuffled:
            self._warn_if_repeated(progress)
        self._time += 1
        progress.time = self._time
        if progress not in self._known:
            self._known.append(progress)
        if progress.steps == 2:  # iterators without a batch since the last loop, the second one since, are left
            ended = max((each.time for each in self._known if each.is_loop and each.is_closed), default=0)
            self._known = [each for each in self._known if each.is_closed or each.time > ended]

    def close(self, progress: EpochProgress[T]) -> None:
        """Record that an iterator has ended, or was left."""
        progress.is_closed = True
        self._looks = 0 if progress.is_loop else self._looks + progress.steps
        # Ranks do not compare an evaluation that they have left.
        progress.check = progress.summary = None
        if progress.steps and progress not in self._known:  # it is left, or an epoch or a state was set
            return
        self._known = [each for each in self._known if each is not progress]
        if progress.is_loop or not any(each.is_loop and each.is_closed for each in self._known):
            self._known = [*(each for each in self._known if not each.is_closed), progress]

    def release(self) -> None:
        """Free the indices of a closed iterator, until they are needed, before those of another epoch are drawn."""
        for each in self._known:
            if each.is_closed and isinstance(each.shard.order, Permutation):
                each.shard.order.release()

    @property
    def latest_loop(self) -> EpochProgress[T] | None:
        """The loop with the latest batch; the epoch after it is the next one."""
        return max((each for each in self._known if each.is_loop), key=lambda each: each.time, default=None)

    @property
    def current(self) -> EpochProgress[T] | None:
        """The iterator that goes on: the open loop with the latest batch, else the latest loop.

        A loop over the same loader inside of it, and a look at a first batch, do not end it.
        """
        return max(self._known, key=lambda each: (each.is_loop - each.is_closed, each.time), default=None)

    def _warn_if_repeated(self, progress: EpochProgress[T]) -> None:
        """Warn if iterators yield the same batches, where those of the user's loader yield others."""
        in_turn = [each for each in self._known if each.time == self._time and each is not progress]
        if progress.steps == 1 and self._looks == _MAX_LOOKS:
            text = (
                f"the first batch of an epoch was taken {_MAX_LOOKS} times: an iterator that is left after one batch "
                "does not advance the epoch, so that next(iter(loader)) yields the same batch again. Keep the "
                "iterator, batches = iter(loader), loop over shard_loader(loader, limit=1), or call set_epoch()."
            )
        elif progress.steps == 2 and any(
            each.steps == 2 and not each.is_closed and each.position == progress.position for each in in_turn
        ):
            text = (
                "two iterators over one epoch of a loader advance in turn, as in zip(loader, loader): they yield the "
                "same batches. Use a second DataLoader, with another seed: shard_loader(other, seed=1)."
            )
        else:
            return
        warnings.warn(text, stacklevel=4)

    def warn_if_ambiguous(self) -> None:
        """Warn, once, if it is unknown whether the current iterator goes on, because a later one has ended."""
        current, latest = self.current, self.latest_loop
        if current is None or latest is None or self._has_warned:
            return
        if current.is_loop and not current.is_closed and latest.is_closed:
            self._has_warned = True
            warnings.warn(
                f"state_dict() is the position of an iterator over epoch {current.position.epoch} that was begun "
                "before the latest loop over this loader, and is still open. If it is never continued, close or delete "
                "it before that loop.",
                stacklevel=3,
            )


@dataclass(eq=False)
class LineOfCode:
    """A line that calls shard_loader: the number of its loaders in this run, and the epoch in which the next begins.

    The epoch is that of a new loader of a kind, which follows one that had a single epoch.
    """

    made: int = 0
    next_epochs: dict[object, int] = field(default_factory=dict)
