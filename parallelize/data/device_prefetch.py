"""Batches on the device that eats them, copied while it is still eating the last one.

    current stream     | step k-1      | wait for copy k | step k          | wait for copy k+1 | step k+1
    copy stream          copy k        |                   copy k+1                            | copy k+2
                                       ^ copy k+1 waits for what was in the current stream when its memory was taken

The memory of a batch is taken from the current stream's pool, and its copy waits for what that stream had to do by
then. So it can go back to that pool like that of any other tensor: no `record_stream`, which holds memory back for as
long as the host runs ahead of the device.
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

__all__ = ["ahead", "moved", "on_device"]

T = TypeVar("T")


def on_device(batches: Iterator[T], device: torch.device, *, prefetch: int) -> Iterator[T]:
    """The batches, with all that lies in them on a device.

    Args:
        batches: on the host, in pinned memory if their copies are to run beside the device's work.
        device: where to.
        prefetch: batches that are copied ahead; takes so much more memory on the device.
    """
    if prefetch == 0 or device.type in ("cpu", "mps"):
        return (moved(batch, device) for batch in batches)
    return ahead(batches, _Copier(device), prefetch=prefetch)


def moved(value: T, device: torch.device) -> T:
    """The same containers with everything that has `.to` on a device.

    Args:
        value: a tensor, an object with a method `to`, or containers of them; anything else stays as it is.
        device: where to.
    """
    return _mapped(lambda leaf: _to(leaf, device), value)


def _mapped(move: Any, value: T) -> T:
    # An object that knows how to move itself is asked before its insides are: Hugging Face's encodings are mappings.
    result: T = map_leaves(move, value, is_leaf=lambda each: hasattr(each, "to"))
    return result


def _to(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(device, non_blocking=True)
    return leaf.to(device) if hasattr(leaf, "to") else leaf


class _Copier:
    """Copies batches on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.Stream(device=device)

    def send(self, batch: T) -> _Sent[T]:
        """Begin to copy a batch."""
        current = torch.accelerator.current_stream(self._device)
        copies: list[tuple[Tensor, Tensor]] = []

        def place(leaf: Any) -> Any:
            if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.device.type != "cpu":
                # Whoever moves itself takes memory where we cannot see it: on the current stream that is always safe.
                return _to(leaf, self._device)
            target = torch.empty_like(leaf, device=self._device)
            copies.append((target, leaf if leaf.is_pinned() else leaf.pin_memory()))
            return target

        placed = _mapped(place, batch)
        self._side.wait_event(current.record_event())
        with self._side:
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        return _Sent(placed, self._side.record_event(), current)

    def receive(self, sent: _Sent[T]) -> T:
        """The batch; what the current stream does from now on comes after its copy."""
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(sent.copied)
        if current != sent.stream:  # taken on one stream, used on another: the allocator has to know of it
            for leaf in leaves(sent.batch):
                if isinstance(leaf, Tensor) and leaf.device.type == self._device.type:
                    leaf.record_stream(current)
        return sent.batch


@dataclass(frozen=True)
class _Sent(Generic[T]):
    batch: T
    copied: torch.Event
    stream: torch.Stream


def ahead(batches: Iterator[T], copier: Any, *, prefetch: int) -> Iterator[T]:
    """The batches in order, each sent while those before it are in use.

    An error in fetching comes when its turn has come, not as early as it is met.

    Args:
        batches: on the host.
        copier: sends a batch, and receives what it has sent.
        prefetch: how many are sent before the one that is given is used; one at first, for the first is waited for.
    """
    waiting: deque[Any] = deque()
    fetched, wanted = _Fetched(batches), 2
    try:
        while True:
            waiting.extend(map(copier.send, itertools.islice(fetched, wanted - len(waiting))))
            if not waiting:
                break
            yield copier.receive(waiting.popleft())
            wanted = prefetch + 1
    finally:
        # Nobody will use them, but their memory may not go to others before the copies into it are over.
        for each in waiting:
            copier.receive(each)
    if fetched.failure is not None:
        raise fetched.failure


class _Fetched(Iterator[T]):
    """Batches up to the first error, which is kept."""

    def __init__(self, batches: Iterator[T]) -> None:
        self._batches = batches
        self.failure: Exception | None = None

    def __next__(self) -> T:
        if self.failure is not None:
            raise StopIteration
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except Exception as exc:  # noqa: BLE001 - raised when its turn has come
            self.failure = exc
            raise StopIteration from None
