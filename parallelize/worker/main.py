"""The one road into a worker: from a freshly started process to the user's function, and back to the caller.

launcher ──(Orders)──> run ── environment, signals, __main__ ──> perform ── runtime, seed ──> train(...)
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
from typing import Any, NoReturn

import torch

from parallelize.call import main_module
from parallelize.call.log_settings import Logs
from parallelize.call.module_sync import modules_in
from parallelize.call.task import Outcome, Task
from parallelize.call.torch_settings import Settings
from parallelize.cluster.slurm_allocation import STOP_FILE
from parallelize.cluster.world import World, detect
from parallelize.config.layout import Layout
from parallelize.errors import LaunchError
from parallelize.runtime.context import Runtime, activate
from parallelize.worker.shutdown import Ending, flush, hear_interrupts, on_request, tell_of_threads

__all__ = ["Orders", "entered", "outcome_path", "refuse_while_reading", "run", "seed_everything", "task_path"]

_reading: ContextVar[bool] = ContextVar("parallelize_reading", default=False)

_KEPT = "TORCHELASTIC_"  # variables of the agent that started this process


@dataclass(frozen=True)
class Orders:
    """What a launcher tells each process it starts.

    Args:
        folder: private folder of this run; holds the task, gets the outcomes.
        environ: the caller's variables at the call, with what the launcher changed.
        launcher_pid: when this process is gone, the worker has nobody left to work for.
        start_method: how this process starts others by default, those of a DataLoader for one.
        logs: what the caller sees of a log on her console.
        settings: what the caller has set in torch.
    """

    folder: str
    environ: Mapping[str, str]
    launcher_pid: int
    start_method: str
    logs: Logs
    settings: Settings


def task_path(folder: Path) -> Path:
    """Where a run keeps its task."""
    return folder / "task"


def outcome_path(folder: Path, rank: int, attempt: int) -> Path:
    """Where a rank leaves its outcome; every restart of the group has its own."""
    return folder / f"outcome.{rank}.{attempt}"


def run(orders: Orders) -> None:
    """A worker's life: called in a fresh process in which the agent has set torchrun's variables.

    Leaves an Outcome in the run's folder: before the process group is taken down, which peers take for a failure.
    """
    world = detect(os.environ)
    assert world is not None
    folder = Path(orders.folder)
    path = outcome_path(folder, world.rank, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    os.setsid()  # a group of its own: what this process starts can be ended with it
    ending = Ending(world, path, launcher_pid=orders.launcher_pid)
    try:
        _settle(orders, world)
        ending.watch()
        task = _read(task_path(folder))
        main_module.fill(task.function)
        main_module.share()
        _perform(task, world, path, ending, settings=orders.settings)
        tell_of_threads(world.rank)
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is its outcome
        ending.fail(error)


def _read(path: Path) -> Task:
    token = _reading.set(True)
    try:
        return Task.read(path, device=_default_device())
    finally:
        _reading.reset(token)


def refuse_while_reading(name: str) -> None:
    """Make no call from the top level of a module that a worker imports to read its task.

    Args:
        name: of the function that is called.

    Raises:
        LaunchError: this is such a call.
    """
    if _reading.get():
        raise LaunchError(
            f"{name} is called by a module while a worker imports it",
            why="a module's top level runs in every worker that needs something of it, and would make the call in each",
            fix="put the call into a function, or below if __name__ == '__main__':",
        )


def _perform(task: Task, world: World, path: Path, ending: Ending, *, settings: Settings) -> None:
    modules = modules_in(task.args, task.kwargs) if world.is_main and task.layout.config.update_modules else []
    with entered(task.layout.masked(), world) as runtime:
        runtime.watch.on_proof = ending.at_once
        settings.settle_device()
        try:
            value = _value(task)
            if runtime.device.type != "cpu":
                torch.accelerator.synchronize()  # a kernel that failed says so here
            wanted = value if world.is_main or task.all_ranks else None
            Outcome.returned(world, wanted, modules).write(path)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        except BaseException as error:  # noqa: BLE001 - before the process group is taken down
            ending.fail(runtime.watch.explained(error))
    flush()


def _value(task: Task) -> Any:
    # Only now: before, a signal may find this process waiting for peers inside compiled code, where no handler runs.
    signal.signal(signal.SIGTERM, on_request)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, on_request)
    try:
        return task.function(*task.args, **task.kwargs)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        return None


@contextlib.contextmanager
def entered(layout: Layout, world: World) -> Iterator[Runtime]:
    """This process as one of a run: its Runtime active, its random generators seeded if the request says so."""
    with activate(Runtime(world, layout)) as runtime:
        if layout.config.seed is not None:
            seed_everything(layout.config.seed)
        yield runtime


def seed_everything(seed: int) -> None:
    """Set every generator that user code draws from: random, NumPy where it is loaded, torch on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _settle(orders: Orders, world: World) -> None:
    """Make a process of the fork server look like a child of the caller."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
    os.environ.clear()
    os.environ.update({**orders.environ, **kept, **world.env()})
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # "4,2": inner levels follow
    if threads.isdigit() and int(threads) > 0:  # libraries that are loaded have read the fork server's value
        torch.set_num_threads(int(threads))
    _settle_signals()
    multiprocessing.set_start_method(orders.start_method, force=True)
    _draw_afresh()
    _settle_output(world)
    orders.logs.settle()
    orders.settings.settle()


def _settle_signals() -> None:
    """Hear again what was blocked while this process started.

    Where a file tells a run to stop, the signals that ask a job for it tell this process nothing.
    """
    if not hasattr(signal, "pthread_sigmask"):
        return
    asking = {signal.SIGUSR1, signal.SIGUSR2}
    if STOP_FILE in os.environ:
        for number in asking:
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, asking)
    hear_interrupts()


def _draw_afresh() -> None:
    """Forks of one server would all draw the same numbers, in every rank of every call."""
    torch.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _settle_output(world: World) -> None:
    # Unbuffered: nothing that was printed is lost with a worker that is killed. The caller reads UTF-8.
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "wb", closefd=False), "utf-8", "backslashreplace", write_through=True)
        for number in (1, 2)
    )
    faulthandler.enable()
    sys.breakpointhook = _refuse_breakpoint
    if not world.is_main:
        # Once is enough: rank 0 shows the same ones. Filters stay, so that -W error still raises on every rank.
        warnings.showwarning = lambda *_args, **_kwargs: None


def _refuse_breakpoint(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise LaunchError(
        "breakpoint() in a worker process",
        why="several processes cannot share one keyboard: the debugger would wait for input that never comes",
        fix="run in one process, where it works: PARALLELIZE_PROCESSES=1 (or PARALLELIZE_GPUS=1) before the command",
    )


def _default_device() -> torch.device:
    """Where tensors of the arguments go that were on an accelerator: the device of this local rank."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
