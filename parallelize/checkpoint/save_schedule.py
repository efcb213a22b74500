"""Save schedules: decide after each step whether a checkpoint is due, with the same result on every rank."""

from __future__ import annotations

import abc
import itertools
import re
import time
from typing import Any

import torch.distributed as dist

from parallelize.errors import ConfigError

__all__ = ["EveryNSeconds", "EveryNSteps", "SaveSchedule", "parse_schedule"]

_UNITS_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|min|h|d)")

_schedule_ids = itertools.count()


class SaveSchedule(abc.ABC):
    """Base class of save schedules; `is_due` is called after every step."""

    @abc.abstractmethod
    def is_due(self, step: int) -> bool:
        """Return whether to save after this step; steps count from 1."""


class EveryNSteps(SaveSchedule):
    """Saves every `every` steps."""

    def __init__(self, every: int) -> None:
        self.every = every

    def is_due(self, step: int) -> bool:
        """Return whether the step is a multiple of `every`; needs no communication."""
        return step % self.every == 0


class EveryNSeconds(SaveSchedule):
    """Saves every `every_s` seconds by rank 0's clock; rank 0 announces one step in advance which step to save after.

    Ranks that synchronize at every step see this in time: none finishes the next step before rank 0 has begun it.

    Args:
        every_s: seconds between saves.
        store: the process group's store; None if there is only one process.
        rank: rank of this process.
    """

    def __init__(self, every_s: float, *, store: dist.Store | None, rank: int) -> None:
        self.every_s = every_s
        self._store, self._rank = store, rank
        self._key = f"parallelize/save_schedule/{next(_schedule_ids)}"
        self._num_published = 0
        self._due_step: int | None = None
        self._last_save_s = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Return whether rank 0 has announced a save after this step; other ranks query the store."""
        if self._store is None:
            is_due = time.monotonic() - self._last_save_s >= self.every_s
            self._last_save_s = time.monotonic() if is_due else self._last_save_s
            return is_due
        if self._due_step is None:
            self._due_step = self._publish_due_step(step) if self._rank == 0 else self._published_step()
        if self._due_step is None or step < self._due_step:
            return False
        self._due_step = None
        self._num_published += 1
        self._last_save_s = time.monotonic()
        return True

    def _publish_due_step(self, step: int) -> int | None:
        if time.monotonic() - self._last_save_s < self.every_s:
            return None
        assert self._store is not None
        self._store.set(f"{self._key}/{self._num_published}", str(step + 1))
        return step + 1

    def _published_step(self) -> int | None:
        assert self._store is not None
        key = f"{self._key}/{self._num_published}"
        return int(self._store.get(key)) if self._store.check([key]) else None


def parse_schedule(every: Any, *, store: dist.Store | None, rank: int) -> SaveSchedule:
    """Return the schedule for the option `every=`.

    Args:
        every: a number of steps, or a duration such as "10min".
        store: the process group's store; None if there is only one process.
        rank: rank of this process.

    Raises:
        ConfigError: `every` is neither.
    """
    if type(every) is int and every > 0:
        return EveryNSteps(every)
    match = _DURATION.fullmatch(every.strip()) if isinstance(every, str) else None
    if match is None or float(match[1]) == 0:
        raise ConfigError(
            f"every={every!r}",
            why="it is neither a number of steps nor a duration",
            fix=f"use every=1000 for steps, or every='10min' with one of the units {', '.join(_UNITS_S)}",
        )
    return EveryNSeconds(float(match[1]) * _UNITS_S[match[2]], store=store, rank=rank)
