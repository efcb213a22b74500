"""Calls that run in the calling process: as a rank that a launcher has started, or as the only process."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from parallelize.call.task import Outcome, Task
from parallelize.cluster.world import World
from parallelize.runtime.context import current
from parallelize.runtime.gather import broadcast_object, gather_objects
from parallelize.runtime.rng import RNGState
from parallelize.worker.main import active_run, call_function

__all__ = ["gather_values", "run_as_rank", "run_in_this_process"]


def run_as_rank(task: Task, world: World) -> Any:
    """Run a task in this process, under the rank that a launcher has assigned to this process."""
    with active_run(task.layout, world):
        value = call_function(task)
        return gather_values(value) if task.all_ranks else _broadcast_value(value)


def _broadcast_value(value: object) -> Any:
    return broadcast_object(value, device=current().device, dump=_pickled, load=_unpickled)


def gather_values(value: object) -> list[Any]:
    """Return the values of all ranks, in rank order, on every rank; CUDA tensors come to this rank's device."""
    return gather_objects(value, device=current().device, dump=_pickled, load=_unpickled)


def _pickled(value: object) -> bytes:
    return Outcome.returned(current().world, value).dumps()


def _unpickled(content: bytes) -> Any:
    return Outcome.read(content, device=current().device).value


def run_in_this_process(task: Task) -> Any:
    """Run a single-device task in the calling process, so that debuggers and profilers work."""
    devices = task.layout.indices if task.layout.device_type == "cuda" else ()
    # A call in other processes would not change the states of random generators.
    with torch.random.fork_rng(devices=devices), contextlib.ExitStack() as restored:
        restored.callback(RNGState(None).restore)
        restored.enter_context(active_run(task.layout, World()))
        value = call_function(task)
    return [value] if task.all_ranks else value
