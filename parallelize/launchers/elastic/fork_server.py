"""Start of worker processes by multiprocessing: the fork server, signals and the caller's main module."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.util
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from typing import Any

from parallelize.launchers.elastic.server_imports import REQUEST, ServerImports

__all__ = ["starting_processes"]

_PRELOADED_MODULES = ["parallelize.launchers.elastic.preload"]
_imports_by_pid: dict[int, ServerImports] = {}  # of the fork server

_start_lock = threading.Lock()


@contextlib.contextmanager
def starting_processes(environ: Mapping[str, str], *, by_fork_server: bool) -> Iterator[None]:
    """Prepare this process to start workers with these variables inside the context; one thread at a time."""
    with (
        _start_lock,
        _paused_garbage_collection(),
        _hidden_main_module(),
        _changed_commands(environ),
        _blocked_signals(),
    ):
        if by_fork_server:
            multiprocessing.set_forkserver_preload(_PRELOADED_MODULES)
            _ensure_own_fork_server(environ)
        yield


def _ensure_own_fork_server(environ: Mapping[str, str]) -> None:
    """Start a fork server, or a new one if this process was forked since, or has changed what the server imported."""
    server: Any = forkserver._forkserver
    imports = _imports_by_pid.get(server._forkserver_pid)
    if imports is not None and not imports.are_current(environ):
        threading.Thread(target=_wait_for, args=[server._forkserver_pid], daemon=True).start()
        _forget(server)
    try:
        server.ensure_running()
    except ChildProcessError:
        _forget(server)
        server.ensure_running()
    if server._forkserver_pid not in _imports_by_pid:  # started by the caller
        _imports_by_pid[server._forkserver_pid] = ServerImports.of_caller(environ)


def _wait_for(pid: int) -> None:
    """Wait for a fork server, which ends when its last child does; it is none of ours if this process was forked."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _forget(server: Any) -> None:
    _imports_by_pid.clear()  # a later fork server may get the same pid
    os.close(server._forkserver_alive_fd)
    server.__init__()
    server.set_forkserver_preload(_PRELOADED_MODULES)


@contextlib.contextmanager
def _changed_commands(environ: Mapping[str, str]) -> Iterator[None]:
    """Start Python processes with the caller's sys.path, and the fork server with the list of what it imports.

    multiprocessing starts them by `python -c`, which puts the current directory first: a `tqdm.py` there, which the
    caller does not import, would replace the installed package. sys.path that multiprocessing sends comes too late.
    """
    util: Any = multiprocessing.util
    spawnv_passfds = util.spawnv_passfds
    path = [os.fspath(each) for each in sys.path]

    def start(executable: bytes, arguments: Sequence[Any], fds: Sequence[int]) -> Any:
        code = arguments.index("-c") + 1
        first = f"import sys; sys.path[:] = {path!r}; {arguments[code]}"
        command = [*arguments[:code], first, *arguments[code + 1 :]]
        if "multiprocessing.forkserver" not in first:
            return spawnv_passfds(executable, command, fds)
        imports = ServerImports.of_caller(environ)
        with imports.request(environ) as request:
            pid = spawnv_passfds(executable, [*command, f"{REQUEST}{request}"], [*fds, request])
        _imports_by_pid[pid] = imports
        return pid

    util.spawnv_passfds = start
    try:
        yield
    finally:
        util.spawnv_passfds = spawnv_passfds


@contextlib.contextmanager
def _paused_garbage_collection() -> Iterator[None]:
    """Pause garbage collection, which may finalize a semaphore while the resource tracker is in use.

    The finalizer calls the tracker, which then warns that the semaphore might leak; on Python 3.10, it deadlocks.

    Source: https://github.com/python/cpython/issues/109629
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block SIGINT, SIGUSR1 and SIGUSR2 in started processes until they have their own process group and handlers.

    A terminal sends Ctrl-C to the caller's whole process group, and some clusters send USR1 or USR2 to every process
    of a job as a warning. The fork server inherits the mask; it and the workers unblock the signals that they handle.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    try:
        resource_tracker.ensure_running()  # first, since starting it unblocks SIGINT in this thread
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _hidden_main_module() -> Iterator[None]:
    """Keep workers from importing the caller's __main__: a script without `if __name__` would run once per rank.

    multiprocessing passes the path of __main__ to a child, which executes that file. The task already contains all
    that a worker needs of __main__.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    main.__spec__ = None
    if "__file__" in hidden:
        del main.__file__
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)
        multiprocessing.set_start_method(chosen, force=True)  # starting a child sets a default method
