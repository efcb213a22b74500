"""Handles SIGTERM, Ctrl-C etc. while workers run: the workers are stopped first, then the caller's handler runs."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

from parallelize.errors import LaunchError

__all__ = ["StopSignals"]

_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_STOP_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class _StopRequested(BaseException):
    """Raised by our handler; passes through torch elastic's agent, which then stops the workers."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _redeliver(number: int) -> None:
    """Deliver a signal to the caller's handler; hide torch elastic's frames if the handler raises an exception."""
    try:
        signal.raise_signal(number)
    except BaseException as raised:
        raised.__suppress_context__ = True
        raise


class StopSignals:
    """Installs the launcher's handlers of stop signals while workers run.

    Python allows signal handlers in the main thread only: in another thread this class does nothing.
    """

    def __init__(self) -> None:
        self._callers_handlers: dict[int, Any] = {}

    @contextlib.contextmanager
    def handled(self) -> Iterator[StopSignals]:
        """Install our handlers for the block; then restore the caller's handlers and deliver a signal that arrived.

        Raises:
            LaunchError: a stop signal arrived, and the caller's handler returned instead of raising.
        """
        stopped_by: int | None = None
        if threading.current_thread() is threading.main_thread():
            self._callers_handlers = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
            self.install()
        try:
            yield self
        except _StopRequested as request:
            stopped_by = request.number
            # An interrupted start refers to semaphores: Python would print a warning if a default handler of the signal
            # ended this process before they are closed.
            request.__context__ = None
            traceback.clear_frames(request.__traceback__)
            gc.collect()
        finally:
            for number, handler in self._callers_handlers.items():
                signal.signal(number, handler)
        if stopped_by is not None:
            _redeliver(stopped_by)
            raise LaunchError(
                f"stopped by {signal.Signals(stopped_by).name}",
                why="this process's own handler of the signal returned, after the workers had been stopped",
                fix="raise an exception in that handler to end the program, or call the function again",
            )

    def install(self) -> None:
        """Install our handlers, also after each start of workers: torch elastic replaces them, even SIG_IGN (nohup)."""
        for number, handler in self._callers_handlers.items():
            signal.signal(number, handler if handler == signal.SIG_IGN else self._stop)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        for each in self._callers_handlers:
            signal.signal(each, signal.SIG_IGN)  # ignore further signals while the workers are stopped
        raise _StopRequested(number)
