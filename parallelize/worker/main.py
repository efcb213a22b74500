"""A worker process from start to end: read this file first of the room.

    launcher
      │ a WorkerSetup, a rank, files for the output                     setup.py
    set up        streams, variables, signals, settings                 process_setup.py
      │
    load          the task, and with it the user's modules
      │
    connect       the run begins: process group, watchdog, seed         function_run.py
      │
    run           the user's function                                   function_run.py
      │           SIGTERM and SIGINT raise in it                        shutdown.py
    return        the outcome is written: the caller has the value
      │
    disconnect    the run ends, and with it the process group
      │
    share         with several nodes: rank 0's outcome goes to each       share_outcome.py
      │
    leave         threads and executors of the function end             leaving.py

What ends a worker earlier:

    an exception, a hang            its outcome is the error; SIGKILL to its process group
    sys.exit(), sys.exit(0)         as a return of None
    Ctrl-C                          KeyboardInterrupt in the function; if it catches that and
                                    returns, the value counts
    SIGTERM: another rank has       SystemExit in the function, for its `finally` blocks. Some
    failed, or the caller was       seconds later the fork server kills the process group
    stopped or killed

Glossary:

    task       the call: function, arguments, layout
    outcome    what a rank hands to its caller: the value, or the error. It is a file
    caller     the process in which the user called the function
    to leave   to end the process after its outcome is written

The order of the last steps matters. Destroying the process group breaks collectives of slower
ranks, so an error that comes from that must not hide the value; and whatever ends a process that
leaves, the value is not lost.
"""

from __future__ import annotations

import bdb
import logging
import os
import signal
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from parallelize.call.logs import RecordFile, without_log_files
from parallelize.call.main_module import pickle_main_by_value, populate_main
from parallelize.call.outcome import Outcome, format_error, is_peer_lost
from parallelize.call.returned import WayBack
from parallelize.call.task import Task
from parallelize.cluster.world import World
from parallelize.errors import LaunchError
from parallelize.hang_detection.watchdog import Watchdog
from parallelize.run.surroundings import loading_task, surroundings
from parallelize.torch_patches.process_groups import replace_group_functions
from parallelize.worker.function_run import active_run, call_function
from parallelize.worker.keyboard import inspect_error
from parallelize.worker.leaving import forget_exit_functions, leave
from parallelize.worker.process_setup import redirect_output, set_up_process
from parallelize.worker.setup import WorkerSetup, outcome_paths, task_path
from parallelize.worker.share_outcome import share_outcome
from parallelize.worker.shutdown import StopHandler, WorkerShutdown

_log = logging.getLogger("parallelize")

_POST_MORTEM = "PARALLELIZE_POST_MORTEM"
_LOOK_FOR_SPACE_EVERY_S = 1.0


def run(setup: WorkerSetup, world: World, files: tuple[str, str] | None) -> None:
    """Run the task in this new worker process, which leads a process group.

    Args:
        setup: settings of the process.
        world: its rank, and the address of the run's store.
        files: files for its stdout and stderr; None: they stay as they are.
    """
    record_file = None
    if files is not None:
        try:
            record_file = redirect_output(files)
        except FileNotFoundError:
            # The caller has left, and its folder with it.
            os._exit(1)
        # This process is forked from a server.
        forget_exit_functions()
    shutdown = WorkerShutdown(world, *outcome_paths(Path(setup.folder), world.rank))
    try:
        set_up_process(setup, world, record_file)
        # Before the task's modules are loaded, which may import these functions by name.
        with replace_group_functions():
            task = _load_task(setup, world, record_file)
            _perform(task, world, shutdown, setup)
        leave()
    except BaseException as error:  # noqa: BLE001 - any exception that ends a rank is its outcome
        shutdown.fail(error)


def refuse_during_task_load(name: str) -> None:
    """Raise LaunchError for a distributed call at the top level of a module that a worker imports.

    Args:
        name: name of the called function.

    Raises:
        LaunchError: this process is a worker that is loading its task.
    """
    if surroundings().is_loading_task:
        raise LaunchError(
            f"{name} is called at the top level of a module that a worker imports",
            why="the top level of a module runs in every worker that imports it, so each worker "
            "would make the call",
            fix="put the call into a function, or below if __name__ == '__main__':",
        )


def _load_task(setup: WorkerSetup, world: World, record_file: RecordFile | None) -> Task:
    """Read the task, which imports the user's modules; `__main__` gets what the caller's has."""
    folder = Path(setup.folder)
    with without_log_files(), loading_task():
        task = Task.read(task_path(folder), device=setup.devices[world.local_rank])
    if record_file is None:
        setup.logs.apply()
    else:
        setup.logs.apply(record_file.mark)
    if task.not_set and world.is_main:
        text = f"not sent to the workers: {', '.join(task.not_set)}; set it in the function"
        warnings.warn(text, RuntimeWarning, stacklevel=1)
    # torch marks `optimizer.step` when a scheduler is made. Pickling has lost the mark, and the
    # scheduler would warn that `step` was replaced.
    warnings.filterwarnings("ignore", "Seems like `optimizer.step\\(\\)` has been overridden")
    populate_main(task.function)
    pickle_main_by_value(folder)
    return task


def _perform(task: Task, world: World, shutdown: WorkerShutdown, setup: WorkerSetup) -> None:
    """Connect, run the function, write the outcome, disconnect, and share it with other nodes."""
    way_back = WayBack(task, world)
    rendezvous = setup.rendezvous(world.rank)
    with active_run(
        task.layout.renumbered(),
        world,
        rendezvous=rendezvous,
        watchdog=_watchdog(task, shutdown, setup),
    ) as runtime:
        setup.settings.apply_default_device()
        if runtime.config.seed is None:
            # Imported modules may have drawn numbers.
            setup.random_states.begin(runtime.devices)
        stop = StopHandler(
            rendezvous.store or world.master_port,
            has_accelerator=runtime.device.type != "cpu",
        )
        try:
            value, has_exited = _value_of_function(task, stop)
            shutdown.end_if_forked()
            _synchronize(runtime.devices)
            outcome = way_back.outcome(
                value,
                has_exited=has_exited,
                devices=runtime.devices,
                has_evaluated=runtime.loaders.has_evaluated,
            )
            _write(outcome, setup.outcome_path(world))
            # The caller has the value: from here on, SIGTERM ends a process that leaves at once.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if stop.raised is not None:
                # The group may be interrupted, and cannot be destroyed.
                share_outcome(task, world, Path(setup.folder))
                os._exit(0)
        except BaseException as error:  # noqa: BLE001 - before the process group is destroyed
            if setup.has_keyboard and _is_inspected(error):
                inspect_error(error)
            shutdown.fail(runtime.watchdog.explain(error))
    share_outcome(task, world, Path(setup.folder))


def _watchdog(task: Task, shutdown: WorkerShutdown, setup: WorkerSetup) -> Watchdog:
    """Make the watchdog, which ends this process if it hangs."""
    # Ranks that share a folder see there where the others were last.
    seen_folder = Path(setup.folder) if task.layout.num_nodes == 1 else None
    watchdog = Watchdog(has_debugger=setup.has_keyboard, seen_folder=seen_folder)
    watchdog.on_hang = shutdown.terminate
    return watchdog


def _value_of_function(task: Task, stop: StopHandler) -> tuple[Any, bool]:
    """Call the function with the handlers of signals.

    Returns:
        Its value, and whether it has called sys.exit() without an error in place of a return.

    Raises:
        BaseException: the function's own; after a signal, that of the handler.
    """
    # Not earlier: while the process group connects, the main thread runs C++ code, which delays
    # Python's handlers.
    stop.install()
    try:
        return call_function(task), False
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        return None, True
    except RuntimeError as error:
        # After a signal, this is the error of a collective that the handler's thread has
        # interrupted: the signal is the cause.
        if stop.raised is None:
            raise
        raise stop.raised from error


def _synchronize(devices: Sequence[torch.device]) -> None:
    """Wait for the kernels of the function: their errors are raised before the value counts."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _write(outcome: Outcome, path: Path) -> None:
    """Write an outcome. If the disk is full, wait for space: what was trained is not lost."""
    is_announced = False
    while True:
        try:
            outcome.write(path)
        except LaunchError as error:
            if not is_announced:
                _log.warning("rank %d waits with its result: %s", outcome.rank, error)
            is_announced = True
            time.sleep(_LOOK_FOR_SPACE_EVERY_S)
        else:
            return


def _is_inspected(error: BaseException) -> bool:
    """Return whether the debugger is to stop where an error was raised."""
    if not isinstance(error, Exception) or isinstance(error, bdb.BdbQuit):
        return False
    if os.environ.get(_POST_MORTEM, "0") == "0":
        return False
    # An error that another rank has caused is not inspected: its prompt would hold up the call.
    return not is_peer_lost(error, format_error(error, error.__traceback__))
