"""Background saving: a process writes a snapshot of the tensors, in shared memory, while training continues.

training process                                  writer process
copies the tensors into shared memory ──────────▶ writes them to the disk at low priority
trains                                            (one snapshot at a time: one copy of what this rank writes)
a thread waits for the result ◀────────────────── result, or exception
"""

from __future__ import annotations

import contextlib
import functools
import io
import mmap
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

from parallelize.checkpoint.safe_types import is_wrapper
from parallelize.errors import ParallelizeError

__all__ = ["MIN_BYTES", "BackgroundWriter", "serve"]

MIN_BYTES = 8_000_000  # a smaller state is written at once, in less time than the writer process takes to start

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
        self._connection: Any = None
        self._memory = -1
        self._buffer: Any = b""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        """Copy the arguments, and call the function with them in the writer process; what is returned waits for it."""
        content = io.BytesIO()
        snapshot = _Snapshot(content)
        snapshot.dump((function, arguments))
        if snapshot.size < MIN_BYTES:
            done: Future[Any] = Future()
            try:
                done.set_result(function(*arguments))
            except Exception as exc:  # noqa: BLE001 - raised by the caller once it has told the other ranks
                done.set_exception(exc)
            return done.result
        buffer = self._shared_memory(snapshot.size)
        for place, tensor in snapshot.tensors:
            _tensor_at(buffer, *place).copy_(tensor, non_blocking=True)
        for device in {tensor.device for _, tensor in snapshot.tensors if tensor.device.type != "cpu"}:
            torch.get_device_module(device).synchronize(device)
        with contextlib.suppress(OSError):  # the process has ended: _result raises
            self._connection.send_bytes(pickle.dumps((snapshot.size, content.getvalue())))
        return self._result

    def _shared_memory(self, size: int) -> Any:
        """Return memory that is shared with the writer process; it is reused, because new pages are slow to write."""
        if self._process is None:
            self._start()
        if size > len(self._buffer):
            os.ftruncate(self._memory, size)
            self._buffer = mmap.mmap(self._memory, size)
        return self._buffer

    def complete(self, job: Callable[[], object]) -> None:
        """Run the job, which waits for the writer process, in a thread; the interpreter waits for it at exit."""
        self._job = self._thread.submit(job)

    def raise_failure(self) -> None:
        """Raise the exception of the last job, if it has failed."""
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the current job, or end the writer process and raise the job's exception."""
        job, self._job = self._job, None
        try:
            if job is not None:
                job.result()
        except Exception:  # the other ranks fail once they are told; then this one has little time for `close`
            self._end_process()
            raise

    def close(self) -> None:
        """Wait for the current job, and end the writer process."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._end_process()

    def _end_process(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.wait()
            os.close(self._memory)
            self._process, self._buffer = None, b""

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
        try:
            result, failure = self._connection.recv()
        except (EOFError, OSError) as exc:
            raise ParallelizeError(
                "the process that writes checkpoints has ended",
                why="it was killed, or could not be started; its output above may have the reason",
                fix="if memory is short, use in_background=False; the previous checkpoint is still there",
            ) from exc
        if failure is not None:
            raise failure
        return result


class _Snapshot(pickle.Pickler):
    """Pickler that gives each tensor a place in shared memory; equal tensors, such as tied weights, share it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[tuple[Any, torch.Tensor]] = []
        self.size = 0
        self._places: dict[Any, Any] = {}

    def persistent_id(self, obj: Any) -> Any:
        """Return the place of a tensor; of a tensor subclass, each inner tensor gets a place."""
        if not isinstance(obj, torch.Tensor) or obj.is_meta or is_wrapper(obj):
            return None
        key = obj.data_ptr(), obj.shape, obj.stride(), obj.dtype, obj.device
        if obj.numel() == 0 or key not in self._places:
            is_dense = obj.untyped_storage().nbytes() == obj.nbytes
            stride = obj.stride() if is_dense else torch.empty(obj.shape, device="meta").stride()
            self._places[key] = self.size, tuple(obj.shape), stride, obj.dtype
            self.tensors.append((self._places[key], obj))
            self.size += -(-obj.nbytes // _ALIGNMENT) * _ALIGNMENT
        return self._places[key]


def _tensor_at(buffer: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return the tensor at a place in the memory, with a storage of its own."""
    num_bytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(buffer, dtype=torch.uint8, offset=offset, count=num_bytes)
    return flat.view(dtype).as_strided(shape, stride)


def _call(content: bytes, buffer: Any) -> Any:
    """Make the call in a snapshot; the same place is the same storage, which torch.save writes once."""
    tensor_at = functools.cache(functools.partial(_tensor_at, buffer))
    unpickler: Any = pickle.Unpickler(io.BytesIO(content))
    unpickler.persistent_load = lambda place: tensor_at(*place).detach()
    function, arguments = unpickler.load()
    return function(*arguments)


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
        result = failure = None
        try:
            result = _call(content, mmap.mmap(memory_fd, size) if size else b"")
        except Exception as exc:  # noqa: BLE001 - raised in the training process
            failure = exc
        connection.send((result, failure))


def _exit_with_parent(parent: int) -> None:
    """End this process when the training process ends: a restarted run must find no writer of the killed one."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)
