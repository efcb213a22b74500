"""Fit: the units, the sizes of which decide whether a model fits the devices, and the fastest plan for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from parallelize.backends.balanced import refusals, units
from parallelize.backends.balanced.hardware import DeviceSpec
from parallelize.backends.balanced.plan import Plan, PlannerOptions
from parallelize.backends.balanced.profiling import Profiler, module_costs, profile_model
from parallelize.backends.balanced.schedule import Profile, best_plan, needed_cap
from parallelize.backends.balanced.stage_placement import ModelPlacement, spec_of
from parallelize.errors import ConfigError

__all__ = ["first_fit"]


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


def first_fit(
    profiler: Profiler, *, options: PlannerOptions, specs: Sequence[DeviceSpec], placement: ModelPlacement
) -> tuple[Plan, Profile]:
    """Return the best plan that fits, and its measurements, with the largest micro-batch that the devices can run.

    The profiler's units are the submodules without submodules; `placement` moves the model.

    Raises:
        ConfigError: no plan fits.
    """
    fitted: Profiler | None = None
    while True:
        try:
            fitted = fitted or profiler.fitted([spec_of(each.device, specs).cap_bytes for each in profiler.stages])
            return _first_fit(fitted, options=options, specs=specs, placement=placement)
        except torch.OutOfMemoryError as error:
            fitted = None if fitted is None else fitted.smaller()
            if fitted is None:
                raise ConfigError(
                    f"a forward of {profiler.sizes[0]} samples does not fit on the devices",
                    why=str(error).splitlines()[0],
                    fix="use larger devices or smaller submodules, which can be on different devices",
                ) from error


def _first_fit(
    profiler: Profiler, *, options: PlannerOptions, specs: Sequence[DeviceSpec], placement: ModelPlacement
) -> tuple[Plan, Profile]:
    """Return the best plan of the first granularity with which the model fits.

    Small units balance best; large units need the least memory when recomputed; the smallest possible units fit
    where no others do. The memory limit in the error is that of units chosen by bytes, since units chosen by time
    differ between runs.
    """
    model = profiler.inner.model
    costs = dict(zip(("time", "bytes"), module_costs(profiler), strict=True))
    outermost = units.choose_units(model, costs["bytes"], at_most=math.inf)
    stage_of = {id(module): stage for module, stage in units.module_stages(model, profiler.routes)}
    needed = math.inf
    for granularity in _GRANULARITIES[options.recompute]:
        of_each, parts = costs[granularity.cost], granularity.units_per_device
        total = sum(of_each.get(id(each), 0.0) for each in outermost)
        at_most = total / (parts * len(specs)) if parts else -1.0
        chosen = units.choose_units(model, of_each, at_most=at_most)
        split_profiler = replace(profiler, routes={id(module): [stage_of[id(module)]] for module in chosen})
        placement.move(units.module_stages(model, split_profiler.routes), profiler.stages)
        profile, decided = profile_model(split_profiler), replace(options, recompute=granularity.recompute)
        plan = best_plan(profile, specs, decided)
        if plan is not None:
            return plan, profile
        if granularity.cost == "bytes":
            needed = min(needed, needed_cap(profile, specs, decided))
    raise refusals.too_large(needed, [spec.device for spec in specs])
