"""A wait for keys that other ranks write to the store, with a check that these ranks can still write them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from parallelize.hang_detection import deadlock
from parallelize.hang_detection.exchange import StateExchange

__all__ = ["StoreWait"]

_CHECK_AFTER_S = 1.0


class StoreWait:
    """One wait for keys in the store: the waiting thread calls `failure`, the watchdog thread calls `check`.

    Args:
        ranks: returns the ranks whose keys are not in the store yet.
    """

    def __init__(self, ranks: Callable[[], Sequence[int]]) -> None:
        self._ranks = ranks
        self._since = time.monotonic()
        self._suspected: tuple[deadlock.HangReport, int] | None = None
        self._proven: deadlock.HangReport | None = None

    def failure(self) -> str:
        """Return why a rank can no longer write its key; "" if all ranks still can."""
        return "" if self._proven is None else self._proven.what

    def check(self, exchange: StateExchange) -> None:
        """Request all states and look for a rank that cannot write its key; newer states must confirm the result."""
        if self._proven is not None or time.monotonic() - self._since < _CHECK_AFTER_S:
            return
        request, states = exchange.request_states(), exchange.states()
        report = deadlock.find_absent_rank(exchange.rank, self._ranks(), states)
        if report is None or self._suspected is None or self._suspected[0] != report:
            self._suspected = None if report is None else (report, request)
        elif report.is_confirmed(states, since=self._suspected[1]):
            self._proven = report
