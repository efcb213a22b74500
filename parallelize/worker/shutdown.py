"""How a worker ends: by an error of its own, at somebody's word, or because nobody is left to work for."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import NoReturn

from parallelize.call.task import Outcome
from parallelize.cluster.world import World

__all__ = ["Ending", "flush", "hear_interrupts", "on_request", "tell_of_threads"]

_FINALLY_WITHIN_S = 5.0
_THREADS_WITHIN_S = 3.0


class Ending:
    """The end of one worker, whoever brings it about.

    Args:
        world: this process among the others.
        path: of its outcome, in the run's folder.
        launcher_pid: when this process is gone, the worker has nobody left to work for, and nobody reads the folder.
    """

    def __init__(self, world: World, path: Path, *, launcher_pid: int) -> None:
        self._world = world
        self._path = path
        self._parent = os.getppid()
        self._launcher: int | None = None
        self._begun = threading.Lock()  # never released
        if hasattr(os, "pidfd_open"):
            try:
                self._launcher = os.pidfd_open(launcher_pid)
            except ProcessLookupError:
                os._exit(1)

    def watch(self) -> None:
        """End with the launcher, however it ends; a fork server's children are nobody's otherwise."""
        threading.Thread(target=self._follow, name="parallelize-launcher-watch", daemon=True).start()

    def fail(self, error: BaseException) -> NoReturn:
        """End this rank and all it started at once: peers that are gone cannot help to take a process group down."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that being stopped does not take the place of the cause
        self.at_once(error)

    def at_once(self, error: BaseException) -> NoReturn:
        """As `fail`, from whatever thread; the first error stands."""
        self._begun.acquire()
        try:
            Outcome.raised(self._world, error).write(self._path)
        except Exception:  # noqa: BLE001 - a full disk: the caller shows the last lines of a rank that left no outcome
            with contextlib.suppress(OSError, ValueError):
                traceback.print_exception(error)
        finally:
            # The signal of a parent's death comes a moment before the death.
            if self._is_alone(wait_s=0.2 if isinstance(error, KeyboardInterrupt) else 0.0):
                self._remove_folder()
            flush()
            os.killpg(0, signal.SIGKILL)
        os._exit(1)  # never reached

    def _follow(self) -> None:
        while not self._is_alone(wait_s=None if self._launcher is not None else 1.0):
            pass
        self._remove_folder()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(_FINALLY_WITHIN_S)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    def _is_alone(self, *, wait_s: float | None) -> bool:
        """Whether the launcher is gone, after waiting for that; None: until it is."""
        if self._launcher is None:
            threading.Event().wait(wait_s)
            return os.getppid() != self._parent
        poll = select.poll()
        poll.register(self._launcher, select.POLLIN)
        return bool(poll.poll(None if wait_s is None else wait_s * 1000))

    def _remove_folder(self) -> None:
        shutil.rmtree(self._path.parent, ignore_errors=True)


def tell_of_threads(rank: int) -> None:
    """Say, from a thread of its own, for what Python waits when it should have ended: a caller may not know why."""
    threading.Thread(target=_tell_of_threads, args=[rank], name="parallelize-end", daemon=True).start()


def _tell_of_threads(rank: int) -> None:
    threading.main_thread().join()  # from here on only threads hold the process
    threading.Event().wait(_THREADS_WITHIN_S)
    left = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    if not left:
        return
    with contextlib.suppress(OSError, ValueError):  # as in `flush`
        sys.stderr.write(
            f"parallelize: rank {rank} has returned, and its process waits for threads that the function has left: "
            f"{', '.join(left)}. The call returns when they end: join them, or start them with daemon=True\n"
        )


def on_request(number: int, _frame: FrameType | None) -> None:
    """A worker's handler of SIGTERM and SIGINT: `finally` blocks run, and are not interrupted by a second signal.

    Two come when the launcher dies: ours, and the SIGINT that a process started by torch gets with its parent's death.
    """
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + signal.SIGTERM)


def hear_interrupts() -> None:
    """Unblock SIGINT; one that came meanwhile was meant for the caller, who ends what it started."""
    if hasattr(signal, "pthread_sigmask"):
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which also forgets a pending one
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, handler)


def flush() -> None:
    """Write what was printed, if anybody still reads it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader may be gone
            stream.flush()
