"""The fork server: it has imported torch once for all calls, and forks the processes that start their workers.

caller ──> fork server ──> process of a call ──> worker (own process group) ──> its children
  └── socket: requests ──>    <── process ids, exit codes

A call's workers end when its socket closes, which the kernel does however the caller ends: with SIGTERM, and SIGKILL to
their process groups some seconds later. That reaches workers that are stopped, or in compiled code, too. The server is
in a session of its own, so a terminal's Ctrl-C and a `timeout` reach the caller alone.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import math
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

__all__ = ["connect", "kill_group", "serve"]

_END_GRACE_S = 5.0  # between SIGTERM and SIGKILL, for workers whose caller has ended
_LOOK_EVERY_S = 1.0  # whether the caller has ended, if a process that it has forked keeps its sockets open
_POLL_EVERY_S = 0.05  # how a worker has ended whose children keep its sentinel open

_TORCH = (
    "torch._dynamo",  # DistributedDataParallel imports it, which takes a second per rank
    "torch.distributed.fsdp",
    "torch.utils.serialization",  # torch.load imports it
    "parallelize.worker.main",
)
# Packages that start no thread or connection when they are imported, and make no random generator of their own.
_FORKABLE = frozenset(
    {
        "PIL",
        "matplotlib",
        "numpy",
        "pandas",
        "parallelize",
        "scipy",
        "sklearn",
        "timm",
        "torchaudio",
        "torchmetrics",
        "torchvision",
        "transformers",
    }
)
# Variables that libraries read when they are imported. Not the number of threads, which workers set.
_READ_AT_IMPORT = re.compile(
    # Not the folder that importing torch._dynamo sets, as the first optimizer of a process does.
    r"(PY)?TORCH(?!ELASTIC_|INDUCTOR_CACHE_DIR$)|NCCL_|GLOO_|LD_|MKL_|OMP_(?!NUM_THREADS)|KMP_|PARALLELIZE_PRELOAD$"
)
# In the server, as some clusters send them to all processes of a job, and in workers until they have their handlers.
_BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class _Server:
    """A fork server, as its caller sees it.

    Args:
        owner: process that has started it.
        key: what chooses it: the variables that libraries read when they are imported; None: it imports nothing.
        process: the server.
        control: socket by which it gets the socket of each call; it ends when this is closed, and its calls have ended.
    """

    owner: int
    key: object
    process: subprocess.Popen[str]
    control: socket.socket


_servers: list[_Server] = []
_start_lock = threading.Lock()


def connect(environ: Mapping[str, str], *, is_preloaded: bool) -> Connection:
    """Return a connection to a process for one call, which starts the workers.

    It gets the call's folder, the caller's current one, and for each worker a pickled tuple of a function and its
    arguments; then, to end the workers, the seconds between SIGTERM and SIGKILL. It sends the workers' process ids and
    exit codes, again for each exit.

    Args:
        environ: variables of a fork server that has to be started: the first, after a fork of this process, or if those
            have changed that libraries read when they are imported.
        is_preloaded: whether the processes are forked from a server that has imported torch.
    """
    ours, its = socket.socketpair()
    connection = Connection(ours.detach())
    with _start_lock, its:
        server = _running_server(environ, is_preloaded=is_preloaded)
        with contextlib.suppress(OSError):  # it has just ended, which closes the connection
            socket.send_fds(server.control, [b"+"], [its.fileno()])
    return connection


def _running_server(environ: Mapping[str, str], *, is_preloaded: bool) -> _Server:
    key = {name: value for name, value in environ.items() if _READ_AT_IMPORT.match(name)} if is_preloaded else None
    for server in _servers:
        is_running = server.process.poll() is None and server.control.fileno() >= 0
        if is_running and (server.owner, server.key) == (os.getpid(), key):
            return server
        server.control.close()
    control, its = socket.socketpair()
    # `python -c` puts the current folder first: a `tqdm.py` there would replace the installed package.
    path = [str(Path(each).absolute()) if os.path.exists(each or ".") else each for each in sys.path]  # noqa: PTH110 - raises nothing
    code = f"import sys; sys.path[:] = {path!r}; from {__name__} import serve; serve({its.fileno()})"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
    try:
        process = subprocess.Popen(
            [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code],  # type: ignore[attr-defined]  # private
            env=environ,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # workers have files
            text=True,
            pass_fds=[its.fileno()],
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        its.close()
    _servers.append(_Server(os.getpid(), key, process, control))
    modules = list(_TORCH) if is_preloaded else []
    if is_preloaded and environ.get("PARALLELIZE_PRELOAD") != "0":
        modules += [name for name in list(sys.modules) if name.partition(".")[0] in _FORKABLE]
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin:  # as above
        json.dump(modules, process.stdin)
    return _servers[-1]


@atexit.register
def _end_servers() -> None:
    for server in _servers:
        server.control.close()
        if server.owner == os.getpid():
            server.process.kill()  # it may still import
            server.process.wait()


def kill_group(pid: int) -> None:
    """Kill a worker and its process group, which it leads; a worker that has just been forked leads none yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def serve(number: int) -> None:
    """Run the fork server of the process that holds the other end of a socket: fork a process for each call."""
    control, caller, fork = socket.socket(fileno=number), os.getppid(), multiprocessing.get_context("fork")
    _preload(json.load(sys.stdin))
    resource_tracker.ensure_running()  # one for all workers, which outlives those that are killed
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)  # the start of the tracker unblocks some
    is_open = True
    while os.getppid() == caller and (is_open or multiprocessing.active_children()):
        calls = [each.sentinel for each in multiprocessing.active_children()]  # which waits for those that have ended
        if control not in wait([*calls, *([control] if is_open else [])], _LOOK_EVERY_S):
            continue
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        is_open = bool(message)
        for descriptor in descriptors:
            with Connection(descriptor) as connection:
                fork.Process(target=_serve_call, args=(connection, control)).start()
    os._exit(0)


_entered = contextlib.ExitStack()  # until the server ends


def _preload(modules: Sequence[str]) -> None:
    """Import torch and the other modules, of which the caller has shown what they print."""
    for name in modules[: len(_TORCH)]:
        import_module(name)
    if modules:
        import_module("parallelize.worker.main").unbuffer_output()  # imported modules may keep the streams
    stderr = os.dup(2)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a descriptor is needed
        os.dup2(nowhere.fileno(), 2)
    for name in modules[len(_TORCH) :]:
        with contextlib.suppress(BaseException):
            import_module(name)
    os.dup2(stderr, 2)
    os.close(stderr)
    if modules:  # once, and not in each worker, which takes 20 ms
        _entered.enter_context(import_module("parallelize.worker.main").replace_group_functions())
    gc.collect()
    gc.freeze()  # so that collections in workers do not copy the pages of these modules


def _serve_call(connection: Connection, control: socket.socket) -> None:
    """Start the workers of a call, tell the caller how they end, and end them if it asks for that, or has ended."""
    control.close()
    server, fork = os.getppid(), multiprocessing.get_context("fork")
    try:
        folder, cwd, requests = connection.recv()
    except (EOFError, OSError):  # the caller was interrupted
        return
    workers = [fork.Process(target=_work, args=(connection, cwd, request)) for request in requests]
    for each in workers:
        each.start()
    told, kill_at, is_alone = list[Any](), math.inf, False
    while True:
        exitcodes = [each.exitcode for each in workers]
        if exitcodes != told:
            told = exitcodes
            with contextlib.suppress(OSError):  # the caller has ended
                connection.send(([each.pid for each in workers], exitcodes))
        is_ending = kill_at < math.inf
        if time.monotonic() > kill_at or (is_ending and None not in exitcodes):
            break
        if not is_ending and os.getppid() != server:
            connection.close()  # from which the caller hears that the server has ended
        if not is_ending and (connection.closed or connection.poll()):
            try:
                grace_s = connection.recv()
            except (EOFError, OSError):
                grace_s, is_alone = _END_GRACE_S, True
            kill_at = time.monotonic() + grace_s
            for each in workers:
                each.terminate()
            continue
        living = [each.sentinel for each in workers if each.exitcode is None]
        wait([*living, *([] if kill_at < math.inf else [connection])], _POLL_EVERY_S)
    for each in workers:
        assert each.pid is not None
        kill_group(each.pid)
    for each in workers:
        each.join()
    if is_alone:
        shutil.rmtree(folder, ignore_errors=True)


def _work(connection: Connection, cwd: str, request: bytes) -> None:
    """Be a worker: a process in which nothing is left of the fork server but what it has imported."""
    os.setsid()  # a new process group, so that all processes started from here can be killed together
    connection.close()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.chdir(cwd)
    function, *arguments = pickle.loads(request)
    function(*arguments)
