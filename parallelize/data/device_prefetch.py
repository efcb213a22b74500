"""Prefetching: copies the next batches to the device on a side stream while the current step runs.

    current stream     | step k-1      | wait for copy k | step k          | wait for copy k+1 | step k+1
    copy stream          copy k        |                   copy k+1                            | copy k+2
                                       ^ copy k+1 waits for the work queued on the current stream until now

A batch's memory is allocated on the current stream, and its copy waits for all work queued there before. So the
caching allocator reuses the memory as it does for any other tensor. `record_stream` is not called: it would delay the
reuse for as long as the host runs ahead of the device.

A loader may return the same memory again, with other values: a tensor on the CPU is therefore read before the next
batch is fetched, and no batch is fetched ahead of one that is returned as it is, such as a tensor on the device.
"""

from __future__ import annotations

import inspect
import itertools
from collections import UserDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from parallelize.runtime.containers import leaves, map_leaves

__all__ = ["move_batches", "move_to_device", "prefetch_batches"]

T = TypeVar("T")


def move_batches(batches: Iterator[T], device: torch.device, *, prefetch: int, are_fresh: bool = False) -> Iterator[T]:
    """Yield the batches, moved to a device.

    Args:
        batches: batches on the host; those that are not pinned are copied to pinned memory first.
        device: the target device.
        prefetch: number of batches to copy ahead; each takes memory on the device.
        are_fresh: whether no batch shares memory with an earlier one, as those of DataLoader workers: pinned memory is
            then read later, and objects are prefetched whose `to` returns themselves.
    """
    if prefetch == 0 or device.type in ("cpu", "mps"):
        return (move_to_device(batch, device, non_blocking=are_fresh) for batch in batches)
    return prefetch_batches(batches, _Copier(device, are_fresh=are_fresh), prefetch=prefetch)


def move_to_device(value: T, device: torch.device, *, non_blocking: bool = False) -> T:
    """Move every leaf that has a `to` method to a device, and return the leaves in the same containers.

    Args:
        value: a tensor, an object with a `to` method, or containers of them; other leaves are kept.
        device: the target device.
        non_blocking: whether pinned memory may be read after this function has returned.
    """
    return _map_movable(lambda leaf: _move(leaf, device, non_blocking=non_blocking), value)


def _map_movable(move: Any, value: T) -> T:
    # A container with a `to` method, such as a TensorDict, is moved as one object, except Hugging Face's BatchEncoding
    # and BatchFeature (UserDicts), whose tensors are leaves.
    result: T = map_leaves(move, value, is_leaf=lambda each: hasattr(each, "to") and not isinstance(each, UserDict))
    return result


def _move(leaf: Any, device: torch.device, *, non_blocking: bool) -> Any:
    if not hasattr(leaf, "to"):
        return leaf
    if not isinstance(leaf, Tensor) and not _accepts_non_blocking(leaf.to):
        return leaf.to(device)
    return leaf.to(device, non_blocking=non_blocking)


def _accepts_non_blocking(to: Any) -> bool:
    try:
        parameters = inspect.signature(to).parameters.values()
    except ValueError:  # a method of a C extension
        return False
    return any(each.name == "non_blocking" or each.kind is each.VAR_KEYWORD for each in parameters)


class _Copier:
    """Copies batches to a device on a side stream."""

    def __init__(self, device: torch.device, *, are_fresh: bool) -> None:
        self._device = device
        self._are_fresh = are_fresh
        self._copy_stream = torch.Stream(device=device)

    def start(self, batch: T) -> _Copy[T]:
        """Start copying a batch to the device."""
        current = torch.accelerator.current_stream(self._device)
        copies: list[tuple[Tensor, Tensor]] = []
        is_shared = False

        def allocate(leaf: Any) -> Any:
            nonlocal is_shared
            if type(leaf) is Tensor and leaf.layout is torch.strided and leaf.device.type == "cpu":
                target = torch.empty_like(leaf, device=self._device)
                copies.append((target, self._pinned(leaf)))
                return target
            # A custom `to` allocates memory itself, which is always safe on the current stream.
            moved = _move(leaf, self._device, non_blocking=self._are_fresh)
            is_on_device = isinstance(leaf, Tensor) and moved is leaf
            is_shared |= is_on_device or (moved is leaf and not self._are_fresh and _is_writable(leaf))
            return moved

        moved = _map_movable(allocate, batch)
        self._copy_stream.wait_event(current.record_event())
        with self._copy_stream:
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        return _Copy(moved, self._copy_stream.record_event(), current, is_shared)

    def _pinned(self, leaf: Tensor) -> Tensor:
        if self._are_fresh and leaf.is_pinned():
            return leaf
        return torch.empty_like(leaf, pin_memory=True).copy_(leaf)

    def wait(self, copy: _Copy[T]) -> T:
        """Make the current stream wait for a copy, and return the copied batch."""
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(copy.done)
        if current != copy.stream:  # notify the allocator that another stream uses the memory
            for leaf in leaves(copy.batch):
                if isinstance(leaf, Tensor) and leaf.device.type == self._device.type:
                    leaf.record_stream(current)
        return copy.batch


def _is_writable(leaf: Any) -> bool:
    return hasattr(leaf, "to") or hasattr(leaf, "__array_interface__")  # an object that holds tensors, a NumPy array


@dataclass(frozen=True)
class _Copy(Generic[T]):
    batch: T
    done: torch.Event
    stream: torch.Stream
    is_shared: bool  # whether the loader may write to a part of the batch when it makes the next one


def prefetch_batches(batches: Iterator[T], copier: Any, *, prefetch: int) -> Iterator[T]:
    """Yield the batches in order, and start to copy later batches while earlier ones are in use.

    The first batch is yielded before the second is fetched; each further one starts one copy more, up to `prefetch`.
    An error of the loader is raised after all earlier batches have been yielded.

    Args:
        batches: batches on the host.
        copier: an object with the methods `start(batch) -> copy` and `wait(copy) -> batch`; a copy has `is_shared`.
        prefetch: number of copies to start ahead of the batch in use; none ahead of a batch that is shared.
    """
    copies: deque[Any] = deque()
    end: Exception | None = None
    try:
        for ahead in itertools.chain(range(prefetch), itertools.repeat(prefetch)):
            end = end or _start_copies(batches, copier, copies, ahead=ahead)
            if not copies:
                break
            yield copier.wait(copies.popleft())
    finally:
        # The memory of unused copies may be reused only after they have finished.
        for each in copies:
            copier.wait(each)
    if end is not None and not isinstance(end, StopIteration):
        raise end


def _start_copies(batches: Iterator[Any], copier: Any, copies: deque[Any], *, ahead: int) -> Exception | None:
    """Start the next copies, and return what ended the batches: StopIteration, an error of the loader, or None."""
    while len(copies) <= ahead and not (copies and copies[-1].is_shared):
        try:
            batch = next(batches)
        except Exception as exc:  # noqa: BLE001 - raised by prefetch_batches after the earlier batches
            return exc
        copies.append(copier.start(batch))
    return None
