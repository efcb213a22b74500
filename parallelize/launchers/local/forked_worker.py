"""A worker of the fork server: how it is forked and ended, and what it does before it has its call.

A worker that has ended stays a zombie until the whole call is over. As long as it does, no other
process gets its number, by which the server sends signals to it and to its group. A group is the
process group that a worker leads: what it has started is in it, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import popen_fork
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from parallelize.launchers.local.server_messages import WorkerCall, WorkerRequest

# PR_SET_PDEATHSIG of <sys/prctl.h>.
_SIGNAL_OF_PARENTS_DEATH = 1
# The path of a socket has at most so many bytes: `sun_path` of <sys/un.h>, without its last zero.
_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
# As multiprocessing.connection.arbitrary_address names it.
_SOCKET_NAME = "listener-12345678"


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
            if end is not None and end.si_code == os.CLD_EXITED:
                self.returncode = end.si_status
            elif end is not None:
                self.returncode = -end.si_status
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if the worker has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

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


@dataclass(frozen=True, eq=False)
class ForkedWorker:
    """A worker, as the server sees it.

    Args:
        process: the process.
        pipe: for its `WorkerRequest`; closed once that is sent.
    """

    process: _WaitingFork
    pipe: Connection

    @classmethod
    def fork(cls, files: Sequence[Any]) -> ForkedWorker:
        """Fork a worker.

        Args:
            files: what the server has open, and the worker must not keep.

        Raises:
            OSError: there are too many processes, or there is too little memory.
        """
        workers_end, servers_end = multiprocessing.Pipe(duplex=False)
        process: Any = multiprocessing.get_context("fork").Process(
            target=_work, args=([*files, servers_end], workers_end)
        )
        # The class that `start` calls.
        process._Popen = _WaitingFork
        with workers_end:
            try:
                process.start()
            except OSError:
                servers_end.close()
                raise
        return cls(process._popen, servers_end)

    def send(self, request: WorkerRequest) -> None:
        """Say what the worker runs."""
        with self.pipe, contextlib.suppress(OSError):  # The worker was killed.
            # So little that it waits for no reader, such as a worker that is stopped.
            self.pipe.send(request)


def die_with_parent() -> None:
    """Let Linux kill this process when its parent ends; other systems have no such thing."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENTS_DEATH, signal.SIGKILL)


def _work(files: Sequence[Any], pipe: Connection) -> None:
    """Be a worker: a process in which only the imports are left of the fork server.

    Args:
        files: what the server has open.
        pipe: brings the worker's request.
    """
    # A process group of its own, so that all processes started from here can be killed together.
    os.setsid()
    # If the server and the caller are killed.
    die_with_parent()
    for file in files:
        file.close()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        request: WorkerRequest = pipe.recv()
        call_bytes = Path(request.path).read_bytes()
    except (EOFError, FileNotFoundError):
        # The server was killed; or the caller has left, and its folder with it.
        return
    pipe.close()
    _keep_sockets_in(Path(request.path).parent)
    os.chdir(request.current_folder)
    call: WorkerCall = pickle.loads(call_bytes)
    call.function(*call.arguments)


def _keep_sockets_in(folder: Path) -> None:
    """Let multiprocessing make its sockets in the call's folder, in child processes, too.

    By itself it makes a folder for them in the temporary folder (`multiprocessing.util`,
    `get_temp_dir`). A process that is killed leaves that there, as a DataLoader's worker is that
    has sent a tensor and lives at the end of the call.
    """
    if len(os.fsencode(folder / _SOCKET_NAME)) <= _SOCKET_PATH_BYTES:
        process: Any = multiprocessing.current_process()
        process._config["tempdir"] = str(folder)
