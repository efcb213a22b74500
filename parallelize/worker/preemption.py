"""Preemption: should_stop(), and the handlers for it in a Slurm job that the user has submitted.

    SIGUSR1, SIGUSR2        some time before the job's end, to the caller
      │ request_stop
    the stop file           STOP_FILE_VARIABLE has its path, in the caller and in the workers
      │ should_stop
    True on all ranks

In a job of the Slurm launcher, the job's script takes the place of the caller.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parallelize.cluster.slurm_allocation import STOP_FILE_VARIABLE, current_allocation
from parallelize.collectives import all_reduce
from parallelize.run.context import is_main


def should_stop() -> bool:
    """Return whether the job will soon reach its time limit or be preempted.

    If so, save a checkpoint and return. A collective: every process must call `should_stop` at the
    same place in its loop. All processes get the same result, so that all save the same step.
    Outside of a cluster job, the result is always False.

    If the result was True in a job of the Slurm launcher, the job is requeued when the function
    returns. The function is then called again, with SLURM_RESTART_COUNT increased by 1.
    """
    name = os.environ.get(STOP_FILE_VARIABLE)
    is_requested = name is not None and Path(name).exists()
    if all_reduce(float(is_requested), "max") == 0.0:
        return False
    if name is not None and is_main():
        Path(name + ".acknowledged").touch()
    return True


def request_stop(*_: Any) -> None:
    """Make should_stop() return True: the handler that `handle_stop_signals` installs."""
    Path(os.environ[STOP_FILE_VARIABLE]).touch()


@contextlib.contextmanager
def handle_stop_signals() -> Iterator[None]:
    """Make should_stop() return True after SIGUSR1 or SIGUSR2 in a job that the user has submitted.

    `sbatch --signal` sends them. The handler only creates a file; should_stop() looks for it, also
    in the workers of this process. The user's own handlers are kept. Outside of Slurm, and in a job
    of the Slurm launcher, no handler is installed.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    is_in_job = current_allocation(os.environ) is not None
    if not is_main_thread or not is_in_job or STOP_FILE_VARIABLE in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="parallelize-") as folder:
        unhandled = [
            number
            for number in (signal.SIGUSR1, signal.SIGUSR2)
            if signal.getsignal(number) is signal.SIG_DFL
        ]
        os.environ[STOP_FILE_VARIABLE] = str(Path(folder) / "stop")
        try:
            for number in unhandled:
                signal.signal(number, request_stop)
            yield
        finally:
            for number in unhandled:
                signal.signal(number, signal.SIG_DFL)
            del os.environ[STOP_FILE_VARIABLE]
