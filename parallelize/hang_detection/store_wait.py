"""Ranks that this one waits for by looking for what they leave in the store, and whether they can still come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from parallelize.hang_detection import deadlock
from parallelize.hang_detection.exchange import Board

__all__ = ["Need"]

AFTER_S = 1.0


class Need:
    """One such wait: the waiting thread asks `hopeless`, the watching one looks.

    Args:
        ranks: those that have not come yet.
    """

    def __init__(self, ranks: Callable[[], Sequence[int]]) -> None:
        self._ranks = ranks
        self._since = time.monotonic()
        self._suspected: tuple[deadlock.Finding, int] | None = None
        self._proven: deadlock.Finding | None = None

    def hopeless(self) -> str:
        """Why one of them cannot come any more; "": all still may."""
        return "" if self._proven is None else self._proven.what

    def look(self, board: Board) -> None:
        """Ask where all are; what is found twice, the second time by new answers, is proven."""
        if self._proven is not None or time.monotonic() - self._since < AFTER_S:
            return
        question, places = board.ask(), board.places()
        finding = deadlock.hopeless(board.rank, self._ranks(), places)
        if finding is None or self._suspected is None or self._suspected[0] != finding:
            self._suspected = None if finding is None else (finding, question)
        elif finding.is_confirmed(places, since=self._suspected[1]):
            self._proven = finding
