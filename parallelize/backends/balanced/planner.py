"""Planner: makes the plan from a model and its first batch.

1  place      put the model on the output device; if it does not fit there, split it by the bytes of its parameters
2  profile    time every submodule to choose units, which are not split further; time the units at two batch sizes
3  schedule   choose the stages with the shortest predicted step under every device's memory limit
4  time       run the best plans, which are validated, and the unsplit model; if no plan is faster, do not split

The model's forward hooks run during planning. Buffers and RNG states are restored at the end; gradients do not change.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from parallelize.backends.balanced import refusals, units
from parallelize.backends.balanced.hardware import DeviceSpec, synchronized_time
from parallelize.backends.balanced.microbatch_split_join import (
    batch_size,
    first_samples,
    names_not_per_sample,
    split_dims,
)
from parallelize.backends.balanced.opaque_inputs import copy_opaque_inputs
from parallelize.backends.balanced.pipeline import Pipeline
from parallelize.backends.balanced.plan import Plan, signature
from parallelize.backends.balanced.profiling import Profiler, module_bytes, module_seconds, profile_model, run_backward
from parallelize.backends.balanced.schedule import (
    Memory,
    Profile,
    Schedule,
    best_schedule,
    candidates,
    fits_device,
    ideal_speedup,
    needed_cap,
)
from parallelize.backends.balanced.side_effects import ModelState, clone_inference_tensors
from parallelize.backends.balanced.stage_placement import ModelPlacement, initial_stages, spec_of
from parallelize.backends.balanced.stage_threads import stages_on
from parallelize.errors import ConfigError
from parallelize.plugins.base import Inner

__all__ = ["Planner", "PlannerOptions"]

_log = logging.getLogger(__name__)

# The model is split only if the speedup is at least this.
_MIN_SPEEDUP = 1.03
_MAX_TIMED_PLANS = 2


@dataclass(frozen=True, kw_only=True)
class _Granularity:
    """Limits each unit to 1 / `units_per_device` of the mean cost per device; None: units as small as possible."""

    cost: Literal["time", "bytes"]
    units_per_device: int | None
    recompute: bool


_BALANCED = _Granularity(cost="time", units_per_device=8, recompute=False)
_LOW_MEMORY = _Granularity(cost="bytes", units_per_device=2, recompute=True)
_FINEST = _Granularity(cost="bytes", units_per_device=None, recompute=False)
# Granularities to try, in this order, for each value of the option `recompute`.
_GRANULARITIES: Mapping[bool | str, Sequence[_Granularity]] = {
    "auto": (_BALANCED, _LOW_MEMORY, _FINEST, replace(_FINEST, recompute=True)),
    True: (replace(_LOW_MEMORY, cost="time"), _LOW_MEMORY, replace(_FINEST, recompute=True)),
    False: (_BALANCED, _FINEST),
}


@dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """The options of BalancedBackend that affect the plan; `microbatches=None`: choose the fastest number."""

    microbatches: int | None = None
    recompute: bool | Literal["auto"] = "auto"
    optimizer_state: float = 2.0
    batch_dim: int = 0


@dataclass(frozen=True)
class _Fit:
    """A schedule that fits the devices, and the measurements from which it was made."""

    schedule: Schedule
    profile: Profile
    memory: Memory


@dataclass(kw_only=True)
class Planner:
    """Makes the plan of one model for the devices in `device_specs`; `pipeline(plan)` runs the model by a plan."""

    inner: Inner
    pipeline: Callable[[Plan], contextlib.AbstractContextManager[Pipeline]]
    device_specs: Sequence[DeviceSpec]
    output_device: torch.device
    placement: ModelPlacement
    options: PlannerOptions
    _samples: int = 1
    _whole_inputs: tuple[str, ...] = ()

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """Make the plan from one batch, given by its arguments.

        Raises:
            ConfigError: the model cannot be split, or does not fit on the devices.
        """
        self._devices = {self.output_device, *(torch.device(spec.device) for spec in self.device_specs)}
        model, dim = self.inner.model, self.options.batch_dim
        state = ModelState(model, self._devices).restored()
        with torch.inference_mode(mode=False), torch.enable_grad(), state, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the step itself gives forward's warnings
            inputs = clone_inference_tensors((args, kwargs))
            try:
                self._samples = batch_size(inputs, dim=dim)
                self._whole_inputs = tuple(sorted(names_not_per_sample(inputs, dim=dim)))
                return self._plan_units(inputs)
            except refusals.CannotSplitError as error:
                why = f"the first batch cannot be split: {error}"
            self.options = replace(self.options, microbatches=1)
            _log.warning("%s", why)
            return replace(self._plan_units(inputs), why=why)

    def _plan_units(self, inputs: Any) -> Plan:
        model, output = self.inner.model, self.output_device
        ratio = 1 + _trained_share(model) * (1 + self.options.optimizer_state)
        stages, routes = initial_stages(model, self.device_specs, output_device=output, memory_ratio=ratio)
        self.placement.move(units.module_stages(model, routes), stages)
        if not routes:
            return self._leave_unsplit("the model calls no submodules, so there is nowhere to split it")
        spec = spec_of(output, self.device_specs)
        is_alone = len(stages) == 1
        if self.options.microbatches == 1 and is_alone and math.isinf(spec.cap_bytes):
            return self._leave_unsplit("microbatches=1 runs the model as it is")
        profiler = Profiler(
            inner=self.inner, stages=stages, routes=routes, output_device=output, batch_dim=self.options.batch_dim
        )
        with self._explained_split_failure(profiler, inputs):
            fit = self._first_fit(profiler, inputs)
        if is_alone and fits_device(fit.profile, spec, memory=fit.memory):
            self.placement.move(units.module_stages(model, routes), stages)
            if self.options.microbatches == 1:
                return self._leave_unsplit("microbatches=1 runs the model as it is")
            fit = replace(fit, profile=replace(fit.profile, unsplit_s=self._seconds(self.inner, inputs)))
        plan = self._choose(fit, inputs)
        if plan.is_split:
            _log.info("%s", plan)
        return plan

    @contextlib.contextmanager
    def _explained_split_failure(self, profiler: Profiler, inputs: Any) -> Iterator[None]:
        """Replace an exception that occurs only on a part of a batch by CannotSplitError; `inputs` are all of it."""
        try:
            yield
        except Exception as error:
            if isinstance(error, ConfigError):
                raise
            profiler.run(inputs)  # raises the user's error, if it is of the full batch
            raise refusals.split_failure(split_dims(inputs, dim=self.options.batch_dim), error) from error

    def _seconds(self, call: Callable[..., Any], inputs: Any) -> float:
        """Return the seconds of forward and backward, the best of three runs after a warm-up; store no gradients."""
        found = []
        for _ in range(4):
            args, kwargs = copy_opaque_inputs(inputs)
            began = synchronized_time(*self._devices)
            run_backward(self.inner.model, call(*args, **kwargs))
            found.append(synchronized_time(*self._devices) - began)
        return min(found[1:])

    def _first_fit(self, profiler: Profiler, inputs: Any) -> _Fit:
        """Return the best schedule of the first granularity with which the model fits.

        Small units balance best; large units need the least memory when recomputed; the smallest possible units fit
        where no others do. The memory limit in the error is that of units chosen by bytes, since units chosen by time
        differ between runs.

        Raises:
            ConfigError: no schedule fits.
        """
        microbatch = self._microbatch(inputs)
        seconds = module_seconds(profiler, microbatch)
        bytes_kept = module_bytes(profiler, microbatch, called=seconds)
        outermost = units.choose_units(self.inner.model, bytes_kept, at_most=math.inf)
        totals: dict[str, tuple[Mapping[int, float], float]] = {
            "time": (seconds, sum(profiler.run(microbatch).forward_s)),
            "bytes": (bytes_kept, sum(bytes_kept.get(id(each), 0.0) for each in outermost)),
        }
        stage_of = {id(module): stage for module, stage in units.module_stages(self.inner.model, profiler.routes)}
        needed = math.inf
        for granularity in _GRANULARITIES[self.options.recompute]:
            costs, total = totals[granularity.cost]
            parts = granularity.units_per_device
            at_most = total / (parts * len(self.device_specs)) if parts else -1.0
            chosen = units.choose_units(self.inner.model, costs, at_most=at_most)
            split_profiler = replace(profiler, routes={id(module): [stage_of[id(module)]] for module in chosen})
            self.placement.move(units.module_stages(self.inner.model, split_profiler.routes), profiler.stages)
            measured = profile_model(
                split_profiler, inputs, samples=self._samples, is_never_split=self.options.microbatches == 1
            )
            measured = replace(measured, trained_share=_trained_share(self.inner.model))
            memory = Memory(optimizer_state=self.options.optimizer_state, recompute=granularity.recompute)
            constraints: dict[str, Any] = {"microbatches": self.options.microbatches, "memory": memory}
            schedule = best_schedule(measured, self.device_specs, **constraints)
            if schedule is not None:
                return _Fit(schedule, measured, memory)
            if granularity.cost == "bytes":
                needed = min(needed, needed_cap(measured, self.device_specs, **constraints))
        raise refusals.too_large(needed, [spec.device for spec in self.device_specs], is_measured=True)

    def _microbatch(self, inputs: Any) -> Any:
        """Return the inputs of a trial micro-batch: half of the batch, or all of it if batches are not split."""
        count = 1 if self.options.microbatches == 1 else 2
        return first_samples(inputs, max(1, self._samples // count), dim=self.options.batch_dim)

    def _choose(self, fit: _Fit, inputs: Any) -> Plan:
        plan = self._make_plan(fit, fit.schedule)
        unsplit_s = fit.profile.unsplit_s
        if self.options.microbatches is not None or unsplit_s is None:
            return plan
        if len(plan.devices) == 1:
            count = len(self.device_specs)
            why = "only one device" if count == 1 else f"no split over {count} devices is predicted to be faster"
            return self._leave_unsplit(why, plan)
        why = f"a step takes {_ms(unsplit_s)} on one device, and "
        plans = [plan, *(self._make_plan(fit, each) for each in self._alternatives(fit))]
        faster = [each for each in plans if unsplit_s >= _MIN_SPEEDUP * (each.predicted_s or math.inf)]
        if not faster:
            predicted_s = min(each.predicted_s or math.inf for each in plans)
            return self._leave_unsplit(f"{why}is predicted to take {_ms(predicted_s)} if split", plan)
        timed = []
        for each in faster[:_MAX_TIMED_PLANS]:
            measured_s, refusal = self._split_s(each, inputs)
            if refusal is not None:
                raise refusal
            timed.append(replace(each, measured_s=measured_s))
        plan = min(timed, key=lambda each: each.measured_s or math.inf)
        if unsplit_s < _MIN_SPEEDUP * (plan.measured_s or math.inf):
            return self._leave_unsplit(f"{why}{_ms(plan.measured_s or math.inf)} if split", plan)
        return plan

    def _split_s(self, plan: Plan, inputs: Any) -> tuple[float, ConfigError | None]:
        """Return the seconds of a step by a plan, and why its batch was not split; None: it was."""
        with self.pipeline(plan) as pipeline:
            return self._seconds(pipeline, inputs), pipeline.refusal

    def _alternatives(self, fit: _Fit) -> list[Schedule]:
        """Return the best split for each other number of micro-batches, the shortest predicted step first."""
        every = candidates(fit.profile, self.device_specs, microbatches=None, memory=fit.memory)
        best_of: dict[int, Schedule] = {fit.schedule.microbatches: fit.schedule}
        for each in sorted(every, key=lambda each: each.predicted_s):
            if len(each.devices) > 1:
                best_of.setdefault(each.microbatches, each)
        return list(best_of.values())[1:]

    def _make_plan(self, fit: _Fit, schedule: Schedule) -> Plan:
        measured = fit.profile
        fits = measured.unsplit_s is not None
        least_s = (measured.unsplit_s or 0.0) / self._largest_speedup(schedule)  # a shorter prediction is noise
        return Plan(
            model=type(self.inner.model).__name__,
            signature=signature(self.inner.model),
            samples=measured.samples,
            events=tuple(call.unit for call in measured.calls),
            bounds=schedule.split_points,
            devices=tuple(spec.device for spec in schedule.devices),
            microbatches=schedule.microbatches,
            recompute=schedule.recompute,
            forward_s=schedule.forward_s,
            backward_s=schedule.backward_s,
            memory_bytes=schedule.memory_bytes,
            unsplit_s=measured.unsplit_s,
            predicted_s=max(schedule.predicted_s, least_s),
            why="shortest predicted step of all splits"
            + ("; the model fits on one device, where backend='ddp' is normally faster" if fits else "")
            + ("; without recomputing, no split fits" if schedule.recompute else ""),
            whole_inputs=self._whole_inputs,
        )

    def _largest_speedup(self, schedule: Schedule) -> float:
        """Return the speedup over the output device of stages that are equally long on devices like the fastest."""
        fastest = max(spec.speed for spec in schedule.devices)
        ideal = ideal_speedup(len(schedule.devices), schedule.microbatches)
        return ideal * fastest / spec_of(self.output_device, self.device_specs).speed

    def _leave_unsplit(self, why: str, plan: Plan | None = None) -> Plan:
        self.placement.move(units.module_stages(self.inner.model, {}), stages_on([self.output_device]))
        devices = (str(self.output_device),)
        unsplit = plan or Plan(
            model=type(self.inner.model).__name__,
            signature=signature(self.inner.model),
            samples=self._samples,
            events=(),
            bounds=(0,),
            devices=devices,
            microbatches=1,
        )
        unsplit = replace(unsplit, is_split=False, devices=devices, why=f"no gain: {why}; consider backend='ddp'")
        _log.warning("%s", unsplit)
        return unsplit


def _trained_share(model: nn.Module) -> float:
    total = sum(each.numel() for each in model.parameters())
    return sum(each.numel() for each in model.parameters() if each.requires_grad) / max(1, total)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
