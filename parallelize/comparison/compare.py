"""compare_runs: runs a function with one process and with its own layout, on the same global batches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch

from parallelize.call.task import Outcome, Task
from parallelize.comparison.recording import RecordedFunction, Recording
from parallelize.comparison.report import Comparison, compare_recordings
from parallelize.config.layout import Layout
from parallelize.config.placement import Placement
from parallelize.errors import ConfigError, WorkerError, add_note
from parallelize.runtime.context import active
from parallelize.worker.preemption import handle_stop_signals

__all__ = ["compare_runs"]


def compare_runs(
    task: Task, placement: Placement, *, steps: int, launch: Callable[[Task], Sequence[Outcome]]
) -> Comparison:
    """Run the first steps of a task with one process and with its layout, both in new processes, and compare them.

    Args:
        task: the call.
        placement: where the call would run.
        steps: number of optimizer steps.
        launch: runs a task in new processes and returns the outcomes of all ranks.

    Raises:
        ConfigError: the call has one device or several nodes, runs inside another run, or `steps` is not positive.
        WorkerError: a run made no optimizer step.
    """
    _check(task, placement, steps)
    layout = _seeded(task.layout)
    recordings = []
    with handle_stop_signals():
        for each in (_one_process(layout), layout):
            function = RecordedFunction(task.function, steps=steps, merged_ranks=layout.world_size)
            run = Task(function, task.args, task.kwargs, each, all_ranks=True)
            with _noted(f"in the run with {each.world_size} process(es) of {task.name}.compare"):
                recordings.append([_checked(outcome.value, run) for outcome in launch(run)])
    (single,), ranks = recordings
    labels = ("1 process", f"{layout.world_size} processes")
    if layout.world_size == 1:
        labels = ("1 device", f"{len(layout.devices[0])} devices")
    return compare_recordings(single, ranks, labels=labels, tolerance=_tolerance(layout, single))


@contextlib.contextmanager
def _noted(note: str) -> Iterator[None]:
    """Add a note to exceptions; one process may, for example, have too little memory for the global batch."""
    try:
        yield
    except Exception as error:
        add_note(error, note)
        raise


def _check(task: Task, placement: Placement, steps: object) -> None:
    what = f"{task.name}.compare({steps!r}, ...)"
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        why = "the first argument is the number of optimizer steps, at least 1"
        raise ConfigError(what, why=why, fix=f"use {task.name}.compare(5, ...), followed by the arguments of the call")
    if active() is not None or placement.world is not None:
        raise ConfigError(
            f"{what} in a process of a run",
            why="it starts its own processes: first one, then as many as the call has",
            fix="call it in a plain script, without torchrun or srun and outside of decorated functions",
        )
    if task.layout.num_nodes > 1:
        raise ConfigError(
            f"{what} with num_nodes={task.layout.num_nodes}",
            why="both runs are on this machine",
            fix=f"use {task.name}.options(num_nodes=1).compare(...)",
        )
    if sum(map(len, task.layout.devices)) == 1:
        raise ConfigError(
            f"{what} on one device",
            why="the call itself would run on one device, so there is nothing to compare",
            fix=f"use {task.name}.options(processes=2).compare(...) for two processes on the CPU",
        )


def _seeded(layout: Layout) -> Layout:
    seed = layout.config.seed or 0  # both runs need the same initial weights
    return dataclasses.replace(layout, config=layout.config.changed(seed=seed))


def _one_process(layout: Layout) -> Layout:
    """Return the layout of one process on the first device."""
    device: dict[str, int] = {"processes": 1} if layout.device_type == "cpu" else {"gpus": 1}
    config = layout.config.changed(backend="ddp", num_nodes=1, **device)
    return dataclasses.replace(layout, config=config, devices=(layout.devices[0][:1],), warnings=())


def _checked(recording: Recording, run: Task) -> Recording:
    if not recording.steps:
        raise WorkerError(
            f"{run.name} returned without an optimizer step, on {run.layout.world_size} process(es)",
            why="compare records the steps of torch optimizers",
            fix="compare a call that trains with an optimizer of torch.optim, or a subclass of torch.optim.Optimizer",
        )
    return recording


def _tolerance(layout: Layout, single: Recording) -> float:
    """Return the relative difference of gradients that rounding explains: the root of the dtype's precision."""
    dtypes = {each.dtype for step in single.steps for each in step.weights}
    epsilon = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
    if layout.config.amp is not None:
        epsilon = max(epsilon, torch.finfo(torch.bfloat16).eps)
    elif layout.device_type == "cuda":
        epsilon = max(epsilon, 2.0**-10)  # TF32, which convolutions use by default
    return float(epsilon**0.5)
