"""Threads of a pipeline, the thread-local state that they share with the caller, and the lock of each stage.

One thread per micro-batch runs forward; one thread per stage runs backward. A stage admits one micro-batch at a time.
On their first visits to a stage, micro-batches enter in ascending order:

    micro-batch 0   [ stage 0 ]──>[ stage 1 ]──>[ stage 2 ]
    micro-batch 1    waits  [ stage 0 ]──>[ stage 1 ]──>[ stage 2 ]
    micro-batch 2            waits  [ stage 0 ]──>[ stage 1 ]──>[ stage 2 ]

A micro-batch releases its stage before it waits for the next one, so a waiting micro-batch holds no lock and deadlock
is impossible. A micro-batch that returns to a stage (a shared module, a loop) enters as soon as the stage is free.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from parallelize.backends.balanced.segment import Stage
from parallelize.runtime.function_modes import function_modes, replace_function_modes

__all__ = ["Aborted", "StageLock", "StageThreads", "ThreadLocalState", "stages_on"]


def stages_on(devices: Sequence[torch.device]) -> tuple[Stage, ...]:
    """Return one stage per device; stages on the CPU get equal numbers of cores, if there are enough."""
    on_cpu = [index for index, device in enumerate(devices) if device.type == "cpu"]
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    count = len(cores) // len(on_cpu) if on_cpu else 0
    cores_of = {index: frozenset(cores[i * count :][:count]) for i, index in enumerate(on_cpu)}
    return tuple(Stage(device, cores_of.get(index, frozenset())) for index, device in enumerate(devices))


class StageThreads:
    """Forward and backward threads of a pipeline, started on construction and joined by `close`.

    Args:
        stages: the stages; each gets one backward thread, bound to the stage's device or cores.
        microbatches: number of forward threads: the maximum number of micro-batches.
    """

    def __init__(self, stages: Sequence[Stage], *, microbatches: int) -> None:
        intra_op = torch.get_num_threads()
        on_cpu = sum(stage.device.type == "cpu" for stage in stages)
        threads_per_stage = max(1, intra_op // on_cpu) if on_cpu else intra_op
        self._forward = _pool("forward", microbatches, lambda: torch.set_num_threads(threads_per_stage))
        self._backward = [
            _pool(f"backward-{index}", 1, lambda stage=stage: _set_up_thread(stage, threads_per_stage))  # type: ignore[misc]  # binds the loop variable
            for index, stage in enumerate(stages)
        ]
        # The calls of set_num_threads in the pools also changed the default for new threads: restore it.
        torch.set_num_threads(intra_op)

    def forward(self, call: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Queue the forward of a micro-batch on a forward thread."""
        return self._forward.submit(call, *args)

    def backward(self, stage: int, call: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Queue a backward on the backward thread of a stage."""
        return self._backward[stage].submit(call, *args)

    def close(self) -> None:
        """Cancel queued tasks, and join all threads after their current tasks."""
        for pool in (self._forward, *self._backward):
            pool.shutdown(wait=True, cancel_futures=True)


class Aborted(Exception):  # noqa: N818  # not an error itself, but ends a thread after one
    """Raised in micro-batches that wait for a stage, after another micro-batch has failed."""


class StageLock:
    """Lock that admits micro-batches to one stage, one at a time, during one forward."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_busy = False
        self._is_aborted = False
        self._seen: set[int] = set()  # micro-batches that have visited the stage or have finished
        self._next_in_order = 0  # the first micro-batch that is not in _seen

    def acquire(self, microbatch: int) -> None:
        """Wait until a micro-batch may enter the stage, and enter it.

        Raises:
            Aborted: another micro-batch has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_aborted or self._may_acquire(microbatch))
            if self._is_aborted:
                raise Aborted
            self._is_busy = True
            self._mark_seen(microbatch)

    def release(self) -> None:
        """Leave the stage, and wake the micro-batches that wait for it."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()

    def finish(self, microbatch: int) -> None:
        """Mark a micro-batch as finished, so that later ones do not wait for its first visit."""
        with self._changed:
            self._mark_seen(microbatch)
            self._changed.notify_all()

    def abort(self) -> None:
        """Make all current and future `acquire` calls raise Aborted."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()

    def _may_acquire(self, microbatch: int) -> bool:
        return not self._is_busy and (microbatch in self._seen or microbatch == self._next_in_order)

    def _mark_seen(self, microbatch: int) -> None:
        self._seen.add(microbatch)
        while self._next_in_order in self._seen:
            self._next_in_order += 1


class ThreadLocalState:
    """Thread-local state of the thread that creates the object, with which calls can run on other threads.

    Contains grad and inference mode, autocast, saved-tensor hooks, function modes (such as a default device), context
    variables, and the current stream of each of `devices`.
    """

    def __init__(self, devices: frozenset[torch.device]) -> None:
        self._context = contextvars.copy_context()
        self._is_grad_enabled = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        types = {device.type for device in devices}
        on = {kind: torch.get_autocast_dtype(kind) for kind in {"cpu", *types} if torch.is_autocast_enabled(kind)}
        accelerator = next((kind for kind in types if kind != "cpu" and kind in on), None)
        # Autocast of an accelerator includes the stages on the CPU, which compute a part of the same model.
        self._autocast = on if accelerator is None else {**on, **dict.fromkeys(types, on[accelerator])}
        self._is_autocast_cached = torch.is_autocast_cache_enabled()
        self._saved_tensors_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003  # torch's signature
        self._function_modes = function_modes()
        self._streams = [torch.accelerator.current_stream(device) for device in devices if device.type != "cpu"]

    def run(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call, made on the current thread with the stored state."""
        return self._context.copy().run(self._call, call)

    def use_streams(self) -> None:
        """Make the stored streams current on the calling thread."""
        for stream in self._streams:
            torch.accelerator.set_stream(stream)

    def _call(self, call: Callable[[], Any]) -> Any:
        with contextlib.ExitStack() as stack:
            self.use_streams()
            if self._is_inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._is_grad_enabled))
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._is_autocast_cached))
            if self._saved_tensors_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saved_tensors_hooks))
            stack.callback(replace_function_modes, function_modes())
            replace_function_modes([*function_modes(), *self._function_modes])
            return call()


def _set_up_thread(stage: Stage, intra_op: int) -> None:
    torch.set_num_threads(intra_op)
    stage.bind_thread()


def _pool(name: str, threads: int, initializer: Callable[[], None]) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(threads, thread_name_prefix=f"pipeline-{name}", initializer=initializer)
    barrier = threading.Barrier(threads)
    concurrent.futures.wait([pool.submit(barrier.wait) for _ in range(threads)])
    return pool
