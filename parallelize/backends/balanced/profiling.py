"""Profiling on the first batch: seconds of each unit's forward and backward, and bytes that autograd saves.

Units run as they will in the pipeline, each in its own segment, but in one thread, on micro-batches of two sizes:

    seconds   │            x        A line through both gives the time for a micro-batch of b samples:
              │     x      ╎            fixed + per_sample * b
        fixed │     ╎      ╎
              └─────┴──────┴── b
                 small   large
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from parallelize.backends.balanced.executor import ModelForward
from parallelize.backends.balanced.hardware import synchronized_time
from parallelize.backends.balanced.microbatch_run import MicrobatchRun
from parallelize.backends.balanced.microbatch_split_join import (
    SplitBatch,
    first_samples,
    infer_batch_dims,
    output_form,
    output_shapes,
)
from parallelize.backends.balanced.opaque_inputs import changed_inputs, copy_opaque_inputs, snapshot
from parallelize.backends.balanced.schedule import Profile, UnitCall
from parallelize.backends.balanced.segment import Stage
from parallelize.backends.balanced.stage_parameters import StageParameters
from parallelize.backends.balanced.stage_threads import StageThreads, ThreadLocalState
from parallelize.backends.balanced.stage_transfer import StageTransfer
from parallelize.backends.balanced.units import module_names, parameter_bytes
from parallelize.runtime.containers import leaves

__all__ = ["Profiler", "Timings", "module_bytes", "module_seconds", "profile_model"]

_REPEATS = 3


@dataclass
class Timings:
    """Measurements of one run: seconds and bytes of each unit call, and names of input objects that forward changed."""

    calls: list[str] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    saved_bytes: list[int] = field(default_factory=list)
    input_bytes: list[int] = field(default_factory=list)
    output_shapes: tuple[tuple[int, ...] | None, ...] = ()
    changed_inputs: list[str] = field(default_factory=list)


class _ProfiledRun(MicrobatchRun):
    """Run of a micro-batch that begins a segment at each unit call, and measures the time of each segment."""

    def __init__(self, profiler: Profiler) -> None:
        devices = [stage.device for stage in profiler.stages]
        super().__init__(
            0,
            stages=profiler.stages,
            routes=profiler.routes,
            stage_parameters=StageParameters(devices, half_parameters=profiler.module.half_parameters),
            seed=0 if profiler.draws else None,
        )
        names = module_names(profiler.model)
        self._unit_names = {key: names[key] for key in profiler.routes}
        self._began = 0.0
        self.timings = Timings()

    def enter_module(self, module: nn.Module) -> None:
        name = self._unit_names.get(id(module))
        if name is None or self.is_recomputing:
            return
        if self.timings.calls:
            self.move_to(self._routes[id(module)][0])
        elif self.segment.stage != self._routes[id(module)][0]:
            # Operations before the first unit ran on another stage: each segment must be one unit call, so drop theirs.
            self.move_to(self._routes[id(module)][0])
            self.segments.pop(0)
            self.timings.forward_s.pop()
            self.timings.input_bytes.pop()
        self.timings.calls.append(name)

    def move_to(self, stage: int) -> None:
        super().move_to(stage)
        self._began = synchronized_time(*self._devices)

    def _leave_stage(self) -> None:
        if self.segment is not self.user_segment:
            self.timings.forward_s.append(synchronized_time(*self._devices) - self._began)
            copies = [each.copy for each in self.segment.imports.values()]
            self.timings.input_bytes.append(sum(copy.numel() * copy.element_size() for copy in copies))
        super()._leave_stage()


@dataclass(frozen=True, kw_only=True)
class Profiler:
    """Runs and measures micro-batches of a model; `routes` maps the id of a unit to the stages of its calls."""

    module: ModelForward
    model: nn.Module
    stages: tuple[Stage, ...]
    routes: Mapping[int, Sequence[int]]
    threads: StageThreads
    batch_dim: int
    draws: bool = True

    def run(self, inputs: Any, *, counts_saved: bool = False) -> Timings:
        """Measure forward and backward of one micro-batch; with `counts_saved`, also the bytes that autograd saves."""
        inputs = copy_opaque_inputs(inputs)
        run = _ProfiledRun(self)
        thread_state = ThreadLocalState(frozenset(stage.device for stage in self.stages))
        measure = functools.partial(self._measure, run, inputs, counts_saved=counts_saved)
        timings: Timings = self.threads.forward(thread_state.run, measure).result()
        return timings

    def _measure(self, run: _ProfiledRun, inputs: Any, *, counts_saved: bool) -> Timings:
        batch = SplitBatch(inputs, microbatches=1, dim=self.batch_dim)
        run.mark_inputs(batch.parts[0])
        args, kwargs = batch.inputs(0)
        before = snapshot(inputs)
        with contextlib.ExitStack() as stack:
            saved = stack.enter_context(_count_saved_bytes(run, self.model)) if counts_saved else {}
            output = run.call_forward(lambda: self.module(*args, **kwargs), transfer=StageTransfer(run))
        for leaf in leaves(output):
            output_leaf = run.export_output(leaf)[1] if isinstance(leaf, torch.Tensor) else None
            if output_leaf is not None:
                output_leaf.grad = torch.ones_like(output_leaf)
        timings = run.timings
        timings.output_shapes = output_shapes(output)
        timings.changed_inputs = changed_inputs(inputs, before)
        timings.saved_bytes = [saved.get(segment.key, 0) for segment in run.segments]
        devices = [stage.device for stage in self.stages]
        for segment in reversed(run.segments):
            began = synchronized_time(*devices)
            segment.backward()
            timings.backward_s.insert(0, synchronized_time(*devices) - began)
        return timings


def profile_model(
    profiler: Profiler, inputs: Any, *, samples: int, is_never_split: bool = False
) -> tuple[Profile, dict[int, int | None], tuple[int | None, ...]]:
    """Profile a model at two micro-batch sizes; with `is_never_split`, on the full batch only, as forward may need it.

    Returns:
        The profile; position of each output tensor -> its batch dimension, None if it has none; and the number of
        dimensions of each output, None for an output that is no tensor.
    """
    has_batchnorm = any(isinstance(module, _BatchNorm) for module in profiler.model.modules())
    least = 2 if samples >= 4 and has_batchnorm else 1
    small, large = (samples, samples) if is_never_split else (max(least, samples // 16), max(least, samples // 2))
    sizes = [small, large] if small < large else [large]
    rows = [_fastest(profiler, first_samples(inputs, size, dim=profiler.batch_dim)) for size in sizes]
    memory = profiler.run(first_samples(inputs, large, dim=profiler.batch_dim), counts_saved=True)
    few, many = rows[0], rows[-1]
    if few.calls != many.calls:
        few = many  # the calls depend on the data: use one size only
    seen: dict[int, int] = {}
    calls = []
    modules = dict(profiler.model.named_modules())
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
    dims = infer_batch_dims(rows[0].output_shapes, rows[-1].output_shapes)
    found = Profile(calls=tuple(calls), samples=samples, least_samples=small)
    return found, dims, output_form(many.output_shapes)


def module_seconds(profiler: Profiler, inputs: Any) -> dict[int, float]:
    """Return the seconds that all forward calls of a submodule take, by id of each called submodule."""
    began: list[tuple[nn.Module, float]] = []
    found: dict[int, float] = {}
    known = module_names(profiler.model)
    devices = [stage.device for stage in profiler.stages]

    def before(module: nn.Module, _args: Any) -> None:
        if id(module) in known:
            began.append((module, synchronized_time(*devices)))

    def after(module: nn.Module, _args: Any, _output: Any) -> None:
        if id(module) in known and began and began[-1][0] is module:
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
    modules = dict(profiler.model.named_modules())
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
def _count_saved_bytes(run: MicrobatchRun, model: nn.Module) -> Iterator[dict[int, int]]:
    """Yield the bytes that autograd saves, by segment key; each storage is counted once, parameters are not counted."""
    seen = {each.untyped_storage().data_ptr() for each in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found[run.segment.key] = found.get(run.segment.key, 0) + storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
