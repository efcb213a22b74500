"""Writing a checkpoint while the loop goes on: from a copy, in a thread, one at a time."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch

from parallelize.checkpoint.file_format import Checkpoint
from parallelize.checkpoint.sharded_folder import Share
from parallelize.runtime.containers import map_leaves

__all__ = ["Background", "Copies"]


class Background:
    """Runs one job at a time beside the loop."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, job: Callable[[], object]) -> None:
        """Run a job once the one before it has ended.

        Raises:
            BaseException: what the one before it has raised.
        """
        self.wait()

        def run() -> None:
            try:
                job()
            except BaseException as exc:  # noqa: BLE001 - it belongs to the loop's thread, which raises it
                self._failure = exc

        # No daemon: an interpreter that ends waits for the file.
        self._thread = threading.Thread(target=run, name="parallelize-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until nothing runs.

        Raises:
            BaseException: what the job has raised.
        """
        if self._thread is not None:
            self._thread.join()
        failure, self._failure, self._thread = self._failure, None, None
        if failure is not None:
            raise failure


class Copies:
    """Copies of tensors in memory that is kept for the next ones: new pages cost more than copying does."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def of(self, checkpoint: Checkpoint, share: Share | None) -> tuple[Checkpoint, Share | None]:
        """The same, apart from what the loop changes; the copies before it are overwritten."""
        before, self._kept = iter(self._kept), []
        copied: dict[Any, torch.Tensor] = {}  # tied weights are one tensor under several names

        def copy(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.is_meta:
                return value
            key = value.data_ptr(), value.shape, value.stride(), value.dtype, value.device
            if value.numel() == 0 or key not in copied:
                copied[key] = self._copied(value, next(before, None))
                self._kept.append(copied[key])
            return copied[key]

        entries = {
            name: dataclasses.replace(each, state=map_leaves(copy, each.state))
            for name, each in checkpoint.entries.items()
        }
        if share is not None:
            parts = [dataclasses.replace(each, values=copy(each.values)) for each in share.parts]
            share = dataclasses.replace(share, parts=parts)
        return dataclasses.replace(checkpoint, entries=entries), share

    @staticmethod
    def _copied(value: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
        if memory is None or memory.shape != value.shape or memory.dtype != value.dtype:
            # Pinned: a copy from the device to it is as fast as the bus.
            memory = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.device.type == "cuda")
        return memory.copy_(value)
