"""should_stop(): whether the machine has asked for an end soon, and all processes of the run know."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parallelize.cluster.slurm_allocation import STOP_FILE, allocated
from parallelize.collectives import all_reduce
from parallelize.runtime.context import is_main

__all__ = ["heeding", "should_stop"]


def should_stop() -> bool:
    """Whether the job's time is nearly over, or it is about to be preempted: save, and return.

    A collective: every process calls it at the same place of its loop, and all get the same answer, so that all save
    the same step. Outside of a cluster's job it is always false.

    In a job of the Slurm launcher a function that returns after it was told so has not ended: the job is requeued, and
    the function called again, with SLURM_RESTART_COUNT one higher.
    """
    name = os.environ.get(STOP_FILE)
    is_told = name is not None and Path(name).exists()
    if all_reduce(float(is_told), "max") == 0.0:
        return False
    if name is not None and is_main():
        Path(name + ".heeded").touch()
    return True


@contextlib.contextmanager
def heeding() -> Iterator[None]:
    """While a call of a user's own Slurm job lasts, USR1 and USR2 (`sbatch --signal`) say that it should stop.

    The handler leaves a file and nothing else: workers that this process has started find it too. Handlers of the
    user's own stay; outside of Slurm, and in a job of the Slurm launcher, nothing is touched.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if allocated(os.environ) is None or STOP_FILE in os.environ or not is_main_thread:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="parallelize-") as folder:
        told = Path(folder) / "stop"

        def tell(*_: Any) -> None:
            told.touch()

        mine = [each for each in (signal.SIGUSR1, signal.SIGUSR2) if signal.getsignal(each) is signal.SIG_DFL]
        os.environ[STOP_FILE] = str(told)
        try:
            for number in mine:
                signal.signal(number, tell)
            yield
        finally:
            for number in mine:
                signal.signal(number, signal.SIG_DFL)
            del os.environ[STOP_FILE]
