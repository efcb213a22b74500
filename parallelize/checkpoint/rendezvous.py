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
"""Call counters by process group and call name; earlier groups may have other counts."""


class Rendezvous:
    """One rank's part in one call to save, load or checkpoints.

    Args:
        call: name of the call in messages, such as "save at train.py:12"; the same on all ranks.

    Attributes:
        call_index: number of earlier calls under the same name in this process group.
    """

    def __init__(self, call: str) -> None:
        self.call, self._run, self._store = call, context.current(), store_of_ranks()
        self.rank, self.world_size, self.call_index = 0, 1, 0
        if self._store is not None:
            group: Any = dist.group.WORLD
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self.call_index = next(_counters.setdefault(group, defaultdict(itertools.count))[call])
        elif self._run.world.world_size > 1 and not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                f"{call} without a process group in a world of {self._run.world.world_size}",
                why="a launcher has started this process, but no process group is initialized",
                fix="call this inside a @distributed function, or call torch.distributed.init_process_group() first",
            )
        self._own: dict[str, bytes] = {}

    def post(self, value: bytes, stage: str = "call") -> None:
        """Post this rank's data, without waiting: of the call, or of a later stage of it."""
        if self._store is not None:
            self._store.set(self._key(self.rank, stage), value)  # type: ignore[arg-type]  # set() accepts bytes too
        self._own[stage] = value

    def posted(self, rank: int, stage: str = "call") -> bytes | None:
        """Return the data that a rank has posted, or None if that rank has not posted yet."""
        if self._store is None:
            return self._own.get(stage)
        key = self._key(rank, stage)
        return self._store.get(key) if self._store.check([key]) else None

    def missing_ranks(self, stage: str = "call") -> list[int]:
        """Return the ranks that have not posted yet."""
        store = self._store
        return [] if store is None else [r for r in range(self.world_size) if not store.check([self._key(r, stage)])]

    def all_arrive(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for all ranks; return whether all have posted."""
        return self._store is None or poll(self._store, self._keys("call"), timeout_s)

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
        limit_s = min(timeout_s, self._timeout_s)
        with self._run.watchdog.waiting_in_store(self.missing_ranks) as deadlock_reason:
            all_arrived = self._wait(self._keys("call"), limit_s, deadlock_reason)
        # The first rank's decision holds for all: a rank that posts at the last moment must not continue alone.
        decision = self._store.compare_set(self._key("decision"), "", _DONE if all_arrived else "missed").decode()
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

    def require_same(self, value: str, verb: str, *, why: str, fix: str) -> None:
        """Raise if another rank has posted another text: rank 0 compares with all ranks, each other rank with rank 0.

        Raises:
            SyncError: texts differ.
        """
        for rank in range(1, self.world_size) if self.rank == 0 else range(1):
            posted = self.posted(rank)
            if posted is not None and posted.decode() != value:
                theirs, other = (posted.decode(), value) if rank else (value, posted.decode())
                what = f"rank {rank or self.rank} {verb} {theirs}; rank 0 {verb} {other}"
                raise SyncError(what, why=why, fix=fix)

    def results(self, stage: str = "result") -> list[bytes]:
        """Wait for what all ranks post in a stage and return it by rank.

        Raises:
            SyncError: a rank has posted nothing within the run's timeout.
        """
        if self._store is None:
            return [self._own[stage]]
        if not poll(self._store, self._keys(stage), self._timeout_s):
            raise SyncError(
                f"{self.call}: {_list_ranks(self.missing_ranks(stage))} did not finish within {self._timeout_s:g} s",
                why="every rank reads or writes its own shards",
                fix="find out what that rank is waiting for; timeout= allows more time",
            )
        return list(map(self._store.get, self._keys(stage)))

    def publish_outcome(self, outcome: str) -> None:
        """Publish the outcome of rank 0's work in the store, where the other ranks wait for it; "" means success."""
        if self._store is not None:
            self._store.set(self._key("outcome"), outcome or _DONE)
            for rank in range(self.world_size) if self.call_index else ():
                for stage in (
                    "call",
                    "details",
                    "result",
                ):  # of the previous call: every rank that needed them has read them
                    self._store.delete_key(self._key(rank, stage, before=1))

    def wait_outcome(self) -> str:
        """Wait for the outcome that rank 0 publishes and return it: "" for success, otherwise the error text.

        Raises:
            SyncError: rank 0 has published nothing within the run's timeout.
        """
        assert self._store is not None
        if not self._wait([self._key("outcome")], self._timeout_s, warns=lambda: 0 in self.missing_ranks()):
            raise SyncError(
                f"{self.call}: rank {self.rank} has waited {self._timeout_s:g} s for rank 0",
                why="rank 0 writes for all ranks; it has not made this call, or has not finished writing",
                fix="make this call on all ranks, or on rank 0 alone",
            )
        outcome = self._store.get(self._key("outcome")).decode()
        return "" if outcome == _DONE else outcome

    def error_of_rank_0(self, failure: str) -> SyncError:
        """Build the error that the other ranks raise when rank 0 has failed."""
        what = f"{self.call} failed on rank 0: {failure}"
        return SyncError(what, why="rank 0 does this for all ranks", fix="see the error of rank 0", is_secondary=True)

    def previous_had_late_ranks(self) -> bool:
        """Return whether all ranks have by now posted to the previous call, so that late ranks are expected again."""
        return self._store is not None and self.call_index > 0 and self._store.check(self._keys("call", before=1))

    @property
    def _timeout_s(self) -> float:
        return self._run.config.timeout.total_seconds()

    def _key(self, of: int | str, stage: str = "call", *, before: int = 0) -> str:
        return f"parallelize/rendezvous/{self.call}/{self.call_index - before}/{of}/{stage}"

    def _keys(self, stage: str, *, before: int = 0) -> list[str]:
        return [self._key(each, stage, before=before) for each in range(self.world_size)]

    def _wait(
        self,
        keys: list[str],
        limit_s: float,
        deadlock_reason: Callable[[], str] = str,
        *,
        warns: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Wait for the keys and return whether they were set in time; log a warning after GRACE_S."""
        assert self._store is not None
        first_s = min(GRACE_S, limit_s)
        if poll(self._store, keys, first_s, deadlock_reason):
            return True
        if not deadlock_reason() and warns():
            _log.warning("rank %d waits in %s for %s", self.rank, self.call, _list_ranks(self.missing_ranks()))
        return poll(self._store, keys, limit_s - first_s, deadlock_reason)


def poll(store: dist.Store, keys: list[str], limit_s: float, deadlock_reason: Callable[[], str] = str) -> bool:
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


def _list_ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def store_of_ranks() -> dist.Store | None:
    """Return the process group's store, or None if there is only one process."""
    is_connected = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return default_store() if is_connected else None
