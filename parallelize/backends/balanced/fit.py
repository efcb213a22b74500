"""Fit: the units, the sizes of which decide whether a model fits the devices, and the fastest plan for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from parallelize.backends.balanced import refusals, units
from parallelize.backends.balanced.hardware import DeviceSpec
from parallelize.backends.balanced.plan import Plan, PlannerOptions
from parallelize.backends.balanced.profiling import Profiler, module_shares, profile_model
from parallelize.backends.balanced.schedule import best_plan, needed_cap, unsplit_bytes
from parallelize.backends.balanced.stage_placement import ModelPlacement, spec_of
from parallelize.errors import ConfigError

__all__ = ["first_fit"]


# What to try, in this order, for each value of the option `recompute`: how many units each device has at least, of
# equal time and memory (None: units as small as possible), and whether activations are recomputed. Small units balance
# best; large ones need the least memory when recomputed; the smallest fit where no others do.
_GRANULARITIES: Mapping[bool | str, Sequence[tuple[int | None, bool]]] = {
    "auto": ((8, False), (2, True), (None, False), (None, True)),
    True: ((2, True), (None, True)),
    False: ((8, False), (None, False)),
}


def first_fit(
    profiler: Profiler, *, options: PlannerOptions, specs: Sequence[DeviceSpec], placement: ModelPlacement
) -> tuple[Plan, float]:
    """Return the best plan that fits, measured with the largest micro-batch that the devices can run.

    The second result is the bytes that the model needs if it is not split.
    The profiler's units are the submodules without submodules; `placement` moves the model.

    Raises:
        NoUnitsError: forward calls no submodules.
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
) -> tuple[Plan, float]:
    """Return the best plan of the first granularity with which the model fits, and the bytes of the unsplit model."""
    model, shares, needed = profiler.inner.model, module_shares(profiler), math.inf
    stage_of = {id(module): stage for module, stage in units.module_stages(model, profiler.routes)}
    for of_each_device, recompute in _GRANULARITIES[options.recompute]:
        at_most = 1 / (of_each_device * len(specs)) if of_each_device else -1.0
        chosen = units.choose_units(model, shares, at_most=at_most)
        split_profiler = replace(profiler, routes={id(module): [stage_of[id(module)]] for module in chosen})
        placement.move(units.module_stages(model, split_profiler.routes), profiler.stages)
        profile, decided = profile_model(split_profiler), replace(options, recompute=recompute)
        if not profile.calls:
            raise refusals.NoUnitsError
        plan = best_plan(profile, specs, decided)
        if plan is not None:
            return plan, unsplit_bytes(profile, decided)
        needed = needed_cap(profile, specs, decided)  # at last, of the smallest units: the same in every run
    raise refusals.too_large(needed, [spec.device for spec in specs])
