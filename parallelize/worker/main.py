"""Entry point of a worker process: sets up the process, runs the user's function and writes the Outcome.

launcher ─(WorkerSetup)─> run ── environment, signals, __main__ ──> perform ── runtime, seed ──> train(...)
caller  <──(Outcome file)── written before anything is torn down ─────────────────────────────────┘
"""

from __future__ import annotations

import bdb
import contextlib
import faulthandler
import functools
import io
import linecache
import logging
import multiprocessing
import os
import secrets
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from parallelize.agreement.unsynced_training import warn_if_unsynced
from parallelize.call.logs import LogSettings, append_line, without_log_files
from parallelize.call.outcome import Outcome
from parallelize.call.pickling import pickle_main_by_value, populate_main
from parallelize.call.random_states import RandomStates, advances_caller
from parallelize.call.returned import Changes
from parallelize.call.settings import Settings, absolute_search_path
from parallelize.call.task import Task
from parallelize.cluster.slurm_allocation import STOP_FILE_VARIABLE
from parallelize.cluster.store import STORE_FILE
from parallelize.cluster.world import World
from parallelize.config.layout import RUN_ID, Layout
from parallelize.errors import LaunchError, add_note
from parallelize.hang_detection.stack_frames import call_site
from parallelize.hang_detection.watchdog import Watchdog
from parallelize.run.context import Runtime, activate, current
from parallelize.run.generators import seed_generators
from parallelize.run.rendezvous import Rendezvous
from parallelize.run.surroundings import loading_task, surroundings
from parallelize.torch_patches.process_groups import replace_group_functions
from parallelize.worker.keyboard import debug_with_caller, inspect_error
from parallelize.worker.shutdown import StopHandler, WorkerShutdown

_log = logging.getLogger("parallelize")

LEAVE_GRACE_S = 5.0  # after the function has returned: time for threads and `atexit` functions
_POST_MORTEM = "PARALLELIZE_POST_MORTEM"


@dataclass(frozen=True)
class WorkerSetup:
    """Settings that a launcher passes to each worker process.

    Args:
        folder: private folder of this run, with the task file; workers write their outcome files there.
        environ: the caller's environment variables, with the launcher's changes.
        devices: first device of each local rank, on which argument tensors from an accelerator are loaded.
        start_method: default multiprocessing start method in the worker, such as for DataLoader workers.
        logs: the caller's loggers.
        settings: the caller's settings of torch and warnings.
        random_states: states of the caller's random generators.
        sources: lines of code that is in no file, such as a notebook's cells, as `linecache` keeps them.
        path: the caller's sys.path.
        argv: the caller's sys.argv.
        authkey: the caller's key for connections of multiprocessing, such as those of a manager.
        key: a secret of the run's ranks; None: they have none, or PARALLELIZE_KEY.
        has_file_store: whether the ranks, all on this node, meet in a file in the folder, and not in a TCPStore.
        has_keyboard: whether the caller gives its keyboard to debuggers.
    """

    folder: str
    environ: Mapping[str, str]
    devices: tuple[torch.device, ...]
    start_method: str
    logs: LogSettings
    settings: Settings
    random_states: RandomStates
    sources: Mapping[str, Any]
    path: Sequence[str]
    argv: Sequence[str]
    authkey: bytes
    key: bytes | None = None
    has_file_store: bool = False
    has_keyboard: bool = False

    @classmethod
    def capture(cls, layout: Layout, *, folder: str, environ: Mapping[str, str]) -> WorkerSetup:
        """Return the setup of a call's workers, with the settings of this process."""
        devices = tuple(driven[0] for driven in layout.renumbered().devices)
        start_method = (
            multiprocessing.get_start_method(allow_none=True) or "fork"
        )  # which keeps __main__
        sources = {name: entry for name, entry in linecache.cache.items() if entry[1:2] == (None,)}
        logs, settings, authkey = (
            LogSettings.capture(),
            Settings.capture(),
            multiprocessing.current_process().authkey,
        )
        random_states = RandomStates.capture(layout.devices[0])
        key = secrets.token_bytes(32)
        return cls(
            folder=folder,
            environ=environ,
            devices=devices,
            start_method=start_method,
            logs=logs,
            settings=settings,
            random_states=random_states,
            sources=sources,
            path=absolute_search_path(),
            argv=sys.argv,
            authkey=bytes(authkey),
            key=key,
        )

    def rendezvous(self, rank: int) -> Rendezvous:
        """Return how a rank meets the others.

        Each rank reaches the file by a link of its own, so that `StopHandler` can cut it off alone.
        """
        if not self.has_file_store:
            return Rendezvous(self.key)
        link = Path(self.folder, f"{STORE_FILE}.{rank}")
        link.symlink_to(STORE_FILE)
        return Rendezvous(self.key, link)


def task_path(folder: Path) -> Path:
    """Return the path of the task file in a run's folder."""
    return folder / "task"


def outcome_paths(folder: Path, rank: int) -> tuple[Path, Path]:
    """Return the paths of a rank's outcome file: if the function returns, and if it fails."""
    return folder / f"outcome.{rank}", folder / f"error.{rank}"


def run(setup: WorkerSetup, world: World, files: tuple[str, str] | None) -> None:
    """Run the task in a new worker process, which leads a process group.

    The Outcome is written before the process group is destroyed, because destroying it breaks other ranks' collectives.

    Args:
        setup: settings of the process.
        world: its rank, and the address of the run's store.
        files: files for its stdout and stderr; None: they stay as they are.
    """
    try:
        for number, path in enumerate(files or (), start=1):
            with open(path, "wb") as file:  # noqa: PTH123 - a descriptor is needed
                os.dup2(file.fileno(), number)
    except FileNotFoundError:  # the caller has left, and its folder with it
        os._exit(1)
    folder = Path(setup.folder)
    shutdown = WorkerShutdown(world, *outcome_paths(folder, world.rank))
    try:
        _set_up_process(setup, world)
        with replace_group_functions():  # before the task's modules import them by name
            with without_log_files(), loading_task():
                task = Task.read(task_path(folder), device=setup.devices[world.local_rank])
            send = (
                functools.partial(append_line, Path(files[1]).with_suffix(".log"))
                if files
                else None
            )
            setup.logs.apply(send)
            if task.not_set and world.is_main:
                text = f"not sent to the workers: {', '.join(task.not_set)}; set it in the function"
                warnings.warn(text, RuntimeWarning, stacklevel=1)
            # A scheduler that was pickled has lost its mark on optimizer.step, and would warn about that.
            warnings.filterwarnings(
                "ignore", "Seems like `optimizer.step\\(\\)` has been overridden"
            )
            populate_main(task.function)
            pickle_main_by_value(folder)
            _perform(task, world, shutdown, setup)
        threads = threading.Timer(LEAVE_GRACE_S, _leave_threads)
        threads.daemon = True
        threads.start()
        # If the process is in compiled code. sys.stderr may be another object by now.
        faulthandler.dump_traceback_later(1.2 * LEAVE_GRACE_S, exit=True, file=2)
    except BaseException as error:  # noqa: BLE001 - any exception that ends a rank is its outcome
        shutdown.fail(error)


def _leave_threads() -> None:
    """End a process that waits for threads which the function has left; the caller logs the last line of stderr."""
    left = [
        each
        for each in threading.enumerate()
        if not each.daemon and each is not threading.main_thread()
    ]
    frames: Mapping[Any, Any] = sys._current_frames()  # a thread may have ended just now
    pairs = [(each.name, frames[each.ident]) for each in left if each.ident in frames]
    lines = [f"{name} at {call_site([*traceback.walk_stack(frame)])}" for name, frame in pairs]
    if lines:
        sys.stderr.write(f"threads that the function has left were ended: {', '.join(lines)}\n")
        os._exit(1)


def refuse_during_task_load(name: str) -> None:
    """Raise LaunchError for a distributed call at the top level of a module that a worker imports to load its task.

    Args:
        name: name of the called function.

    Raises:
        LaunchError: this process is a worker that is loading its task.
    """
    if surroundings().is_loading_task:
        raise LaunchError(
            f"{name} is called at the top level of a module that a worker imports",
            why="the top level of a module runs in every worker that imports it, so each worker would make the call",
            fix="put the call into a function, or below if __name__ == '__main__':",
        )


def _perform(task: Task, world: World, shutdown: WorkerShutdown, setup: WorkerSetup) -> None:
    changes = (
        Changes(task.stateful, task.data)
        if world.is_main and task.layout.config.update_modules
        else None
    )
    seen_folder = Path(setup.folder) if task.layout.num_nodes == 1 else None
    watchdog = Watchdog(has_debugger=setup.has_keyboard, seen_folder=seen_folder)
    watchdog.on_hang = shutdown.terminate
    rendezvous = setup.rendezvous(world.rank)
    with active_run(
        task.layout.renumbered(), world, rendezvous=rendezvous, watchdog=watchdog
    ) as runtime:
        setup.settings.apply_default_device()
        if runtime.config.seed is None:
            setup.random_states.begin(runtime.devices)  # imported modules may have drawn numbers
        try:
            has_accelerator = runtime.device.type != "cpu"
            stop = StopHandler(
                rendezvous.store or world.master_port, has_accelerator=has_accelerator
            )
            value = _call(task, stop)
            shutdown.end_if_forked()
            for device in (each for each in runtime.devices if each.type != "cpu"):
                torch.accelerator.synchronize(device)  # raises errors of asynchronous kernels
            returned = value if world.is_main or task.all_ranks else None
            random_states = None
            if world.is_main and advances_caller(runtime.config):
                random_states = RandomStates.capture(runtime.devices)
            found = changes.found() if changes else {}
            if not task.all_ranks and runtime.loaders.has_evaluated and type(value) in (int, float):
                found["evaluated"] = repr(value)
            _write(
                Outcome.returned(world, returned, random_states=random_states, **found),
                shutdown.path,
            )
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if stop.exit is not None:  # the group may be interrupted
                os._exit(0)
        except BaseException as error:  # noqa: BLE001 - before the process group is destroyed
            is_uncaught = isinstance(error, Exception) and not isinstance(error, bdb.BdbQuit)
            if setup.has_keyboard and is_uncaught and os.environ.get(_POST_MORTEM, "0") != "0":
                inspect_error(error)
            shutdown.fail(runtime.watchdog.explain(error))


def _write(outcome: Outcome, path: Path) -> None:
    """Write an outcome; while its disk is full, wait for space: what was trained is not lost."""
    is_told = False
    while True:
        try:
            outcome.write(path)
        except LaunchError as error:
            if not is_told:
                _log.warning("rank %d waits with its result: %s", outcome.rank, error)
            is_told = True
            time.sleep(1.0)
        else:
            return


def _call(task: Task, stop: StopHandler) -> Any:
    # Not earlier: while the process group connects, the main thread runs C++ code, which delays Python's handlers.
    stop.install()
    try:
        return call_function(task)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        return None
    except RuntimeError as error:
        if stop.exit is None:
            raise
        raise stop.exit from error  # of a collective that the signal has interrupted


def call_function(task: Task) -> Any:
    """Return the function's value; blocks that it has started end before."""
    with current().ending_blocks():
        current().watchdog.begin(task.function)
        try:
            return task.function(*task.args, **task.kwargs)
        except AttributeError as error:
            if error.name == "module" and isinstance(error.obj, nn.Module):
                add_note(
                    error,
                    "a model in parallel_model is not wrapped: write model instead of model.module",
                )
            raise


@contextlib.contextmanager
def active_run(
    layout: Layout,
    world: World,
    *,
    rendezvous: Rendezvous | None = None,
    watchdog: Watchdog | None = None,
) -> Iterator[Runtime]:
    """Activate the Runtime of this process, and seed the global random generators if the config has a seed."""
    run = Runtime(
        world, layout, rendezvous=rendezvous or Rendezvous(), watchdog=watchdog or Watchdog()
    )
    with activate(run) as runtime, warn_if_unsynced(runtime.state):
        if layout.config.seed is not None:
            seed_generators(layout.config.seed)
        yield runtime


def _set_up_process(setup: WorkerSetup, world: World) -> None:
    """Set up a process that a launcher has started, as if the caller had started it by torchrun."""
    sys.path[:], sys.argv[:] = setup.path, setup.argv
    multiprocessing.current_process().authkey = setup.authkey
    os.environ.clear()
    os.environ.update(
        {**setup.environ, **world.env(), "TORCHELASTIC_RUN_ID": f"{RUN_ID}{os.getpid()}"}
    )
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[
        0
    ]  # "4,2": the first is the outer level
    if threads.isdigit() and int(threads) > 0:  # loaded libraries have read the fork server's value
        torch.set_num_threads(int(threads))
    stop_signals = (signal.SIGUSR1, signal.SIGUSR2)
    for number in stop_signals if STOP_FILE_VARIABLE in os.environ else ():
        signal.signal(number, signal.SIG_IGN)  # the cluster may send them to this process, too
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, (signal.SIGINT, *stop_signals)
    )  # blocked while this process started
    multiprocessing.set_start_method(setup.start_method, force=True)
    _set_up_output(world, setup)
    linecache.cache.update(setup.sources)  # for tracebacks and debuggers
    setup.settings.apply()
    setup.random_states.begin(())  # for numbers that modules draw on import


def unbuffer_output() -> None:
    """Replace stdout and stderr, so that no output is lost when this process is killed; the caller decodes UTF-8."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.FileIO(number, "wb", closefd=False), "utf-8", "backslashreplace", write_through=True
        )
        for number in (1, 2)
    )


def _set_up_output(world: World, setup: WorkerSetup) -> None:
    unbuffer_output()
    sys.stdin = io.TextIOWrapper(io.BufferedReader(_NoInput(os.devnull)))
    faulthandler.enable()
    if setup.has_keyboard:
        debug_with_caller(Path(setup.folder), world.rank)
    if not world.is_main:
        # Rank 0 shows the same warnings. Warning filters are kept: -W error still raises on every rank.
        warnings.showwarning = lambda *_args, **_kwargs: None


class _NoInput(io.FileIO):
    """Standard input of a worker, /dev/null: reading it is an error, and not an input that has ended."""

    def readinto(self, *_args: Any) -> NoReturn:
        raise LaunchError(
            "input(), or a read from sys.stdin, or breakpoint() in a worker process",
            why="several processes cannot share what the caller reads; and for a debugger, this program was started "
            "without a terminal, or on several nodes",
            fix="read it before the call, and pass it as an argument; debug on one node, from a terminal or a "
            "notebook; or run in one process, where both work: PARALLELIZE_PROCESSES=1 (or PARALLELIZE_GPUS=1) before "
            "the command",
        )

    readall = readinto
