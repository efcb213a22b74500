"""Exchange of rank states between watchdogs, through a few keys of the process group's store.

request          number of the latest request; a waiting rank increments it, the other ranks read it once a second
state/<rank>     the state of a rank, with the number of the request that it answers
leader           the one waiting rank that searches all states for a deadlock
report           the report of a proven deadlock
line             a line for rank 0 to log
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from parallelize.hang_detection.deadlock import HangReport
from parallelize.hang_detection.rank_state import RankState

__all__ = ["StateExchange"]


class StateExchange:
    """One rank's access to these keys. Methods do not wait for other ranks and may be called by any thread.

    Args:
        store: a separate connection to the store, because the main one may be blocked in a wait.
        rank: rank of this process.
        world_size: number of ranks.
    """

    def __init__(self, store: dist.Store, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = store
        self._store.set_timeout(timedelta(seconds=10))  # so that a call fails if the store is lost
        self._is_leader = False
        self._last_line = ""

    def last_request(self) -> int:
        """Return the number of the latest request."""
        return self._store.add("request", 0)

    def request_states(self) -> int:
        """Request the states of all ranks; return the number of the request."""
        return self._store.add("request", 1)

    def publish_state(self, state: RankState) -> None:
        """Write the state of this rank to the store."""
        self._store.set(f"state/{state.rank}", state.dumps())

    def states(self) -> list[RankState]:
        """Return the latest published state of every rank that has published one."""
        keys = [f"state/{rank}" for rank in range(self.world_size)]
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        return [RankState.loads(each) for each in self._store.multi_get(keys)] if keys else []

    def try_become_leader(self) -> bool:
        """Make this rank the leader if no rank is; return whether this rank is the leader."""
        if not self._is_leader:
            self._is_leader = self._store.compare_set("leader", "", str(self.rank)).decode() == str(self.rank)
        return self._is_leader

    def resign_leader(self) -> None:
        """Allow another rank to become the leader."""
        if self._is_leader:
            self._store.delete_key("leader")
            self._is_leader = False

    def publish_report(self, report: HangReport) -> None:
        """Publish the report of a deadlock to all ranks."""
        self._store.set("report", report.dumps())

    def report(self) -> HangReport | None:
        """Return the published report, if any."""
        return HangReport.loads(self._store.get("report")) if self._store.check(["report"]) else None

    def publish_line(self, line: str) -> None:
        """Publish a line for rank 0 to log."""
        self._store.set("line", line)

    def new_line(self) -> str:
        """Return the published line if it differs from that of the previous call, else ""."""
        line = self._store.get("line").decode() if self._store.check(["line"]) else ""
        self._last_line, is_new = line, line != self._last_line
        return line if is_new else ""
