"""Shutdown of a worker process: after an error, a stop signal, or a detected hang."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from parallelize.call.task import Outcome
from parallelize.cluster.world import World
from parallelize.runtime.group_abort import interrupt_collectives, mark_as_interrupted

__all__ = ["StopHandler", "WorkerShutdown"]

_HANDLER_TIMEOUT_S = 0.1  # a main thread that runs Python calls the handler within milliseconds


class WorkerShutdown:
    """Ends a worker process after an error, which it writes as its Outcome.

    Args:
        world: rank and world size of the worker.
        path: path of the outcome file, if the function returns.
        error_path: path of the outcome file, if it fails.
    """

    def __init__(self, world: World, path: Path, error_path: Path) -> None:
        self._world, self.path, self._error_path, self._pid = world, path, error_path, os.getpid()
        self._terminate_lock = threading.Lock()  # acquired by the first error, never released

    def fail(self, error: BaseException) -> NoReturn:
        """Terminate after a main-thread error, without destroying the process group, which may wait for dead ranks."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # a signal must not replace the error as the cause
        self.terminate(error)

    def terminate(self, error: BaseException) -> NoReturn:
        """Write an error as this rank's Outcome and kill this worker's processes; any thread may call this.

        An error after the function's value was written is only printed.
        """
        self.end_if_forked(error)
        self._terminate_lock.acquire()
        try:
            if self.path.exists():
                traceback.print_exception(error)
            else:
                Outcome.raised(self._world, error).write(self._error_path)
        except Exception:  # noqa: BLE001 - a full disk: the caller shows the last output of a rank without an outcome
            has_caller = self._error_path.parent.exists()  # one that has left, as by Ctrl-C, wants to hear nothing
            with contextlib.suppress(OSError, ValueError):
                if has_caller:
                    traceback.print_exception(error)
        finally:
            os.killpg(0, signal.SIGKILL)
        os._exit(1)  # never reached

    def end_if_forked(self, error: BaseException | None = None) -> None:
        """End this process if the function has forked it: it is no rank, and has no outcome."""
        if os.getpid() == self._pid:
            return
        code = error.code if isinstance(error, SystemExit) else int(error is not None)
        if code not in (None, 0):
            traceback.print_exception(error)
        os._exit(code if isinstance(code, int) else int(code is not None))


class StopHandler:
    """Handles SIGTERM and SIGINT in a worker: raises in the main thread, so that `finally` and `except` blocks run.

    Python calls handlers in the main thread only, and not while that is in compiled code. A thread is told of the
    signal at once, through a socket; if the main thread does not react, it interrupts the collectives.

    Args:
        store: the run's store, whose requests are interrupted, too: port of the TCPStore, or path of the FileStore.

    Attributes:
        exit: SystemExit or KeyboardInterrupt, which ends the function; None: no signal has been handled.
    """

    def __init__(self, store: int | Path) -> None:
        self.exit: BaseException | None = None
        self._store = store
        self._is_handled = threading.Event()
        self._has_interrupted = False

    def install(self) -> None:
        """Install the handler in the main thread; SIGINT's only in place of Python's own."""
        signal.signal(signal.SIGTERM, self)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self)
        received, written = socket.socketpair()
        written.settimeout(0)  # required by set_wakeup_fd
        signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        # A forked child has the same handlers: its signals are not this process's.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        threading.Thread(target=self._watch, args=[received, written], name="parallelize-stop", daemon=True).start()
        sys.unraisablehook = functools.partial(self._raise_later, sys.unraisablehook)

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Raise in the main thread; after SIGINT a SIGTERM may follow, after SIGTERM no signal is handled."""
        is_stop = number == signal.SIGTERM
        for each in (signal.SIGINT, signal.SIGTERM)[: 1 + is_stop]:
            signal.signal(each, signal.SIG_IGN)
        self._is_handled.set()
        self.exit = SystemExit(128 + signal.SIGTERM) if is_stop else KeyboardInterrupt()
        if not is_stop:
            mark_as_interrupted()
        # While the error of an interrupted collective is handled, another one would end the `finally` block half-way.
        if not (is_stop and self._has_interrupted and isinstance(sys.exc_info()[1], RuntimeError)):
            raise self.exit

    def _raise_later(self, before: Callable[[Any], object], unraisable: Any) -> None:
        """Raise again what Python ignores in a finalizer."""
        if unraisable.exc_value is None or unraisable.exc_value is not self.exit:
            before(unraisable)
            return
        number = signal.SIGINT if isinstance(self.exit, KeyboardInterrupt) else signal.SIGTERM
        signal.signal(number, self)
        threading.Timer(0.01, os.kill, [os.getpid(), number]).start()  # not in this hook, which would ignore it, too

    def _watch(self, received: socket.socket, _written: socket.socket) -> None:
        while number := received.recv(1):
            ours: Any = self
            store = None  # at first, because torch logs requests that fail
            # The user's code may have replaced the handler.
            while signal.getsignal(number[0]) is ours and not self._is_handled.wait(_HANDLER_TIMEOUT_S):
                self._has_interrupted = True
                interrupt_collectives(store=store)
                store = self._store
            self._is_handled.clear()
