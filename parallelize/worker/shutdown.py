"""Shutdown of a worker process: after an error, a stop signal, a detected hang, or the end of its launcher."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from parallelize.call.task import Outcome
from parallelize.cluster.world import World
from parallelize.runtime.group_abort import interrupt_collectives

__all__ = ["StopHandler", "WorkerShutdown", "flush", "report_leftover_threads", "unblock_sigint"]

_FINALLY_TIMEOUT_S = 5.0
_LAUNCHER_TIMEOUT_S = 5.0
_THREADS_TIMEOUT_S = 3.0
_HANDLER_TIMEOUT_S = 0.1  # a main thread that runs Python calls the handler within milliseconds


class WorkerShutdown:
    """Ends a worker process: after an error, which it writes as its Outcome, or when the launcher ends.

    Args:
        world: rank and world size of the worker.
        path: path of the outcome file, in the run's folder.
        launcher_pid: process id of the launcher; when the launcher ends, the worker removes the run's folder and ends.
    """

    def __init__(self, world: World, path: Path, *, launcher_pid: int) -> None:
        self._world = world
        self._path = path
        self._launcher_pid = launcher_pid
        self._launcher_fd: int | None = None
        self._terminate_lock = threading.Lock()  # acquired by the first error, never released
        if hasattr(os, "pidfd_open"):
            try:
                self._launcher_fd = os.pidfd_open(launcher_pid)
            except ProcessLookupError:
                os._exit(1)
            except OSError:  # an old kernel, or a sandbox: the launcher's pid is polled
                pass

    def follow_launcher(self) -> None:
        """Start a thread that ends this worker when the launcher ends; a fork server's child would outlive it."""
        threading.Thread(target=self._wait_for_launcher, name="parallelize-launcher-watch", daemon=True).start()

    def fail(self, error: BaseException) -> NoReturn:
        """Terminate after a main-thread error, without destroying the process group, which may wait for dead ranks."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a SIGTERM must not replace the error as the cause
        self.terminate(error)

    def terminate(self, error: BaseException) -> NoReturn:
        """Write an error as this rank's Outcome and kill this worker's processes; any thread may call this."""
        self._terminate_lock.acquire()
        try:
            Outcome.raised(self._world, error).write(self._path)
        except Exception:  # noqa: BLE001 - a full disk: the caller shows the last output of a rank without an outcome
            with contextlib.suppress(OSError, ValueError):
                traceback.print_exception(error)
        finally:
            # If the launcher dies, its workers get SIGINT (PR_SET_PDEATHSIG) before its memory is freed and it is gone.
            is_signal = isinstance(error, KeyboardInterrupt) and not _is_installed(signal.SIGINT)
            if self._is_launcher_gone(wait_s=_LAUNCHER_TIMEOUT_S if is_signal else 0.0):
                self._remove_folder()
            flush()
            os.killpg(0, signal.SIGKILL)
        os._exit(1)  # never reached

    def _wait_for_launcher(self) -> None:
        while not self._is_launcher_gone(wait_s=None if self._launcher_fd is not None else 1.0):
            pass
        self._remove_folder()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(_FINALLY_TIMEOUT_S)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    def _is_launcher_gone(self, *, wait_s: float | None) -> bool:
        """Wait up to `wait_s` seconds (None: no limit) for the launcher to end; return whether it has ended."""
        if self._launcher_fd is None:
            return not _is_running(self._launcher_pid) or threading.Event().wait(wait_s)
        poll = select.poll()
        poll.register(self._launcher_fd, select.POLLIN)
        return bool(poll.poll(None if wait_s is None else wait_s * 1000))

    def _remove_folder(self) -> None:
        shutil.rmtree(self._path.parent, ignore_errors=True)


def _is_running(pid: int) -> bool:
    """Return whether a process exists that is no zombie; without /proc, whether it exists."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except ProcessLookupError:
        return False
    except OSError:
        return not Path("/proc/self").exists() or Path(f"/proc/{pid}").exists()


def report_leftover_threads(rank: int) -> None:
    """Start a thread that prints which non-daemon threads keep this process alive after the function has returned."""
    threading.Thread(target=_report_leftover_threads, args=[rank], name="parallelize-end", daemon=True).start()


def _report_leftover_threads(rank: int) -> None:
    threading.main_thread().join()  # from here on only threads keep the process alive
    threading.Event().wait(_THREADS_TIMEOUT_S)
    names = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    if not names:
        return
    with contextlib.suppress(OSError, ValueError):  # as in `flush`
        sys.stderr.write(
            f"parallelize: rank {rank} has returned, but its process waits for threads that the function started: "
            f"{', '.join(names)}. The call returns when they end: join them, or start them with daemon=True\n"
        )


class StopHandler:
    """Handles SIGTERM and SIGINT in a worker: raises in the main thread, so that `finally` blocks run.

    Python calls handlers in the main thread only, and not while that is in compiled code. A thread is told of the
    signal at once, through a socket; if the main thread does not react, it interrupts the collectives.

    Args:
        store_port: port of the run's TCPStore, whose requests are interrupted, too.

    Attributes:
        exit: the exception that ends the function; None: no signal has been handled.
    """

    def __init__(self, store_port: int) -> None:
        self.exit: BaseException | None = None
        self._store_port = store_port
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

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Raise in the main thread, and ignore further signals.

        When the launcher dies, two arrive: SIGTERM from `WorkerShutdown`, and SIGINT from torch's PR_SET_PDEATHSIG.
        """
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        self._is_handled.set()
        self.exit = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + signal.SIGTERM)
        # While the error of an interrupted collective is handled, another one would end the `finally` block half-way.
        if not (self._has_interrupted and isinstance(sys.exc_info()[1], RuntimeError)):
            raise self.exit

    def _watch(self, received: socket.socket, _written: socket.socket) -> None:
        while number := received.recv(1):
            ours: Any = self
            store_port = None  # at first, because torch logs requests that fail
            # The user's code may have replaced the handler.
            while signal.getsignal(number[0]) is ours and not self._is_handled.wait(_HANDLER_TIMEOUT_S):
                self._has_interrupted = True
                interrupt_collectives(store_port=store_port)
                store_port = self._store_port


def _is_installed(number: int) -> bool:
    """Whether a StopHandler handles a signal: not before the function starts, nor after the first signal."""
    return isinstance(signal.getsignal(number), StopHandler)


def unblock_sigint() -> None:
    """Unblock SIGINT and discard a pending SIGINT, because the caller handles Ctrl-C and ends its workers itself."""
    if hasattr(signal, "pthread_sigmask"):
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # discards a pending SIGINT
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, handler)


def flush() -> None:
    """Flush stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the other end of the pipe may be closed
            stream.flush()
