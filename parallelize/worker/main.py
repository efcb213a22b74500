"""Entry point of a worker process: sets up the process, runs the user's function and writes the Outcome.

launcher ─(WorkerSetup)─> run ── environment, signals, __main__ ──> perform ── runtime, seed ──> train(...)
caller  <──(Outcome file)── written before anything is torn down ─────────────────────────────────┘
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import random
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from parallelize.call import main_module
from parallelize.call.log_settings import LogSettings
from parallelize.call.module_sync import TrainingState
from parallelize.call.task import Outcome, Task
from parallelize.call.torch_settings import TorchSettings
from parallelize.call.unreturned import UnreturnedChanges
from parallelize.cluster.environment import detect
from parallelize.cluster.slurm_allocation import STOP_FILE_VARIABLE
from parallelize.cluster.world import World
from parallelize.config.layout import Layout
from parallelize.errors import LaunchError, add_note
from parallelize.runtime.context import Runtime, activate, current
from parallelize.runtime.user_process_group import replace_group_functions
from parallelize.worker.shutdown import StopHandler, WorkerShutdown, flush, report_leftover_threads, unblock_sigint

__all__ = ["WorkerSetup", "active_run", "call_function", "outcome_path", "refuse_during_task_load", "run", "task_path"]

_is_loading_task: ContextVar[bool] = ContextVar("parallelize_is_loading_task", default=False)

_ONE_PROCESS = "run in one process, where it works: PARALLELIZE_PROCESSES=1 (or PARALLELIZE_GPUS=1) before the command"
_AGENT_PREFIX = "TORCHELASTIC_"  # variables set by torch elastic's agent, which started this process


@dataclass(frozen=True)
class WorkerSetup:
    """Settings that a launcher passes to each worker process.

    Args:
        folder: private folder of this run, with the task file; workers write their outcome files there.
        environ: the caller's environment variables, with the launcher's changes.
        devices: first device of each local rank, on which argument tensors from an accelerator are loaded.
        launcher_pid: process id of the launcher; the worker ends when the launcher ends.
        start_method: default multiprocessing start method in the worker, such as for DataLoader workers.
        logs: the caller's console logging settings.
        settings: the caller's torch settings.

    Attributes:
        was_unpickled: whether this process is a worker, or about to be one.
    """

    folder: str
    environ: Mapping[str, str]
    devices: tuple[torch.device, ...]
    launcher_pid: int
    start_method: str
    logs: LogSettings
    settings: TorchSettings

    was_unpickled: ClassVar[bool] = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle the settings, which only a process that is going to be a worker does."""
        self.__dict__.update(state)
        WorkerSetup.was_unpickled = True


def task_path(folder: Path) -> Path:
    """Return the path of the task file in a run's folder."""
    return folder / "task"


def outcome_path(folder: Path, rank: int, attempt: int) -> Path:
    """Return the path of a rank's outcome file; `attempt` counts the restarts of the workers."""
    return folder / f"outcome.{rank}.{attempt}"


def run(setup: WorkerSetup) -> None:
    """Run the task in a new worker process, in which torch elastic's agent has set torchrun's variables.

    The Outcome is written before the process group is destroyed, because destroying it breaks other ranks' collectives.
    """
    world = detect(os.environ)
    assert world is not None
    folder = Path(setup.folder)
    path = outcome_path(folder, world.rank, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    os.setsid()  # a new process group, so that all processes started from here can be killed together
    shutdown = WorkerShutdown(world, path, launcher_pid=setup.launcher_pid)
    try:
        _set_up_process(setup, world)
        shutdown.follow_launcher()
        with replace_group_functions():  # before the task's modules import them by name
            task = _load_task(task_path(folder), device=setup.devices[world.local_rank])
            # A scheduler that was pickled has lost its mark on optimizer.step, and would warn about that.
            warnings.filterwarnings("ignore", "Seems like `optimizer.step\\(\\)` has been overridden")
            main_module.populate(task.function)
            main_module.pickle_main_by_value()
            _perform(task, world, path, shutdown, settings=setup.settings)
        report_leftover_threads(world.rank)
    except BaseException as error:  # noqa: BLE001 - any exception that ends a rank is its outcome
        shutdown.fail(error)


def _load_task(path: Path, *, device: torch.device) -> Task:
    token = _is_loading_task.set(True)
    try:
        return Task.read(path, device=device)
    finally:
        _is_loading_task.reset(token)


def refuse_during_task_load(name: str) -> None:
    """Raise LaunchError for a distributed call at the top level of a module that a worker imports to load its task.

    Args:
        name: name of the called function.

    Raises:
        LaunchError: this process is a worker that is loading its task.
    """
    if _is_loading_task.get():
        raise LaunchError(
            f"{name} is called at the top level of a module that a worker imports",
            why="the top level of a module runs in every worker that imports it, so each worker would make the call",
            fix="put the call into a function, or below if __name__ == '__main__':",
        )


def _perform(task: Task, world: World, path: Path, shutdown: WorkerShutdown, *, settings: TorchSettings) -> None:
    changes = _Changes(task) if world.is_main and task.layout.config.update_modules else None
    with active_run(task.layout.renumbered(), world) as runtime:
        runtime.watchdog.on_hang = shutdown.terminate
        settings.apply_default_device()
        try:
            value = _call(task, StopHandler(world.master_port))
            for device in (each for each in runtime.devices if each.type != "cpu"):
                torch.accelerator.synchronize(device)  # raises errors of asynchronous kernels
            returned = value if world.is_main or task.all_ranks else None
            Outcome.returned(world, returned, **(changes.found(runtime) if changes else {})).write(path)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        except BaseException as error:  # noqa: BLE001 - before the process group is destroyed
            shutdown.fail(runtime.watchdog.explain(error))
    flush()


class _Changes:
    """What the call changes in objects that the caller has, too."""

    def __init__(self, task: Task) -> None:
        self._state = TrainingState(task.stateful)
        self._others = UnreturnedChanges(task.roots(), returned=task.stateful)

    def found(self, runtime: Runtime) -> dict[str, Any]:
        models = [model for model in (reference() for reference in runtime.models) if model is not None]
        names, unmatched = self._others.unreturned_models(models)
        unreturned = list(dict.fromkeys([*self._others.names(), *names]))
        return {"states": self._state.changed(models), "unreturned": unreturned, "unmatched": unmatched}


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
        try:
            return task.function(*task.args, **task.kwargs)
        except AttributeError as error:
            if error.name == "module" and isinstance(error.obj, nn.Module):
                add_note(error, "a model in parallel_model is not wrapped: write model instead of model.module")
            raise


@contextlib.contextmanager
def active_run(layout: Layout, world: World) -> Iterator[Runtime]:
    """Activate the Runtime of this process, and seed the global random generators if the config has a seed."""
    with activate(Runtime(world, layout)) as runtime:
        if layout.config.seed is not None:
            _seed_generators(layout.config.seed)
        yield runtime


def _seed_generators(seed: int) -> None:
    """Seed the global generators: Python's random, torch on all devices, and NumPy's if it is imported."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _set_up_process(setup: WorkerSetup, world: World) -> None:
    """Set up a process that the fork server has forked, as if the caller had started it."""
    agent = {name: value for name, value in os.environ.items() if name.startswith(_AGENT_PREFIX)}
    os.environ.clear()
    os.environ.update({**setup.environ, **agent, **world.env()})
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # "4,2": the first is the outer level
    if threads.isdigit() and int(threads) > 0:  # loaded libraries have read the fork server's value
        torch.set_num_threads(int(threads))
    _set_up_signals()
    multiprocessing.set_start_method(setup.start_method, force=True)
    _reseed()
    _set_up_output(world)
    setup.logs.apply()
    setup.settings.apply()


def _set_up_signals() -> None:
    """Unblock the signals that were blocked while this process started.

    SIGUSR1 and SIGUSR2 are ignored if a stop file is used instead: the cluster may send them to this process, too.
    """
    if not hasattr(signal, "pthread_sigmask"):
        return
    stop_signals = {signal.SIGUSR1, signal.SIGUSR2}
    if STOP_FILE_VARIABLE in os.environ:
        for number in stop_signals:
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals)
    unblock_sigint()


def _reseed() -> None:
    """Reseed the generators from the operating system, because processes of a fork server start with equal states."""
    torch.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _set_up_output(world: World) -> None:
    # Unbuffered, so that no output is lost when a worker is killed. The caller decodes UTF-8.
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "wb", closefd=False), "utf-8", "backslashreplace", write_through=True)
        for number in (1, 2)
    )
    sys.stdin = io.TextIOWrapper(io.BufferedReader(_NoInput(os.devnull)))
    faulthandler.enable()
    sys.breakpointhook = _refuse_breakpoint
    if not world.is_main:
        # Rank 0 shows the same warnings. Warning filters are kept: -W error still raises on every rank.
        warnings.showwarning = lambda *_args, **_kwargs: None


def _refuse_breakpoint(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise LaunchError(
        "breakpoint() in a worker process",
        why="several processes cannot share one keyboard: the debugger would wait for input forever",
        fix=_ONE_PROCESS,
    )


class _NoInput(io.FileIO):
    """Standard input of a worker, /dev/null: reading it is an error, and not an input that has ended."""

    def readinto(self, *_args: Any) -> NoReturn:
        raise LaunchError(
            "input(), or a read from sys.stdin, in a worker process",
            why="several processes cannot share the terminal or the pipe that the caller reads",
            fix=f"read it before the call, and pass it as an argument; or {_ONE_PROCESS}",
        )

    readall = readinto
