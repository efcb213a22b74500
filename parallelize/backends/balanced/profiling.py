"""Profiling on the first batch: seconds of each unit's forward and backward, and bytes that autograd saves.

Units run in one thread, on micro-batches of two sizes. Under a memory limit, a first forward of the smallest size keeps
nothing for backward: what it would have kept shows which sizes fit. If none does, backward is taken for twice as long.
A unit's forward lasts until the next unit begins. Its backward begins when the gradient of the next unit's input is
computed, and ends when that of its own input is.

    seconds   │            x        A line through both gives the time for a micro-batch of b samples:
              │     x      ╎            fixed + per_sample * b
        fixed │     ╎      ╎
              └─────┴──────┴── b
                 small   large
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from parallelize.backends.balanced.batchnorm import BatchNorms
from parallelize.backends.balanced.device_transfer import DeviceTransfer
from parallelize.backends.balanced.hardware import synchronized_time
from parallelize.backends.balanced.microbatch_run import MicrobatchRun, ModuleHooks
from parallelize.backends.balanced.microbatch_split_join import first_samples
from parallelize.backends.balanced.opaque_inputs import copy_inputs
from parallelize.backends.balanced.schedule import Profile, UnitCall
from parallelize.backends.balanced.stage_threads import Stage
from parallelize.backends.balanced.threaded_backward import compute_gradients, has_reentrant_checkpoint
from parallelize.backends.balanced.units import module_names, module_stages, parameter_bytes
from parallelize.plugins.base import Inner
from parallelize.runtime.containers import leaves

__all__ = ["Profiler", "Timings", "module_bytes", "module_seconds", "profile_model", "run_backward"]

_REPEATS = 3


@dataclass
class Timings:
    """Measurements of one run: seconds and bytes of each unit call."""

    calls: list[str] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    saved_bytes: list[int] = field(default_factory=list)
    input_bytes: list[int] = field(default_factory=list)


class _Clock:
    """Records when units begin in forward, and when their inputs' gradients are computed in backward."""

    def __init__(self, names: Mapping[int, str], devices: Collection[torch.device]) -> None:
        self.timings = Timings()
        self._names = names
        self._devices = devices
        self._began = self.now()
        self._is_forward, self._running = True, -1

    def now(self) -> float:
        return synchronized_time(*self._devices)

    def on_unit(self, module: nn.Module, args: Any) -> None:
        """Begin a unit call: the operations before the first one count as a part of it."""
        if not self._is_forward:
            return
        timings, index = self.timings, len(self.timings.calls)
        if index:
            self._end_forward()
        timings.calls.append(self._names[id(module)])
        timings.saved_bytes.append(0)
        tensors = [each for each in leaves(args) if isinstance(each, torch.Tensor)]
        timings.input_bytes.append(sum(each.numel() * each.element_size() for each in tensors))
        for each in tensors:
            if each.requires_grad and not each.is_leaf:
                each.register_hook(lambda _, index=index: self._end_backward(index))  # type: ignore[no-untyped-call]  # torch's

    def end_forward(self) -> None:
        """End the last unit call, and begin backward."""
        self._end_forward()
        self._is_forward = False
        self.timings.backward_s = [0.0] * len(self.timings.calls)
        self._running = len(self.timings.calls) - 1

    def end_backward(self) -> None:
        self._end_backward(0)

    def _end_forward(self) -> None:
        now = self.now()
        self.timings.forward_s.append(now - self._began)
        self._began = now

    def _end_backward(self, index: int) -> None:
        """End the backward of unit call `index`; those of later calls that no gradient has ended are a part of it."""
        if index <= self._running:
            now = self.now()
            self.timings.backward_s[index] += now - self._began
            self._began, self._running = now, index - 1


@dataclass(frozen=True, kw_only=True)
class Profiler:
    """Runs and measures micro-batches of a model.

    Args:
        routes: id of a unit -> the stages of its calls.
        sizes: number of samples of the smaller and of the larger micro-batch.
        restore: restores the model's buffers and numbers, before each micro-batch: those of another size would leave
            the pointers of queues at places that are no multiples of a batch.
        has_backward: whether tensors are saved for backward, which is measured, too.
    """

    inner: Inner
    stages: tuple[Stage, ...]
    routes: Mapping[int, Sequence[int]]
    output_device: torch.device
    batch_dim: int
    sizes: tuple[int, int]
    restore: Callable[[], None]
    watching: Callable[[], contextlib.AbstractContextManager[None]]
    has_backward: bool = True

    def fitted(self, inputs: Any, *, samples: int, caps: Sequence[float]) -> Profiler:
        """Return a profiler with the sizes of micro-batches that fit the stages, up to half of the batch.

        Args:
            inputs: those of the batch.
            samples: number of its samples.
            caps: bytes that each stage may use.
        """
        least, model = self.sizes[0], self.inner.model
        if all(map(math.isinf, caps)):
            return replace(self, sizes=(max(least, samples // 16), max(least, samples // 2)))
        counting = replace(self, has_backward=False)
        timings = counting.run(first_samples(inputs, least, dim=self.batch_dim), counts_saved=True)
        modules = dict(model.named_modules())
        saved, kept = [0] * len(caps), [0] * len(caps)
        for name, each in zip(timings.calls, timings.saved_bytes, strict=True):
            saved[self.routes[id(modules[name])][0]] += each
        for module, stage in module_stages(model, self.routes):
            kept[stage] += 2 * sum(each.nbytes for each in module.parameters(recurse=False))  # and gradients
        fitting = [(cap - k) * least / s for cap, k, s in zip(caps, kept, saved, strict=True) if s]
        most = min(fitting, default=math.inf)
        if most < least:
            return counting
        small, large = (max(least, int(min(samples // part, most))) for part in (16, 2))
        return replace(self, sizes=(small, large))

    def smaller(self) -> Profiler | None:
        """Return a profiler that needs less memory; None: there is none."""
        small, large = self.sizes
        if large > small:
            return replace(self, sizes=(small, max(small, large // 2)))
        return replace(self, has_backward=False) if self.has_backward else None

    def microbatch(self, inputs: Any, size: int | None = None) -> Any:
        """Return the inputs of a micro-batch of a size, by default the larger one."""
        return first_samples(inputs, size or self.sizes[1], dim=self.batch_dim)

    def run(self, inputs: Any, *, counts_saved: bool = False) -> Timings:
        """Measure forward and backward of one micro-batch; with `counts_saved`, also the bytes that autograd saves."""
        self.restore()
        args, kwargs = copy_inputs(inputs)
        model, devices = self.inner.model, {self.output_device, *(stage.device for stage in self.stages)}
        clock = _Clock(module_names(model), devices)
        transfer = DeviceTransfer(devices) if len(devices) > 1 else None
        run = MicrobatchRun(self.stages, self.routes, transfer=transfer, on_unit=clock.on_unit)
        with contextlib.ExitStack() as stack:
            norms = BatchNorms(model)
            hooks = ModuleHooks(model, self.stages, self.routes, norms, output_device=self.output_device)
            stack.callback(hooks.close)
            if counts_saved or not self.has_backward:
                stack.enter_context(_count_saved_bytes(clock.timings, (model, (args, kwargs)), keeps=self.has_backward))
            stack.enter_context(run.active())
            with self.watching():
                output = self.inner(*args, **kwargs)
            clock.end_forward()
        if self.has_backward and run_backward(model, output):
            clock.end_backward()
        else:
            clock.timings.backward_s = [2 * each for each in clock.timings.forward_s]
        return clock.timings


def run_backward(model: nn.Module, output: Any) -> bool:
    """Compute and discard the gradients of a model's parameters; return False if this cannot be done."""
    wanted = [each for each in model.parameters() if each.requires_grad]
    outputs = [each for each in leaves(output) if isinstance(each, torch.Tensor) and each.grad_fn is not None]
    if not outputs or not wanted or has_reentrant_checkpoint(outputs):
        return False
    compute_gradients(outputs, [torch.ones_like(each) for each in outputs], inputs=wanted)
    return True


def profile_model(profiler: Profiler, inputs: Any, *, samples: int) -> Profile:
    """Profile a model on a batch with this many samples, at two micro-batch sizes."""
    modules = dict(profiler.inner.model.named_modules())
    small, large = profiler.sizes
    rows = [_fastest(profiler, profiler.microbatch(inputs, size)) for size in dict.fromkeys(profiler.sizes)]
    memory = profiler.run(profiler.microbatch(inputs), counts_saved=True)
    few, many = rows[0], rows[-1]
    if few.calls != many.calls:
        few = many  # the calls depend on the data: use one size only
    seen: dict[int, int] = {}
    calls = []
    for i, name in enumerate(many.calls):
        new = parameter_bytes(modules[name], seen)
        seen |= new
        forward_line = _fit_line(few.forward_s[i], many.forward_s[i], small, large)
        backward_line = _fit_line(few.backward_s[i], many.backward_s[i], small, large)
        is_known = memory.calls == many.calls
        calls.append(
            UnitCall(
                unit=name,
                forward_fixed_s=forward_line[0],
                forward_per_sample_s=forward_line[1],
                backward_fixed_s=backward_line[0],
                backward_per_sample_s=backward_line[1],
                parameter_bytes=sum(new.values()),
                saved_bytes=memory.saved_bytes[i] / large if is_known else 0.0,
                input_bytes=many.input_bytes[i] / large,
            )
        )
    return Profile(calls=tuple(calls), samples=samples, least_samples=small)


def module_seconds(profiler: Profiler, inputs: Any) -> dict[int, float]:
    """Return the seconds that all forward calls of a submodule take, by id of each called submodule."""
    began: list[tuple[nn.Module, float]] = []
    found: dict[int, float] = {}
    known = module_names(profiler.inner.model)
    devices = [stage.device for stage in profiler.stages]

    def before(module: nn.Module, _args: Any) -> None:
        if id(module) in known and not torch.compiler.is_compiling():
            began.append((module, synchronized_time(*devices)))

    def after(module: nn.Module, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling() and began and began[-1][0] is module:
            found[id(module)] = found.get(id(module), 0.0) + synchronized_time(*devices) - began.pop()[1]

    with contextlib.ExitStack() as stack, torch.no_grad():
        profiler.run(inputs)
        stack.callback(register_module_forward_pre_hook(before).remove)
        stack.callback(register_module_forward_hook(after).remove)
        profiler.run(inputs)
    return found


def module_bytes(profiler: Profiler, inputs: Any, *, called: Collection[int]) -> dict[int, float]:
    """Return the bytes of a submodule's parameters and saved tensors, by id of each called submodule.

    The profiler's units must be the submodules without submodules.
    """
    timings = profiler.run(inputs, counts_saved=True)
    modules = dict(profiler.inner.model.named_modules())
    kept: dict[int, int] = {}
    for name, saved in zip(timings.calls, timings.saved_bytes, strict=True):
        kept[id(modules[name])] = kept.get(id(modules[name]), 0) + saved
    return {
        id(module): sum(parameter_bytes(module).values()) + sum(kept.get(id(part), 0) for part in module.modules())
        for module in modules.values()
        if id(module) in called
    }


def _fastest(profiler: Profiler, inputs: Any) -> Timings:
    """Return each unit call's shortest times over several runs, after a warm-up."""
    profiler.run(inputs)
    best = profiler.run(inputs)
    for _ in range(_REPEATS - 1):
        again = profiler.run(inputs)
        if again.calls != best.calls:
            return again
        best.forward_s = [min(pair) for pair in zip(best.forward_s, again.forward_s, strict=True)]
        best.backward_s = [min(pair) for pair in zip(best.backward_s, again.backward_s, strict=True)]
    return best


def _fit_line(at_small: float, at_large: float, small: int, large: int) -> tuple[float, float]:
    """Return (fixed seconds, seconds per sample) of the line through two measurements; both are at least 0."""
    if large == small:
        return at_large, 0.0
    per_sample = min(max(0.0, (at_large - at_small) / (large - small)), at_large / large)
    return at_large - per_sample * large, per_sample


@contextlib.contextmanager
def _count_saved_bytes(timings: Timings, known: tuple[nn.Module, Any], *, keeps: bool) -> Iterator[None]:
    """Count the bytes that autograd saves in each unit call: each storage once, those of parameters and inputs never.

    Without `keeps`, nothing is saved, and backward is impossible.
    """
    refer: Any = StorageWeakRef
    tensors = (*known[0].parameters(), *(each for each in leaves(known[1]) if isinstance(each, torch.Tensor)))
    seen = {refer(each.untyped_storage()) for each in tensors}

    def pack(tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        reference = refer(storage)  # not data_ptr, which the next tensor has if nothing is kept
        if reference not in seen and timings.saved_bytes:
            seen.add(reference)
            timings.saved_bytes[-1] += storage.nbytes()
        return tensor if keeps else None

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
