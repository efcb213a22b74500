"""One call that all ranks make, or one of them alone: who has come to it is told without a collective.

Every rank counts its calls of a line of the program, and leaves what it brings in the store of the process group under
that number. So a call that was made by one rank only is no more than a wait that ends.

    rank 0    brings ── waits for the others ── works ── tells the outcome
    rank k    brings ──────────────────────────────────── waits for the outcome
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

__all__ = ["ALONE_S", "LATE_S", "Meeting"]

LATE_S = 5.0
"""How long rank 0 waits for others who may not come; after which a rank that has to wait longer says so."""
ALONE_S = 60.0
"""How long a rank that cannot go on alone waits for others who train in step with it."""

_DONE = "done"
_LOOK_FIRST_S, _LOOK_EVERY_S = 0.001, 0.05

_log = logging.getLogger("parallelize")

_calls: WeakKeyDictionary[Any, dict[str, Iterator[int]]] = WeakKeyDictionary()


class Meeting:
    """One call, as one rank sees it.

    Args:
        what: the call, as messages name it, such as "save at train.py:12": the same on all ranks.
        store: of the process group; None: a world of one.
        rank: of this process.
        world_size: processes.
    """

    def __init__(self, what: str, *, store: dist.Store | None, rank: int, world_size: int) -> None:
        self.what, self.rank, self.world_size = what, rank, world_size
        self._store = store
        self.number = 0 if store is None else next(_numbers()[what])
        self._key = f"parallelize/meeting/{what}/{self.number}"
        run = context.current()
        self._timeout, self._watch = run.config.timeout, run.watch
        self._own = b""

    @classmethod
    def of(cls, what: str) -> Meeting:
        """The next call of a line, in the group of this process."""
        is_connected = dist.is_available() and dist.is_initialized()
        if is_connected and dist.get_world_size() > 1:
            store = dist.distributed_c10d._get_default_store()
            return cls(what, store=store, rank=dist.get_rank(), world_size=dist.get_world_size())
        world = context.current().world
        if world.world_size > 1 and not is_connected:
            raise ConfigError(
                f"{what} without a process group in a world of {world.world_size}",
                why="a launcher has started this process, but nobody has connected it with the others",
                fix="call this inside a @distributed function, or torch.distributed.init_process_group() before",
            )
        return cls(what, store=None, rank=0, world_size=1)

    def bring(self, value: bytes) -> None:
        """Leave what this rank brings; it never waits."""
        if self._store is not None:
            self._store.set(self._brought(self.rank), value)  # type: ignore[arg-type]  # it takes bytes, too

    def absent(self) -> list[int]:
        """The ranks that have not come yet."""
        return [each for each in range(self.world_size) if not self._has(self._brought(each))]

    def all_come(self, patience_s: float) -> bool:
        """Whether all ranks come within so many seconds."""
        return self._wait([self._brought(each) for each in range(self.world_size)], patience_s)

    def require_all(self, patience_s: float, *, why: str, fix: str) -> None:
        """Wait for all ranks.

        Args:
            patience_s: for so long; the run's timeout if that is less.
            why: all are needed.
            fix: what to do where they do not come.

        Raises:
            SyncError: not all have come in time; on every rank that has, or comes later.
        """
        if self._store is None:
            return
        limit_s = min(patience_s, self._timeout.total_seconds())
        keys = [self._brought(each) for each in range(self.world_size)]
        with self._watch.needing(self.absent) as hopeless:
            met = self._wait(keys, limit_s, says=self._lonely, hopeless=hopeless)
        # Whoever decides first decides for all: a rank that comes at the very end does not go on alone.
        verdict = self._store.compare_set(f"{self._key}/verdict", "", _DONE if met else "missed").decode()
        if verdict != _DONE:
            missing, why_not = self.absent(), f": {hopeless()}" if hopeless() else f" within {limit_s:g} s"
            raise SyncError(
                f"{self.what}: {_ranks(missing)} did not come{why_not}"
                if missing
                else f"{self.what}: rank {self.rank} came when the others had given up",
                why=why,
                fix=fix,
            )

    def brought(self, rank: int) -> bytes | None:
        """What a rank has brought; None: it has not come."""
        key = self._brought(rank)
        return self._store.get(key) if self._store is not None and self._has(key) else None

    def compared(self) -> range:
        """The ranks with which this one compares what it does: rank 0 with all, the others with rank 0."""
        return range(1, self.world_size) if self.rank == 0 else range(1)

    def hand_in(self, value: bytes) -> None:
        """Leave what this rank has done of the work; it never waits."""
        if self._store is not None:
            self._store.set(self._handed(self.rank), value)  # type: ignore[arg-type]  # it takes bytes, too
        self._own = value

    def handed_in(self) -> list[bytes]:
        """What every rank has handed in, waited for.

        Raises:
            SyncError: some have not done so within the run's timeout.
        """
        if self._store is None:
            return [self._own]
        keys, limit_s = [self._handed(each) for each in range(self.world_size)], self._timeout.total_seconds()
        if not self._wait(keys, limit_s):
            missing = [rank for rank, key in enumerate(keys) if not self._has(key)]
            raise SyncError(
                f"{self.what}: {_ranks(missing)} did not end within {limit_s:g} s",
                why="every rank does its part of the work",
                fix="see what that rank waits for; timeout= gives it longer",
            )
        return [self._store.get(key) for key in keys]

    def tell(self, outcome: str) -> None:
        """End the call: rank 0 tells the others that wait, and those who come later, what came of it."""
        if self._store is not None:
            self._store.set(f"{self._key}/outcome", outcome or _DONE)
            for rank in range(self.world_size) if self.number else ():
                # Of the call before: everybody who was to read it has.
                self._store.delete_key(self._brought(rank, before=1))
                self._store.delete_key(self._handed(rank, before=1))

    def outcome(self) -> str:
        """What rank 0 tells: "" or what went wrong.

        Raises:
            SyncError: rank 0 has told nothing within the run's timeout.
        """
        assert self._store is not None
        key, limit_s = f"{self._key}/outcome", self._timeout.total_seconds()
        if not self._wait([key], limit_s, says=lambda: self._lonely() if 0 in self.absent() else ""):
            raise SyncError(
                f"{self.what}: rank {self.rank} has waited {limit_s:g} s for rank 0",
                why="rank 0 writes for all, and has not come or not ended",
                fix="call it on all ranks, or on rank 0 alone",
            )
        told = self._store.get(key).decode()
        return "" if told == _DONE else told

    def came_late(self) -> bool:
        """Whether the call before this one was ended without ranks that came later all the same."""
        if self._store is None or self.number == 0:
            return False
        return all(self._has(self._brought(each, before=1)) for each in range(self.world_size))

    def _lonely(self) -> str:
        return f"rank {self.rank} waits in {self.what} for {_ranks(self.absent())}"

    def _brought(self, rank: int, *, before: int = 0) -> str:
        return f"parallelize/meeting/{self.what}/{self.number - before}/{rank}"

    def _handed(self, rank: int, *, before: int = 0) -> str:
        return f"{self._brought(rank, before=before)}/done"

    def _has(self, key: str) -> bool:
        return self._store is not None and self._store.check([key])

    def _wait(
        self,
        keys: list[str],
        limit_s: float,
        *,
        says: Callable[[], str] | None = None,
        hopeless: Callable[[], str] = str,
    ) -> bool:
        """Whether the keys are there in time; a line in the log where that takes long."""
        if self._store is None:
            return True
        first_s = limit_s if says is None else min(LATE_S, limit_s)
        if self._is_set(keys, first_s, hopeless):
            return True
        if hopeless():
            return False
        line = says() if says is not None else ""
        if line:
            _log.warning("%s", line)
        return limit_s > first_s and self._is_set(keys, limit_s - first_s, hopeless)

    def _is_set(self, keys: list[str], limit_s: float, hopeless: Callable[[], str]) -> bool:
        """Look again and again: a wait in the store would keep this process's other threads from it."""
        assert self._store is not None
        end, pause_s = time.monotonic() + limit_s, _LOOK_FIRST_S
        while not self._store.check(keys):
            if time.monotonic() >= end or hopeless():
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_EVERY_S)
        return True


def _numbers() -> dict[str, Iterator[int]]:
    """The calls of each line, counted anew in every process group: another one's ranks may have counted otherwise."""
    group: Any = dist.group.WORLD
    return _calls.setdefault(group, defaultdict(itertools.count))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
