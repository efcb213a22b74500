"""What the planner has to know of devices: memory, speed, how fast tensors get there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from parallelize.backends.balanced.costs import Spot
from parallelize.backends.balanced.profiling import now
from parallelize.errors import ConfigError

__all__ = ["spots"]

# Of a GPU's free memory; the rest is for workspaces and for gaps between blocks.
_USABLE = 0.9


def spots(
    devices: Sequence[torch.device], *, memory: int | Sequence[int] | None, model: nn.Module | None = None
) -> list[Spot]:
    """What each device can do, the first one's speed being 1.

    Args:
        devices: in the user's order.
        model: what it occupies already is not lost to it.
        memory: bytes to use of each, or of every one; None: what is free on GPUs, no limit on the CPU.

    Raises:
        ConfigError: as many limits as devices, or one, are needed.
    """
    if memory is not None and not isinstance(memory, int) and len(memory) != len(devices):
        raise ConfigError(
            f"memory={list(memory)} for {len(devices)} devices",
            why="each device has one limit",
            fix="give as many numbers of bytes as there are devices, or one for all",
        )
    limits = [memory] * len(devices) if memory is None or isinstance(memory, int) else list(memory)
    kinds = {device: _kind(device) for device in devices}
    # Devices of one kind are equally fast: a difference would be noise.
    seconds = {kind: _seconds(device) for device, kind in kinds.items()} if len(set(kinds.values())) > 1 else {}
    first = seconds.get(kinds[devices[0]], 1.0)
    return [
        Spot(
            device=str(device),
            cap_bytes=_free(device, model) / list(devices).count(device) if limit is None else limit,
            speed=first / seconds.get(kinds[device], first),
            bytes_per_s=_rate(devices[index - 1], device),
        )
        for index, (device, limit) in enumerate(zip(devices, limits, strict=True))
    ]


def _kind(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def _free(device: torch.device, model: nn.Module | None) -> float:
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    parameters = () if model is None else model.parameters()
    own = sum(each.numel() * each.element_size() for each in parameters if each.device == device)
    return (free + spare + own) * _USABLE


def _seconds(device: torch.device) -> float:
    """Of a product of matrices: the least of three."""
    matrix = torch.ones(1024, 1024, device=device)
    found = []
    for _ in range(4):
        began = now(device)
        matrix @ matrix
        found.append(now(device) - began)
    return min(found[1:])


def _rate(source: torch.device, target: torch.device) -> float:
    """Bytes per second from one device to another, or of a copy on one."""
    block = torch.ones(2**20, device=source)
    found = []
    for _ in range(4):
        began = now(target)
        block.to(target, copy=True)
        found.append(now(target) - began)
    return block.numel() * block.element_size() / max(min(found[1:]), 1e-9)
