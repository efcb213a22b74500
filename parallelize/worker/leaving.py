"""The end of a worker whose outcome is written: what the function has left in its process ends.

The caller has the value, and waits for the process for some seconds only. It ends as a program:

    executors of concurrent.futures   finish what was submitted to them, then their threads and
    and of loky (joblib)              processes end
    threads that are no daemons       are waited for
    functions of `atexit`             run, those of multiprocessing last: they terminate daemon
                                      processes, as of a `Pool` or a DataLoader, and wait for others

By itself, a worker would not: it is a process of multiprocessing, which until Python 3.13 waits for
its children first, also for the processes of an idle executor, which nobody has told to end, and
calls no function of `atexit`.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing.util
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from parallelize.hang_detection.stack_frames import call_site

LEAVE_GRACE_S = 5.0
"""How long threads and functions of `atexit` may take when the function has returned."""
# A process in compiled code runs no Python, so that `_limit` cannot end it.
_COMPILED_CODE_GRACE_S = 1.2 * LEAVE_GRACE_S
# An idle process of an executor ends within milliseconds, unless it still imports modules for tasks
# that another one has done meanwhile.
_IDLE_GRACE_S = 0.3
_LOOK_EVERY_S = 0.05


def forget_exit_functions() -> None:
    """Forget the functions of `atexit` that the fork server's imports have registered.

    They are the server's: one removes a folder that all workers use. Python does the same in a
    process of multiprocessing since 3.13 (`Popen._launch` of multiprocessing/popen_fork.py).
    """
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]  # private


def leave() -> None:
    """End what the function has left in this process, and limit how long that takes."""
    limit = threading.Thread(
        target=_limit, args=[_processes_of_executors()], name="parallelize-leave", daemon=True
    )
    limit.start()
    # Descriptor 2, as sys.stderr may be another object by now.
    faulthandler.dump_traceback_later(_COMPILED_CODE_GRACE_S, exit=True, file=2)
    # What Python calls at the end of a program (`Py_FinalizeEx` of pylifecycle.c). The calls that
    # multiprocessing, or Python, makes later find nothing to do.
    end_threads: Callable[[], None] = threading._shutdown  # type: ignore[attr-defined]  # private
    end_threads()
    atexit._run_exitfuncs()


def _limit(processes: Mapping[threading.Thread, Sequence[BaseProcess]]) -> None:
    """End idle processes soon, and this process after the grace."""
    end_s = time.monotonic() + LEAVE_GRACE_S
    time.sleep(_IDLE_GRACE_S)
    while time.monotonic() < end_s:
        _terminate_idle(processes)
        time.sleep(_LOOK_EVERY_S)
    _end_threads()


def _left_threads() -> list[threading.Thread]:
    """Return the threads for which the end of this process waits."""
    main = threading.main_thread()
    return [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]


def _processes_of_executors() -> dict[threading.Thread, list[BaseProcess]]:
    """Return the processes of all executors, by the thread that manages them.

    Such a thread, of concurrent.futures and of loky (both private), has two dictionaries: what was
    submitted and has no result, and the processes. While it ends them it empties the second.
    """
    processes = {}
    for thread in threading.enumerate():
        manager: Any = thread
        if hasattr(manager, "pending_work_items"):
            processes[thread] = list(manager.processes.values())
    return processes


def _terminate_idle(processes: Mapping[threading.Thread, Sequence[BaseProcess]]) -> None:
    """Terminate the processes of executors whose work is done, if no thread can give them more."""
    managers: list[Any] = _left_threads()
    if not all(manager in processes for manager in managers):
        return
    for manager in managers:
        if not manager.pending_work_items:
            for process in processes[manager]:
                process.terminate()


def _end_threads() -> None:
    """End a process that waits for threads which the function has left.

    The caller logs the last line of stderr.
    """
    frames = sys._current_frames()
    places = []
    for thread in _left_threads():
        frame = frames.get(thread.ident or 0)
        # None: the thread has ended just now.
        if frame is not None:
            line = call_site([*traceback.walk_stack(frame)])
            # A thread whose function is written in C, as Thread(target=time.sleep), has no line.
            at_line = f" at {line}" if line else ""
            places.append(f"{thread.name}{at_line}")
    if places:
        sys.stderr.write(f"threads that the function has left were ended: {', '.join(places)}\n")
        os._exit(1)
