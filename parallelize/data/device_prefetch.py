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

import contextlib
import inspect
import itertools
from collections import UserDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from parallelize.runtime.containers import leaves, map_leaves

__all__ = ["move_batches", "move_to_device", "prefetch_batches"]

T = TypeVar("T")


def move_batches(batches: Iterator[T], device: torch.device, *, prefetch: int, are_fresh: bool = False) -> Iterator[T]:
    """Yield batches of the host, moved to a device; those that are not pinned are copied to pinned memory first.

    Args:
        batches: batches on the host.
        device: the target device.
        prefetch: number of batches to copy ahead; each takes memory on the device.
        are_fresh: whether no batch shares memory with an earlier one, as those of DataLoader workers: pinned memory is
            then read later, and objects are prefetched whose `to` returns themselves.
    """
    if prefetch == 0 or device.type in ("cpu", "mps"):
        return (move_to_device(batch, device, non_blocking=are_fresh) for batch in batches)
    return prefetch_batches(batches, _Copier(device, are_fresh=are_fresh), prefetch=prefetch)


def move_to_device(value: T, device: torch.device, *, non_blocking: bool = False) -> T:
    """Move every leaf that has a `to` method to a device, and return all leaves in the same containers.

    With `non_blocking`, pinned memory may be read after this function has returned.
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
    if not isinstance(leaf, Tensor):
        parameters: Iterable[inspect.Parameter] = ()
        with contextlib.suppress(ValueError):  # a method of a C extension
            parameters = inspect.signature(leaf.to).parameters.values()
        if not any(each.name == "non_blocking" or each.kind is each.VAR_KEYWORD for each in parameters):
            return leaf.to(device)
    return leaf.to(device, non_blocking=non_blocking)


class _Copier:
    """Copies batches to a device on a side stream."""

    def __init__(self, device: torch.device, *, are_fresh: bool) -> None:
        self._device, self._are_fresh = device, are_fresh
        self._copy_stream = torch.Stream(device=device)

    def start(self, batch: Any) -> _Copy:
        """Start copying a batch to the device."""
        current = torch.accelerator.current_stream(self._device)
        copies: list[tuple[Tensor, Tensor]] = []
        is_shared = False

        def allocate(leaf: Any) -> Any:
            nonlocal is_shared
            if type(leaf) is Tensor and leaf.layout is torch.strided and leaf.device.type == "cpu":
                target, is_readable = torch.empty_like(leaf, device=self._device), self._are_fresh and leaf.is_pinned()
                copies.append((target, leaf if is_readable else torch.empty_like(leaf, pin_memory=True).copy_(leaf)))
                return target
            # A custom `to` allocates memory itself, which is always safe on the current stream.
            moved = _move(leaf, self._device, non_blocking=self._are_fresh)
            # An object that holds tensors, or a NumPy array, is one that the loader may write to.
            is_writable = not self._are_fresh and (hasattr(leaf, "to") or hasattr(leaf, "__array_interface__"))
            is_shared |= moved is leaf and (isinstance(leaf, Tensor) or is_writable)
            return moved

        moved = _map_movable(allocate, batch)
        self._copy_stream.wait_event(current.record_event())
        with self._copy_stream:
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        return _Copy(moved, self._copy_stream.record_event(), current, is_shared)

    def wait(self, copy: _Copy) -> Any:
        """Make the current stream wait for a copy, and return the copied batch."""
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(copy.done)
        if current != copy.stream:  # notify the allocator that another stream uses the memory
            for leaf in leaves(copy.batch):
                if isinstance(leaf, Tensor) and leaf.device.type == self._device.type:
                    leaf.record_stream(current)
        return copy.batch


class _Copy(NamedTuple):
    batch: Any
    done: torch.Event
    stream: torch.Stream
    is_shared: bool  # whether the loader may write to a part of the batch when it makes the next one


def prefetch_batches(batches: Iterator[T], copier: Any, *, prefetch: int) -> Iterator[T]:
    """Yield the batches in order, and start to copy later batches while earlier ones are in use.

    The first batch is yielded before the second is fetched; each further one starts one copy more, up to `prefetch`.
    None starts ahead of a copy that `is_shared`. An error of the loader is raised after all earlier batches.
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
