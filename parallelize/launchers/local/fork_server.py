"""The fork server: it has imported torch once for all calls, and forks their workers.

caller ── a socket for each call ──> fork server ──> worker (own process group) ──> its children

    StartWorkers       ──>                          forked while the caller pickles the call
    RequestsOfWorkers  ──>  <── WorkersReport       again for each worker that has ended
                            <── WorkersRefused      they cannot be forked
    InterruptWorkers   ──>                          Ctrl-C
    EndWorkers         ──>  <── WorkersEnded        they and their groups have ended, and are reaped
    LeaveCall          ──>                          the caller has removed the call's folder

When the socket closes instead, as the kernel does it however the caller ends, the server ends the
workers, with SIGTERM, and SIGKILL to their process groups some seconds later, and removes the
folder. SIGKILL reaches workers that are stopped, or in compiled code, too. The server is in a
session of its own, so a terminal's Ctrl-C and a `timeout` reach the caller alone.

A worker that has ended stays a zombie until the whole call is over. As long as it does, no other
process gets its number, by which the server sends signals to it and to its group.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import popen_fork, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from parallelize.cluster.call_folders import remove_call_folder

_END_GRACE_S = 5.0  # between SIGTERM and SIGKILL, for workers whose caller has ended
_LOOK_EVERY_S = (
    1.0  # whether the caller has ended, if a process that it has forked keeps its sockets open
)
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
_POLL_EVERY_S = 0.05  # how a worker has ended whose children keep its sentinel open
# The path of a socket has at most so many bytes: `sun_path` of <sys/un.h>, without its last zero.
_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
# As multiprocessing.connection.arbitrary_address names it.
_SOCKET_NAME = "listener-12345678"

TORCH_MODULES = (
    "torch._dynamo",  # DistributedDataParallel imports it, which takes a second per rank
    "torch.distributed.fsdp",
    "torch.utils.serialization",  # torch.load imports it
    "parallelize.worker.main",
)
# In the server, as some clusters send them to all processes of a job, and in workers until they have their handlers.
BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class StartWorkers(NamedTuple):
    """Fork workers, which wait for their requests.

    Args:
        number: how many.
        folder: the call's folder, which the server removes if the caller is killed.
    """

    number: int
    folder: str


class RequestsOfWorkers(NamedTuple):
    """What the workers run.

    Args:
        cwd: the caller's current folder.
        paths: for each worker, a file with a pickled tuple of a function and its arguments.
    """

    cwd: str
    paths: Sequence[str]


class InterruptWorkers(NamedTuple):
    """Send SIGINT to the workers."""


class EndWorkers(NamedTuple):
    """End the workers, and what they have started.

    Args:
        grace_s: seconds between SIGTERM and SIGKILL.
    """

    grace_s: float


class LeaveCall(NamedTuple):
    """The caller says nothing more, and has removed the call's folder."""


class WorkersReport(NamedTuple):
    """The workers' process ids and exit codes, as in multiprocessing; None: it has not ended."""

    pids: Sequence[int]
    exitcodes: Sequence[int | None]


class WorkersRefused(NamedTuple):
    """The workers cannot be forked.

    Args:
        reason: what the kernel says.
    """

    reason: str


class WorkersEnded(NamedTuple):
    """All workers and their groups have ended; other processes may have their numbers now."""


def serve(number: int) -> None:
    """Run the fork server of the process that holds the other end of a socket, by which it sends one for each call."""
    control, caller = socket.socket(fileno=number), os.getppid()
    # Ignored, as a caller may do, it would have the kernel reap the workers: no exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    modules = json.load(sys.stdin)
    _preload(modules)
    if len(modules) > len(TORCH_MODULES) and not _can_fork():
        _begin_again(number, modules[: len(TORCH_MODULES)])
    resource_tracker.ensure_running()  # one for all workers, which outlives those that are killed
    signal.pthread_sigmask(
        signal.SIG_BLOCK, BLOCKED_SIGNALS
    )  # the start of the tracker unblocks some
    with contextlib.ExitStack() as until_end:
        if modules:  # once, and not in each worker, which takes 20 ms
            until_end.enter_context(
                import_module("parallelize.worker.main").replace_group_functions()
            )
        gc.collect()
        gc.freeze()  # so that collections in workers do not copy the pages of these modules
        _serve_calls(control, caller)
        os._exit(0)


def _serve_calls(control: socket.socket, caller: int) -> None:
    """Serve the calls of the caller until it has ended, and they have.

    Args:
        control: brings a socket for each call.
        caller: number of its process.
    """
    calls, is_open = list[_Call](), True
    while is_open or calls:
        awaited: list[Any] = [control] if is_open else []
        for call in calls:
            awaited += call.awaited()
        wait(awaited, _POLL_EVERY_S if calls else _LOOK_EVERY_S)
        # Looked up before anything is read: all that an ended caller has sent can be read then.
        has_caller = os.getppid() == caller
        is_open = is_open and _accept(control, calls) and has_caller
        for call in calls:
            files: list[Any] = [control]
            for other in calls:
                files += other.files()
            call.look(files, has_caller=has_caller)
        calls = [call for call in calls if not call.connection.closed]


def _accept(control: socket.socket, calls: list[_Call]) -> bool:
    """Add the calls that the caller has sent; return whether it may send more."""
    while wait([control], 0):
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        calls += [_Call(Connection(descriptor)) for descriptor in descriptors]
        if not message:
            return False
    return True


def _preload(modules: Sequence[str]) -> None:
    """Import torch and the other modules, of which the caller has shown what they print."""
    for name in modules[: len(TORCH_MODULES)]:
        import_module(name)
    if modules:
        import_module(
            "parallelize.worker.process_setup"
        ).unbuffer_output()  # imported modules may keep the streams
    stderr = os.dup(2)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a descriptor is needed
        os.dup2(nowhere.fileno(), 2)
    for name in modules[len(TORCH_MODULES) :]:
        with contextlib.suppress(BaseException):
            import_module(name)
    os.dup2(stderr, 2)
    os.close(stderr)


def _can_fork() -> bool:
    """Return whether a forked process can use the accelerator, which an imported package may have initialized.

    torch tells forked processes alone (`poison_fork` of torch/csrc/cuda/Module.cpp), so one is asked.
    """
    torch = import_module("torch")
    accelerator = (
        torch.accelerator.current_accelerator()
    )  # as torch was built, without a question to the driver
    module = None if accelerator is None else torch.get_device_module(accelerator)
    is_in_bad_fork = getattr(module, "_is_in_bad_fork", bool)  # bool() is False
    pid = os.fork()
    if pid == 0:
        os._exit(int(is_in_bad_fork()))
    return os.waitpid(pid, 0)[1] == 0


def _begin_again(number: int, modules: Sequence[str]) -> None:
    """Replace this process by a server that imports these modules; it keeps the number, and the socket with calls."""
    os.set_inheritable(number, True)  # noqa: FBT003 - positional-only
    os.ftruncate(0, 0)
    os.pwrite(0, json.dumps(modules).encode(), 0)
    os.lseek(0, 0, os.SEEK_SET)
    os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - as this process was started


class _WaitingFork(popen_fork.Popen):
    """A forked worker whose number is its own until `reap`: when it has ended, it stays a zombie.

    multiprocessing reaps a process as soon as anybody asks for its exit code, or starts another
    one. Systems without WNOWAIT, such as macOS before Python 3.13, leave no other way; there, an
    ended worker's group gets no signal.
    """

    _is_reaped = False

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code; None: the worker has not ended."""
        if not hasattr(os, "WNOWAIT"):
            self._is_reaped = super().poll(flag) is not None
        elif self.returncode is None:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | flag)
            if end is not None:
                self.returncode = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        return self.returncode

    def interrupt(self) -> None:
        """Send SIGINT, if the worker has not ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGINT)

    def kill_group(self) -> None:
        """Kill the worker and the process group that it leads, unless it has just been forked."""
        if self._is_reaped:
            return
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Let go of the number of a worker that has ended."""
        if not self._is_reaped:
            self._is_reaped = True
            os.waitpid(self.pid, 0)


class _Call:
    """The workers of a call, as the fork server sees them.

    running
      │ EndWorkers, or the caller has ended
    ending: SIGTERM
      │ all have ended, or the grace is over
    killed: SIGKILL to their groups
      │ all have ended
    ended: reaped
      │ the caller has left
    closed

    Attributes:
        connection: to the caller; closed when there is nothing more to do.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._workers = list[_WaitingFork]()
        self._requests = list[Connection]()  # one for each worker, until it is sent
        self._folder, self._reported = "", list[int | None]()
        self._kill_at, self._are_killed, self._have_ended = math.inf, False, False
        self._has_caller = True

    def files(self) -> list[Any]:
        """Return what the server has open for this call."""
        return [self.connection, *self._requests]

    def awaited(self) -> list[Any]:
        """Return what shows that there is something to do."""
        living = [worker.sentinel for worker in self._workers if worker.poll() is None]
        return [*living, *([self.connection] if self._has_caller else [])]

    def look(self, files: Sequence[Any], *, has_caller: bool) -> None:
        """Do what the caller asks for, tell it how its workers end, and end them if it asks for that, or has ended.

        Args:
            files: what the server has open, and workers must not keep.
            has_caller: whether the caller runs.
        """
        self._read(files, has_caller=has_caller)
        exitcodes = [worker.poll() for worker in self._workers]
        if exitcodes != self._reported and not self._are_killed:
            self._reported = exitcodes
            self._tell(WorkersReport([worker.pid for worker in self._workers], exitcodes))
        have_ended = None not in exitcodes
        is_ending = self._kill_at < math.inf
        is_late = time.monotonic() > self._kill_at
        if not self._are_killed and is_ending and (is_late or have_ended):
            self._are_killed = True
            for worker in self._workers:
                worker.kill_group()
        if self._are_killed and have_ended and not self._have_ended:
            self._have_ended = True
            for worker in self._workers:
                worker.reap()
                worker.close()
            self._workers.clear()
            self._tell(WorkersEnded())
        if self._have_ended and not self._has_caller:
            if self._folder:
                remove_call_folder(Path(self._folder))
            self.connection.close()

    def _read(self, files: Sequence[Any], *, has_caller: bool) -> None:
        """Read what the caller has sent: if it was killed, too, as that names the call's folder."""
        while self._has_caller:
            try:
                if self.connection.poll():
                    message = self.connection.recv()
                elif has_caller:
                    return
                else:  # a process that it has forked keeps the connection open
                    message = LeaveCall()
            except (EOFError, OSError):
                message = LeaveCall()
            self._do(message, files, has_caller=has_caller)

    def _do(self, message: object, files: Sequence[Any], *, has_caller: bool) -> None:
        if isinstance(message, StartWorkers):
            self._folder = message.folder
            if has_caller:
                self._start(message.number, files)
        elif isinstance(message, RequestsOfWorkers):
            # If the caller was killed meanwhile, no worker was forked.
            for request, path in zip(self._requests, message.paths, strict=False):
                with request, contextlib.suppress(OSError):  # the worker was killed
                    # So little that it waits for no reader, as a worker that is stopped.
                    request.send((message.cwd, path))
            self._requests.clear()
        elif isinstance(message, InterruptWorkers):
            for worker in self._workers:
                worker.interrupt()
        elif isinstance(message, EndWorkers):
            self._end(message.grace_s)
        elif isinstance(message, LeaveCall):
            self._has_caller = False
            if self._kill_at == math.inf:
                self._end(_END_GRACE_S)

    def _start(self, number: int, files: Sequence[Any]) -> None:
        for _ in range(number):
            workers_end, servers_end = multiprocessing.Pipe(duplex=False)
            self._requests.append(servers_end)
            arguments = ([*files, *self._requests], workers_end)
            process: Any = multiprocessing.get_context("fork").Process(target=_work, args=arguments)
            process._Popen = _WaitingFork  # which `start` calls
            with workers_end:
                try:
                    process.start()
                except OSError as error:  # too many processes, or too little memory
                    self._tell(WorkersRefused(str(error)))
                    self._end(0.0)
                    return
            self._workers.append(process._popen)

    def _end(self, grace_s: float) -> None:
        """End the workers, now or earlier than it was said before."""
        if self._kill_at == math.inf:
            for worker in self._workers:
                worker.terminate()
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)

    def _tell(self, message: object) -> None:
        with contextlib.suppress(OSError):  # the caller has ended
            self.connection.send(message)


def _work(files: Sequence[Any], its: Connection) -> None:
    """Be a worker: a process in which nothing is left of the fork server but what it has imported."""
    os.setsid()  # a new process group, so that all processes started from here can be killed together
    with contextlib.suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(
            _DIES_WITH_PARENT, signal.SIGKILL
        )  # if the server and the caller are killed
    for each in files:
        each.close()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        cwd, path = its.recv()
        request = Path(path).read_bytes()
    except (
        EOFError,
        FileNotFoundError,
    ):  # the server was killed; the caller has left, and its folder with it
        return
    its.close()
    _keep_sockets_in(Path(path).parent)
    os.chdir(cwd)
    function, *arguments = pickle.loads(request)
    function(*arguments)


def _keep_sockets_in(folder: Path) -> None:
    """Let multiprocessing make its sockets in the call's folder, in child processes, too.

    By itself it makes a folder for them in the temporary folder (`multiprocessing.util`,
    `get_temp_dir`). A process that is killed leaves that there, as a DataLoader's worker is that
    has sent a tensor and lives at the end of the call.
    """
    if len(os.fsencode(folder / _SOCKET_NAME)) <= _SOCKET_PATH_BYTES:
        process: Any = multiprocessing.current_process()
        process._config["tempdir"] = str(folder)
