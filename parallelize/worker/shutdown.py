"""Shutdown of a worker process: after an error, a stop signal, or a detected hang."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from parallelize.call.outcome import Outcome
from parallelize.cluster.world import World
from parallelize.hang_detection.rank_state import progress
from parallelize.hang_detection.stack_frames import is_in_collective
from parallelize.run.group_abort import interrupt_collectives, mark_as_interrupted

_HANDLER_TIMEOUT_S = 0.1  # a main thread that runs Python calls the handler within milliseconds
_PATIENCE_S = {signal.SIGINT: 10.0, signal.SIGTERM: 1.5}
"""For how long a main thread that waits for an accelerator is left alone after a signal.

The launcher kills workers 30 s after Ctrl-C, and 3 s after SIGTERM (`launchers/local/workers.py`): the rest is for
`finally` blocks.
"""
_STALLED_S = {signal.SIGINT: 3.0, signal.SIGTERM: 0.5}
"""For how long, if it waits for a collective meanwhile, and none makes progress: another rank makes no more of them."""


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
            signal.signal(
                number, signal.SIG_IGN
            )  # a signal must not replace the error as the cause
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
            has_caller = (
                self._error_path.parent.exists()
            )  # one that has left, as by Ctrl-C, wants to hear nothing
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
        has_accelerator: whether the main thread may wait for an accelerator, see `_Patience`.

    Attributes:
        exit: SystemExit or KeyboardInterrupt, which ends the function; None: no signal has been handled.
    """

    def __init__(self, store: int | Path, *, has_accelerator: bool) -> None:
        self.exit: BaseException | None = None
        self._store, self._has_accelerator = store, has_accelerator
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
        threading.Thread(
            target=self._watch, args=[received, written], name="parallelize-stop", daemon=True
        ).start()
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
        threading.Timer(
            0.01, os.kill, [os.getpid(), number]
        ).start()  # not in this hook, which would ignore it, too

    def _watch(self, received: socket.socket, _written: socket.socket) -> None:
        while number := received.recv(1):
            ours: Any = self
            store = None  # at first, because torch logs requests that fail
            patience = _Patience(signal.Signals(number[0])) if self._has_accelerator else None
            # The user's code may have replaced the handler.
            while signal.getsignal(number[0]) is ours and not self._is_handled.wait(
                _HANDLER_TIMEOUT_S
            ):
                if patience is not None and not patience.is_over():
                    continue
                self._has_interrupted = True
                interrupt_collectives(store=store)
                store = self._store
            self._is_handled.clear()


class _Patience:
    """Decides when the collectives of a main thread that is in compiled code are interrupted after a signal.

    A main thread that drives an accelerator is there most of the time, because it reads a number of the device, or the
    queue of kernels is full. It returns to Python when the device has done its work. Until then it is left alone: after
    an interruption, NCCL's communicators are aborted, and a `finally` block can save no shards.

    What the device waits for may never come: a peer that has handled the signal makes no more collectives.

    Args:
        number: the signal.
    """

    def __init__(self, number: signal.Signals) -> None:
        self._most_s, self._stalled_s = _PATIENCE_S[number], _STALLED_S[number]
        self._began_s = self._moved_s = time.monotonic()
        self._progress = progress()
        self._is_over = False

    def is_over(self) -> bool:
        """Return whether to interrupt; once this is so, it stays so."""
        now_s = time.monotonic()
        latest = progress()
        if latest != self._progress:
            self._progress, self._moved_s = latest, now_s
        has_pending = any(begun != completed for begun, completed in latest)
        is_stalled = (
            has_pending or _is_in_torch_distributed()
        ) and now_s - self._moved_s >= self._stalled_s
        self._is_over = self._is_over or is_stalled or now_s - self._began_s >= self._most_s
        return self._is_over


def _is_in_torch_distributed() -> bool:
    """Return whether the main thread waits in a call of torch.distributed, as for a key of a store."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and is_in_collective([*traceback.walk_stack(frame)])
