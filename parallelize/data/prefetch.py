"""Prefetching: batches of worker processes are copied to the device one ahead of the loop.

Copies from pinned memory do not block the host, which goes on to queue the step's work.
"""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parallelize.runtime.containers import map_leaves

__all__ = ["move_batches"]


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
    ahead: deque[Any] = deque()
    try:
        for number, batch in enumerate(batches):
            ahead.append(_moved(batch, device, are_fresh=are_fresh))
            # The first batch does not wait for the second.
            if not number or len(ahead) > prefetch * are_fresh:
                yield ahead.popleft()
    except Exception:
        yield from ahead
        raise
    yield from ahead


def _moved(batch: Any, device: torch.device, *, are_fresh: bool) -> Any:
    pins = device.type not in ("cpu", "mps", "meta")

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf.to(device) if hasattr(leaf, "to") else leaf
        is_plain = type(leaf) is Tensor and leaf.layout is torch.strided
        if pins and is_plain and leaf.device.type == "cpu" and not (are_fresh and leaf.is_pinned()):
            leaf = torch.empty_like(leaf, pin_memory=True).copy_(leaf)
        return leaf.to(device, non_blocking=pins and leaf.is_pinned())

    # A container with a `to` method, such as a TensorDict, is moved as one object, but not Hugging
    # Face's BatchEncoding and BatchFeature (UserDicts).
    def is_object(each: Any) -> bool:
        return hasattr(each, "to") and not isinstance(each, UserDict)

    return map_leaves(move, batch, is_leaf=is_object)
