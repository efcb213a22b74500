"""The line to the store of the run's nodes: every question on it ends, by an answer or by giving the line up.

torch's store waits without end for the answer of a host that has vanished. So a thread asks, and the agent waits for
the thread as long as it waits for a node that says nothing. The thread also says, every second of a call, that this
node is there: the agent itself may be starting processes, or ending them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["Line"]

T = TypeVar("T")

_BEAT_EVERY_S = 1.0


class Line:
    """A store that may be on another host.

    Args:
        store: torch's.
        patience_s: how long an answer may take.

    Attributes:
        beats: the key that is set again and again; "": none.
    """

    def __init__(self, store: dist.Store, patience_s: float) -> None:
        self.store, self._patience_s = store, patience_s
        self._questions: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._is_lost = False
        self.beats = ""
        self._beaten = 0.0
        # A daemon: it may be in a question that is never answered when this process ends.
        threading.Thread(target=self._answer, name="parallelize-line", daemon=True).start()

    def under(self, prefix: str) -> dist.Store:
        """The part of the store with such names, for others."""
        return dist.PrefixStore(prefix, self.store)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._ask(lambda: self.store.set(key, value))  # type: ignore[arg-type]  # it takes bytes, too

    def get(self, key: str) -> bytes:
        """A value that is there."""
        return self._ask(lambda: self.store.get(key))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there."""
        return self._ask(lambda: self.store.check(list(keys)))

    def _ask(self, question: Callable[[], T]) -> T:
        """The answer to a question.

        Raises:
            DistNetworkError: there was none in time, now or earlier.
            DistError, RuntimeError: the store's own.
        """
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if not self._is_lost:
            self._questions.put((question, answers))
        try:
            answer, error = answers.get(block=not self._is_lost, timeout=self._patience_s)
        except queue.Empty:
            self._is_lost = True
            raise dist.DistNetworkError(f"no answer within {self._patience_s:g} s") from None
        if error is not None:
            raise error
        return answer  # type: ignore[no-any-return]  # what the question's function returns

    def _answer(self) -> None:
        while True:
            self._beat()
            try:
                question, answers = self._questions.get(timeout=_BEAT_EVERY_S)
            except queue.Empty:
                continue
            try:
                answers.put((question(), None))
            except BaseException as exc:  # noqa: BLE001 - it belongs to the thread that has asked
                answers.put((None, exc))

    def _beat(self) -> None:
        now = time.monotonic()
        if self.beats and now - self._beaten >= _BEAT_EVERY_S:
            self._beaten = now
            with contextlib.suppress(dist.DistError, RuntimeError):  # the next question says so
                self.store.set(self.beats, str(now))
