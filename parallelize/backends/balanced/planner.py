"""Planner: makes the plan from a model and its first batch.

1  place      put the model on the output device; if it does not fit there, split it by the bytes of its parameters
2  profile    time every submodule to choose units, which are not split further; time the units at two batch sizes
3  schedule   choose the stages with the shortest predicted step under every device's memory limit
4  time       run the plan, which is validated, and the unsplit model; if the plan is not faster, do not split

The model's forward hooks run during planning. Buffers and RNG states are restored at the end; gradients do not change.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from parallelize.backends.balanced import refusals, units
from parallelize.backends.balanced.batch import Batch, copy_inputs
from parallelize.backends.balanced.fit import first_fit
from parallelize.backends.balanced.hardware import DeviceSpec, device_out_of_memory, synchronized_time
from parallelize.backends.balanced.pipeline import Pipeline
from parallelize.backends.balanced.plan import Plan, PlannerOptions, ideal_speedup, signature
from parallelize.backends.balanced.profiling import Profiler, run_backward, trained_share
from parallelize.backends.balanced.side_effects import ModelState
from parallelize.backends.balanced.stage_placement import ModelPlacement, initial_stages, spec_of
from parallelize.backends.balanced.stage_threads import stages_on
from parallelize.errors import ConfigError
from parallelize.plugins.base import Inner
from parallelize.runtime.containers import map_leaves

__all__ = ["Planner"]

_log = logging.getLogger(__name__)

# The model is split only if the speedup is at least this.
_MIN_SPEEDUP = 1.03
# Fraction of the memory limits that is left to the next plan, if one has run out of memory.
_SHRUNK = 0.8


@dataclass(kw_only=True)
class Planner:
    """Makes the plan of one model for the devices in `device_specs`; `pipeline(plan)` runs the model by a plan."""

    inner: Inner
    pipeline: Callable[[Plan], contextlib.AbstractContextManager[Pipeline]]
    device_specs: Sequence[DeviceSpec]
    output_device: torch.device
    placement: ModelPlacement
    options: PlannerOptions
    _predicted: dict[str, float] = field(default_factory=dict)  # bytes on each device of what runs
    _restriction: ConfigError | None = None  # why there is one pipeline
    _repeated: list[str] = field(default_factory=list)  # why planning has taken longer

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """Make the plan from one batch, given by its arguments.

        Raises:
            ConfigError: the model cannot be split, or does not fit on the devices.
        """
        self._devices = {self.output_device, *(torch.device(spec.device) for spec in self.device_specs)}
        self._state = ModelState(self.inner.model, self._devices)
        with torch.inference_mode(mode=False), torch.enable_grad(), self._state.restored(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the step itself gives forward's warnings
            # Autograd cannot save tensors made in inference mode.
            inputs = map_leaves(
                lambda x: x.clone() if isinstance(x, torch.Tensor) and x.is_inference() else x, (args, kwargs)
            )
            self._batch = Batch(inputs, dim=None)
            try:
                self._batch = Batch(inputs, dim=self.options.batch_dim)
                found = self._plan_units()
            except refusals.CannotSplitError as error:
                why = f"the first batch cannot be split: {error}"
                _log.warning("%s", why)
                self.options = replace(self.options, microbatches=1)
                found = replace(self._plan_units(), why=why)
        if found.is_split:
            _log.info("%s", found)
        if self._repeated:
            _log.info("planning may have taken more than the time of 10 steps: %s", "; ".join(self._repeated))
        return found

    def _plan_units(self) -> Plan:
        model, output = self.inner.model, self.output_device
        ratio = 1 + trained_share(model) * (1 + self.options.optimizer_state)
        stages, routes = initial_stages(model, self.device_specs, output_device=output, memory_ratio=ratio)
        if not routes:
            return self._leave_unsplit("the model calls no submodules, so there is nowhere to split it")
        spec = spec_of(output, self.device_specs)
        if self.options.microbatches == 1 and len(stages) == 1 and math.isinf(spec.cap_bytes):
            return self._leave_unsplit("microbatches=1 runs the model as it is")
        profiler = Profiler(
            inner=self.inner,
            batch=self._batch,
            stages=stages,
            routes=routes,
            output_device=output,
            sizes=(self._least_samples(),) * 2,
            state=self._state,
        )
        while True:
            found, full = None, None
            try:
                found = self._plan_within_caps(profiler)
            except torch.OutOfMemoryError as error:
                full = error
            if self._restriction is not None and self.options.max_pipelines is None:
                self.options = replace(self.options, max_pipelines=1)
                self._repeated.append(f"{str(self._restriction).splitlines()[0]}, so that there is one pipeline")
            elif full is not None:
                self._lower_caps(full)
            elif found is not None:
                return found

    def _plan_within_caps(self, profiler: Profiler) -> Plan:
        self.placement.move(units.module_stages(self.inner.model, profiler.routes), profiler.stages)
        whole = functools.partial(profiler.run, self._batch.size)
        specs, placement = self.device_specs, self.placement
        try:
            with refusals.explained_split_failure(self._batch.split_dims, run_whole=whole):
                plan, needed = first_fit(profiler, options=self.options, specs=specs, placement=placement)
        except refusals.NoUnitsError as error:
            return self._leave_unsplit(str(error).splitlines()[0])
        spec = spec_of(self.output_device, specs)
        if len(profiler.stages) == 1 and needed <= spec.cap_bytes:
            self.placement.move(units.module_stages(self.inner.model, profiler.routes), profiler.stages)
            if self.options.microbatches == 1:
                return self._leave_unsplit("microbatches=1 runs the model as it is")
            self._predicted = {spec.device: needed}
            plan = replace(plan, unsplit_s=min(self._seconds(self.inner) for _ in range(2)))
        return self._choose(self._explained(plan))

    def _lower_caps(self, error: torch.OutOfMemoryError) -> None:
        """Lower the memory limit of the device that has run out of memory, in what the planner has run last."""
        full = device_out_of_memory(error)

        def lower(spec: DeviceSpec) -> DeviceSpec:
            used = min(spec.cap_bytes, self._predicted.get(spec.device, math.inf))
            return spec if full not in {None, spec.device} else replace(spec, cap_bytes=_SHRUNK * used)

        before, self.device_specs = self.device_specs, [lower(spec) for spec in self.device_specs]
        if self.device_specs == before:
            raise error
        self._repeated.append(f"more memory was needed than predicted ({str(error).splitlines()[0]})")
        _log.info("%s: planning again", self._repeated[-1])

    def _least_samples(self) -> int:
        """Return the size of the smallest micro-batch: two samples for batch norm, all if batches are not split."""
        if self.options.microbatches == 1:
            return self._batch.size
        return 2 if self._batch.size >= 4 and any(isinstance(m, _BatchNorm) for m in self.inner.model.modules()) else 1

    def _seconds(self, call: Callable[..., Any]) -> float:
        """Return the seconds of forward and backward of the batch; store no gradients."""
        self._state.restore()
        args, kwargs = copy_inputs(self._batch.inputs)
        began = synchronized_time(*self._devices)
        run_backward(self.inner.model, call(*args, **kwargs))
        return synchronized_time(*self._devices) - began

    def _choose(self, plan: Plan) -> Plan:
        """Return the plan with its measured time; or leave the model unsplit, if this is not slower."""
        unsplit_s = plan.unsplit_s
        if self.options.microbatches is not None or unsplit_s is None:
            if plan.pipelines == 1 and all(torch.device(each).type == "cpu" for each in plan.devices):
                return plan
            return replace(plan, measured_s=self._split_s(plan)[0])  # tells whether it fits
        if len(plan.devices) == 1:
            count = len(self.device_specs)
            why = "only one device" if count == 1 else f"no split over {count} devices is predicted to be faster"
            return self._leave_unsplit(why, plan)
        why = f"a step takes {_ms(unsplit_s)} on one device, and "
        if unsplit_s < _MIN_SPEEDUP * (plan.predicted_s or 0.0):
            return self._leave_unsplit(f"{why}is predicted to take {_ms(plan.predicted_s or 0.0)} if split", plan)
        measured_s, refusal = self._split_s(plan)
        if refusal is not None:
            raise refusal
        if unsplit_s < _MIN_SPEEDUP * measured_s:
            return self._leave_unsplit(f"{why}{_ms(measured_s)} if split", plan)
        return replace(plan, measured_s=measured_s)

    def _split_s(self, plan: Plan) -> tuple[float, ConfigError | None]:
        """Return the seconds of a step by a plan, and why its batch was not split; None: it was."""
        # Of a device with several stages, the largest: each of its specs has its own limit.
        self._predicted = dict(sorted(zip(plan.devices, plan.memory_bytes, strict=False), key=lambda pair: pair[1]))
        with self.pipeline(plan) as pipeline:
            try:
                self._seconds(pipeline)  # validates the batch, and warms up
                if any(kind is not None and kind.in_evaluation for kind in pipeline.kinds.values()):
                    self._repeated.append("random numbers, or batch norm: validated in evaluation mode, too")
                return self._seconds(pipeline), pipeline.refusal
            finally:
                self._restriction = self._restriction or pipeline.restriction

    def _explained(self, plan: Plan) -> Plan:
        """Return a plan with the reasons for it, and with no shorter predicted step than is possible."""
        # A prediction that is faster than equally long stages on devices like the fastest is noise.
        fastest = max(spec_of(torch.device(each), self.device_specs).speed for each in plan.devices)
        ideal = ideal_speedup(len(plan.devices), plan.microbatches) * fastest
        least_s = (plan.unsplit_s or 0.0) / ideal * spec_of(self.output_device, self.device_specs).speed
        return replace(
            plan,
            predicted_s=max(plan.predicted_s or 0.0, least_s),
            why="shortest predicted step of all splits"
            + ("; the model fits on one device, where backend='ddp' is normally faster" if plan.unsplit_s else "")
            + ("; without recomputing, no split fits" if plan.recompute else "")
            + ("; no device can hold the model, and it does not need all of them" if plan.pipelines > 1 else "")
            + (f"; in one pipeline: {str(self._restriction).splitlines()[0]}" if self._restriction else ""),
            whole_inputs=tuple(sorted(self._batch.not_per_sample)),
        )

    def _leave_unsplit(self, why: str, plan: Plan | None = None) -> Plan:
        self.placement.move(units.module_stages(self.inner.model, {}), stages_on([self.output_device]))
        devices = (str(self.output_device),)
        unsplit = plan or Plan(
            model=type(self.inner.model).__name__,
            signature=signature(self.inner.model),
            samples=self._batch.size,
            events=(),
            bounds=(0,),
            devices=devices,
            microbatches=1,
        )
        unsplit = replace(unsplit, is_split=False, devices=devices, why=f"no gain: {why}; consider backend='ddp'")
        _log.warning("%s", unsplit)
        return unsplit


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
