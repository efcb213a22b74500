"""The fork server: it has imported torch once for all calls, forks their workers, and ends those whose call has ended.

caller ──> Forked, a socket for each attempt of a call ──> fork server ──> worker (own process group) ──> its children
             requests ──>        <── process ids, exit codes

A call's workers end when its socket closes, which the kernel does however the caller ends: with SIGTERM, and SIGKILL to
their process groups some seconds later. That reaches workers that are stopped, or in compiled code, too. The server is
in a session of its own, so a terminal's Ctrl-C and a `timeout` reach the caller alone.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
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
from importlib import import_module
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from parallelize.errors import LaunchError

__all__ = ["Forked", "kill_group", "serve"]

_END_GRACE_S = 5.0  # between SIGTERM and SIGKILL, for workers whose caller has ended
_LOOK_EVERY_S = 1.0  # whether the caller has ended, if a process that it has forked keeps its sockets open

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


_servers: list[_Server] = []
_start_lock = threading.Lock()


class Forked:
    """The worker processes of one attempt of a call.

    Args:
        environ: variables of a server that has to be started; what libraries read of them chooses the server.
        requests: what each process calls: a pickled tuple of a function and its arguments.
        folder: the run's folder, which the server removes if the caller does not live to do so.
        is_preloaded: whether the processes are forked from a server that has imported torch.

    Attributes:
        pids: process ids.
        exitcodes: index of a process that was not killed by `end` -> its exit code, as in multiprocessing.

    Raises:
        LaunchError: the server has ended.
    """

    def __init__(
        self, environ: Mapping[str, str], requests: Sequence[bytes], folder: str, *, is_preloaded: bool
    ) -> None:
        self.pids: list[int] = []
        self.exitcodes: dict[int, int] = {}
        self._is_over = self._is_ending = False
        ours, its = socket.socketpair()
        self._connection = Connection(ours.detach())
        with _start_lock, its:
            server = _running_server(environ, is_preloaded=is_preloaded)
            with contextlib.suppress(OSError):  # the server has just ended, which `look` finds
                socket.send_fds(server.control, [b"+"], [its.fileno()])
        start = {
            "folder": folder,
            "path": [os.fspath(each) for each in sys.path],
            "argv": sys.argv,
            "cwd": str(Path.cwd()),
            "authkey": bytes(multiprocessing.current_process().authkey),
        }
        try:
            with contextlib.suppress(OSError):
                self._connection.send((start, requests))
            while not self.pids:
                self.look(0.05)
        except BaseException:
            self._connection.close()
            if not wait([server.control], 0):  # it imports: a caller that was interrupted does not wait for that
                server.process.kill()
            raise

    def look(self, timeout_s: float) -> None:
        """Wait until a process has ended, or the timeout; read which have.

        Raises:
            LaunchError: the server has ended.
        """
        try:
            while self._connection.poll(timeout_s):
                timeout_s = 0
                self.pids, self.exitcodes = self._connection.recv()
        except (EOFError, OSError):
            if not self._is_ending:
                for pid in self.pids:
                    kill_group(pid)
                raise LaunchError(
                    "the fork server, which starts the worker processes, has ended",
                    why="it was killed, or ran out of memory while it imported modules",
                    fix="see the kernel's log, or use LocalLauncher(start_method='spawn')",
                ) from None
            self._is_over = True

    def living(self) -> list[int]:
        """Return the ids of the processes that have not ended by themselves."""
        return [pid for index, pid in enumerate(self.pids) if index not in self.exitcodes]

    def end(self, grace_s: float, timeout_s: float) -> bool:
        """End all processes by SIGTERM, and after `grace_s` by SIGKILL, with all they started; return whether it has.

        Processes that SIGKILL does not end are waited for `timeout_s`.
        """
        end, self._is_ending = time.monotonic() + grace_s + timeout_s, True
        with contextlib.suppress(OSError):
            self._connection.send((grace_s, []))
        while not self._is_over and time.monotonic() < end:
            self.look(min(0.05, timeout_s))
        if self._is_over:
            self._connection.close()
        return self._is_over


def kill_group(pid: int) -> None:
    """Kill a worker and its process group, which it leads; a worker that has just been forked leads none yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


class _Server:
    """A fork server, as its caller sees it.

    Args:
        environ: variables of the server.
        key: the variables that libraries read when they are imported; False: it imports nothing before it forks.
    """

    def __init__(self, environ: Mapping[str, str], key: Any) -> None:
        self.owner, self.key = os.getpid(), key
        self.control, its = socket.socketpair()
        # `python -c` puts the current folder first: a `tqdm.py` there would replace the installed package.
        path = [str(Path(each).absolute()) for each in sys.path]
        code = f"import sys; sys.path[:] = {path!r}; from {__name__} import serve; serve({its.fileno()})"
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
        try:
            self.process = subprocess.Popen(
                [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code],  # type: ignore[attr-defined]  # private
                env=environ,
                cwd="/",
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            its.close()
        modules = [name for name in list(sys.modules) if name.partition(".")[0] in _FORKABLE]
        used = modules if environ.get("PARALLELIZE_PRELOAD") != "0" else []
        message = json.dumps([] if key is False else [*_TORCH, *used]).encode()
        self.control.sendall(len(message).to_bytes(8, "big") + message)


def _running_server(environ: Mapping[str, str], *, is_preloaded: bool) -> _Server:
    """Return this process's server, or a new one: the first, after a fork, or if what libraries read has changed."""
    key: Any = is_preloaded and {name: value for name, value in environ.items() if _READ_AT_IMPORT.match(name)}
    for server in list(_servers):
        is_ours = server.owner == os.getpid() and server.process.poll() is None
        if is_ours and server.key == key and server.control.fileno() >= 0:
            return server
        if not is_ours or type(server.key) is type(key):
            server.control.close()  # it ends when its calls have
        if not is_ours:
            _servers.remove(server)
    _servers.append(_Server(environ, key))
    return _servers[-1]


@atexit.register
def _end_servers() -> None:
    for server in _servers:
        server.control.close()
        if server.owner == os.getpid():
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(_END_GRACE_S)


def serve(number: int) -> None:
    """Run the fork server of the process that holds the other end of a socket."""
    control, caller = socket.socket(fileno=number), os.getppid()
    size = int.from_bytes(control.recv(8, socket.MSG_WAITALL), "big")
    _preload(json.loads(control.recv(size, socket.MSG_WAITALL)))
    resource_tracker.ensure_running()  # one for all workers, which outlives those that are killed
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)  # the start of the tracker unblocks some
    control.shutdown(socket.SHUT_WR)  # which the caller sees: from here on there are workers to end
    _serve(control, caller)
    os._exit(0)  # the caller waits for this at its exit


def _preload(modules: Sequence[str]) -> None:
    """Import torch and the other modules, of which the caller has shown what they print."""
    for name in modules[: len(_TORCH)]:
        import_module(name)
    if modules:
        import_module("parallelize.worker.main").unbuffer_output()  # imported modules may keep the streams
    streams = [os.dup(each) for each in (1, 2)]
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a descriptor is needed
        for each in (1, 2):
            os.dup2(nowhere.fileno(), each)
    for name in modules[len(_TORCH) :]:
        with contextlib.suppress(BaseException):
            import_module(name)
    for each, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, each)
        os.close(stream)
    gc.collect()
    gc.freeze()  # so that collections in workers do not copy the pages of these modules


def _serve(control: socket.socket, caller: int) -> None:
    """Fork and end workers until the caller is gone, and no call is left."""
    woken, waker = socket.socketpair()
    waker.settimeout(0)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the wakeup descriptor is written
    calls: dict[Connection, _Call] = {}
    while calls or control.fileno() >= 0:
        inherited = [control, woken, waker, *calls]
        waited = [each for each in (control, woken) if each.fileno() >= 0]
        readable = [connection for connection, call in calls.items() if call.kill_at is None]
        ready = wait([*waited, *readable], _LOOK_EVERY_S if len(readable) == len(calls) else 0.05)
        if woken in ready:
            woken.recv(4096)
        if control in ready:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if message:
                calls[Connection(descriptors[0])] = _Call()
            else:
                control.close()
        for connection in readable:
            if connection in ready:
                calls[connection].read(connection, inherited)
        for connection, call in list(calls.items()):
            if os.getppid() != caller:
                control.close()
                call.end(_END_GRACE_S, is_alone=True)
            if call.look(connection):
                connection.close()
                del calls[connection]


class _Call:
    """The workers of one attempt of a call, in the server."""

    def __init__(self) -> None:
        self.kill_at: float | None = None
        self._processes: list[Any] = []
        self._exitcodes: dict[int, int] = {}
        self._folder: str | None = None
        self._is_killed = self._is_alone = False

    def read(self, connection: Connection, inherited: Sequence[Any]) -> None:
        """Do what the caller asks for: start the workers, or end them; also if the caller has closed the connection."""
        try:
            message, requests = connection.recv()
        except (EOFError, OSError):
            self.end(_END_GRACE_S, is_alone=True)
            return
        if not requests:
            self.end(message)
            return
        self._folder, context = message["folder"], multiprocessing.get_context("fork")
        for request in requests:
            self._processes.append(context.Process(target=_work, args=(message, request, inherited)))
            self._processes[-1].start()
        self._tell(connection)

    def end(self, grace_s: float, *, is_alone: bool = False) -> None:
        if self.kill_at is None:
            self.kill_at, self._is_alone = time.monotonic() + grace_s, is_alone
            for process in self._processes:
                process.terminate()

    def look(self, connection: Connection) -> bool:
        """Tell the caller which workers have ended, and kill those whose time is over; return whether none is left."""
        exitcodes = {index: each.exitcode for index, each in enumerate(self._processes) if each.exitcode is not None}
        if len(exitcodes) > len(self._exitcodes) and not self._is_killed:
            self._exitcodes = exitcodes
            self._tell(connection)
        have_ended = len(exitcodes) == len(self._processes)
        if self.kill_at is not None and not self._is_killed and (have_ended or time.monotonic() > self.kill_at):
            self._is_killed = True
            for process in self._processes:
                kill_group(process.pid)
        if self._is_killed and have_ended and self._is_alone and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._is_killed and have_ended

    def _tell(self, connection: Connection) -> None:
        with contextlib.suppress(OSError):  # the caller is gone
            connection.send(([each.pid for each in self._processes], self._exitcodes))


def _work(start: Mapping[str, Any], request: bytes, inherited: Sequence[Any]) -> None:
    """Be a worker: a process in which nothing is left of the fork server but what it has imported."""
    os.setsid()  # a new process group, so that all processes started from here can be killed together
    for each in inherited:
        each.close()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    sys.path[:], sys.argv[:] = start["path"], start["argv"]
    os.chdir(start["cwd"])
    multiprocessing.current_process().authkey = start["authkey"]
    function, *arguments = pickle.loads(request)
    function(*arguments)
