"""Background saving: a process writes a snapshot of the tensors, in shared memory, while training continues.

training process                                  writer process
copies the tensors into shared memory ──────────▶ writes them to the disk at low priority
trains                                            (one snapshot at a time: one copy of what this rank writes)
a thread waits for the result ◀────────────────── result, or exception
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

from parallelize.errors import ParallelizeError

__all__ = ["MIN_BYTES", "BackgroundWriter", "serve"]

MIN_BYTES = 8_000_000
"""A state with fewer bytes of tensors is written at once: this takes less time than to start the writer process."""

_ALIGNMENT = 64
_PARENT_CHECK_S = 0.2
_START = (
    "import pickle, sys; sys.path[:] = pickle.loads(bytes.fromhex(sys.argv[1])); "
    "from parallelize.checkpoint.background_save import serve; serve(*map(int, sys.argv[2:]))"
)


class BackgroundWriter:
    """Starts one job at a time in a writer process, and completes it in a thread that only waits."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parallelize-checkpoint")
        self._job: Future[object] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._memory = -1
        self._capacity = 0
        self._buffer: Any = None

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        """Copy the arguments, with the tensors in them, and call the function with them in the writer process.

        Returns:
            A function that waits for the result and returns it, or raises the exception of the call.
        """
        done: Future[Any] = Future()
        try:
            if self._is_sent(function, *arguments):
                return self._result
            done.set_result(function(*arguments))
        except Exception as exc:  # noqa: BLE001 - raised by the caller once it has told the other ranks
            done.set_exception(exc)
        return done.result

    def _is_sent(self, function: Callable[..., Any], *arguments: Any) -> bool:
        """Send a call to the writer process, unless its arguments are small."""
        content = io.BytesIO()
        snapshot = _Snapshot(content)
        snapshot.dump((function, arguments))
        if snapshot.size < MIN_BYTES:
            return False
        if self._process is None:
            self._start()
        if snapshot.size > self._capacity:
            self._buffer = None
            os.ftruncate(self._memory, snapshot.size)
            self._buffer, self._capacity = mmap.mmap(self._memory, snapshot.size), snapshot.size
        for where, tensor in snapshot.tensors:
            _tensor_at(self._buffer, *where).copy_(tensor)
        assert self._connection is not None
        try:
            self._connection.send_bytes(pickle.dumps((snapshot.size, content.getvalue())))
        except OSError as exc:
            raise _ended_error() from exc
        return True

    def complete(self, job: Callable[[], object]) -> None:
        """Run the job, which waits for the writer process, in a thread; the interpreter waits for it at exit."""
        self._job = self._thread.submit(job)

    def raise_failure(self) -> None:
        """Raise the exception of the last job, if it has failed."""
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the current job.

        Raises:
            BaseException: the job's exception.
        """
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def close(self) -> None:
        """Wait for the current job, and end the writer process."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._process is not None and self._connection is not None:
                self._connection.close()
                self._process.wait()
                os.close(self._memory)
                self._process = self._connection = self._buffer = None
                self._capacity = 0

    def _start(self) -> None:
        with tempfile.TemporaryFile() as file:  # if there is no file in memory
            self._memory = os.memfd_create("checkpoint") if hasattr(os, "memfd_create") else os.dup(file.fileno())
        self._connection, theirs = Pipe()
        path, fds = pickle.dumps(sys.path).hex(), (theirs.fileno(), self._memory)
        command = [sys.executable, "-c", _START, path, *map(str, fds), str(os.getpid())]
        # In a session of its own, it finishes the file when Ctrl-C interrupts the training process.
        self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()

    def _result(self) -> Any:
        assert self._connection is not None
        try:
            result, failure = self._connection.recv()
        except (EOFError, OSError) as exc:
            raise _ended_error() from exc
        if failure is not None:
            raise failure
        return result


def _ended_error() -> ParallelizeError:
    return ParallelizeError(
        "the process that writes checkpoints has ended",
        why="it was killed, or could not be started; its output above may have the reason",
        fix="if memory is short, use in_background=False; the previous checkpoint is still there",
    )


class _Snapshot(pickle.Pickler):
    """Pickler that gives each tensor a place in shared memory; equal tensors, such as tied weights, share it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[tuple[Any, torch.Tensor]] = []
        self.size = 0
        self._places: dict[Any, Any] = {}

    def persistent_id(self, obj: Any) -> Any:
        """Return the place of a tensor."""
        if not isinstance(obj, torch.Tensor) or obj.is_meta:
            return None
        key = obj.data_ptr(), obj.shape, obj.stride(), obj.dtype, obj.device
        if obj.numel() == 0 or key not in self._places:
            is_dense = obj.untyped_storage().nbytes() == obj.nbytes
            stride = obj.stride() if is_dense else torch.empty(obj.shape, device="meta").stride()
            self._places[key] = self.size, tuple(obj.shape), stride, obj.dtype
            self.tensors.append((self._places[key], obj))
            self.size += -(-obj.nbytes // _ALIGNMENT) * _ALIGNMENT
        return self._places[key]


class _FromSnapshot(pickle.Unpickler):
    def __init__(self, content: bytes, buffer: Any) -> None:
        super().__init__(io.BytesIO(content))
        self._buffer = buffer
        self._tensors: dict[Any, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """Return the tensor at a place: the same storage for the same place, which torch.save writes once."""
        if pid not in self._tensors:
            self._tensors[pid] = _tensor_at(self._buffer, *pid)
        return self._tensors[pid].detach()


def _tensor_at(buffer: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return the tensor at a place in shared memory, with a storage of its own."""
    num_bytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    return (
        torch.frombuffer(buffer, dtype=torch.uint8, offset=offset, count=num_bytes)
        .view(dtype)
        .as_strided(shape, stride)
    )


def serve(connection_fd: int, memory_fd: int, parent: int) -> None:
    """Run jobs in the writer process until the training process closes the connection or ends."""
    os.nice(10)
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, args=[parent], daemon=True).start()
    connection = Connection(connection_fd)
    while True:
        try:
            size, content = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        buffer = mmap.mmap(memory_fd, size) if size else None
        result = failure = None
        try:
            function, arguments = _FromSnapshot(content, buffer).load()
            result = function(*arguments)
        except Exception as exc:  # noqa: BLE001 - raised in the training process
            failure = _sendable(exc)
        arguments = buffer = None
        connection.send((result, failure))


def _sendable(exc: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(exc))
    except Exception:  # noqa: BLE001 - any exception: a class may define its own pickling
        return RuntimeError("".join(traceback.format_exception(exc)))
    return exc


def _exit_with_parent(parent: int) -> None:
    """End this process when the training process ends: a restarted run must find no writer of the killed one."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)
