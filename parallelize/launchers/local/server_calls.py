"""The fork servers of a calling process, and the connection of a call to one of them.

    first call           a server is started with the caller's variables, and the call gets a socket
                         to it
    later calls          the same server, as long as the variables that libraries read at import are
                         the same
    end of the process   the server is killed; one with an open call ends that call's workers by
                         itself

This is the caller's side; the server's is `fork_server`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from parallelize.call.settings import absolute_search_path
from parallelize.launchers.local import fork_server
from parallelize.launchers.local.fork_server import BLOCKED_SIGNALS, LATER_MODULES, TORCH_MODULES
from parallelize.launchers.local.server_messages import LeaveCall, Reply, Request, ServerImports

# A killed process that waits for a device ends later.
_KILL_TIMEOUT_S = 5.0
# Packages that start no thread or connection when they are imported, and make no random generator
# of their own.
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
# Variables that libraries read when they are imported. The number of threads is none of them, since
# workers set it. Neither is the folder that torch._dynamo sets when it is imported, as it is by the
# first optimizer of a process.
_READ_AT_IMPORT = re.compile(
    r"(PY)?TORCH(?!ELASTIC_|INDUCTOR_CACHE_DIR$)|NCCL_|GLOO_|LD_|MKL_|OMP_(?!NUM_THREADS)|KMP_|"
    r"PARALLELIZE_PRELOAD$"
)
# In the code of a function, these say that it trains, so that it needs torch's compiler.
_NAMES_IN_TRAINING = frozenset({"backward", "optim", "parallel_model"})


@dataclass(eq=False)
class _Server:
    """A fork server, as its caller sees it.

    Args:
        owner: number of the process that has started it.
        variables: those that libraries read at import, by which a call chooses its server; None:
            the server imports nothing.
        imports: what it imports.
        process: the server.
        control: socket by which it gets the socket of each call; it ends when this is closed, and
            its calls have ended.
        open_calls: how many calls the caller has not left.
    """

    owner: int
    variables: Mapping[str, str] | None
    imports: ServerImports
    process: subprocess.Popen[bytes]
    control: socket.socket
    open_calls: int = 0

    @property
    def is_running(self) -> bool:
        """Whether it takes calls.

        One that was killed has closed its end of the control some time before it has ended, unless
        its early server still has to be killed.
        """
        if self.control.fileno() < 0 or wait([self.control], 0):
            return False
        return self.process.poll() is None


class ServerCall:
    """A call at the fork server, as its caller sees it.

    Args:
        server: the server.
        connection: to the server.
        lock: guards the sockets of the servers, which calls in other threads use, too.
    """

    def __init__(self, server: _Server, connection: Connection, lock: threading.Lock) -> None:
        self._server = server
        self._connection = connection
        self._lock = lock

    def send(self, request: Request) -> None:
        """Send a request, unless the server has ended, as `receive` will find."""
        with contextlib.suppress(OSError):
            self._connection.send(request)

    def receive(self, timeout_s: float) -> Reply | None:
        """Return the next reply; None: there is none within the timeout.

        Raises:
            EOFError: the server has ended.
            OSError: likewise.
        """
        if not self._connection.poll(timeout_s):
            return None
        reply: Reply = self._connection.recv()
        return reply

    def is_server_running(self) -> bool:
        """Return whether the server has not ended, so that it keeps the numbers of its workers.

        The early server, which may be the one that has forked them, closes the connection when it
        ends. Replies that were sent before that do not hide it.
        """
        hangup = select.poll()
        # Without events, the poll answers only that the other end is closed.
        hangup.register(self._connection.fileno(), 0)
        return self._server.process.poll() is None and not hangup.poll(0)

    def describe_server(self) -> str:
        """Say what the server does as long as it does not answer."""
        pid = self._server.process.pid
        with contextlib.suppress(OSError):  # The server has ended, or this is not Linux.
            # The state follows the name of the program, which stands in parentheses.
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "T":
                return f"the fork server (process {pid}), which a signal has stopped"
        imports = self._server.imports
        modules = [*imports.torch, *imports.packages]
        packages = dict.fromkeys(name.partition(".")[0] for name in modules)
        names = ", ".join(packages) or "nothing but this package"
        return f"the fork server (process {pid}), which imports {names}"

    def kill_server(self) -> None:
        """Kill the server, which no call uses any more; Linux kills its workers with it."""
        with self._lock:
            self._server.control.close()
        self._server.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.process.wait(_KILL_TIMEOUT_S)


class ForkServers:
    """The fork servers that a process has started: usually one, which all calls share.

    Calls may be made in several threads, so that a lock guards what is written here.
    """

    def __init__(self) -> None:
        self._servers: list[_Server] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def connected(
        self, environ: Mapping[str, str], *, is_preloaded: bool, imports_later: bool
    ) -> Iterator[ServerCall]:
        """Connect to a fork server for the workers of one call; leave the call with the block.

        Args:
            environ: variables of a fork server that has to be started: the first, after a fork of
                this process, or if those have changed that libraries read when they are imported.
            is_preloaded: whether the processes are forked from a server that has imported torch.
            imports_later: whether a server that has to be started forks them before it imports
                torch's compiler. Then each of them that needs the compiler imports it.
        """
        callers_end, servers_end = socket.socketpair()
        connection = Connection(callers_end.detach())
        with connection:
            with self._lock, servers_end:
                server = self._running(
                    environ, is_preloaded=is_preloaded, imports_later=imports_later
                )
                server.open_calls += 1
                # A server that has just ended closes the connection, too.
                with contextlib.suppress(OSError):
                    socket.send_fds(server.control, [b"+"], [servers_end.fileno()])
            call = ServerCall(server, connection, self._lock)
            try:
                yield call
            finally:
                # Closing is not enough: a child that this process has forked meanwhile may keep the
                # connection open.
                call.send(LeaveCall())
                with self._lock:
                    server.open_calls -= 1

    def _running(
        self, environ: Mapping[str, str], *, is_preloaded: bool, imports_later: bool
    ) -> _Server:
        """Return a running server for these variables; forget those that have ended."""
        variables = _read_at_import(environ) if is_preloaded else None
        for server in list(self._servers):
            has_variables = (server.owner, server.variables) == (os.getpid(), variables)
            if has_variables and server.is_running:
                return server
            # A server of other variables ends with its last call.
            server.control.close()
            if server.process.poll() is not None:
                self._servers.remove(server)
        imports = ServerImports()
        if is_preloaded:
            imports = _imports_of_server(environ, imports_later=imports_later)
        server = _started(environ, variables, imports)
        self._servers.append(server)
        return server

    def end(self) -> None:
        """End the servers, at the end of this process."""
        for server in self._servers:
            server.control.close()
            # A server with a call, of a thread that ends with this process, ends that call's
            # workers, and removes its folder.
            if server.owner == os.getpid() and not server.open_calls:
                # Not by closing alone, because it may still import.
                server.process.kill()
                server.process.wait()


def names_training(function: Callable[..., Any]) -> bool:
    """Return whether a function, or one of its module that it calls by name, names what trains.

    This decides only how soon the workers of a first call are forked, so it may be wrong.
    """
    module = getattr(function, "__module__", None)
    unread: list[Any] = [function]
    read: set[CodeType] = set()
    while unread:
        current = unread.pop()
        if not isinstance(current, FunctionType) or current.__code__ in read:
            continue
        if current.__module__ != module:
            continue
        read.add(current.__code__)
        names = _names_in(current.__code__)
        if names & _NAMES_IN_TRAINING:
            return True
        unread += [current.__globals__.get(name) for name in names]
    return False


def _names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function, and in functions inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _read_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries read when they are imported."""
    return {name: value for name, value in environ.items() if _READ_AT_IMPORT.match(name)}


def _imports_of_server(environ: Mapping[str, str], *, imports_later: bool) -> ServerImports:
    """Return what a new server imports: torch, and what the caller has imported of packages.

    A caller that has imported torch's compiler has made an optimizer, or compiles: its functions
    need the compiler, too.
    """
    torch_modules = list(TORCH_MODULES)
    later = []
    for name in LATER_MODULES:
        if imports_later and name not in sys.modules:
            later.append(name)
        else:
            torch_modules.append(name)
    packages = []
    if environ.get("PARALLELIZE_PRELOAD") != "0":
        packages = [name for name in list(sys.modules) if name.partition(".")[0] in _FORKABLE]
    return ServerImports(torch_modules, packages, later)


def _started(
    environ: Mapping[str, str], variables: Mapping[str, str] | None, imports: ServerImports
) -> _Server:
    """Start a server."""
    control, servers_control = socket.socketpair()
    number = servers_control.fileno()
    # `python -c` puts the current folder first: a `tqdm.py` there would replace the installed
    # package.
    code = (
        f"import sys; sys.path[:] = {absolute_search_path()!r}; "
        f"from {fork_server.__name__} import serve; serve({number})"
    )
    # A file, not a pipe: the server gets all of it if this process is killed, and a server that
    # does not read it is not waited for here.
    with tempfile.TemporaryFile() as imports_file, servers_control:
        imports_file.write(json.dumps(asdict(imports)).encode())
        imports_file.seek(0)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        try:
            process = subprocess.Popen(
                [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code],  # type: ignore[attr-defined]  # private
                # torch.cuda.is_available(), which packages call when they are imported, then asks
                # NVML, and does not initialize the driver. Workers have the variables of their
                # call.
                env={"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **environ},
                cwd="/",
                stdin=imports_file,
                # Workers have files.
                stdout=subprocess.DEVNULL,
                pass_fds=[number],
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return _Server(os.getpid(), variables, imports, process, control)
