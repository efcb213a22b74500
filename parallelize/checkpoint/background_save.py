"""Background saving: a thread writes a snapshot of the tensors while training continues."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch

from parallelize.checkpoint.file_format import Checkpoint
from parallelize.checkpoint.sharded_folder import FolderWrite
from parallelize.runtime.containers import map_leaves

__all__ = ["BackgroundRunner", "SnapshotBuffers"]


class BackgroundRunner:
    """Runs one job at a time in a background thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, job: Callable[[], object]) -> None:
        """Wait for the previous job, then start a new one.

        Raises:
            BaseException: the previous job's exception.
        """
        self.wait()

        def run() -> None:
            try:
                job()
            except BaseException as exc:  # noqa: BLE001 - raised by the next wait(), in the training thread
                self._failure = exc

        # Not a daemon thread: the interpreter waits at exit until the file is written.
        self._thread = threading.Thread(target=run, name="parallelize-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the current job.

        Raises:
            BaseException: the job's exception.
        """
        if self._thread is not None:
            self._thread.join()
        failure, self._failure, self._thread = self._failure, None, None
        if failure is not None:
            raise failure


class SnapshotBuffers:
    """Copies tensors into buffers that the next snapshot reuses: allocating new pages costs more than copying."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def snapshot(self, checkpoint: Checkpoint, to_write: FolderWrite | None) -> tuple[Checkpoint, FolderWrite | None]:
        """Return copies of both arguments, with all tensors in the buffers; overwrites the previous snapshot."""
        buffers, self._buffers = iter(self._buffers), []
        copied: dict[Any, torch.Tensor] = {}  # tied weights: one tensor under several names

        def copy(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.is_meta:
                return value
            key = value.data_ptr(), value.shape, value.stride(), value.dtype, value.device
            if value.numel() == 0 or key not in copied:
                copied[key] = _copy_into(next(buffers, None), value)
                self._buffers.append(copied[key])
            return copied[key]

        entries = {
            name: dataclasses.replace(each, state=map_leaves(copy, each.state))
            for name, each in checkpoint.entries.items()
        }
        if to_write is not None:
            shards = [dataclasses.replace(each, values=copy(each.values)) for each in to_write.shards]
            to_write = dataclasses.replace(to_write, shards=shards)
        return dataclasses.replace(checkpoint, entries=entries), to_write


def _copy_into(buffer: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
        # Pinned memory: the device copies into it at the bandwidth of the bus.
        buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.device.type == "cuda")
    return buffer.copy_(value)
