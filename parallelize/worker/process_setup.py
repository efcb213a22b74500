"""Makes a process that a launcher has started what it would be if the caller had started it.

Of the caller, a worker has the variables, sys.path, sys.argv, settings of torch and warnings,
loggers and random states. Its own are the streams, the handlers of signals, and its rank.
"""

from __future__ import annotations

import faulthandler
import io
import linecache
import multiprocessing
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch

from parallelize.call.logs import RecordFile
from parallelize.cluster.slurm_allocation import STOP_FILE_VARIABLE
from parallelize.cluster.world import World
from parallelize.config.layout import RUN_ID
from parallelize.errors import LaunchError
from parallelize.worker.keyboard import debug_with_caller
from parallelize.worker.setup import WorkerSetup

_SIGNALS_OF_USERS = (signal.SIGUSR1, signal.SIGUSR2)


def redirect_output(files: tuple[str, str]) -> RecordFile:
    """Redirect stdout and stderr of this process, and of its children, to two new files.

    Returns:
        The file for log records, beside these.
    """
    paths = [Path(name) for name in files]
    for number, path in enumerate(paths, start=1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    return RecordFile(paths[0].with_suffix(".records"), paths)


def set_up_process(setup: WorkerSetup, world: World, record_file: RecordFile | None) -> None:
    """Set up a process that a launcher has started, before the user's modules are imported."""
    sys.path[:] = setup.path
    sys.argv[:] = setup.argv
    multiprocessing.current_process().authkey = setup.authkey
    multiprocessing.set_start_method(setup.start_method, force=True)
    _set_up_variables(setup, world)
    _set_up_signals()
    _set_up_streams(setup, world, record_file)
    # Tracebacks and debuggers show these lines.
    linecache.cache.update(setup.sources)
    setup.settings.apply()
    # Modules may draw numbers on import.
    setup.random_states.begin(())


def _set_up_variables(setup: WorkerSetup, world: World) -> None:
    os.environ.clear()
    os.environ.update(setup.environ)
    os.environ.update(world.env())
    os.environ["TORCHELASTIC_RUN_ID"] = f"{RUN_ID}{os.getpid()}"
    # OpenMP has read the fork server's value, so that torch has to be told. Of "4,2", the first
    # number is of the outer level.
    threads, _, _ = os.environ.get("OMP_NUM_THREADS", "").partition(",")
    if threads.isdigit() and int(threads) > 0:
        torch.set_num_threads(int(threads))


def _set_up_signals() -> None:
    """Unblock the signals that were blocked while this process started.

    In a job, `should_stop` answers for SIGUSR1 and SIGUSR2, which some clusters send to every
    process: they would end this one, whose function has no handler yet.
    """
    if STOP_FILE_VARIABLE in os.environ:
        for number in _SIGNALS_OF_USERS:
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, *_SIGNALS_OF_USERS))


def _set_up_streams(setup: WorkerSetup, world: World, record_file: RecordFile | None) -> None:
    unbuffer_output(record_file)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(_NoInput(os.devnull)))
    faulthandler.enable()
    if setup.has_keyboard:
        debug_with_caller(Path(setup.folder), world.rank)
    if not world.is_main:
        # Rank 0 shows the same warnings. Warning filters are kept: -W error still raises on every
        # rank.
        warnings.showwarning = lambda *_args, **_kwargs: None


def unbuffer_output(record_file: RecordFile | None = None) -> None:
    """Replace stdout and stderr, so that no output is lost when this process is killed.

    The encoding is UTF-8, whatever the locale is: the caller decodes it.

    Args:
        record_file: notes when the other stream is written to than before; None: nothing does.
    """
    order = _OrderOfStreams(record_file)
    sys.stdout = _unbuffered(_Descriptor(1, order))
    sys.stderr = _unbuffered(_Descriptor(2, order))


def _unbuffered(raw: io.FileIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)


class _OrderOfStreams:
    """Lets the caller show stdout and stderr in the order in which they were written.

    Args:
        record_file: where a change of the stream is noted.
    """

    def __init__(self, record_file: RecordFile | None) -> None:
        self._record_file = record_file
        self._latest = 1

    def write_to(self, descriptor: int) -> None:
        """Note that a stream is about to be written to."""
        if descriptor != self._latest:
            self._latest = descriptor
            if self._record_file is not None:
                self._record_file.mark()


class _Descriptor(io.FileIO):
    """A descriptor of this process, as a stream that tells of its writes."""

    def __init__(self, descriptor: int, order: _OrderOfStreams) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._order = order

    def write(self, content: Any, /) -> int:
        self._order.write_to(self.fileno())
        return super().write(content)


class _NoInput(io.FileIO):
    """Standard input of a worker, /dev/null. Reading it is an error, not the end of an input."""

    def readinto(self, *_args: Any) -> NoReturn:
        raise LaunchError(
            "input(), or a read from sys.stdin, or breakpoint() in a worker process",
            why="several processes cannot share what the caller reads; and for a debugger, this "
            "program was started without a terminal, or on several nodes",
            fix="read it before the call, and pass it as an argument; debug on one node, from a "
            "terminal or a notebook; or run in one process, where both work: "
            "PARALLELIZE_PROCESSES=1 (or PARALLELIZE_GPUS=1) before the command",
        )

    readall = readinto
