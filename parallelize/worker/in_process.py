"""Calls that run in the calling process: as a rank, or as the only process.

A rank is a process that torchrun, srun, mpirun or a pod has started; each of them calls the
function itself. At the end of the call the ranks exchange the values, so that each can return them.
"""

from __future__ import annotations

from typing import Any

from parallelize.agreement.gather import broadcast_object, gather_objects
from parallelize.call.outcome import Outcome
from parallelize.call.random_states import restoring_caller
from parallelize.call.task import Call
from parallelize.cluster.world import World
from parallelize.hang_detection.waiting import waiting_for
from parallelize.run.context import current
from parallelize.worker.function_run import active_run, call_function

_RETURN = "the return of its value"
"""What a rank waits for at its end, as reports of hangs name it."""


def run_as_rank(call: Call, world: World) -> Any:
    """Run a call in this process, as the rank that a launcher has given to it.

    Returns:
        Rank 0's value, or the values of all ranks if the call wants them: the same on every rank.
    """
    devices = call.layout.devices[world.local_rank]
    with (
        restoring_caller(call.layout.config, devices),
        active_run(call.layout, world),
    ):
        value = call_function(call)
        if call.all_ranks:
            return gather_values(value)
        return _broadcast_value(value)


def run_in_this_process(call: Call) -> Any:
    """Run a call of one device in the calling process, so that debuggers and profilers work."""
    devices = call.layout.devices[0]
    with (
        restoring_caller(call.layout.config, devices),
        active_run(call.layout, World()),
    ):
        value = call_function(call)
    if call.all_ranks:
        return [value]
    return value


def gather_values(value: object) -> list[Any]:
    """Return the values of all ranks, in rank order, on every rank.

    Tensors on a GPU come to the GPU of this rank.
    """
    device = current().device
    with waiting_for(_RETURN):
        return gather_objects(value, device=device, dump=_pickled, load=_unpickled)


def _broadcast_value(value: object) -> Any:
    """Return rank 0's value, on every rank."""
    device = current().device
    with waiting_for(_RETURN):
        return broadcast_object(value, device=device, dump=_pickled, load=_unpickled)


def _pickled(value: object) -> bytes:
    return Outcome.returned(current().world, value).dumps()


def _unpickled(content: bytes) -> Any:
    return Outcome.read(content, device=current().device).value
