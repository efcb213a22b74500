"""Threads of a pipeline on the CPU, and the thread-local state that they share with the caller.

On an accelerator one thread issues all work, which runs on the device. On the CPU, one thread per micro-batch runs
forward, and backward has as many threads as there are stages. In forward, a lock admits one micro-batch at a time to
each stage. A micro-batch releases its stage before it waits for the next one, so deadlock is impossible:

    micro-batch 0   [ stage 0 ]──>[ stage 1 ]──>[ stage 2 ]
    micro-batch 1    waits  [ stage 0 ]──>[ stage 1 ]──>[ stage 2 ]
    micro-batch 2            waits  [ stage 0 ]──>[ stage 1 ]──>[ stage 2 ]
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import os
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

__all__ = ["Stage", "StageThreads", "ThreadLocalState", "is_bound_to_thread", "saved_tensors_hooks", "stages_on"]


@dataclass(frozen=True)
class Stage:
    """A device, or some cores of the CPU, on which a part of the model runs.

    Args:
        cores: CPU cores on which a CPU stage runs; empty: any cores.
    """

    device: torch.device
    cores: frozenset[int] = frozenset()

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
    """Forward and backward threads of a pipeline on the CPU, started on construction and joined by `close`.

    Args:
        stages: the stages; each gets one backward thread, bound to the stage's cores.
        microbatches: number of forward threads: the maximum number of micro-batches.

    Attributes:
        forward: queues a call, given with its arguments, on a forward thread; returns a Future.
        backward: the same, on a backward thread.
    """

    def __init__(self, stages: Sequence[Stage], *, microbatches: int) -> None:
        intra_op = torch.get_num_threads()
        threads_per_stage = max(1, intra_op // len(stages))
        unbound = list(stages)  # each thread takes one

        def bind() -> None:
            torch.set_num_threads(threads_per_stage)
            unbound.pop().bind_thread()

        forward = _pool("forward", microbatches, lambda: torch.set_num_threads(threads_per_stage))
        backward = _pool("backward", len(stages), bind)
        self._pools = forward, backward
        self.forward, self.backward = forward.submit, backward.submit
        # The calls of set_num_threads in the pools also changed the default for new threads: restore it.
        torch.set_num_threads(intra_op)

    def close(self) -> None:
        """Cancel queued tasks, and join all threads after their current tasks."""
        for pool in self._pools:
            pool.shutdown(wait=True, cancel_futures=True)


def is_bound_to_thread() -> bool:
    """Return whether this thread has state that `ThreadLocalState` lacks: torch.func, dispatch modes, dual numbers."""
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return is_transformed or bool(_get_current_dispatch_mode_stack()) or forward_ad._current_level >= 0


def saved_tensors_hooks() -> Any:
    """Return the innermost (pack, unpack) hooks of saved tensors on this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003  # torch's signature


class ThreadLocalState:
    """Thread-local state of the thread that creates the object, with which calls can run on other threads.

    Contains grad and inference mode, autocast on the CPU, saved-tensor hooks, function modes (such as a default device)
    and context variables.
    """

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._is_grad_enabled = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        self._autocast = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
        self._is_autocast_cached = torch.is_autocast_cache_enabled()
        self._saved_tensors_hooks = saved_tensors_hooks()
        self._function_modes = function_modes()

    def run(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call, made on the current thread with the stored state."""
        return self._context.copy().run(self._call, call)

    def _call(self, call: Callable[[], Any]) -> Any:
        with contextlib.ExitStack() as stack:
            if self._is_inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._is_grad_enabled))
            is_enabled, dtype = self._autocast
            if is_enabled:
                stack.enter_context(torch.autocast("cpu", dtype=dtype, cache_enabled=self._is_autocast_cached))
            if self._saved_tensors_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saved_tensors_hooks))
            stack.callback(replace_function_modes, function_modes())
            replace_function_modes([*function_modes(), *self._function_modes])
            return call()


def _pool(name: str, threads: int, initializer: Callable[[], None]) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(threads, thread_name_prefix=f"pipeline-{name}", initializer=initializer)
    barrier = threading.Barrier(threads)
    concurrent.futures.wait([pool.submit(barrier.wait) for _ in range(threads)])
    return pool
