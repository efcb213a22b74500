"""Threads of a pipeline on the CPU, and the thread-local state that they share with the caller.

On an accelerator one thread issues all work, which runs on the device. On the CPU, one thread per micro-batch runs
forward and backward; in backward, as many at a time as there are stages. In forward, a lock admits one micro-batch at a
time to each stage. A micro-batch releases its stage before it waits for the next one, so deadlock is impossible:

    micro-batch 0   [ stage 0 ]──>[ stage 1 ]──>[ stage 2 ]
    micro-batch 1    waits  [ stage 0 ]──>[ stage 1 ]──>[ stage 2 ]
    micro-batch 2            waits  [ stage 0 ]──>[ stage 1 ]──>[ stage 2 ]
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import functools
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from parallelize.runtime.function_modes import function_modes, replace_function_modes

__all__ = ["Stage", "StageThreads", "is_bound_to_thread", "saved_tensors_hooks", "stages_on"]


@dataclass(frozen=True)
class Stage:
    """A device, or some cores of the CPU, on which a part of the model runs."""

    device: torch.device
    cores: frozenset[int] = frozenset()  # empty: any cores

    def bind_thread(self) -> None:
        """Make the stage's device current in the calling thread; on the CPU, bind the thread to the stage's cores."""
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device.index or 0)
        elif self.cores and sys.platform == "linux":
            # If the thread moved to other cores, their caches would not contain the stage's weights.
            os.sched_setaffinity(0, self.cores)


def stages_on(devices: Sequence[torch.device]) -> tuple[Stage, ...]:
    """Return one stage per device; stages on the CPU get equal numbers of cores, if there are enough."""
    on_cpu = [index for index, device in enumerate(devices) if device.type == "cpu"]
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    count = len(cores) // len(on_cpu) if on_cpu else 0
    cores_of = {index: frozenset(cores[i * count :][:count]) for i, index in enumerate(on_cpu)}
    return tuple(Stage(device, cores_of.get(index, frozenset())) for index, device in enumerate(devices))


class StageThreads:
    """Threads of a pipeline on the CPU, one per micro-batch, started on construction and joined by `close`."""

    def __init__(self, stages: Sequence[Stage], *, microbatches: int) -> None:
        intra_op, self._is_closed = torch.get_num_threads(), False
        self._free = queue.SimpleQueue[Stage]()  # stages on which no backward runs
        for stage in stages:
            self._free.put(stage)
        self._idents = idents = set[int]()  # of the threads

        def start() -> None:  # without a reference to the pool, whose threads end with it if Ctrl-C comes here
            torch.set_num_threads(max(1, intra_op // len(stages)))
            idents.add(threading.get_ident())

        self._pool = ThreadPoolExecutor(microbatches, thread_name_prefix="pipeline", initializer=start)
        barrier = threading.Barrier(microbatches)
        concurrent.futures.wait([self._pool.submit(barrier.wait) for _ in range(microbatches)])
        # The calls of set_num_threads in the pool also changed the default for new threads: restore it.
        torch.set_num_threads(intra_op)

    def run(self, calls: Sequence[Callable[[], Any]], *, is_backward: bool = False) -> list[Any]:
        """Return the results of calls, made in the threads with the thread-local state of this one.

        Those of a backward take a free stage. In one of the threads, and after `close`, they are made one by one.
        """
        if self._is_closed or threading.get_ident() in self._idents:
            return [call() for call in calls]
        if is_backward:
            calls = [functools.partial(self._on_a_stage, call) for call in calls]
        run = _with_state_of_this_thread()
        futures = [self._pool.submit(run, call) for call in calls]
        try:
            concurrent.futures.wait(futures)
        except BaseException:  # for example Ctrl-C: end the calls before the caller uses the model again
            for each in futures:
                each.cancel()
            concurrent.futures.wait(futures)
            raise
        return [each.result() for each in futures]

    def close(self) -> None:
        """Cancel queued calls, and join all threads after their current calls."""
        self._is_closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _on_a_stage(self, call: Callable[[], Any]) -> Any:
        stage = self._free.get()
        try:
            stage.bind_thread()
            return call()
        finally:
            self._free.put(stage)


def is_bound_to_thread() -> bool:
    """Return whether this thread has state that others do not get: torch.func, dispatch modes, dual numbers."""
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return is_transformed or bool(_get_current_dispatch_mode_stack()) or forward_ad._current_level >= 0


def saved_tensors_hooks() -> Any:
    """Return the innermost (pack, unpack) hooks of saved tensors on this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003  # torch's signature


def _with_state_of_this_thread() -> Callable[[Callable[[], Any]], Any]:
    """Return a function that makes a call, on any thread, with the thread-local state of this one.

    It contains grad and inference mode, autocast on the CPU, saved-tensor hooks, function modes (such as a default
    device) and context variables.
    """
    context, modes, hooks = contextvars.copy_context(), function_modes(), saved_tensors_hooks()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    dtype, is_cached = torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    is_autocast = torch.is_autocast_enabled("cpu")

    def run(call: Callable[[], Any]) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            if is_autocast:
                stack.enter_context(torch.autocast("cpu", dtype, cache_enabled=is_cached))
            if hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
            stack.callback(replace_function_modes, function_modes())
            replace_function_modes([*function_modes(), *modes])
            return call()

    return lambda call: context.copy().run(run, call)
