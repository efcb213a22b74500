"""A script as `__main__` in each process of a run.

parallelize run ──> distributed()(program) ──> each rank: program ──> the script, as a program that a launcher placed
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
from types import TracebackType

from parallelize.cluster.devices import Gpus
from parallelize.runtime import context

__all__ = ["program", "trace_of_script"]

_GPUS = "PARALLELIZE_GPUS"


def program(target: str, arguments: tuple[str, ...], *, is_module: bool) -> None:
    """Run a script in this process, which is a rank of a run.

    Its helpers see the run as they would under torchrun, by this process's variables, so that options of the command
    line win over those in its code, and a decorated function that it imports joins the run with options of its own.

    Args:
        target: path of a script, or name of a module.
        arguments: its `sys.argv[1:]`.
        is_module: whether `target` is a module's name.
    """
    _say_gpus()
    with _handlers_of_its_own(), _as_command(target, arguments, is_module=is_module), context.outside():
        _run(target, is_module=is_module)


def _run(target: str, *, is_module: bool) -> None:
    try:
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except BaseException as error:  # noqa: BLE001 - it is raised again below, as it would be without runpy
        raised = error
    else:
        return
    raise raised.with_traceback(_behind_runpy(raised.__traceback__))


def trace_of_script(error: BaseException) -> TracebackType | None:
    """Where in a script an error was raised in this process; None: not in one."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not program.__code__:
        trace = trace.tb_next
    return None if trace is None else _behind_runpy(trace)


def _behind_runpy(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that is the script's; all of it if it never came so far."""
    inner = trace
    while inner is not None and inner.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        inner = inner.tb_next
    return inner or trace


def _say_gpus() -> None:
    """Name the GPUs of the node as this process numbers them: a worker sees those of the run only, from 0."""
    if not os.environ.get(_GPUS, "").strip():
        return
    driven = tuple(each.index for devices in context.current().layout.devices for each in devices if each.type != "cpu")
    os.environ[_GPUS] = str(Gpus(indices=driven) if driven else Gpus.NONE)


@contextlib.contextmanager
def _handlers_of_its_own() -> Iterator[None]:
    """Let a worker run what the script registers with atexit: before Python 3.13 multiprocessing's children do not."""
    if multiprocessing.parent_process() is None:
        yield
        return
    atexit._clear()
    try:
        yield
    finally:
        atexit._run_exitfuncs()


@contextlib.contextmanager
def _as_command(target: str, arguments: tuple[str, ...], *, is_module: bool) -> Iterator[None]:
    """`sys.argv` and `sys.path` as `python script.py` or `python -m module` would have them."""
    argv, path, variables = sys.argv, sys.path, os.environ.get(_GPUS)
    folder = str(Path.cwd()) if is_module else str(Path(target).resolve().parent)
    is_safe = getattr(sys.flags, "safe_path", False)  # python -P, from 3.11 on: neither is put first
    sys.argv = [target, *arguments]
    sys.path = path if is_safe else [folder, *path[1:]]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path
        if variables is not None:
            os.environ[_GPUS] = variables
