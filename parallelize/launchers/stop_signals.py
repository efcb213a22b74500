"""Signals to a program while its workers run: Ctrl-C, SIGTERM, SIGUSR1 and others.

a stop signal           the workers are ended, and the caller's handlers are restored. Then the
                        signal is delivered again, so that the caller's handler runs.
the first Ctrl-C, if    the workers are interrupted, and the call goes on. If they return, the
they can return         caller gets what they have trained, and then the signal.
further signals         are ignored while the workers are ended
SIGUSR1, SIGUSR2        go to the workers in which the function has installed a handler. If there
                        are none, they are stop signals, as in one process. A handler that the
                        caller has installed before the call runs instead. In a Slurm job that the
                        user has submitted, should_stop() becomes true first.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from parallelize.errors import LaunchError
from parallelize.worker.preemption import request_stop

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SIGNALS_OF_USERS = (signal.SIGUSR1, signal.SIGUSR2)


class StopRequested(BaseException):
    """Raised by our handler in the caller, which then ends the workers."""


def has_handler(pid: int, number: int) -> bool | None:
    """Return whether a process handles or ignores a signal, instead of ending by it.

    A handler may be in C, as those of faulthandler.

    Returns:
        None if the process has ended, or if this system does not say.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    # Sets of signals that are ignored, and that are caught: bit 0 is signal 1.
    masks = re.findall(r"^Sig(?:Ign|Cgt):\s*(\w+)", status, re.MULTILINE)
    if not masks:
        return None
    return any(int(mask, 16) & 1 << (number - 1) for mask in masks)


class StopSignals:
    """Handles stop signals, and those of users, while workers run.

    Python allows signal handlers in the main thread only: in another thread this class does
    nothing.

    Attributes:
        interrupt: interrupts the workers, which may then return: what the first Ctrl-C does; None:
            it ends them.
        pass_on: sends a signal to the workers that have a handler of it, and returns whether there
            are any; None: there are none.
        is_interrupted: whether Ctrl-C has interrupted the workers. If they return, the caller gets
            the signal by `Outcome.is_interrupted`.
    """

    def __init__(self) -> None:
        self.interrupt: Callable[[], None] | None = None
        self.pass_on: Callable[[int], bool] | None = None
        self.is_interrupted = False
        # Signal -> its handler before, for the signals that are handled here.
        self._callers_handlers: dict[int, Any] = {}
        self._stopped_by: int | None = None

    @contextlib.contextmanager
    def handled(self) -> Iterator[StopSignals]:
        """Handle stop signals in the block; after it, deliver the one that has arrived.

        Raises:
            LaunchError: a stop signal arrived, and the caller's handler returned instead of
                raising.
        """
        try:
            if threading.current_thread() is threading.main_thread():
                self._install_handlers()
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

    def _install_handlers(self) -> None:
        """Replace the caller's handlers, and note them.

        What the caller ignores stays ignored, such as SIGHUP in a program that nohup has started. A
        handler that is not Python's stays, too, such as that of R or Julia with Python inside:
        `getsignal` has None for it, and nothing could restore it.
        For SIGUSR1 and SIGUSR2, a handler of the caller's own stays, too.
        """
        for number in _STOP_SIGNALS:
            handler = signal.getsignal(number)
            if handler is None or handler == signal.SIG_IGN:
                continue
            self._callers_handlers[number] = handler
            signal.signal(number, self.stop)
        for number in _SIGNALS_OF_USERS:
            handler = signal.getsignal(number)
            # Python does not know of a handler in C, and says that there is none.
            is_free = handler == signal.SIG_DFL and has_handler(os.getpid(), number) is False
            if is_free or handler == request_stop:
                self._callers_handlers[number] = handler
                signal.signal(number, self._handle_users_signal)

    def _handle_users_signal(self, number: int, _frame: FrameType | None) -> None:
        """Pass SIGUSR1 or SIGUSR2 on to the workers; without a handler anywhere, stop.

        Raises:
            StopRequested: the workers are to be ended.
        """
        is_in_job = self._callers_handlers[number] == request_stop
        if is_in_job:
            request_stop()
        is_handled = self.pass_on is not None and self.pass_on(number)
        if not is_handled and not is_in_job:
            self.stop(number)

    def stop(self, number: int, _frame: FrameType | None = None) -> None:
        """Do what a stop signal does.

        Raises:
            StopRequested: the workers are to be ended.
        """
        self._stopped_by = number
        if number == signal.SIGINT and self.interrupt is not None and not self.is_interrupted:
            self.is_interrupted = True
            self.interrupt()
            return
        for handled_number in self._callers_handlers:
            signal.signal(handled_number, signal.SIG_IGN)
        raise StopRequested

    def _deliver(self, number: int) -> None:
        try:
            signal.raise_signal(number)
        except BaseException as raised:
            # Its traceback would begin with the frames of this library.
            raised.__suppress_context__ = True
            raise
        raise LaunchError(
            f"stopped by {signal.Signals(number).name}",
            why="this process's own handler of the signal returned, after the workers had been "
            "stopped",
            fix="raise an exception in that handler to end the program, or call the function again",
        )
