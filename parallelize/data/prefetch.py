"""Prefetching: while the device works on one batch, the next one is copied to it.

On CUDA, the copies of an iteration run on a stream of their own, the copy stream. The stream on
which the loop's kernels run is the loop stream. In the steady state, with prefetch=1::

    host         copy k+1    take k    queue step k            copy k+2    take k+1
    copy stream        [wait for step k-1] [copy k+1]                [wait for step k] [copy k+2]
    loop stream  [step k-1] [wait for copy k] [step k] [wait for copy k+1] [step k+1]

Two waits make it safe, and neither blocks the host:

- A copy waits for what the loop stream has queued before. The memory of the copy is that of the
  loop stream, and may have belonged to a tensor that a queued step still reads.
- The loop stream waits for the copy before the loop takes the batch.

The memory is therefore that of a tensor which the loop has made itself: the loop drops the batch
when it likes, and the next allocation of the loop stream may have the memory at once. Memory of the
copy stream would need `record_stream` for each batch, which keeps it until the host learns that the
step has ended: a host that is many steps ahead of the device would hold as many batches.
"""

from __future__ import annotations

import multiprocessing
from collections import UserDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from parallelize.run.containers import map_leaves


def move_batches(
    batches: Iterator[Any], device: torch.device, *, prefetch: int, are_fresh: bool = False
) -> Iterator[Any]:
    """Yield batches moved to a device; an error of the loader is raised after all earlier batches.

    Args:
        batches: batches on the host.
        device: the target device.
        prefetch: number of batches to copy ahead of the loop; each takes memory on the device.
        are_fresh: whether no batch shares memory with an earlier one, as those of workers. Others
            are copied to pinned memory of their own, and none is fetched before its step.
    """
    mover = _CopyStreamMover(device) if device.type == "cuda" else _Mover(device)
    most_ahead = prefetch if are_fresh else 0
    ahead: deque[_MovedBatch] = deque()
    is_first = True
    try:
        for batch in batches:
            ahead.append(mover.start(batch, are_fresh=are_fresh))
            # The first batch does not wait for the second.
            if is_first or len(ahead) > most_ahead:
                is_first = False
                yield mover.finish(ahead.popleft())
    except Exception:
        while ahead:
            yield mover.finish(ahead.popleft())
        raise
    else:
        while ahead:
            yield mover.finish(ahead.popleft())
    finally:
        if ahead:
            mover.close()


def pins_memory(loader: Any, device: torch.device) -> bool:
    """Return whether a copy of a DataLoader may have pin_memory=True, to copy to a device.

    Its thread then pins the batches, and the main thread finds them pinned. But torch's thread
    raises on tensors that are expanded, sparse or on a device. torch's default_collate makes none
    of these, so that only its batches are pinned there; `move_batches` pins all others.
    """
    if device.type != "cuda" or not isinstance(loader, DataLoader):
        return False
    if loader.num_workers == 0 or loader.collate_fn is not default_collate:
        return False
    # Workers that are forked have no CUDA; those of other start methods may collate on a device.
    context = loader.multiprocessing_context or multiprocessing
    start_method = context.get_start_method(allow_none=True)
    if start_method is None:
        start_method = multiprocessing.get_all_start_methods()[0]
    return bool(start_method == "fork")


@dataclass
class _MovedBatch:
    """A batch whose copies are queued.

    Args:
        batch: containers with tensors on the device.
        tensors: those that the copy stream writes.
        copied: reached by the copy stream after the last of them.
    """

    batch: Any
    tensors: list[Tensor] = field(default_factory=list)
    copied: torch.cuda.Event | None = None


class _Mover:
    """Moves batches on the current stream, which orders the copies with the loop's kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, batch: Any, *, are_fresh: bool) -> _MovedBatch:
        """Queue the copies of a batch, ahead of the loop."""

        def move(leaf: Any) -> Any:
            return _moved(leaf, self._device, are_fresh=are_fresh)

        return _MovedBatch(map_leaves(move, batch, is_leaf=_is_object))

    def finish(self, moved: _MovedBatch) -> Any:
        """Return a batch that the loop may use on its current stream."""
        return moved.batch

    def close(self) -> None:
        """Let go of batches that were started, and which the loop has not taken.

        On one stream there is nothing to do.
        """


class _CopyStreamMover(_Mover):
    """Copies tensors of the host on a stream of their own, as the head of this file draws.

    All else is moved on the current stream: tensors on a device, which the current stream may still
    write, and objects with a method `to`, whose tensors are not known here.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._loop_stream = torch.cuda.current_stream(device)
        self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's

    def start(self, batch: Any, *, are_fresh: bool) -> _MovedBatch:
        sources: list[Tensor] = []
        targets: list[Tensor] = []

        def allocate(leaf: Any) -> Any:
            if not _is_host_tensor(leaf):
                return _moved(leaf, self._device, are_fresh=are_fresh)
            source = _pinned(leaf, are_fresh=are_fresh)
            with torch.cuda.stream(self._loop_stream):
                target = torch.empty_like(source, device=self._device)
            sources.append(source)
            targets.append(target)
            return target

        moved = _MovedBatch(map_leaves(allocate, batch, is_leaf=_is_object), targets)
        # A step that is still queued may use what was in this memory before.
        self._copy_stream.wait_stream(self._loop_stream)
        with torch.cuda.stream(self._copy_stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
        moved.copied = self._copy_stream.record_event()
        return moved

    def finish(self, moved: _MovedBatch) -> Any:
        taking_stream = torch.cuda.current_stream(self._device)
        if moved.copied is not None:
            taking_stream.wait_event(moved.copied)
        for tensor in moved.tensors:
            # A loop that has changed to another stream since its first batch: the memory is not
            # used again before the work of that stream. On the loop stream, this does nothing.
            tensor.record_stream(taking_stream)
        return moved.batch

    def close(self) -> None:
        # The loop stream reuses the memory of batches that nobody has taken: not while copies still
        # write to it.
        self._loop_stream.wait_stream(self._copy_stream)


def _is_object(value: Any) -> bool:
    """Return whether a container is moved by its own method `to`, such as a TensorDict.

    Hugging Face's BatchEncoding and BatchFeature, which are UserDicts, are moved leaf by leaf.
    """
    return hasattr(value, "to") and not isinstance(value, UserDict)


def _is_host_tensor(leaf: Any) -> bool:
    """Return whether a leaf is a plain tensor that can be copied to pinned memory."""
    return type(leaf) is Tensor and leaf.layout is torch.strided and leaf.device.type == "cpu"


def _pinned(tensor: Tensor, *, are_fresh: bool) -> Tensor:
    """Return a pinned tensor which nobody writes while it is copied to the device."""
    if are_fresh and tensor.is_pinned():
        return tensor
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


def _moved(leaf: Any, device: torch.device, *, are_fresh: bool) -> Any:
    """Return a leaf moved to a device on the current stream."""
    if not isinstance(leaf, Tensor):
        return leaf.to(device) if hasattr(leaf, "to") else leaf
    if device.type in ("cpu", "mps", "meta"):
        return leaf.to(device)
    if _is_host_tensor(leaf):
        leaf = _pinned(leaf, are_fresh=are_fresh)
    return leaf.to(device, non_blocking=leaf.is_pinned())
