"""Ctrl-C, SIGTERM and other signals that stop a program while its workers run: the workers are ended first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from parallelize.errors import LaunchError

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class StopRequested(BaseException):
    """Raised by our handler in the caller, which then ends the workers."""


class StopSignals:
    """Handles SIGTERM, Ctrl-C etc. while workers run: the workers are ended first, then the caller's handler runs.

    Python allows signal handlers in the main thread only: in another thread this class does nothing.

    Attributes:
        interrupt: interrupts the workers, which may then return: what the first Ctrl-C does; None: it ends them.
        is_interrupted: whether Ctrl-C has interrupted the workers. If they return, the caller gets what they have
            trained first, and then the signal, by `Outcome.is_interrupted`.
    """

    def __init__(self) -> None:
        self.interrupt: Callable[[], None] | None = None
        self.is_interrupted = False
        self._callers_handlers: dict[int, Any] = {}
        self._stopped_by: int | None = None

    @contextlib.contextmanager
    def handled(self) -> Iterator[StopSignals]:
        """Install our handlers for the block; then restore the caller's handlers and deliver a signal that arrived.

        Raises:
            LaunchError: a stop signal arrived, and the caller's handler returned instead of raising.
        """
        if threading.current_thread() is threading.main_thread():
            self._callers_handlers = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
            for number, handler in self._callers_handlers.items():
                signal.signal(
                    number, handler if handler == signal.SIG_IGN else self.stop
                )  # SIG_IGN: by nohup
        try:
            yield self
            if self.is_interrupted:
                self._stopped_by = None
        except BaseException:
            if self._stopped_by is None:
                raise
        finally:
            for number, handler in self._callers_handlers.items():
                signal.signal(number, handler)
        if self._stopped_by is not None:
            self._deliver(self._stopped_by)

    def stop(self, number: int, _frame: FrameType | None = None) -> None:
        """Do what a stop signal does."""
        self._stopped_by = number
        if number == signal.SIGINT and self.interrupt is not None and not self.is_interrupted:
            self.is_interrupted = True
            self.interrupt()
            return
        for each in self._callers_handlers:
            signal.signal(
                each, signal.SIG_IGN
            )  # ignore further signals while the workers are ended
        raise StopRequested

    def _deliver(self, number: int) -> None:
        try:
            signal.raise_signal(number)
        except BaseException as raised:
            raised.__suppress_context__ = True  # our frames
            raise
        raise LaunchError(
            f"stopped by {signal.Signals(number).name}",
            why="this process's own handler of the signal returned, after the workers had been stopped",
            fix="raise an exception in that handler to end the program, or call the function again",
        )
