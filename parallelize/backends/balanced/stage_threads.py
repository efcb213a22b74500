"""The threads of a pipeline: one per micro-batch for forward, one per stage for backward."""

from __future__ import annotations

import concurrent.futures
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from parallelize.backends.balanced.segment import Stage

__all__ = ["Workers", "places"]


def places(devices: Sequence[torch.device]) -> tuple[Stage, ...]:
    """A stage on each device; those on the CPU share its cores evenly, if there are enough."""
    on_cpu = [index for index, device in enumerate(devices) if device.type == "cpu"]
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    share = len(cores) // len(on_cpu) if on_cpu else 0
    return tuple(
        Stage(device, frozenset(cores[on_cpu.index(i) * share :][:share]) if i in on_cpu else frozenset())
        for i, device in enumerate(devices)
    )


class Workers:
    """Threads that are started at once and joined by `close`.

    Args:
        stages: each gets a thread for its backwards, bound to the stage's cores.
        microbatches: the most there will be.
    """

    def __init__(self, stages: Sequence[Stage], *, microbatches: int) -> None:
        intra_op = torch.get_num_threads()
        on_cpu = sum(stage.device.type == "cpu" for stage in stages)
        each = max(1, intra_op // on_cpu) if on_cpu else intra_op
        self._forward = _pool("forward", microbatches, lambda: torch.set_num_threads(each))
        self._backward = [
            _pool(f"backward-{index}", 1, lambda stage=stage: _settle(stage, each))  # type: ignore[misc]  # a default binds the loop variable
            for index, stage in enumerate(stages)
        ]
        # The number of threads is per thread, and what new threads begin with: the latter is the user's again.
        torch.set_num_threads(intra_op)

    def forward(self, call: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run the forward of a micro-batch."""
        return self._forward.submit(call, *args)

    def backward(self, stage: int, call: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run a backward on a stage, after those it was given before."""
        return self._backward[stage].submit(call, *args)

    def close(self) -> None:
        """Join all threads, after what they do now."""
        for pool in (self._forward, *self._backward):
            pool.shutdown(wait=True, cancel_futures=True)


def _settle(stage: Stage, intra_op: int) -> None:
    torch.set_num_threads(intra_op)
    if stage.device.type != "cpu":
        torch.accelerator.set_device_index(stage.device.index or 0)
    elif stage.cores and sys.platform == "linux":
        os.sched_setaffinity(0, stage.cores)


def _pool(name: str, threads: int, initializer: Callable[[], None]) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(threads, thread_name_prefix=f"pipeline-{name}", initializer=initializer)
    everybody = threading.Barrier(threads)
    concurrent.futures.wait([pool.submit(everybody.wait) for _ in range(threads)])
    return pool
