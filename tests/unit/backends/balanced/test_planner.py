"""planner: which measured and predicted times are believed."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from torch import nn

from parallelize.backends.balanced.batch import Batch
from parallelize.backends.balanced.fit import PlannerOptions
from parallelize.backends.balanced.hardware import DeviceSpec
from parallelize.backends.balanced.planner import Planner
from parallelize.backends.balanced.schedule import Memory, Profile, Schedule, UnitCall, best_schedule
from parallelize.backends.balanced.stage_placement import ModelPlacement


@pytest.mark.parametrize(
    ("microbatches", "speeds", "speedup"),
    [(1, (1.0, 1.0), 1.0), (2, (1.0, 1.0), 4 / 3), (1, (1.0, 8.0), 2.0)],
)
def test_a_prediction_faster_than_the_ideal_is_noise(microbatches, speeds, speedup):
    """Two stages of equal devices are at most as fast as the ideal, however long the unsplit model was measured."""
    specs = tuple(
        DeviceSpec(device=name, cap_bytes=1e9, speed=speed) for name, speed in zip(("cpu", "meta"), speeds, strict=True)
    )
    call = UnitCall(
        unit="0",
        forward_fixed_s=0.25,
        forward_per_sample_s=0.0,
        backward_fixed_s=0.25,
        backward_per_sample_s=0.0,
        parameter_bytes=4,
        saved_bytes=4.0,
        input_bytes=4.0,
    )
    profile = Profile(calls=(call, call), samples=8, least_samples=1, unsplit_s=2.0)
    schedule = Schedule(
        devices=specs,
        split_points=(0, 1, 2),
        microbatches=microbatches,
        recompute=False,
        forward_s=(0.25, 0.25),
        backward_s=(0.25, 0.25),
        memory_bytes=(4.0, 4.0),
        predicted_s=1.0,
    )
    fit = types.SimpleNamespace(schedule=schedule, profile=profile, memory=Memory())
    planner = Planner(
        inner=types.SimpleNamespace(model=nn.Linear(1, 1)),
        pipeline=None,
        device_specs=specs,
        output_device=torch.device("cpu"),
        placement=None,
        options=PlannerOptions(),
    )
    planner._batch = Batch(((torch.zeros(8),), {}), dim=0)
    made = planner._make_plan(fit, schedule)
    assert made.speedup == pytest.approx(speedup)
    assert dataclasses.replace(made, predicted_s=1.0).speedup == 2.0


class Modeled(Planner):
    """Planner that takes predicted times for measured ones, times a factor."""

    slowdown = 1.0

    def _split_s(self, plan):
        return plan.predicted_s * self.slowdown, None


@pytest.mark.parametrize("slowdown", [1.0, 3.0])
def test_auto_splits_if_it_is_faster(slowdown):
    """Equal calls over two devices are split into several micro-batches, unless the measured step is not faster."""
    call = UnitCall(
        unit="0",
        forward_fixed_s=0.0,
        forward_per_sample_s=0.01,
        backward_fixed_s=0.0,
        backward_per_sample_s=0.02,
        parameter_bytes=4,
        saved_bytes=4.0,
        input_bytes=4.0,
    )
    profile = Profile(calls=(call,) * 4, samples=16, least_samples=1, unsplit_s=4 * 16 * 0.03)
    specs = tuple(DeviceSpec(device=name, cap_bytes=1e9) for name in ("cpu", "meta"))
    schedule = best_schedule(profile, specs, microbatches=None, memory=Memory())
    model = nn.Linear(1, 1)
    planner = Modeled(
        inner=types.SimpleNamespace(model=model),
        pipeline=None,
        device_specs=specs,
        output_device=torch.device("cpu"),
        placement=ModelPlacement(model),
        options=PlannerOptions(),
    )
    planner._batch, planner.slowdown = Batch(((torch.zeros(16),), {}), dim=0), slowdown
    found = planner._choose(types.SimpleNamespace(schedule=schedule, profile=profile, memory=Memory()))
    assert found.is_split is (slowdown == 1.0)
    if found.is_split:
        assert (found.microbatches, found.bounds) == (16, (0, 2, 4))
        assert found.speedup == pytest.approx(2 * 16 / 17, rel=0.01)
    else:
        assert "if split" in found.why
