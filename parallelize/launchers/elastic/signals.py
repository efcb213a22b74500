"""The caller's signal handlers while workers run: a signal ends the workers first, then is hers."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from parallelize.errors import LaunchError

__all__ = ["Signals"]

_STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name))


class _Stopped(BaseException):
    """A signal asked the caller to stop; passes through torch elastic, which then ends the workers."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _deliver(number: int) -> None:
    """Let the handlers that are in force have a signal; what they raise comes from here, not from torch elastic."""
    try:
        signal.raise_signal(number)
    except BaseException as raised:
        raised.__suppress_context__ = True
        raise


class Signals:
    """Ours while workers run, the caller's again before she hears of the signal.

    Python lets only the main thread have handlers: in another thread nothing is touched, and nothing needs to be.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[Signals]:
        """Handlers are as before at the end; a signal that came meanwhile is delivered to them, workers gone.

        Raises:
            LaunchError: the caller's handler returned, so that nothing else would end the call.
        """
        stopped: _Stopped | None = None
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in _STOPPING}
            self.take()
        try:
            yield self
        except _Stopped as signalled:
            stopped = signalled
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)
        if stopped is not None:
            _deliver(stopped.number)
            raise LaunchError(
                f"stopped by {signal.Signals(stopped.number).name}",
                why="the signal's handler in this process returned, and the workers are gone",
                fix="raise in the handler, or call again",
            )

    def take(self) -> None:
        """Install ours; torch elastic installs its own at every start, which never go away and ignore nohup."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler == signal.SIG_IGN else self._stop)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        for each in self._before:
            signal.signal(each, signal.SIG_IGN)  # the workers are being ended: once is enough
        raise _Stopped(number)
