"""What ends a worker before its function returns: an error, a stop signal, or a detected hang.

An error, or a hang, ends the process at once (`WorkerShutdown`): its outcome is written, and its
process group is killed. The other ranks are ended by the launcher, which sees the outcome.

A stop signal ends the function by an exception (`StopHandler`), which becomes an error like any
other one unless the function catches it. SIGINT raises KeyboardInterrupt, SIGTERM SystemExit(143).
Who raises it depends on where the main thread is when the signal arrives:

    in Python                  Python calls the handler within milliseconds, which raises
    in compiled code that      Python calls the handler when the code has returned
    returns soon
    in a collective, or in a   Python cannot call the handler. The thread "parallelize-stop" hears
    request to the store       of the signal by a socket, and interrupts the collectives after
                               0.1 s. The collective raises RuntimeError, and now Python calls the
                               handler:
                                 SIGINT     the handler raises
                                 SIGTERM    it does not: the RuntimeError unwinds the function, and
                                            a second exception would end a `finally` block that
                                            runs already. worker/main.py replaces the RuntimeError
                                            by SystemExit when it has left the function
    in a kernel of a device    as in a collective, but later: see `_Patience`
    in a finalizer (__del__)   the handler raises, and Python ignores that. `sys.unraisablehook`
                               sends the signal again

After SIGINT a SIGTERM may follow, as when the launcher's patience ends. After SIGTERM, no signal is
handled any more.
"""

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
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from parallelize.call.outcome import Outcome
from parallelize.cluster.world import World
from parallelize.hang_detection.rank_state import progress
from parallelize.hang_detection.stack_frames import is_in_collective
from parallelize.run.group_abort import interrupt_collectives, mark_as_interrupted
from parallelize.worker.setup import outcome_paths

# A main thread that runs Python calls the handler within milliseconds.
_HANDLER_TIMEOUT_S = 0.1
_RESEND_AFTER_S = 0.01
# The signals that a rank handles, and Python's own handlers of them.
_STOP_SIGNALS: Mapping[int, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
_PATIENCE_S = {signal.SIGINT: 10.0, signal.SIGTERM: 1.5}
"""For how long a main thread that waits for an accelerator is left alone after a signal.

The launcher kills workers 30 s after Ctrl-C, and 3 s after SIGTERM (`launchers/local/workers.py`):
the rest is for `finally` blocks.
"""
_STALLED_S = {signal.SIGINT: 3.0, signal.SIGTERM: 0.5}
"""For how long, if it waits for a collective, and no collective makes progress: another rank has
handled the signal, and makes no more of them."""
_LOOK_FOR_EXITS_EVERY_S = 0.02
_EXITS_WITHIN_S = 1.0
"""How far apart the ranks may call sys.exit(1). If all do, the program exits."""


class WorkerShutdown:
    """Ends a worker process after an error, which it writes as its Outcome.

    Args:
        world: rank and world size of the worker.
        path: path of the outcome file, if the function returns.
        error_path: path of the outcome file, if it fails.
    """

    def __init__(self, world: World, path: Path, error_path: Path) -> None:
        self.path = path
        self._world = world
        self._error_path = error_path
        self._pid = os.getpid()
        # The first error acquires it. It is never released.
        self._first_error = threading.Lock()

    def fail(self, error: BaseException) -> NoReturn:
        """Terminate after an error of the main thread.

        The process group is not destroyed, which may wait for dead ranks.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            # A signal from here on must not replace the error as the cause.
            signal.signal(number, signal.SIG_IGN)
        self.terminate(error)

    def terminate(self, error: BaseException) -> NoReturn:
        """Write an error as this rank's Outcome and kill the processes of this worker.

        Any thread may call this. An error after the function's value was written is only printed.
        """
        self.end_if_forked(error)
        self._first_error.acquire()
        try:
            if self.path.exists():
                traceback.print_exception(error)
            else:
                outcome = Outcome.raised(self._world, error)
                outcome.write(self._error_path)
                if outcome.is_exit:
                    self._wait_for_exits()
        except Exception:  # noqa: BLE001 - a full disk: the caller shows the rank's last output
            # A caller that has left, as after Ctrl-C, wants to hear nothing.
            has_caller = self._error_path.parent.exists()
            with contextlib.suppress(OSError, ValueError):
                if has_caller:
                    traceback.print_exception(error)
        finally:
            os.killpg(0, signal.SIGKILL)
        os._exit(1)  # never reached

    def _wait_for_exits(self) -> None:
        """Wait for the other ranks of this node.

        The end of this process would stop those that are about to exit.
        """
        first_rank = self._world.rank - self._world.local_rank
        awaited_ranks = set(range(first_rank, first_rank + self._world.local_world_size))
        end_s = time.monotonic() + _EXITS_WITHIN_S
        while awaited_ranks and time.monotonic() < end_s:
            for rank in list(awaited_ranks):
                if any(path.exists() for path in outcome_paths(self.path.parent, rank)):
                    awaited_ranks.remove(rank)
            time.sleep(_LOOK_FOR_EXITS_EVERY_S)

    def end_if_forked(self, error: BaseException | None = None) -> None:
        """End this process if the function has forked it: it is no rank, and has no outcome.

        Args:
            error: what the function has raised in the forked process; None: it has returned.
        """
        if os.getpid() == self._pid:
            return
        code: Any = int(error is not None)
        if isinstance(error, SystemExit):
            code = error.code
        if code not in (None, 0):
            traceback.print_exception(error)
        # Python does the same: the code of no value is 0, and that of a text is 1.
        if not isinstance(code, int):
            code = int(code is not None)
        os._exit(code)


class StopHandler:
    """Handles SIGTERM and SIGINT in a worker: raises in the main thread.

    So `finally` and `except` blocks run. The docstring of this file says who raises when.

    Args:
        store: the run's store, whose requests are interrupted, too: port of the TCPStore, or path
            of the FileStore.
        has_accelerator: whether the main thread may wait for an accelerator, see `_Patience`.

    Attributes:
        raised: SystemExit or KeyboardInterrupt, which ends the function; None: no signal has been
            handled.
    """

    def __init__(self, store: int | Path, *, has_accelerator: bool) -> None:
        self.raised: BaseException | None = None
        self._store = store
        self._has_accelerator = has_accelerator
        self._is_handled = threading.Event()
        self._has_interrupted = False
        # Each thread that forks has a mask.
        self._masks = threading.local()

    def install(self) -> None:
        """Install the handler in the main thread; SIGINT's only in place of Python's own."""
        signal.signal(signal.SIGTERM, self)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self)
        received, written = socket.socketpair()
        # set_wakeup_fd takes no other sockets.
        written.settimeout(0)
        signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(
            before=self._block_in_fork,
            after_in_parent=self._unblock_after_fork,
            after_in_child=self._leave_to_child,
        )
        # The thread holds `written`, too, so that the socket stays open.
        threading.Thread(
            target=self._watch, args=[received, written], name="parallelize-stop", daemon=True
        ).start()
        sys.unraisablehook = functools.partial(self._resend, sys.unraisablehook)

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal, in the main thread: raise, unless an exception is already on its way."""
        is_sigterm = number == signal.SIGTERM
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if is_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.raised = SystemExit(128 + signal.SIGTERM)
        else:
            self.raised = KeyboardInterrupt()
            mark_as_interrupted()
        self._is_handled.set()
        is_unwinding = self._has_interrupted and isinstance(sys.exc_info()[1], RuntimeError)
        if not (is_sigterm and is_unwinding):
            raise self.raised

    def _block_in_fork(self) -> None:
        """Block the signals until the child has its own handlers: Python drops earlier ones."""
        self._masks.before_fork = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)

    def _unblock_after_fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before_fork)

    def _leave_to_child(self) -> None:
        """Give a forked child Python's own handlers, as a process of a pool is ended by SIGTERM.

        The child is no rank: it hears of its signals alone, and has no collectives.
        """
        signal.set_wakeup_fd(-1)
        for number, default in _STOP_SIGNALS.items():
            handler: Any = signal.getsignal(number)
            if handler is self:
                signal.signal(number, default)
        self._unblock_after_fork()

    def _resend(self, hook: Callable[[Any], object], unraisable: Any) -> None:
        """Send the signal again whose exception a finalizer has swallowed.

        Args:
            hook: the hook of before, for everything else that Python ignores.
            unraisable: as `sys.unraisablehook` gets it.
        """
        if unraisable.exc_value is None or unraisable.exc_value is not self.raised:
            hook(unraisable)
            return
        number = signal.SIGTERM
        if isinstance(self.raised, KeyboardInterrupt):
            number = signal.SIGINT
        signal.signal(number, self)
        # Not here: Python would ignore an exception in this hook, too.
        threading.Timer(_RESEND_AFTER_S, os.kill, [os.getpid(), number]).start()

    def _watch(self, received: socket.socket, _written: socket.socket) -> None:
        """Interrupt the collectives if the main thread does not come to handle a signal.

        Python's own handler writes the number of each signal to the socket.
        """
        while number := received.recv(1):
            handler: Any = self
            # The first attempt makes no requests to the store: torch logs those that fail.
            store = None
            patience = None
            # The socket gets all signals that have a handler, such as the user's of SIGUSR1.
            if self._has_accelerator and signal.getsignal(number[0]) is handler:
                patience = _Patience(signal.Signals(number[0]))
            # The user's code may have replaced the handler.
            while signal.getsignal(number[0]) is handler:
                if self._is_handled.wait(_HANDLER_TIMEOUT_S):
                    break
                if patience is not None and not patience.is_over():
                    continue
                self._has_interrupted = True
                interrupt_collectives(store=store)
                store = self._store
            self._is_handled.clear()


class _Patience:
    """Decides when to interrupt the collectives of a main thread in compiled code, after a signal.

    A main thread that drives an accelerator is there most of the time, because it reads a number of
    the device, or the queue of kernels is full. It returns to Python when the device has done its
    work. Until then it is left alone: after an interruption, NCCL's communicators are aborted, and
    a `finally` block can save no shards.

    What the device waits for may never come: a peer that has handled the signal makes no more
    collectives.

    Args:
        number: the signal.
    """

    def __init__(self, number: signal.Signals) -> None:
        self._longest_s = _PATIENCE_S[number]
        self._longest_stalled_s = _STALLED_S[number]
        self._began_s = time.monotonic()
        self._progressed_s = self._began_s
        self._progress = progress()
        self._is_over = False

    def is_over(self) -> bool:
        """Return whether to interrupt; once this is so, it stays so."""
        now_s = time.monotonic()
        latest = progress()
        if latest != self._progress:
            self._progress = latest
            self._progressed_s = now_s
        has_pending = any(group.begun != group.completed for group in latest)
        is_waiting = has_pending or _is_in_torch_distributed()
        if is_waiting and now_s - self._progressed_s >= self._longest_stalled_s:
            self._is_over = True
        if now_s - self._began_s >= self._longest_s:
            self._is_over = True
        return self._is_over


def _is_in_torch_distributed() -> bool:
    """Return whether the main thread is in a call of torch.distributed, as for a key of a store."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and is_in_collective([*traceback.walk_stack(frame)])
