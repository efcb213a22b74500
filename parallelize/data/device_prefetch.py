"""Prefetching: copies the next batches to the device on a side stream while the current step runs.

    current stream     | step k-1      | wait for copy k | step k          | wait for copy k+1 | step k+1
    copy stream          copy k        |                   copy k+1                            | copy k+2
                                       ^ copy k+1 waits for the work queued on the current stream until now

A batch's memory is allocated on the current stream, and its copy waits for all work queued there before. So the
caching allocator reuses the memory as it does for any other tensor. `record_stream` is not called: it would delay the
reuse for as long as the host runs ahead of the device.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from parallelize.runtime.containers import leaves, map_leaves

__all__ = ["move_batches", "move_to_device", "prefetch_batches"]

T = TypeVar("T")


def move_batches(batches: Iterator[T], device: torch.device, *, prefetch: int) -> Iterator[T]:
    """Yield the batches, moved to a device.

    Args:
        batches: batches on the host; only copies from pinned memory run in parallel with the device's work.
        device: the target device.
        prefetch: number of batches to copy ahead; each takes memory on the device.
    """
    if prefetch == 0 or device.type in ("cpu", "mps"):
        return (move_to_device(batch, device) for batch in batches)
    return prefetch_batches(batches, _Copier(device), prefetch=prefetch)


def move_to_device(value: T, device: torch.device) -> T:
    """Move every leaf that has a `to` method to a device, and return the leaves in the same containers.

    Args:
        value: a tensor, an object with a `to` method, or containers of them; other leaves are kept.
        device: the target device.
    """
    return _map_movable(lambda leaf: _move(leaf, device), value)


def _map_movable(move: Any, value: T) -> T:
    # A container with a `to` method, such as Hugging Face's BatchEncoding, is moved as one object.
    result: T = map_leaves(move, value, is_leaf=lambda each: hasattr(each, "to"))
    return result


def _move(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(device, non_blocking=True)
    return leaf.to(device) if hasattr(leaf, "to") else leaf


class _Copier:
    """Copies batches to a device on a side stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy_stream = torch.Stream(device=device)

    def start(self, batch: T) -> _Copy[T]:
        """Start copying a batch to the device."""
        current = torch.accelerator.current_stream(self._device)
        copies: list[tuple[Tensor, Tensor]] = []

        def allocate(leaf: Any) -> Any:
            if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.device.type != "cpu":
                # A custom `to` allocates memory itself, which is always safe on the current stream.
                return _move(leaf, self._device)
            target = torch.empty_like(leaf, device=self._device)
            copies.append((target, leaf if leaf.is_pinned() else leaf.pin_memory()))
            return target

        moved = _map_movable(allocate, batch)
        self._copy_stream.wait_event(current.record_event())
        with self._copy_stream:
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        return _Copy(moved, self._copy_stream.record_event(), current)

    def wait(self, copy: _Copy[T]) -> T:
        """Make the current stream wait for a copy, and return the copied batch."""
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(copy.done)
        if current != copy.stream:  # notify the allocator that another stream uses the memory
            for leaf in leaves(copy.batch):
                if isinstance(leaf, Tensor) and leaf.device.type == self._device.type:
                    leaf.record_stream(current)
        return copy.batch


@dataclass(frozen=True)
class _Copy(Generic[T]):
    batch: T
    done: torch.Event
    stream: torch.Stream


def prefetch_batches(batches: Iterator[T], copier: Any, *, prefetch: int) -> Iterator[T]:
    """Yield the batches in order, and start to copy later batches while earlier ones are in use.

    An error of the loader is raised after all earlier batches have been yielded.

    Args:
        batches: batches on the host.
        copier: an object with the methods `start(batch) -> copy` and `wait(copy) -> batch`.
        prefetch: number of copies to start ahead of the batch in use; one for the first batch, to yield it sooner.
    """
    copies: deque[Any] = deque()
    fetched, wanted = _UntilError(batches), 2
    try:
        while True:
            copies.extend(map(copier.start, itertools.islice(fetched, wanted - len(copies))))
            if not copies:
                break
            yield copier.wait(copies.popleft())
            wanted = prefetch + 1
    finally:
        # The memory of unused copies may be reused only after they have finished.
        for each in copies:
            copier.wait(each)
    if fetched.error is not None:
        raise fetched.error


class _UntilError(Iterator[T]):
    """Iterator over batches that ends at the first error, and stores that error in `error`."""

    def __init__(self, batches: Iterator[T]) -> None:
        self._batches = batches
        self.error: Exception | None = None

    def __next__(self) -> T:
        if self.error is not None:
            raise StopIteration
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except Exception as exc:  # noqa: BLE001 - raised by prefetch_batches after the earlier batches
            self.error = exc
            raise StopIteration from None
