"""Rendezvous of all ranks at one call to save, load or checkpoints, through the process group's store.

Each rank counts the calls made at one line of the program and posts its data under this count. No collective is used:
a call that only some ranks make times out instead of hanging.

    rank 0    posts ── waits for the others ── works ── publishes the outcome
    rank k    posts ──────────────────────────────────── waits for the outcome
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from parallelize.errors import ConfigError, SyncError, list_ranks
from parallelize.runtime import context
from parallelize.runtime.process_group import default_store

__all__ = ["ARRIVAL_TIMEOUT_S", "GRACE_S", "Rendezvous", "poll", "store_of_ranks"]

GRACE_S = 5.0  # rank 0 waits so long for ranks that may not make the call; a rank that waits longer logs a warning
ARRIVAL_TIMEOUT_S = 60.0  # a rank waits so long for the other ranks in a call that every rank must make

_DONE = "done"
_FIRST_POLL_S, _MAX_POLL_S = 0.001, 0.05

_log = logging.getLogger("parallelize")

# Call counters by process group and call name; earlier groups may have other counts.
_counters: WeakKeyDictionary[Any, dict[str, Iterator[int]]] = WeakKeyDictionary()


class Rendezvous:
    """One rank's part in one call to save, load or checkpoints, such as "save at train.py:12" on all ranks.

    `call_index` is the number of earlier calls under the same name in this process group.
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
        self._own: dict[str, Any] = {}
        self._timeout_s = self._run.config.timeout.total_seconds()

    def post(self, value: Any, stage: str = "call") -> None:
        """Post this rank's data, without waiting: of the call, or of a later stage of it."""
        if self._store is not None:
            if stage == "call":
                self._delete_old_keys(self._store)
            self._store.set(self._key(stage), pickle.dumps(value))  # type: ignore[arg-type]  # set() accepts bytes too
        self._own[stage] = value

    def posted(self, rank: int, stage: str = "call") -> Any:
        """Return the data that a rank has posted, or None if that rank has not posted yet."""
        if self._store is None:
            return self._own.get(stage)
        key = self._key(stage, rank)
        return pickle.loads(self._store.get(key)) if self._store.check([key]) else None

    def missing_ranks(self, stage: str = "call") -> list[int]:
        """Return the ranks that have not posted yet."""
        store = self._store
        return [] if store is None else [r for r in range(self.world_size) if not store.check([self._key(stage, r)])]

    def all_arrive(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for all ranks; return whether all have posted."""
        return self._store is None or poll(self._store, self._keys("call"), timeout_s)

    def require_all_ranks(self, timeout_s: float, *, why: str, fix: str) -> None:
        """Wait until all ranks have posted; if one has not within the time, raise on all ranks, also on that one."""
        if self._store is None:
            return
        limit_s = min(timeout_s, self._timeout_s)
        all_arrived = self._wait(self._keys("call"), limit_s, lambda: self._failure_of_rank_0() is not None)
        if failure := self._failure_of_rank_0():
            raise failure
        # The first rank's decision holds for all: a rank that posts at the last moment must not continue alone.
        decision = self._store.compare_set(self._key("decision", 0), "", _DONE if all_arrived else "missed").decode()
        if decision != _DONE:
            missing = self.missing_ranks()
            late = f"{self.call}: rank {self.rank} called it after the other ranks had timed out"
            what = f"{self.call}: {list_ranks(missing)} did not call it within {limit_s:g} s" if missing else late
            raise SyncError(what, why=why, fix=fix)

    def require_same(self, verb: str, *, why: str, fix: str) -> None:
        """Raise if another rank has posted another first item, with which a rank does what `verb` says.

        Rank 0 compares with all ranks, each other rank with rank 0.
        """
        own = self._own["call"][0]
        for rank in range(1, self.world_size) if self.rank == 0 else range(1):
            posted = self.posted(rank)
            if posted is not None and posted[0] != own:
                theirs, first = (posted[0], own) if rank else (own, posted[0])
                what = f"rank {rank or self.rank} {verb} {theirs}; rank 0 {verb} {first}"
                raise SyncError(what, why=why, fix=fix)

    def results(self) -> list[Any]:
        """Wait for what all ranks post in the stage "result" and return it by rank."""
        if self._store is not None and not poll(self._store, self._keys("result"), self._timeout_s):
            missing = list_ranks(self.missing_ranks("result"))
            raise SyncError(
                f"{self.call}: {missing} did not finish within {self._timeout_s:g} s",
                why="every rank reads or writes its own shards",
                fix="find out what that rank is waiting for; timeout= allows more time",
            )
        return [self.posted(rank, "result") for rank in range(self.world_size)]

    @contextlib.contextmanager
    def publishing_outcome(self) -> Iterator[None]:
        """Run the block; the other ranks then wait until rank 0 has published that its block succeeded, or raise."""
        if self.rank != 0:
            yield
            self._require_success_of_rank_0()
            return
        outcome = "an exception was raised"
        try:
            yield
            outcome = ""
        except Exception as exc:
            outcome = f"{type(exc).__name__}: {exc}"
            raise
        finally:
            self.post(outcome, "outcome")

    def _require_success_of_rank_0(self) -> None:
        if not self._wait([self._key("outcome", 0)], self._timeout_s):
            raise SyncError(
                f"{self.call}: rank {self.rank} has waited {self._timeout_s:g} s for rank 0",
                why="rank 0 writes for all ranks; it has not made this call, or has not finished writing",
                fix="make this call on all ranks, or on rank 0 alone",
            )
        if failure := self._failure_of_rank_0():
            raise failure

    def _failure_of_rank_0(self) -> SyncError | None:
        """Return the error for this rank if rank 0 has published that it has failed."""
        outcome = self.posted(0, "outcome") if self.rank else None
        if not outcome:
            return None
        what, why = f"{self.call} failed on rank 0: {outcome}", "rank 0 does this for all ranks"
        return SyncError(what, why=why, fix="see the error of rank 0", is_secondary=True)

    def _delete_old_keys(self, store: dist.Store) -> None:
        """Delete what this rank has posted to the call before the previous one, once no rank can read it."""
        stages = ["call", "result"]
        if self.rank == 0 and self.previous_is_complete():
            stages += ["decision", "outcome", "chosen"]
        for stage in stages if self.call_index > 1 else ():
            store.delete_key(self._key(stage, before=2))

    def previous_is_complete(self) -> bool:
        """Return whether all ranks have by now posted to the previous call: then late ranks are expected again."""
        return self._store is not None and self.call_index > 0 and self._store.check(self._keys("call", before=1))

    def _key(self, stage: str, rank: int | None = None, *, before: int = 0) -> str:
        at = self.rank if rank is None else rank
        return f"parallelize/rendezvous/{self.call}/{self.call_index - before}/{at}/{stage}"

    def _keys(self, stage: str, *, before: int = 0) -> list[str]:
        return [self._key(stage, rank, before=before) for rank in range(self.world_size)]

    def _wait(self, keys: list[str], limit_s: float, should_stop: Callable[[], bool] = bool) -> bool:
        """Wait for the keys and return whether they were set in time; after GRACE_S, log which ranks are missing."""
        assert self._store is not None
        first_s = min(GRACE_S, limit_s)
        with self._run.watchdog.waiting_in_store(self.missing_ranks if len(keys) > 1 else lambda: [0]):
            if poll(self._store, keys, first_s, should_stop):
                return True
            missing = self.missing_ranks()
            if len(keys) > 1 or 0 in missing:
                _log.warning("rank %d waits in %s for %s", self.rank, self.call, list_ranks(missing))
            return poll(self._store, keys, limit_s - first_s, should_stop)


def poll(store: dist.Store, keys: list[str], limit_s: float, should_stop: Callable[[], bool] = bool) -> bool:
    """Wait for keys and return whether they were set in time, and before the wait should stop.

    A blocking wait would hold the store's lock and block other threads of this process.
    """
    end, pause_s = time.monotonic() + limit_s, _FIRST_POLL_S
    while not store.check(keys):
        if time.monotonic() >= end or should_stop():
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_POLL_S)
    return True


def store_of_ranks() -> dist.Store | None:
    """Return the process group's store, or None if there is only one process."""
    is_connected = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return default_store() if is_connected else None
