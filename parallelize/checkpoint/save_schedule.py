"""Save schedules: decide after each step whether a checkpoint is due, with the same result on every rank."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallelize.checkpoint.rendezvous import poll
from parallelize.config.options import DURATION_UNITS_S, duration
from parallelize.errors import ConfigError, SyncError
from parallelize.runtime import context

__all__ = ["SaveSchedule"]

_WINDOWS_PER_SAVE = 20
_MAX_WINDOW_S = 5.0

_schedule_ids = itertools.count()


class SaveSchedule:
    """Every `every` steps, or every `every` of time by rank 0's clock; `is_due` is called after every step.

    Calls are divided into windows. At the start of a window rank 0 publishes whether to save at its end, and the length
    of the next window, so that a window takes a few seconds. Other ranks read this at the end of the window: a rank
    whose host has run ahead of rank 0 by a whole window waits for it there. No rank can pass a save.

        calls     1        2        3 4      5 6 7 8    9 ...
        rank 0    posts a  posts b  posts c  posts d    posts e
        rank k             reads a  reads b  reads c    reads d: all save here if rank 0 found a save due at call 5

    `every` is a number of steps, or a duration: a timedelta, or a text such as "10min". `store` is None if there is
    only one process.
    """

    def __init__(self, every: Any, *, store: dist.Store | None, rank: int) -> None:
        period = every if isinstance(every, timedelta) else duration(every)
        self.every_steps = every if type(every) is int else 0
        self.every_s = 0.0 if period is None else period.total_seconds()
        if self.every_steps <= 0 and self.every_s <= 0:
            raise ConfigError(
                f"every={every!r}",
                why="it is neither a number of steps nor a duration",
                fix=f"use every=1000 for steps, or every='10min' with one of the units {', '.join(DURATION_UNITS_S)}",
            )
        self._store, self._rank = store, rank
        self._key = f"parallelize/save_schedule/{next(_schedule_ids)}"
        self._num_calls, self._next_boundary, self._window = 0, 1, 0
        self._decision = (False, 1)  # whether to save at this window's start, and its number of calls
        self._window_started_s = self._last_save_s = time.monotonic()
        self._num_deleted = self._saved_window = 0

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step, from 1; of a window only the first call queries the store."""
        if self.every_steps:
            return step % self.every_steps == 0
        self._num_calls += 1
        if self._store is None:
            is_due = time.monotonic() - self._last_save_s >= self.every_s
            self._last_save_s = time.monotonic() if is_due else self._last_save_s
            return is_due
        if self._num_calls < self._next_boundary:
            return False
        if self._rank != 0 and self._window > 0:
            self._decision = self._published(self._store)
        is_due, length = self._decision
        if self._rank == 0:
            self._publish(self._store, length, is_due_now=is_due)
        self._next_boundary += length
        self._window += 1
        return is_due

    def _publish(self, store: dist.Store, length: int, *, is_due_now: bool) -> None:
        """Publish the decision about the end of the window that starts now, which has `length` calls."""
        now_s = time.monotonic()
        window_s, self._window_started_s = now_s - self._window_started_s, now_s
        # The window that has ended had at least half of this length.
        limit_s = min(self.every_s / _WINDOWS_PER_SAVE, _MAX_WINDOW_S)
        following = 2 * length if window_s < limit_s / 2 else length if window_s < limit_s else max(1, length // 2)
        for window in range(self._num_deleted, self._saved_window):
            store.delete_key(f"{self._key}/{window}")  # every rank has read it before the last save
        self._num_deleted = max(self._num_deleted, self._saved_window)
        if is_due_now:
            self._last_save_s, self._saved_window = now_s, self._window
        self._decision = now_s - self._last_save_s >= self.every_s, following
        store.set(f"{self._key}/{self._window}", f"{int(self._decision[0])} {following}")

    def _published(self, store: dist.Store) -> tuple[bool, int]:
        """Wait for rank 0's decision about the end of the window that ends now."""
        run, key = context.current(), f"{self._key}/{self._window - 1}"
        limit_s = run.config.timeout.total_seconds()
        with run.watchdog.waiting_in_store(lambda: [0]):
            is_published = poll(store, [key], limit_s)
        if not is_published:
            raise SyncError(
                f"checkpoints: rank 0 has not taken step {self._num_calls} in {limit_s:g} s",
                why="rank 0's clock decides when to save, and it is behind by more than the run's timeout",
                fix="call step() equally often on every rank; timeout= allows more time",
            )
        is_due, length = store.get(key).split()
        return is_due == b"1", int(length)
