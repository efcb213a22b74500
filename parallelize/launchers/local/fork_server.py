"""The fork server: it has imported torch once for all calls, and forks their workers.

caller ── a socket for each call ──> fork server ──> worker (own process group) ──> its children
          number of workers, requests ──>  <── process ids, exit codes

A call's workers end when its socket closes, which the kernel does however the caller ends: with SIGTERM, and SIGKILL to
their process groups some seconds later. That reaches workers that are stopped, or in compiled code, too. The server is
in a session of its own, so a terminal's Ctrl-C and a `timeout` reach the caller alone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
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
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
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
    """Return a connection to a fork server, for the workers of one call.

    It gets the number of workers, which it forks at once; then the call's folder, the caller's current one, and for
    each worker a file with a pickled tuple of a function and its arguments; then, to end the workers, the seconds
    between SIGTERM and SIGKILL. It sends the workers' process ids and exit codes, again for each exit, or text: why
    they cannot be forked.

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
    for server in list(_servers):
        # One that was killed has closed its socket some time before it has ended.
        is_running = server.control.fileno() >= 0 and not wait([server.control], 0)
        if is_running and (server.owner, server.key) == (os.getpid(), key):
            return server
        server.control.close()
        if server.process.poll() is not None:
            _servers.remove(server)
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
    """Run the fork server of the process that holds the other end of a socket, by which it sends one for each call."""
    control, caller = socket.socket(fileno=number), os.getppid()
    _preload(json.load(sys.stdin))
    resource_tracker.ensure_running()  # one for all workers, which outlives those that are killed
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)  # the start of the tracker unblocks some
    calls, is_open = list[_Call](), True
    while is_open or calls:
        awaited: list[Any] = [*([control] if is_open else []), *(each for call in calls for each in call.awaited())]
        if control in wait(awaited, _POLL_EVERY_S if calls else _LOOK_EVERY_S):
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            calls += [_Call(Connection(each)) for each in descriptors]
            is_open = bool(message)
        has_caller = os.getppid() == caller
        is_open = is_open and has_caller
        for call in calls:
            call.look([control, *(each for other in calls for each in other.files())], has_caller=has_caller)
        calls = [each for each in calls if not each.connection.closed]
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


class _Call:
    """The workers of a call, as the fork server sees them.

    Attributes:
        connection: to the caller; closed once the workers have ended.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._workers, self._requests = list[Any](), list[Connection]()  # a request for each worker
        self._folder, self._told = "", list[Any]()
        self._kill_at, self._is_killed, self._is_alone = math.inf, False, False

    def files(self) -> list[Any]:
        """Return what the server has open for this call."""
        return [self.connection, *self._requests]

    def awaited(self) -> list[Any]:
        """Return what shows that there is something to do."""
        living = [each.sentinel for each in self._workers if each.exitcode is None]
        return [*living, *([self.connection] if self._kill_at == math.inf else [])]

    def look(self, files: Sequence[Any], *, has_caller: bool) -> None:
        """Do what the caller asks for, tell it how its workers end, and end them if it asks for that, or has ended.

        Args:
            files: what the server has open, and workers must not keep.
            has_caller: whether the caller runs.
        """
        if self._kill_at == math.inf and (not has_caller or self.connection.poll()):
            try:
                self._do(self.connection.recv() if has_caller else None, files)
            except (EOFError, OSError):
                self._do(None, files)
        exitcodes = [each.exitcode for each in self._workers]
        if exitcodes != self._told and not self._is_killed:
            self._told = exitcodes
            with contextlib.suppress(OSError):  # the caller has ended
                self.connection.send(([each.pid for each in self._workers], exitcodes))
        has_ended = None not in exitcodes
        if not self._is_killed and (time.monotonic() > self._kill_at or (has_ended and self._kill_at < math.inf)):
            self._is_killed = True
            for each in self._workers:
                kill_group(each.pid)
        if self._is_killed and has_ended:
            for each in self._workers:
                each.close()
            if self._is_alone and self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)
            self.connection.close()

    def _do(self, request: Any, files: Sequence[Any]) -> None:
        """Start the workers (int), give each what it runs (tuple), or end them (float; None: the caller has ended)."""
        if isinstance(request, int):
            for _ in range(request):
                its, ours = multiprocessing.Pipe(duplex=False)
                self._requests.append(ours)
                worker = multiprocessing.get_context("fork").Process(
                    target=_work, args=([*files, *self._requests], its)
                )
                try:
                    worker.start()
                except OSError as error:  # too many processes, or too little memory
                    self.connection.send(str(error))
                    raise
                self._workers.append(worker)
                its.close()
        elif isinstance(request, tuple):
            self._folder, cwd, paths = request
            for ours, each in zip(self._requests, paths, strict=True):
                with ours, contextlib.suppress(OSError):  # it was killed
                    ours.send((cwd, each))  # little: a worker that is stopped does not read it
            self._requests.clear()
        else:
            self._is_alone = request is None
            self._kill_at = time.monotonic() + (_END_GRACE_S if request is None else request)
            for each in self._workers:
                each.terminate()


def _work(files: Sequence[Any], its: Connection) -> None:
    """Be a worker: a process in which nothing is left of the fork server but what it has imported."""
    os.setsid()  # a new process group, so that all processes started from here can be killed together
    with contextlib.suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)  # if the server and the caller are killed
    for each in files:
        each.close()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        cwd, path = its.recv()
        request = Path(path).read_bytes()
    except (EOFError, FileNotFoundError):  # the server was killed; the caller has left, and its folder with it
        return
    its.close()
    os.chdir(cwd)
    function, *arguments = pickle.loads(request)
    function(*arguments)
