"""Source: adapter for one kind of loader, from which `ShardedLoader` gets this process's shard of an epoch."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from parallelize.errors import ConfigError

__all__ = ["EpochListeners", "EpochShard", "Position", "Source"]

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


class EpochShard(abc.ABC, Generic[T]):
    """One process's shard of the rest of one epoch."""

    units: int | None = None
    """Number of units of the full epoch; None: unknown."""

    @abc.abstractmethod
    def batches(self) -> Iterator[T]:
        """Return an iterator over this process's batches, as the user's loader makes them; call it only once."""

    @abc.abstractmethod
    def start_after(self, steps: int) -> int:
        """Return the `Position.start` at which to resume after every process has taken `steps` batches."""

    def steps(self) -> int | None:
        """Count this process's batches; None if they are not known from the order."""
        return None

    def release(self) -> None:
        """Free memory that can be computed again."""

    def gather(self, results: Any, *, steps: int) -> Any:  # noqa: ARG002 - overridden by shards with indices
        """Gather the results of all processes for the first `steps` steps, in dataset order; a collective."""
        raise ConfigError(
            "gather on a loader without indices",
            why="results are ordered by the indices that were iterated",
            fix="use parallelize.all_gather",
        )

    def samples(self, step: int) -> int | None:  # noqa: ARG002 - unknown by default
        """Count the samples that all processes take in a step, without padding; None if unknown."""
        return None

    def all_samples(self) -> int | None:
        """Count the samples that all processes take in all steps, without padding; None if unknown."""
        return None

    def fingerprint(self) -> str:
        """Return a hash of the order, which processes compare; "" if the order is unknown."""
        return ""

    def weight(self, step: int) -> float:  # noqa: ARG002 - equal weights by default
        """Return the weight of this process's gradients in a step, for which they average to the mean over samples."""
        return 1.0


class Source(abc.ABC, Generic[T]):
    """Adapter for one kind of loader; it replaces only the source of the loader's indices or samples."""

    loader: Any
    """Object on which attributes are looked up: the user's loader, or its copy that makes the batches."""
    can_change_world_size: ClassVar[bool] = False
    """Whether a saved position can be loaded with another number of processes."""
    _copy: Any = None  # a LoaderCopy if the loader is a DataLoader, else None
    _listeners: EpochListeners

    @abc.abstractmethod
    def shard(self, position: Position) -> EpochShard[T]:
        """Return this process's shard of an epoch, from a position on; runs no collective."""

    @abc.abstractmethod
    def steps(self, position: Position) -> int | None:
        """Count this process's batches from a position on; None if unknown."""

    def epoch_set_by_user(self) -> int | None:
        """Return the epoch that the user has set on a sampler or dataset since the last `shard`, or None."""
        return self._listeners.epoch_set_by_user()

    def identity(self) -> dict[str, Any]:
        """Return the values that a saved state must match to be loaded, as plain data."""
        return {}

    def batch_identity(self) -> dict[str, Any]:
        """Return further values that a state saved within an epoch must match, as plain data."""
        return {}

    def batch_summary(self) -> str:
        """Return a description of the batch size per process and the global one, for logs; may be empty."""
        return ""

    def close(self) -> None:
        """Shut down the loader's persistent workers."""
        if self._copy is not None:
            self._copy.close()


class EpochListeners:
    """The samplers and datasets among the candidates that have a `set_epoch` method."""

    def __init__(self, candidates: Iterable[Any]) -> None:
        unique = {id(each): each for each in candidates}
        self._listeners = [each for each in unique.values() if callable(getattr(each, "set_epoch", None))]
        self._last_set = self._current()

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of every sampler and dataset."""
        for each in self._listeners:
            each.set_epoch(epoch)
        self._last_set = self._current()

    @contextlib.contextmanager
    def at(self, epoch: int) -> Iterator[None]:
        """Set an epoch in the block, on every sampler that tells its epoch, and then the previous one."""
        previous = [(each, now) for each, now in zip(self._listeners, self._current(), strict=True) if now is not None]
        changed = [(each, now) for each, now in previous if now != epoch]
        for each, _ in changed:
            each.set_epoch(epoch)
        try:
            yield
        finally:
            for each, now in changed:
                each.set_epoch(now)

    def epoch_set_by_user(self) -> int | None:
        """Return the epoch that the user has set on a sampler or dataset since the last `set_epoch` here, or None."""
        for last_set, current in zip(self._last_set, self._current(), strict=True):
            if current is not None and current != last_set:
                return current
        return None

    def _current(self) -> list[int | None]:
        epochs = (getattr(each, "epoch", None) for each in self._listeners)
        return [epoch if isinstance(epoch, int) else None for epoch in epochs]
