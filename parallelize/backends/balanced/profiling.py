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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from parallelize.backends.balanced.backward import compute_gradients, has_reentrant_checkpoint
from parallelize.backends.balanced.batch import Batch, copy_inputs
from parallelize.backends.balanced.call_clock import Clock, NothingSavedError, count_saved_bytes
from parallelize.backends.balanced.microbatch_run import MicrobatchRun, StagedModel
from parallelize.backends.balanced.plan import signature
from parallelize.backends.balanced.schedule import Line, Profile, UnitCall
from parallelize.backends.balanced.side_effects import ModelState
from parallelize.backends.balanced.stage_threads import Stage
from parallelize.backends.balanced.units import module_stages, parameter_bytes
from parallelize.plugins.base import Inner
from parallelize.runtime.containers import leaves

__all__ = ["Profiler", "module_shares", "profile_model", "run_backward", "trained_share"]

_REPEATS = 4  # of small micro-batches


@dataclass(frozen=True, kw_only=True)
class Profiler:
    """Runs and measures micro-batches of a model.

    Args:
        batch: the batch from which they are taken.
        routes: id of a unit -> the stages of its calls.
        sizes: number of samples of the smaller and of the larger micro-batch.
        state: state of the model, restored before each micro-batch: those of another size would leave the pointers of
            queues at places that are no multiples of a batch.
        has_backward: whether tensors are saved for backward, which is measured, too.
    """

    inner: Inner
    batch: Batch
    stages: tuple[Stage, ...]
    routes: Mapping[int, Sequence[int]]
    output_device: torch.device
    sizes: tuple[int, int]
    state: ModelState
    has_backward: bool = True

    def fitted(self, caps: Sequence[float]) -> Profiler:
        """Return a profiler with the sizes of micro-batches that fit the stages, up to a quarter of a large batch.

        Args:
            caps: bytes that each stage may use.
        """
        least, model = self.sizes[0], self.inner.model
        counting, most = replace(self, has_backward=False), math.inf
        if not all(map(math.isinf, caps)):
            saved, kept = [0.0] * len(caps), [0.0] * len(caps)
            for call in self.counted(least).calls:
                saved[self.routes[id(model.get_submodule(call.unit))][0]] += call.saved_bytes()
            for module, stage in module_stages(model, self.routes):
                kept[stage] += 2 * sum(each.nbytes for each in module.parameters(recurse=False))  # and gradients
            most = min(((cap - k) * least / s for cap, k, s in zip(caps, kept, saved, strict=True) if s), default=most)
        if most < least:
            return counting
        samples = self.batch.size
        sizes = (samples // 16, max(samples // 4, min(4, samples // 2)))
        small, large = (max(least, int(min(each, most))) for each in sizes)
        return replace(self, sizes=(small, large))

    def counted(self, size: int) -> Clock:
        """Count what one micro-batch saves, and keep it only if forward itself computes gradients."""
        try:
            return replace(self, has_backward=False).run(size)
        except NothingSavedError:
            return self.run(size, counts_saved=True)

    def smaller(self) -> Profiler | None:
        """Return a profiler that needs less memory; None: there is none."""
        small, large = self.sizes
        if large > small:
            return replace(self, sizes=(small, max(small, large // 2)))
        return replace(self, has_backward=False) if self.has_backward else None

    def run(self, size: int | None = None, *, counts_saved: bool = False) -> Clock:
        """Measure forward and backward of one micro-batch.

        Args:
            size: its number of samples; None: that of the larger micro-batch.
            counts_saved: whether to count the bytes that autograd saves.
        """
        self.state.restore()
        args, kwargs = copy_inputs(self.batch.first(size or self.sizes[1]))
        model = self.inner.model
        with contextlib.ExitStack() as stack:
            staged = StagedModel(model, self.stages, self.routes, output_device=self.output_device)
            stack.callback(staged.close)
            clock = Clock(model, staged.devices)
            if counts_saved or not self.has_backward:
                stack.enter_context(count_saved_bytes(clock, (model, (args, kwargs)), keeps=self.has_backward))
                handles = [
                    each.register_forward_hook(clock.end_unit) for each in model.modules() if id(each) in self.routes
                ]
                for each in handles:
                    stack.callback(each.remove)
            stack.enter_context(MicrobatchRun(staged, on_unit=clock.on_unit).active())
            with self.state.watching():
                output = self.inner(*args, **kwargs)
            clock.end_forward()
            clock.output_bytes = _output_bytes(output)
        if self.has_backward and run_backward(model, output):
            clock.end_backward()
        else:
            for call in clock.calls:
                call.backward_s = 2 * call.forward_s
        return clock


def run_backward(model: nn.Module, output: Any) -> bool:
    """Compute and discard the gradients of a model's parameters; return False if this cannot be done."""
    wanted = [each for each in model.parameters() if each.requires_grad]
    outputs = [each for each in leaves(output) if isinstance(each, torch.Tensor) and each.grad_fn is not None]
    if not outputs or not wanted or has_reentrant_checkpoint(outputs):
        return False
    compute_gradients(outputs, [each.new_ones(()).expand_as(each) for each in outputs], inputs=wanted)
    return True


def profile_model(profiler: Profiler) -> Profile:
    """Profile a model at two micro-batch sizes."""
    model, (small, large) = profiler.inner.model, profiler.sizes
    # Autocast casts weights once for all micro-batches, so these runs share the casts, and measure working bytes with
    # the graph of casts that the first micro-batch has.
    torch.clear_autocast_cache()
    counts = [profiler.run(counts_saved=True), profiler.counted(small)]  # warm up, too
    torch.clear_autocast_cache()
    first = profiler.run(small)
    many = _fastest([profiler.run(), profiler.run()])
    few = many if small == large else _fastest([first, *(profiler.run(small) for _ in range(_REPEATS - 1))])
    if any(each.units != many.units for each in (few, first, *counts)):
        few, first, counts = many, many, [many, many]  # the calls depend on the data: use one size only
    shared = set.intersection(*({saved.storage for call in each.calls for saved in call.saved} for each in counts))
    seen: dict[int, int] = {}
    calls = []
    for i, (at_small, at_large) in enumerate(zip(few.calls, many.calls, strict=True)):
        new = parameter_bytes(model.get_submodule(at_large.unit), seen)
        seen |= new
        counted = [each.calls[i] for each in counts]
        saved, saved_after = (
            _fit_bytes(few_saved, many_saved, small, large)
            for many_saved, few_saved in (
                [each.saved_bytes(without=shared, after=after) for each in counted] for after in (False, True)
            )
        )
        calls.append(
            UnitCall(
                unit=at_large.unit,
                forward=_fit_line(at_small.forward_s, at_large.forward_s, small, large),
                backward=_fit_line(at_small.backward_s, at_large.backward_s, small, large),
                parameter_bytes=sum(new.values()),
                saved=saved,
                saved_after=saved_after,
                shared_bytes=counted[0].saved_bytes() - saved.at(large) - saved_after.at(large),
                working=_fit_bytes(first.calls[i].working_bytes, counted[0].working_bytes, small, large),
                input_bytes=at_large.input_bytes / large,
            )
        )
    return Profile(
        calls=tuple(calls),
        samples=profiler.batch.size,
        trained_share=trained_share(model),
        least_samples=small,
        output_bytes=many.output_bytes / large,
        model=type(model).__name__,
        signature=signature(model),
    )


def trained_share(model: nn.Module) -> float:
    """Return the fraction of a model's parameters that require grad."""
    total = sum(each.numel() for each in model.parameters())
    return sum(each.numel() for each in model.parameters() if each.requires_grad) / max(1, total)


def _output_bytes(output: Any) -> int:
    """Return the bytes of joined outputs and, if the loss is computed from them, of it and its gradients."""
    tensors = [each for each in leaves(output) if isinstance(each, torch.Tensor)]
    if any(each.dim() == 0 and each.requires_grad for each in tensors):
        return sum(each.nbytes for each in tensors)
    # As cross_entropy does, which autocast runs in float32: it saves as many values, and computes two gradients.
    return sum(each.nbytes + 3 * each.numel() * max(each.element_size(), 4) for each in tensors)


def module_shares(profiler: Profiler) -> dict[int, float]:
    """Return, by ids of called submodules, the share of each in the time of forward or in memory, whichever is larger.

    The profiler's units must be the submodules without submodules: what a module costs is the sum of those inside it.
    """
    called: set[int] = set()

    def before(module: nn.Module, _args: Any) -> None:
        if not torch.compiler.is_compiling():
            called.add(id(module))

    handle = register_module_forward_pre_hook(before)
    try:
        memory = profiler.run(counts_saved=True)
    finally:
        handle.remove()
    modules = dict(profiler.inner.model.named_modules())
    seconds, size = defaultdict[int, float](float), defaultdict[int, float](float)
    for call in profiler.run().calls:
        seconds[id(modules[call.unit])] += call.forward_s
    for call in memory.calls:
        size[id(modules[call.unit])] += call.saved_bytes()
    for each in modules.values():
        size[id(each)] += sum(own.nbytes for own in each.parameters(recurse=False))

    def share(module: nn.Module) -> float:
        parts = [id(each) for each in module.modules()]
        return max(sum(costs[each] for each in parts) / (sum(costs.values()) or 1.0) for costs in (seconds, size))

    return {id(each): share(each) for each in modules.values() if id(each) in called}


def _fastest(runs: Sequence[Clock]) -> Clock:
    """Return the last run, with each unit call's shortest times over all runs, if they have the same calls."""
    last = runs[-1]
    if all(each.units == last.units for each in runs):
        for call, *others in zip(last.calls, *(each.calls for each in runs), strict=True):
            call.forward_s = min(each.forward_s for each in others)
            call.backward_s = min(each.backward_s for each in others)
    return last


def _fit_line(at_small: float, at_large: float, small: int, large: int) -> Line:
    """Return the line through the seconds at two sizes; neither of its parts is negative."""
    if large == small:
        return Line(at_large, 0.0)
    per_sample = min(max(0.0, (at_large - at_small) / (large - small)), at_large / large)
    return Line(at_large - per_sample * large, per_sample)


def _fit_bytes(at_small: float, at_large: float, small: int, large: int) -> Line:
    """Return the line through the bytes at two sizes."""
    return Line(0.0, at_large / large) if small == large else _fit_line(at_small, at_large, small, large)
