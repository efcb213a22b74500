"""Calls in the calling process: as a rank that a launcher has started, or as the only process."""

from __future__ import annotations

from typing import Any

from parallelize.agreement.gather import broadcast_object, gather_objects
from parallelize.call.outcome import Outcome
from parallelize.call.random_states import restoring_caller
from parallelize.call.task import Task
from parallelize.cluster.world import World
from parallelize.hang_detection.waiting import waiting_for
from parallelize.run.context import current
from parallelize.worker.function_run import active_run, call_function

_RETURN = "the return of its value"
"""What a rank waits for at its end, as reports of hangs name it."""


def run_as_rank(task: Task, world: World) -> Any:
    """Run a task in this process, under the rank that a launcher has assigned to this process."""
    devices = task.layout.devices[world.local_rank]
    with restoring_caller(task.layout.config, devices), active_run(task.layout, world):
        value = call_function(task)
        return gather_values(value) if task.all_ranks else _broadcast_value(value)


def _broadcast_value(value: object) -> Any:
    with waiting_for(_RETURN):
        return broadcast_object(value, device=current().device, dump=_pickled, load=_unpickled)


def gather_values(value: object) -> list[Any]:
    """Return the values of all ranks, in rank order, on every rank; CUDA tensors come to this rank's device."""
    with waiting_for(_RETURN):
        return gather_objects(value, device=current().device, dump=_pickled, load=_unpickled)


def _pickled(value: object) -> bytes:
    return Outcome.returned(current().world, value).dumps()


def _unpickled(content: bytes) -> Any:
    return Outcome.read(content, device=current().device).value


def run_in_this_process(task: Task) -> Any:
    """Run a single-device task in the calling process, so that debuggers and profilers work."""
    with (
        restoring_caller(task.layout.config, task.layout.devices[0]),
        active_run(task.layout, World()),
    ):
        value = call_function(task)
    return [value] if task.all_ranks else value
