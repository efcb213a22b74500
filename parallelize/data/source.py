"""What a user's loader is to `ShardedLoader`: something that one process's share of an epoch is read from."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

__all__ = ["Place", "Reading", "Source"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in the data a reading begins.

    Args:
        epoch: from 0.
        start: units of that epoch which were read before, by all processes together; their kind is the source's.
    """

    epoch: int = 0
    start: int = 0


class Reading(abc.ABC, Generic[T]):
    """One process's share of what is left of one epoch."""

    @abc.abstractmethod
    def batches(self) -> Iterator[T]:
        """The batches, as the user's loader makes them; called once."""

    @abc.abstractmethod
    def position(self, given: int) -> int:
        """The `Place.start` from which to go on when every process has been given so many batches."""

    def samples(self, step: int) -> int | None:  # noqa: ARG002 - the default knows nothing
        """New samples in a step, of all processes together; None: not known."""
        return None

    def all_samples(self) -> int | None:
        """New samples in all steps, of all processes together; None: not known."""
        return None

    def fingerprint(self) -> str:
        """Differs where two processes would not read shares of the same order."""
        return ""

    def weight(self, step: int) -> float:  # noqa: ARG002 - the default weighs all alike
        """What this process's gradients weigh in a step, so that their mean over processes is that over all samples."""
        return 1.0


class Source(abc.ABC, Generic[T]):
    """A user's loader, with only its index source changed."""

    loader: Any
    """What attributes are looked up on: the user's loader, or the copy of it that is read from."""
    is_resumable_anywhere: ClassVar[bool] = False
    """Whether a reading may go on with another number of processes."""

    @abc.abstractmethod
    def read(self, place: Place) -> Reading[T]:
        """Begin to read at a place; nothing collective happens."""

    @abc.abstractmethod
    def steps(self, place: Place) -> int | None:
        """How many batches a reading from there gives this process; None: nobody knows."""

    def chosen_epoch(self) -> int | None:
        """The epoch that the user has told a sampler or a dataset since the last reading; None: she has not."""
        return None

    def identity(self) -> dict[str, Any]:
        """What has to be the same when a saved position is used again, as plain values."""
        return {}

    def unit(self) -> dict[str, Any]:
        """What has to be the same where a saved epoch is gone on with, but not where one begins, as plain values."""
        return {}

    def arithmetic(self) -> str:
        """How the batches of the processes add up, as a phrase; empty if there is nothing to say."""
        return ""

    @abc.abstractmethod
    def close(self) -> None:
        """End what the loader keeps running between epochs."""
