"""The fork server: it has imported torch once for all calls, and forks their workers.

    caller ── a socket for each call ──> fork server ──> worker (own process group) ──> its children

The messages are drawn in `server_messages`, and `forked_worker` has the worker. When a call's
socket closes before the caller has left the call, as the kernel closes it however the caller ends,
the server ends the workers, with SIGTERM, and SIGKILL to their process groups some seconds later,
and removes the folder. SIGKILL reaches workers that are stopped, or in compiled code, too. The
server is in a session of its own, so a terminal's Ctrl-C and a `timeout` reach the caller alone.

The life of a server, and of the early server that it forks:

    fork server        imports torch ──> imports torch's compiler ──> serves calls ──> ends
                                    │                                │
    early server                    └──> serves calls ───────────────┴──> ends with its last call

Half of the time of the imports goes into torch's compiler and FSDP, which many functions do not
need. So the first call does not wait for them: the early server forks its workers, and those of the
calls that follow at once. A worker of the early server that needs the compiler imports it by
itself. The fork server forks no worker while it imports.

Glossary:

    caller         the process that has started the server, and makes the calls
    control        the socket that brings the sockets of the calls
    early server   serves calls while the fork server imports, see above
    reap           let go of the number of a process that has ended, and is a zombie until then
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, auto
from importlib import import_module
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from parallelize.cluster.call_folders import remove_call_folder
from parallelize.launchers.local.forked_worker import ForkedWorker, die_with_parent
from parallelize.launchers.local.server_messages import (
    EndWorkers,
    LeaveCall,
    Reply,
    Request,
    RunWorkers,
    ServerImports,
    SignalWorkers,
    StartWorkers,
    WorkersEnded,
    WorkersRefused,
    WorkersReport,
)

# Between SIGTERM and SIGKILL, for workers whose caller has ended.
_END_GRACE_S = 5.0
# How often the server looks whether the caller has ended. The control does not show that if a
# process that the caller has forked keeps it open.
_LOOK_EVERY_S = 1.0
# How often the server looks while there are calls. A worker's sentinel does not show its end if
# children of the worker keep it open.
_POLL_EVERY_S = 0.05
_WORKER_MODULE = "parallelize.worker.main"
_OUTPUT_MODULE = "parallelize.worker.process_setup"

# What every worker needs.
TORCH_MODULES = (
    "torch",
    # torch.load imports it.
    "torch.utils.serialization",
    _WORKER_MODULE,
)
# What some workers need, which takes more than a second.
LATER_MODULES = (
    # The first optimizer of a process imports it.
    "torch._dynamo",
    "torch.distributed.fsdp",
)
# Blocked in the server, because some clusters send them to all processes of a job, and in workers
# until they have their handlers.
BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def serve(number: int) -> None:
    """Run the fork server of the process that has started this one.

    Args:
        number: descriptor of the control. Standard input has a `ServerImports` in JSON.
    """
    control = socket.socket(fileno=number)
    # The early server may take a call for which the fork server has been woken up, too.
    control.setblocking(False)  # noqa: FBT003 - positional-only
    caller = _Caller.of_this_process()
    # Ignored, as a caller may do, it would have the kernel reap the workers: no exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    imports = ServerImports(**json.load(sys.stdin))
    with _without_collections():
        _import(imports)
    if imports.packages and not _can_fork():
        _begin_again(number, ServerImports(imports.torch, later=imports.later))
    # One for all workers, which outlives those that are killed. Its start unblocks some signals.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    with contextlib.ExitStack() as until_end:
        if imports.torch:
            # Once, and not in each worker, which takes 20 ms.
            until_end.enter_context(import_module(_WORKER_MODULE).replace_group_functions())
        server = _Server(control, caller)
        server.import_later(imports.later)
        server.serve_calls()
        os._exit(0)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Import modules in the context, without garbage collections of them now or later.

    A tenth of the time of an import goes into collections that find nothing. Later ones, in
    workers, would write to all objects of the modules, so that the kernel copies their pages.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _import(imports: ServerImports) -> None:
    """Import what workers need at once; what packages print was shown by the caller already."""
    for name in imports.torch:
        import_module(name)
    if imports.torch:
        # Now, because packages may keep the streams.
        import_module(_OUTPUT_MODULE).unbuffer_output()
    stderr = os.dup(2)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a descriptor is needed
        os.dup2(nowhere.fileno(), 2)
    for name in imports.packages:
        with contextlib.suppress(BaseException):
            import_module(name)
    os.dup2(stderr, 2)
    os.close(stderr)


def _can_fork() -> bool:
    """Return whether a forked process can use the accelerator.

    It cannot if an imported package has initialized the accelerator. torch tells forked processes
    alone (`poison_fork` of torch/csrc/cuda/Module.cpp), so one is asked.
    """
    torch = import_module("torch")
    # As torch was built, without a question to the driver.
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return True
    module = torch.get_device_module(accelerator)
    if not hasattr(module, "_is_in_bad_fork"):
        return True
    pid = os.fork()
    if pid == 0:
        os._exit(int(module._is_in_bad_fork()))
    return os.waitpid(pid, 0)[1] == 0


def _begin_again(number: int, imports: ServerImports) -> NoReturn:
    """Replace this process by a server of these imports; it keeps its number, and the control."""
    os.set_inheritable(number, True)  # noqa: FBT003 - positional-only
    os.ftruncate(0, 0)
    os.pwrite(0, json.dumps(asdict(imports)).encode(), 0)
    os.lseek(0, 0, os.SEEK_SET)
    os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - as this process was started


@dataclass(frozen=True)
class _Caller:
    """The process that has started the fork server, as the server and the early server see it.

    Args:
        pid: its number.
        pidfd: is readable once it has ended; None: this system has none, or a sandbox refuses it.
    """

    pid: int
    pidfd: io.FileIO | None

    @classmethod
    def of_this_process(cls) -> _Caller:
        """Return the caller, in the process that it has started."""
        pid = os.getppid()
        pidfd = None
        with contextlib.suppress(OSError, AttributeError):
            pidfd = io.FileIO(os.pidfd_open(pid))
        if pidfd is not None and os.getppid() != pid:
            # The caller has ended meanwhile, and another process may have its number.
            pidfd.close()
            pidfd = None
        return cls(pid, pidfd)

    def has_ended(self) -> bool:
        """Return whether it has ended; without a pidfd, only its child can say that."""
        if self.pidfd is None:
            return os.getppid() != self.pid
        ended: list[Any] = wait([self.pidfd], 0)  # type: ignore[list-item]  # any file will do
        return bool(ended)


class _Server:
    """A fork server, or an early server, that serves calls.

    Args:
        control: brings a socket for each call.
        caller: no call comes any more when it has ended.
    """

    def __init__(self, control: socket.socket, caller: _Caller) -> None:
        self._control = control
        self._caller = caller
        self._calls: list[_Call] = []
        # Of an early server: no call comes any more when this is closed.
        self._until: Connection | None = None
        # The number of the early server that this one has forked, until it has ended.
        self._early_server: int | None = None

    def import_later(self, names: Sequence[str]) -> None:
        """Import modules, while the early server serves the calls that come.

        Where the caller has no pidfd, there is no early server: it could not see the end of the
        caller, whose child it is not.
        """
        missing = [name for name in names if name not in sys.modules]
        until: Connection | None = None
        if missing and self._caller.pidfd is not None:
            until = self._fork_early_server()
        with _without_collections():
            for name in missing:
                import_module(name)
        if until is not None:
            until.close()

    def _fork_early_server(self) -> Connection:
        """Fork the early server; return what it sees the end of, to take no more calls."""
        until_there, until_here = multiprocessing.Pipe(duplex=False)
        fork_server = os.getpid()
        # Not by multiprocessing, which would count the early server in the names of its workers.
        pid = os.fork()
        if pid == 0:
            until_here.close()
            self._until = until_there
            self._be_early_server(fork_server)
        until_there.close()
        self._early_server = pid
        return until_here

    def _be_early_server(self, fork_server: int) -> NoReturn:
        """Serve calls in the process that was forked, and end it.

        Args:
            fork_server: number of the process that has forked it.
        """
        exitcode = 1
        try:
            die_with_parent()
            # The fork server may have been killed before that.
            if os.getppid() == fork_server:
                self.serve_calls()
            exitcode = 0
        except BaseException:  # noqa: BLE001 - it is shown, and this process ends
            traceback.print_exc()
        finally:
            os._exit(exitcode)

    def serve_calls(self) -> None:
        """Serve calls until no more can come, and those that have come are over.

        A fork server outlives its early server, which dies with it.
        """
        is_open = True
        while is_open or self._calls or self._early_server is not None:
            awaited: list[Any] = []
            if is_open:
                awaited += self._files()
            for call in self._calls:
                awaited += call.awaited()
            wait(awaited, _POLL_EVERY_S if self._calls else _LOOK_EVERY_S)
            # Looked up before anything is read: all that an ended caller has sent can be read then.
            has_caller = not self._caller.has_ended()
            if is_open:
                is_open = self._accept() and has_caller
            if self._until is not None and self._until.poll():
                is_open = False
            for call in self._calls:
                files = self._files()
                for other_call in self._calls:
                    files += other_call.files()
                call.step(files, has_caller=has_caller)
            self._calls = [call for call in self._calls if not call.connection.closed]
            self._reap_early_server()

    def _files(self) -> list[Any]:
        """Return what this process has open, beside what it has open for its calls."""
        files: list[Any] = [self._control]
        if self._until is not None:
            files.append(self._until)
        if self._caller.pidfd is not None:
            files.append(self._caller.pidfd)
        return files

    def _accept(self) -> bool:
        """Add the calls that the caller has sent; return whether it may send more."""
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
            except BlockingIOError:
                return True
            for descriptor in descriptors:
                self._calls.append(_Call(Connection(descriptor)))
            if not message:
                return False

    def _reap_early_server(self) -> None:
        if self._early_server is None:
            return
        pid, _ = os.waitpid(self._early_server, os.WNOHANG)
        if pid == self._early_server:
            self._early_server = None


class _CallState(Enum):
    """What the server does with the workers of a call.

    RUNNING
      │ EndWorkers, or the caller has ended: SIGTERM to the workers
    ENDING
      │ all have ended, or the grace is over: SIGKILL to their groups
    KILLED
      │ all have ended: they are reaped
    ENDED
      │ the caller has left
    (the connection is closed)
    """

    RUNNING = auto()
    ENDING = auto()
    KILLED = auto()
    ENDED = auto()


class _Call:
    """The workers of a call, as the fork server sees them.

    Attributes:
        connection: to the caller; closed when there is nothing more to do.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._state = _CallState.RUNNING
        self._workers: list[ForkedWorker] = []
        self._reported_exitcodes: list[int | None] = []
        # The call's folder, which is removed after a caller that has ended; "": there is none yet.
        self._folder = ""
        self._kill_at = math.inf
        self._has_caller = True

    def files(self) -> list[Any]:
        """Return what the server has open for this call."""
        pipes = [worker.pipe for worker in self._workers]
        return [self.connection, *pipes]

    def awaited(self) -> list[Any]:
        """Return what shows that there is something to do."""
        living = [worker for worker in self._workers if worker.process.poll() is None]
        awaited: list[Any] = [worker.process.sentinel for worker in living]
        if self._has_caller:
            awaited.append(self.connection)
        return awaited

    def step(self, files: Sequence[Any], *, has_caller: bool) -> None:
        """Do what the caller asks for, report ends of workers, and go on to the next states.

        Args:
            files: what the server has open, and workers must not keep.
            has_caller: whether the caller runs.
        """
        self._read(files, has_caller=has_caller)
        exitcodes = [worker.process.poll() for worker in self._workers]
        have_ended = None not in exitcodes
        is_before_kill = self._state in (_CallState.RUNNING, _CallState.ENDING)
        if is_before_kill and exitcodes != self._reported_exitcodes:
            self._reported_exitcodes = exitcodes
            pids = [worker.process.pid for worker in self._workers]
            self._reply(WorkersReport(pids, exitcodes))
        is_late = time.monotonic() > self._kill_at
        if self._state is _CallState.ENDING and (have_ended or is_late):
            self._state = _CallState.KILLED
            for worker in self._workers:
                worker.process.kill_group()
        if self._state is _CallState.KILLED and have_ended:
            self._state = _CallState.ENDED
            self._reap_workers()
            self._reply(WorkersEnded())
        if self._state is _CallState.ENDED and not self._has_caller:
            if self._folder:
                remove_call_folder(Path(self._folder))
            self.connection.close()

    def _reap_workers(self) -> None:
        for worker in self._workers:
            worker.process.reap()
            worker.process.close()
            worker.pipe.close()
        self._workers.clear()

    def _read(self, files: Sequence[Any], *, has_caller: bool) -> None:
        """Read what the caller has sent: if it was killed, too, as that names the folder."""
        while self._has_caller:
            request: Request = LeaveCall()
            # Without a caller, a process that it has forked may keep the connection open.
            with contextlib.suppress(EOFError, OSError):
                if self.connection.poll():
                    request = self.connection.recv()
                elif has_caller:
                    return
            self._handle(request, files, has_caller=has_caller)

    def _handle(self, request: Request, files: Sequence[Any], *, has_caller: bool) -> None:
        match request:
            case StartWorkers():
                self._folder = request.folder
                # Those of earlier calls say nothing about this one.
                for number in BLOCKED_SIGNALS:
                    _take_pending_signal(number)
                if has_caller:
                    self._start(request.number, files)
            case RunWorkers():
                # If the caller was killed meanwhile, no worker was forked.
                for worker, worker_request in zip(self._workers, request.requests, strict=False):
                    worker.send(worker_request)
            case SignalWorkers():
                self._signal(request.number, request.pids)
            case EndWorkers():
                self._end(request.grace_s)
            case LeaveCall():
                self._has_caller = False
                if self._state is _CallState.RUNNING:
                    self._end(_END_GRACE_S)

    def _start(self, number: int, files: Sequence[Any]) -> None:
        """Fork the workers; a later one must not keep the pipes of those before it."""
        pipes: list[Connection] = []
        for _ in range(number):
            try:
                worker = ForkedWorker.fork([*files, *pipes])
            except OSError as error:
                self._reply(WorkersRefused(str(error)))
                self._end(0.0)
                return
            self._workers.append(worker)
            pipes.append(worker.pipe)

    def _signal(self, number: int, pids: Sequence[int]) -> None:
        """Send a signal to workers, unless it has come to this process, and so to them, too."""
        if _take_pending_signal(number):
            return
        for worker in self._workers:
            if worker.process.pid in pids:
                worker.process.send_signal(number)

    def _end(self, grace_s: float) -> None:
        """End the workers, now or earlier than it was said before."""
        if self._state is _CallState.RUNNING:
            self._state = _CallState.ENDING
            for worker in self._workers:
                worker.process.terminate()
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)

    def _reply(self, reply: Reply) -> None:
        with contextlib.suppress(OSError):  # The caller has ended.
            self.connection.send(reply)


def _take_pending_signal(number: int) -> bool:
    """Return whether a blocked signal has come to this process; forget it.

    The caller's terminal and its process group do not reach this process. So the signal was sent to
    all processes of a job.
    """
    if number not in signal.sigpending():
        return False
    signal.sigwait([number])
    return True
