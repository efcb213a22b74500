"""Seconds and bytes of a device, as measured: what is free, how long work takes, and the backward of a trial."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelize.cluster.host_memory import available_host_bytes
from parallelize.run.containers import leaves
from parallelize.torch_patches.module_tensors import all_parameters

__all__ = ["elapsed_s", "free_bytes", "now", "run_backward", "seconds_of", "shortest"]

_LIMITS = {"VmSize": resource.RLIMIT_AS, "VmData": resource.RLIMIT_DATA}
"""What /proc/self/status says that this process uses -> its limit."""


def free_bytes(device: torch.device, processes: int = 1) -> float:
    """Return the bytes that this process can still allocate on a device; infinity: not known.

    Args:
        device: on the CPU, the limits of the process count, too.
        processes: number of processes on this node, which share its memory.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        free = min(free, int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved)
        return float(free + reserved - torch.cuda.memory_allocated(device))
    status = Path("/proc/self/status")
    if device.type != "cpu" or not status.exists():
        return float("inf")
    own = dict(line.split(":", 1) for line in status.read_text().splitlines())
    found = [available_host_bytes() / processes]
    for name, limit in _LIMITS.items():
        most = resource.getrlimit(limit)[0]
        found += [] if most == resource.RLIM_INFINITY else [most - _kibibytes(own[name])]
    return max(0.0, min(found))


def _kibibytes(text: str) -> float:
    return float(text.split(maxsplit=1)[0]) * 1024


def seconds_of(call: Callable[[], object], devices: Sequence[torch.device]) -> float:
    """Return the seconds from the begin of a call to the end of its work on all devices."""
    accelerators = [each for each in devices if each.type != "cpu"]
    for each in accelerators:
        torch.accelerator.synchronize(each)
    first = [*accelerators, torch.device("cpu")][0]
    began = now(first)
    call()
    for other in accelerators:
        torch.accelerator.current_stream(first).wait_event(now(other))
    return elapsed_s(began, now(first))


def now(device: torch.device) -> Any:
    """Return a point in a device's work: the time of the CPU, or an event on the current stream."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def elapsed_s(began: Any, ended: Any) -> float:
    """Return the seconds between two points in a device's work."""
    if isinstance(began, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000


def shortest(call: Callable[[], object], *devices: torch.device) -> float:
    """Return the shortest of three durations of a call, after one that warms up."""
    return min([seconds_of(call, devices) for _ in range(4)][1:])


def run_backward(model: nn.Module, output: Any) -> None:
    """Compute and discard the gradients of a model's parameters, where this can be done."""
    wanted = [each for each in all_parameters(model) if each.requires_grad]
    sums = [each.sum().real for each in leaves(output) if getattr(each, "grad_fn", None) is not None]
    if not sums or not wanted:
        return
    try:
        torch.autograd.grad(sums, wanted, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):  # torch's message: such a checkpoint stores gradients
            raise
