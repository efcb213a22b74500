"""Seconds and bytes of a device, as measured: what is free, and how long work takes.

An accelerator works behind the host: a call returns before its work is done. So the points between
which work is timed are events, which the accelerator passes in the order of its work.

    host           call ─── returns
    accelerator          began ──────── work of the call ──────── ended
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from parallelize.cluster.host_memory import available_host_bytes

_LIMITS = {"VmSize": resource.RLIMIT_AS, "VmData": resource.RLIMIT_DATA}
"""Field of /proc/self/status with the bytes that this process uses -> the limit of these bytes."""


def free_bytes(device: torch.device, processes: int = 1) -> float:
    """Return the bytes that this process can still allocate on a device; infinity: not known.

    Args:
        device: on the CPU, the limits of the process count, too.
        processes: number of processes on this node, which share its memory.
    """
    if device.type == "cuda":
        return _free_bytes_of_gpu(device)
    status = Path("/proc/self/status")
    if device.type != "cpu" or not status.exists():
        return float("inf")
    text_of_field = dict(line.split(":", 1) for line in status.read_text().splitlines())
    free = available_host_bytes() / processes
    for name, resource_id in _LIMITS.items():
        limit = resource.getrlimit(resource_id)[0]
        if limit != resource.RLIM_INFINITY:
            free = min(free, limit - _bytes_in(text_of_field[name]))
    return max(0.0, free)


def _free_bytes_of_gpu(device: torch.device) -> float:
    """Return the bytes that are free, with those that torch has reserved and does not use."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    free = min(free, limit - reserved)
    return float(free + reserved - torch.cuda.memory_allocated(device))


def _bytes_in(text: str) -> float:
    """Return the bytes of a text such as "3024 kB"."""
    return float(text.split(maxsplit=1)[0]) * 1024


def seconds_of(call: Callable[[], object], devices: Sequence[torch.device]) -> float:
    """Return the seconds from the begin of a call to the end of its work on all devices.

    Args:
        call: the work.
        devices: all on which the call works; the first accelerator among them is the clock.
    """
    accelerators = [device for device in devices if device.type != "cpu"]
    for device in accelerators:
        torch.accelerator.synchronize(device)
    clock = accelerators[0] if accelerators else torch.device("cpu")
    began = now(clock)
    call()
    for device in accelerators:
        torch.accelerator.current_stream(clock).wait_event(now(device))
    return elapsed_s(began, now(clock))


def now(device: torch.device) -> Any:
    """Return a point in a device's work.

    On the CPU, this is the time in seconds; on an accelerator, an event on the current stream.
    """
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def elapsed_s(began: Any, ended: Any) -> float:
    """Return the seconds between two points in a device's work, as `now` returns them."""
    if isinstance(began, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000


def shortest(call: Callable[[], object], *devices: torch.device) -> float:
    """Return the shortest of three durations of a call, after one that warms up."""
    return min([seconds_of(call, devices) for _ in range(4)][1:])
