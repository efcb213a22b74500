"""Running a script as `__main__` in each process of a run.

parallelize run ──> distributed()(run_script) ──> each rank: run_script ──> the script, as if torchrun had started it
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

from parallelize.config.gpus import Gpus
from parallelize.runtime import context

__all__ = ["run_script"]

_GPUS_VARIABLE, _PROCESSES_VARIABLE = "PARALLELIZE_GPUS", "PARALLELIZE_PROCESSES"


def run_script(target: str, arguments: tuple[str, ...], *, is_module: bool) -> None:
    """Run a script in this process, which is a rank of a run.

    The script's calls of this package read this process's environment variables, as under torchrun. So command-line
    options override options in the code, and an imported decorated function joins the run with its own options.

    Args:
        target: path of a script, or name of a module.
        arguments: `sys.argv[1:]` of the script.
        is_module: whether `target` is the name of a module.
    """
    _renumber_gpus()
    with _run_atexit_handlers(), _python_argv(target, arguments, is_module=is_module), context.deactivated():
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")


def _renumber_gpus() -> None:
    """Set PARALLELIZE_GPUS to the GPU indices in this process, which sees only the run's GPUs, numbered from 0."""
    if not os.environ.get(_GPUS_VARIABLE, "").strip():
        return
    devices = (device for driven in context.current().layout.devices for device in driven)
    indices = tuple(device.index for device in devices if device.type != "cpu")
    os.environ[_GPUS_VARIABLE] = str(Gpus(indices=indices) if indices else Gpus.NONE)
    if indices:  # --gpus auto --processes 2 starts processes on the CPU only without GPUs
        os.environ.pop(_PROCESSES_VARIABLE, None)


@contextlib.contextmanager
def _run_atexit_handlers() -> Iterator[None]:
    """Run the script's atexit handlers in a worker; multiprocessing does not run them before Python 3.13."""
    if multiprocessing.parent_process() is None:
        yield
        return
    atexit._clear()
    try:
        yield
    finally:
        atexit._run_exitfuncs()


@contextlib.contextmanager
def _python_argv(target: str, arguments: tuple[str, ...], *, is_module: bool) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as `python script.py` or `python -m module` would."""
    argv, path, gpus = sys.argv, sys.path, os.environ.get(_GPUS_VARIABLE)
    directory = str(Path.cwd()) if is_module else str(Path(target).resolve().parent)
    is_safe = getattr(sys.flags, "safe_path", False)  # python -P, from 3.11 on, adds neither folder
    sys.argv = [target, *arguments]
    sys.path = path if is_safe else [directory, *path[1:]]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path
        if gpus is not None:
            os.environ[_GPUS_VARIABLE] = gpus
