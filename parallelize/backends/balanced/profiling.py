"""How long each atom takes, forward and backward, and what it keeps: measured on the first batch.

Atoms run as they will in the pipeline, each as a segment of its own, in one thread, on two sizes of micro-batch:

    seconds    ·
       b ······│·········x      fixed + per_sample * b, for any size of micro-batch
             · │  x      │
         ·     │  │      │
     fixed     small   large
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from parallelize.backends.balanced.costs import Event, Profile
from parallelize.backends.balanced.microbatch_run import Tape
from parallelize.backends.balanced.microbatch_split_join import Batch, batch_dims, form, shapes, take
from parallelize.backends.balanced.opaque_inputs import changed, fresh, snapshot
from parallelize.backends.balanced.segment import Stage
from parallelize.backends.balanced.stage_parameters import Half, Shadows
from parallelize.backends.balanced.stage_threads import Workers
from parallelize.backends.balanced.stage_transfer import Crossing
from parallelize.backends.balanced.thread_local_state import Ambient
from parallelize.backends.balanced.units import names_of, parameter_bytes
from parallelize.backends.balanced.user_forward import Forward
from parallelize.runtime.containers import leaves

__all__ = ["Bench", "Timings", "bytes_of_modules", "now", "profile", "seconds_of_modules"]

_REPEATS = 3


@dataclass
class Timings:
    """One run: its atoms and segments, what each took, and which objects among its inputs it has changed."""

    events: list[str] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    saved_bytes: list[int] = field(default_factory=list)
    input_bytes: list[int] = field(default_factory=list)
    output_shapes: tuple[tuple[int, ...] | None, ...] = ()
    changed_inputs: list[str] = field(default_factory=list)


class _ProfileTape(Tape):
    """A micro-batch that begins a segment, and looks at the clock, wherever an atom begins."""

    def __init__(
        self,
        *,
        stages: Sequence[Stage],
        routes: Mapping[int, Sequence[int]],
        names: Mapping[int, str],
        seed: int | None,
        half: Half | None,
    ) -> None:
        shadows = Shadows([stage.device for stage in stages], half=half)
        super().__init__(0, stages=stages, routes=routes, shadows=shadows, seed=seed)
        self._atoms = {key: names[key] for key in routes}
        self._began = 0.0
        self.timings = Timings()

    def arrive(self, module: nn.Module) -> None:
        name = self._atoms.get(id(module))
        if name is None or self.is_again:
            return
        if self.timings.events:
            self.move_to(self._routes[id(module)][0])
        elif self.segment.stage != self._routes[id(module)][0]:
            # What runs before the first atom is the first event's.
            self.move_to(self._routes[id(module)][0])
            self.segments.pop(0)
            self.timings.forward_s.pop()
            self.timings.input_bytes.pop()
        self.timings.events.append(name)

    def move_to(self, stage: int) -> None:
        super().move_to(stage)
        self._began = now(self.device)

    def _leave(self) -> None:
        if self.segment is not self.outside:
            self.timings.forward_s.append(now(self.device) - self._began)
            self.timings.input_bytes.append(sum(_bytes(each.local) for each in self.segment.imports.values()))
        super()._leave()


def now(device: torch.device) -> float:
    """Seconds, when the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where a model is profiled.

    Args:
        module: what runs a micro-batch.
        model: the user's.
        stages: where its atoms are for now.
        routes: id of an atom -> the stages of its calls.
        workers: threads for these stages.
        batch_dim: of the inputs.
        draws: whether the model draws random numbers.
    """

    module: Forward
    model: nn.Module
    stages: tuple[Stage, ...]
    routes: Mapping[int, Sequence[int]]
    workers: Workers
    batch_dim: int
    draws: bool = True

    def run(self, inputs: Any, *, counts_saved: bool = False) -> Timings:
        """Forward and backward of one micro-batch, segment by segment."""
        inputs = fresh(inputs)
        names = names_of(self.model)
        tape = _ProfileTape(
            stages=self.stages,
            routes=self.routes,
            names=names,
            seed=0 if self.draws else None,
            half=self.module.half,
        )
        ambient = Ambient(frozenset(stage.device for stage in self.stages))
        measure = functools.partial(self._measure, tape, inputs, counts_saved=counts_saved)
        timings: Timings = self.workers.forward(ambient.run, measure).result()
        return timings

    def _measure(self, tape: _ProfileTape, inputs: Any, *, counts_saved: bool) -> Timings:
        batch = Batch(inputs, microbatches=1, dim=self.batch_dim)
        for piece in batch.parts[0]:
            if isinstance(piece, torch.Tensor):
                tape.bring(piece)
        args, kwargs = batch.inputs(0)
        before = snapshot(inputs)
        with contextlib.ExitStack() as stack:
            saved = stack.enter_context(_saved(tape, self.model)) if counts_saved else {}
            output = tape.run(lambda: self.module(*args, **kwargs), crossing=Crossing(tape))
        for leaf in leaves(output):
            waiting = tape.hand_out(leaf)[1] if isinstance(leaf, torch.Tensor) else None
            if waiting is not None:
                waiting.grad = torch.ones_like(waiting)
        timings = tape.timings
        timings.output_shapes = shapes(output)
        timings.changed_inputs = changed(inputs, before)
        timings.saved_bytes = [saved.get(segment.key, 0) for segment in tape.segments]
        for segment in reversed(tape.segments):
            device = self.stages[segment.stage].device
            began = now(device)
            segment.backward()
            timings.backward_s.insert(0, now(device) - began)
        return timings


def profile(
    bench: Bench, inputs: Any, *, samples: int, is_whole: bool = False
) -> tuple[Profile, dict[int, int | None], tuple[int | None, ...]]:
    """Measure a model.

    Args:
        bench: where.
        inputs: arguments and keyword arguments of the first batch.
        samples: in it.
        is_whole: whether it will never be cut: some models cannot bear it.

    Returns:
        What was measured; for each output that is a tensor its batch dimension, None if it has none; and the form of
        the outputs.

    Raises:
        ConfigError: forward leaves something behind on the model, so that micro-batches would disturb each other.
    """
    least = 2 if samples >= 4 and _has_batchnorm(bench.model) else 1
    small, large = (samples, samples) if is_whole else (max(least, samples // 16), max(least, samples // 2))
    sizes = [small, large] if small < large else [large]
    rows = [_fastest(bench, take(inputs, size, dim=bench.batch_dim)) for size in sizes]
    memory = bench.run(take(inputs, large, dim=bench.batch_dim), counts_saved=True)
    few, many = rows[0], rows[-1]
    if few.events != many.events:
        few = many  # branches that depend on data: one size has to do
    seen: dict[int, int] = {}
    events = []
    modules = dict(bench.model.named_modules())
    for i, name in enumerate(many.events):
        new = parameter_bytes(modules[name], seen)
        seen |= new
        ahead = _line(few.forward_s[i], many.forward_s[i], small, large)
        back = _line(few.backward_s[i], many.backward_s[i], small, large)
        is_known = memory.events == many.events
        events.append(
            Event(
                atom=name,
                forward_fixed_s=ahead[0],
                forward_per_sample_s=ahead[1],
                backward_fixed_s=back[0],
                backward_per_sample_s=back[1],
                parameter_bytes=sum(new.values()),
                saved_bytes=memory.saved_bytes[i] / large if is_known else 0.0,
                input_bytes=many.input_bytes[i] / large,
            )
        )
    dims = batch_dims(rows[0].output_shapes, rows[-1].output_shapes)
    found = Profile(events=tuple(events), samples=samples, least_samples=small)
    return found, dims, form(many.output_shapes)


def seconds_of_modules(bench: Bench, inputs: Any) -> dict[int, float]:
    """id of each submodule that a forward calls -> seconds in its calls."""
    began: list[tuple[nn.Module, float]] = []
    found: dict[int, float] = {}
    known = names_of(bench.model)
    device = bench.stages[0].device

    def before(module: nn.Module, _args: Any) -> None:
        if id(module) in known:
            began.append((module, now(device)))

    def after(module: nn.Module, _args: Any, _output: Any) -> None:
        if id(module) in known and began and began[-1][0] is module:
            found[id(module)] = found.get(id(module), 0.0) + now(device) - began.pop()[1]

    with contextlib.ExitStack() as stack, torch.no_grad():
        bench.run(inputs)
        stack.callback(register_module_forward_pre_hook(before).remove)
        stack.callback(register_module_forward_hook(after).remove)
        bench.run(inputs)
    return found


def bytes_of_modules(bench: Bench, inputs: Any, *, called: Collection[int]) -> dict[int, float]:
    """id of each submodule that a forward calls -> bytes of its parameters and of what it keeps for backward.

    Args:
        bench: its atoms are the finest there are.
        inputs: of a micro-batch.
        called: ids of the submodules.
    """
    timings = bench.run(inputs, counts_saved=True)
    modules = dict(bench.model.named_modules())
    kept: dict[int, int] = {}
    for name, saved in zip(timings.events, timings.saved_bytes, strict=True):
        kept[id(modules[name])] = kept.get(id(modules[name]), 0) + saved
    return {
        id(module): sum(parameter_bytes(module).values()) + sum(kept.get(id(part), 0) for part in module.modules())
        for module in modules.values()
        if id(module) in called
    }


def _fastest(bench: Bench, inputs: Any) -> Timings:
    """The least of several runs, after one that does not count."""
    bench.run(inputs)
    best = bench.run(inputs)
    for _ in range(_REPEATS - 1):
        again = bench.run(inputs)
        if again.events != best.events:
            return again
        best.forward_s = [min(pair) for pair in zip(best.forward_s, again.forward_s, strict=True)]
        best.backward_s = [min(pair) for pair in zip(best.backward_s, again.backward_s, strict=True)]
    return best


def _line(at_small: float, at_large: float, small: int, large: int) -> tuple[float, float]:
    """The line through two measurements, as (fixed, per sample), neither below zero."""
    if large == small:
        return at_large, 0.0
    per_sample = min(max(0.0, (at_large - at_small) / (large - small)), at_large / large)
    return at_large - per_sample * large, per_sample


@contextlib.contextmanager
def _saved(tape: Tape, model: nn.Module) -> Iterator[dict[int, int]]:
    """Key of a segment -> bytes that autograd keeps for it, each storage once and parameters not at all."""
    seen = {each.untyped_storage().data_ptr() for each in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found[tape.segment.key] = found.get(tape.segment.key, 0) + storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())
