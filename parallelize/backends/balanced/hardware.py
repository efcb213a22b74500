"""Measurements of devices for the planner: memory, speed, transfer rate."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from parallelize.errors import ConfigError

__all__ = ["DeviceSpec", "device_out_of_memory", "device_specs", "memory_use", "synchronized_time"]

# Usable fraction of a GPU's free memory; the rest is for workspaces and fragmentation.
_USABLE = 0.9


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """Memory limit and speed of one device.

    Args:
        device: the device's name in torch, such as "cuda:0".
        cap_bytes: usable memory in bytes.
        speed: compute speed, relative to the device on which the model is profiled.
        bytes_per_s: transfer rate from the previous device in the user's order.
    """

    device: str
    cap_bytes: float
    speed: float = 1.0
    bytes_per_s: float = 1e10


def device_specs(
    devices: Sequence[torch.device], *, memory: int | Sequence[int] | None, model: nn.Module | None = None
) -> list[DeviceSpec]:
    """Measure the memory, speed and transfer rate of each device; speeds are relative to the first device.

    Args:
        devices: in the user's order.
        memory: usable bytes of each device, or one number for all; None: free memory of a GPU, unlimited on the CPU.
        model: its parameters count as free memory, since they are about to be moved to stages.

    Raises:
        ConfigError: `memory` is a sequence of another length than `devices`.
    """
    if memory is not None and not isinstance(memory, int) and len(memory) != len(devices):
        raise ConfigError(
            f"memory={list(memory)} for {len(devices)} devices",
            why="each device has one limit",
            fix="pass one number of bytes per device, or one for all",
        )
    limits = [memory] * len(devices) if memory is None or isinstance(memory, int) else list(memory)
    kinds = {device: _kind(device) for device in devices}
    # Devices of one kind are equally fast: a measured difference would be noise.
    seconds = {kind: _matmul_seconds(device) for device, kind in kinds.items()} if len(set(kinds.values())) > 1 else {}
    first = seconds.get(kinds[devices[0]], 1.0)
    return [
        DeviceSpec(
            device=str(device),
            cap_bytes=_usable_bytes(device, model) / list(devices).count(device) if limit is None else limit,
            speed=first / seconds.get(kinds[device], first),
            bytes_per_s=_bytes_per_s(devices[index - 1], device),
        )
        for index, (device, limit) in enumerate(zip(devices, limits, strict=True))
    ]


def device_out_of_memory(error: torch.OutOfMemoryError) -> str | None:
    """Return the name of the device that has run out of memory; None: the error does not tell."""
    found = re.search(r"GPU (\d+)", str(error))
    return None if found is None else f"cuda:{found[1]}"


def synchronized_time(*devices: torch.device) -> float:
    """Wait until the devices have finished their queued work; return the time in seconds."""
    for device in set(devices):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return time.perf_counter()


def memory_use(*devices: torch.device) -> list[tuple[int, int]]:
    """Return the allocated bytes of each CUDA device, and their peak since the last call."""
    found = []
    for device in devices:
        if device.type == "cuda":
            found.append((torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)))
            torch.cuda.reset_peak_memory_stats(device)
    return found


def _kind(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


def _usable_bytes(device: torch.device, model: nn.Module | None) -> float:
    if device.type != "cuda":
        return math.inf
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    free = min(free, int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved)
    spare = reserved - torch.cuda.memory_allocated(device)
    parameters = () if model is None else model.parameters()
    model_bytes = sum(each.numel() * each.element_size() for each in parameters if each.device == device)
    return (free + spare + model_bytes) * _USABLE


def _matmul_seconds(device: torch.device) -> float:
    """Return the time of a product of 1024 x 1024 matrices in seconds, best of three."""
    matrix = torch.ones(1024, 1024, device=device)
    return _best_of_three(lambda: matrix @ matrix, device)


def _bytes_per_s(source: torch.device, target: torch.device) -> float:
    """Return the rate of a copy from `source` to `target`, in bytes per second."""
    block = torch.ones(2**20, device=source)
    return block.nbytes / max(_best_of_three(lambda: block.to(target, copy=True), source, target), 1e-9)


def _best_of_three(call: Callable[[], object], *devices: torch.device) -> float:
    """Return the shortest of three durations of `call` on the devices, in seconds, after a warm-up call."""
    found = []
    for _ in range(4):
        began = synchronized_time(*devices)
        call()
        found.append(synchronized_time(*devices) - began)
    return min(found[1:])
