"""Rendezvous of all ranks at one call to save, load or checkpoints, through the process group's store.

Each rank counts the calls made at one line of the program and posts its data under this count. No collective is used:
a call that only some ranks make times out instead of hanging.

    rank 0    posts ── waits for the others ── works ── publishes the outcome
    rank k    posts ──────────────────────────────────── waits for the outcome
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from parallelize.errors import ConfigError, SyncError
from parallelize.runtime import context
from parallelize.runtime.process_group import default_store

__all__ = ["ARRIVAL_TIMEOUT_S", "GRACE_S", "Rendezvous", "poll", "store_of_ranks"]

GRACE_S = 5.0
"""Seconds that rank 0 waits for ranks that may not make the call. A rank that waits longer then logs a warning."""
ARRIVAL_TIMEOUT_S = 60.0
"""Seconds that a rank waits for the other ranks in a call that every rank must make."""

_DONE = "done"
_FIRST_POLL_S, _MAX_POLL_S = 0.001, 0.05

_log = logging.getLogger("parallelize")

_counters: WeakKeyDictionary[Any, dict[str, Iterator[int]]] = WeakKeyDictionary()


class Rendezvous:
    """One rank's part in one call to save, load or checkpoints.

    Args:
        call: name of the call in messages, such as "save at train.py:12"; the same on all ranks.
        store: the process group's store; None if there is only one process.
        rank: rank of this process.
        world_size: number of processes.

    Attributes:
        call_index: number of earlier calls under the same name in this process group.
    """

    def __init__(self, call: str, *, store: dist.Store | None, rank: int, world_size: int) -> None:
        self.call, self.rank, self.world_size = call, rank, world_size
        self._store = store
        self.call_index = 0 if store is None else next(_call_counters()[call])
        self._key = f"parallelize/rendezvous/{call}/{self.call_index}"
        run = context.current()
        self._timeout, self._watch = run.config.timeout, run.watchdog
        self._own_result = b""

    @classmethod
    def for_call(cls, call: str) -> Rendezvous:
        """Start the next rendezvous under this name in the current process group."""
        store = store_of_ranks()
        if store is not None:
            return cls(call, store=store, rank=dist.get_rank(), world_size=dist.get_world_size())
        world = context.current().world
        if world.world_size > 1 and not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                f"{call} without a process group in a world of {world.world_size}",
                why="a launcher has started this process, but no process group is initialized",
                fix="call this inside a @distributed function, or call torch.distributed.init_process_group() first",
            )
        return cls(call, store=None, rank=0, world_size=1)

    def post(self, value: bytes) -> None:
        """Post this rank's data, without waiting."""
        if self._store is not None:
            self._store.set(self._post_key(self.rank), value)  # type: ignore[arg-type]  # set() accepts bytes too

    def missing_ranks(self) -> list[int]:
        """Return the ranks that have not posted yet."""
        return [each for each in range(self.world_size) if not self._has(self._post_key(each))]

    def all_arrive(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for all ranks; return whether all have posted."""
        return self._wait([self._post_key(each) for each in range(self.world_size)], timeout_s)

    def require_all_ranks(self, timeout_s: float, *, why: str, fix: str) -> None:
        """Wait until all ranks have posted.

        Args:
            timeout_s: longest wait in seconds; the run's timeout if that is shorter.
            why: why all ranks are needed, for the error.
            fix: what to change, for the error.

        Raises:
            SyncError: a rank has not posted in time; raised on all ranks, including one that posts later.
        """
        if self._store is None:
            return
        limit_s = min(timeout_s, self._timeout.total_seconds())
        keys = [self._post_key(each) for each in range(self.world_size)]
        with self._watch.waiting_in_store(self.missing_ranks) as deadlock_reason:
            all_arrived = self._wait(keys, limit_s, message=self._waiting_message, deadlock_reason=deadlock_reason)
        # The first rank's decision holds for all: a rank that posts at the last moment must not continue alone.
        decision = self._store.compare_set(f"{self._key}/decision", "", _DONE if all_arrived else "missed").decode()
        if decision != _DONE:
            missing, reason = self.missing_ranks(), deadlock_reason()
            until = f": {reason}" if reason else f" within {limit_s:g} s"
            raise SyncError(
                f"{self.call}: {_list_ranks(missing)} did not call it{until}"
                if missing
                else f"{self.call}: rank {self.rank} called it after the other ranks had timed out",
                why=why,
                fix=fix,
            )

    def posted(self, rank: int) -> bytes | None:
        """Return the data that a rank has posted, or None if that rank has not posted yet."""
        key = self._post_key(rank)
        return self._store.get(key) if self._store is not None and self._has(key) else None

    def ranks_to_compare(self) -> range:
        """Return the ranks whose data this rank compares with its own: rank 0 with all, each other rank with rank 0."""
        return range(1, self.world_size) if self.rank == 0 else range(1)

    def post_result(self, value: bytes) -> None:
        """Post the result of this rank's work, without waiting."""
        if self._store is not None:
            self._store.set(self._result_key(self.rank), value)  # type: ignore[arg-type]  # set() accepts bytes too
        self._own_result = value

    def wait_results(self) -> list[bytes]:
        """Wait for the results of all ranks and return them by rank.

        Raises:
            SyncError: a rank has posted no result within the run's timeout.
        """
        if self._store is None:
            return [self._own_result]
        keys, limit_s = [self._result_key(each) for each in range(self.world_size)], self._timeout.total_seconds()
        if not self._wait(keys, limit_s):
            missing = [rank for rank, key in enumerate(keys) if not self._has(key)]
            raise SyncError(
                f"{self.call}: {_list_ranks(missing)} did not finish within {limit_s:g} s",
                why="every rank writes its own shards",
                fix="find out what that rank is waiting for; timeout= allows more time",
            )
        return [self._store.get(key) for key in keys]

    def publish_outcome(self, outcome: str) -> None:
        """Publish the outcome of rank 0's work in the store, where the other ranks wait for it; "" means success."""
        if self._store is not None:
            self._store.set(f"{self._key}/outcome", outcome or _DONE)
            for rank in range(self.world_size) if self.call_index else ():
                # Keys of the previous call: every rank that needed them has read them.
                self._store.delete_key(self._post_key(rank, before=1))
                self._store.delete_key(self._result_key(rank, before=1))

    def wait_outcome(self) -> str:
        """Wait for the outcome that rank 0 publishes and return it: "" for success, otherwise the error text.

        Raises:
            SyncError: rank 0 has published nothing within the run's timeout.
        """
        assert self._store is not None
        key, limit_s = f"{self._key}/outcome", self._timeout.total_seconds()
        if not self._wait([key], limit_s, message=lambda: self._waiting_message() if 0 in self.missing_ranks() else ""):
            raise SyncError(
                f"{self.call}: rank {self.rank} has waited {limit_s:g} s for rank 0",
                why="rank 0 writes for all ranks; it has not made this call, or has not finished writing",
                fix="make this call on all ranks, or on rank 0 alone",
            )
        outcome = self._store.get(key).decode()
        return "" if outcome == _DONE else outcome

    def error_of_rank_0(self, failure: str) -> SyncError:
        """Build the error that the other ranks raise when rank 0 has failed."""
        what = f"{self.call} failed on rank 0: {failure}"
        return SyncError(what, why="rank 0 does this for all ranks", fix="see the error of rank 0", is_secondary=True)

    def previous_had_late_ranks(self) -> bool:
        """Return whether all ranks have by now posted to the previous call, so that late ranks are expected again."""
        if self._store is None or self.call_index == 0:
            return False
        return all(self._has(self._post_key(each, before=1)) for each in range(self.world_size))

    def _waiting_message(self) -> str:
        return f"rank {self.rank} waits in {self.call} for {_list_ranks(self.missing_ranks())}"

    def _post_key(self, rank: int, *, before: int = 0) -> str:
        return f"parallelize/rendezvous/{self.call}/{self.call_index - before}/{rank}"

    def _result_key(self, rank: int, *, before: int = 0) -> str:
        return f"{self._post_key(rank, before=before)}/done"

    def _has(self, key: str) -> bool:
        return self._store is not None and self._store.check([key])

    def _wait(
        self,
        keys: list[str],
        limit_s: float,
        *,
        message: Callable[[], str] | None = None,
        deadlock_reason: Callable[[], str] = str,
    ) -> bool:
        """Wait for the keys and return whether they were set in time; log `message()` as a warning after GRACE_S."""
        if self._store is None:
            return True
        first_s = limit_s if message is None else min(GRACE_S, limit_s)
        if poll(self._store, keys, first_s, deadlock_reason):
            return True
        if deadlock_reason():
            return False
        line = message() if message is not None else ""
        if line:
            _log.warning("%s", line)
        return limit_s > first_s and poll(self._store, keys, limit_s - first_s, deadlock_reason)


def poll(store: dist.Store, keys: list[str], limit_s: float, deadlock_reason: Callable[[], str]) -> bool:
    """Wait for keys and return whether they were set in time, and before a deadlock was found.

    A blocking wait would hold the store's lock and block other threads of this process.
    """
    end, pause_s = time.monotonic() + limit_s, _FIRST_POLL_S
    while not store.check(keys):
        if time.monotonic() >= end or deadlock_reason():
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_POLL_S)
    return True


def _call_counters() -> dict[str, Iterator[int]]:
    """Return the call counters of the current process group by call name; earlier groups may have other counts."""
    group: Any = dist.group.WORLD
    return _counters.setdefault(group, defaultdict(itertools.count))


def _list_ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def store_of_ranks() -> dist.Store | None:
    """Return the process group's store, or None if there is only one process."""
    is_connected = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return default_store() if is_connected else None
