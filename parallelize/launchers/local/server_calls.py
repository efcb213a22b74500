"""The fork servers of a calling process, and the connection of a call to one of them: the caller's side.

first call           a server is started with the caller's variables, and the call gets a socket to it
later calls          the same server, as long as the variables that libraries read at import are the same
end of the process   the server is killed; one with an open call ends that call's workers by itself
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from parallelize.call.settings import absolute_search_path
from parallelize.launchers.local import fork_server
from parallelize.launchers.local.fork_server import BLOCKED_SIGNALS, TORCH_MODULES, LeaveCall

_KILL_TIMEOUT_S = 5.0  # A killed process that waits for a device ends later.
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
    r"(PY)?TORCH(?!ELASTIC_|INDUCTOR_CACHE_DIR$)|NCCL_|GLOO_|LD_|MKL_|OMP_(?!NUM_THREADS)|KMP_|"
    r"PARALLELIZE_PRELOAD$"
)


@dataclass(eq=False)
class _Server:
    """A fork server, as its caller sees it.

    Args:
        owner: process that has started it.
        variables: those that libraries read at import, by which a call chooses its server; None: the
            server imports nothing.
        packages: names of what it imports.
        process: the server.
        control: socket by which it gets the socket of each call; it ends when this is closed, and
            its calls have ended.
        open_calls: how many calls the caller has not left.
    """

    owner: int
    variables: Mapping[str, str] | None
    packages: Sequence[str]
    process: subprocess.Popen[bytes]
    control: socket.socket
    open_calls: int = 0

    @property
    def is_running(self) -> bool:
        """Whether it takes calls. One that was killed has closed its socket some time before it has ended."""
        return self.control.fileno() >= 0 and not wait([self.control], 0)


class ServerCall:
    """A call at the fork server, as its caller sees it.

    Args:
        server: the server.
        connection: for the messages of `fork_server`.
        lock: guards the sockets of the servers, which calls in other threads use, too.

    Attributes:
        connection: as above.
    """

    def __init__(self, server: _Server, connection: Connection, lock: threading.Lock) -> None:
        self._server = server
        self.connection = connection
        self._lock = lock

    def is_server_running(self) -> bool:
        """Return whether the server has not ended, so that it keeps the numbers of its workers."""
        return self._server.process.poll() is None

    def describe_server(self) -> str:
        """Say what the server does as long as it does not answer."""
        pid = self._server.process.pid
        with contextlib.suppress(OSError):  # The server has ended, or this is not Linux.
            # The state follows the name of the program, which stands in parentheses.
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "T":
                return f"the fork server (process {pid}), which a signal has stopped"
        packages = ", ".join(self._server.packages) or "nothing but this package"
        return f"the fork server (process {pid}), which imports {packages}"

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
    def connected(self, environ: Mapping[str, str], *, is_preloaded: bool) -> Iterator[ServerCall]:
        """Connect to a fork server for the workers of one call; leave the call with the block.

        Args:
            environ: variables of a fork server that has to be started: the first, after a fork of this
                process, or if those have changed that libraries read when they are imported.
            is_preloaded: whether the processes are forked from a server that has imported torch.
        """
        callers_end, servers_end = socket.socketpair()
        connection = Connection(callers_end.detach())
        with connection:
            with self._lock, servers_end:
                server = self._running(environ, is_preloaded=is_preloaded)
                server.open_calls += 1
                with contextlib.suppress(
                    OSError
                ):  # It has just ended, which closes the connection.
                    socket.send_fds(server.control, [b"+"], [servers_end.fileno()])
            try:
                yield ServerCall(server, connection, self._lock)
            finally:
                # Closing is not enough: a child that this process has forked meanwhile may keep the
                # connection open.
                with contextlib.suppress(OSError):
                    connection.send(LeaveCall())
                with self._lock:
                    server.open_calls -= 1

    def _running(self, environ: Mapping[str, str], *, is_preloaded: bool) -> _Server:
        """Return a running server for these variables, a new one if there is none; forget those that have ended."""
        variables = _read_at_import(environ) if is_preloaded else None
        for server in list(self._servers):
            if server.is_running and (server.owner, server.variables) == (os.getpid(), variables):
                return server
            server.control.close()  # A server of other variables ends with its last call.
            if server.process.poll() is not None:
                self._servers.remove(server)
        server = _started(
            environ, variables, _modules_to_import(environ, is_preloaded=is_preloaded)
        )
        self._servers.append(server)
        return server

    def end(self) -> None:
        """End the servers, at the end of this process."""
        for server in self._servers:
            server.control.close()
            # A server with a call, of a thread that ends with this process, ends that call's workers,
            # and removes its folder.
            if server.owner == os.getpid() and not server.open_calls:
                server.process.kill()  # It may still import.
                server.process.wait()


def _read_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if _READ_AT_IMPORT.match(name)}


def _modules_to_import(environ: Mapping[str, str], *, is_preloaded: bool) -> list[str]:
    """Return the modules that a new server imports: torch, and packages of the caller that may be forked."""
    if not is_preloaded:
        return []
    modules = list(TORCH_MODULES)
    if environ.get("PARALLELIZE_PRELOAD") != "0":
        modules += [name for name in list(sys.modules) if name.partition(".")[0] in _FORKABLE]
    return modules


def _started(
    environ: Mapping[str, str], variables: Mapping[str, str] | None, modules: Sequence[str]
) -> _Server:
    """Start a server that imports these modules."""
    control, servers_control = socket.socketpair()
    # `python -c` puts the current folder first: a `tqdm.py` there would replace the installed package.
    path = absolute_search_path()
    number = servers_control.fileno()
    code = f"import sys; sys.path[:] = {path!r}; from {fork_server.__name__} import serve; serve({number})"
    # A file, not a pipe: the server gets all of it if this process is killed, and a server that
    # does not read it is not waited for here.
    with tempfile.TemporaryFile() as names, servers_control:
        names.write(json.dumps(modules).encode())
        names.seek(0)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        try:
            process = subprocess.Popen(
                [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code],  # type: ignore[attr-defined]  # private
                # torch.cuda.is_available(), which packages call when they are imported, then asks NVML, and does
                # not initialize the driver. Workers have the variables of their call.
                env={"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **environ},
                cwd="/",
                stdin=names,
                stdout=subprocess.DEVNULL,  # workers have files
                pass_fds=[number],
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    packages = list(dict.fromkeys(name.partition(".")[0] for name in modules))
    return _Server(os.getpid(), variables, packages, process, control)
