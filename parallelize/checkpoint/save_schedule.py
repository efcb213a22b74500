"""When the next checkpoint is due: the same step on every rank, whatever their clocks say."""

from __future__ import annotations

import abc
import itertools
import re
import time
from typing import Any

import torch.distributed as dist

from parallelize.errors import ConfigError

__all__ = ["ByClock", "BySteps", "Timetable", "timetable"]

_UNITS_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|min|h|d)")

_clocks = itertools.count()


class Timetable(abc.ABC):
    """Asked after every step."""

    @abc.abstractmethod
    def is_due(self, step: int) -> bool:
        """Whether to save after this step; steps count from 1."""


class BySteps(Timetable):
    """After every so many steps."""

    def __init__(self, every: int) -> None:
        self.every = every

    def is_due(self, step: int) -> bool:
        """Whether the number of steps says so; the same on all ranks without a word."""
        return step % self.every == 0


class ByClock(Timetable):
    """After so many seconds by rank 0's clock, which tells the others one step ahead.

    Ranks that step together see it in time: none has ended the next step before rank 0 has begun it.

    Args:
        every_s: seconds.
        store: of the process group; None: a world of one.
        rank: of this process.
    """

    def __init__(self, every_s: float, *, store: dist.Store | None, rank: int) -> None:
        self.every_s = every_s
        self._store, self._rank = store, rank
        self._key = f"parallelize/clock/{next(_clocks)}"
        self._told = 0
        self._target: int | None = None
        self._last = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether rank 0 has said so; a question to the store where this is another rank."""
        if self._store is None:
            due = time.monotonic() - self._last >= self.every_s
            self._last = time.monotonic() if due else self._last
            return due
        if self._target is None:
            self._target = self._decide(step) if self._rank == 0 else self._ask()
        if self._target is None or step < self._target:
            return False
        self._target = None
        self._told += 1
        self._last = time.monotonic()
        return True

    def _decide(self, step: int) -> int | None:
        if time.monotonic() - self._last < self.every_s:
            return None
        assert self._store is not None
        self._store.set(f"{self._key}/{self._told}", str(step + 1))
        return step + 1

    def _ask(self) -> int | None:
        assert self._store is not None
        key = f"{self._key}/{self._told}"
        return int(self._store.get(key)) if self._store.check([key]) else None


def timetable(every: Any, *, store: dist.Store | None, rank: int) -> Timetable:
    """What a user's `every=` means.

    Args:
        every: a number of steps, or a time such as "10min".
        store: of the process group; None: a world of one.
        rank: of this process.

    Raises:
        ConfigError: neither.
    """
    if type(every) is int and every > 0:
        return BySteps(every)
    found = _TIME.fullmatch(every.strip()) if isinstance(every, str) else None
    if found is None or float(found[1]) == 0:
        raise ConfigError(
            f"every={every!r}",
            why="it is neither a number of steps nor a time",
            fix=f"use every=1000 for steps, or every='10min' with one of the units {', '.join(_UNITS_S)}",
        )
    return ByClock(float(found[1]) * _UNITS_S[found[2]], store=store, rank=rank)
