"""planner: which measured and predicted times are believed."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from torch import nn

from parallelize.backends.balanced.batch import Batch
from parallelize.backends.balanced.hardware import DeviceSpec
from parallelize.backends.balanced.plan import Plan, PlannerOptions
from parallelize.backends.balanced.planner import Planner
from parallelize.backends.balanced.schedule import Line, Profile, UnitCall, best_plan
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
    predicted = Plan(
        model="",
        signature="",
        samples=8,
        events=("0", "1"),
        bounds=(0, 1, 2),
        devices=("cpu", "meta"),
        microbatches=microbatches,
        unsplit_s=2.0,
        predicted_s=1.0,
    )
    planner = Planner(
        inner=types.SimpleNamespace(model=nn.Linear(1, 1)),
        pipeline=None,
        device_specs=specs,
        output_device=torch.device("cpu"),
        placement=None,
        options=PlannerOptions(),
    )
    planner._batch = Batch(((torch.zeros(8),), {}), dim=0)
    made = planner._explained(predicted)
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
        forward=Line(0.0, 0.01),
        backward=Line(0.0, 0.02),
        parameter_bytes=4,
        saved=Line(0.0, 4.0),
        input_bytes=4.0,
    )
    profile = Profile(calls=(call,) * 4, samples=16)
    specs = tuple(DeviceSpec(device=name, cap_bytes=1e9) for name in ("cpu", "meta"))
    plan = best_plan(profile, specs, PlannerOptions(recompute=False))
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
    found = planner._choose(dataclasses.replace(plan, unsplit_s=4 * 16 * 0.03))
    assert found.is_split is (slowdown == 1.0)
    if found.is_split:
        assert (found.microbatches, found.bounds) == (16, (0, 2, 4))
        assert found.speedup == pytest.approx(2 * 16 / 17, rel=0.01)
    else:
        assert "if split" in found.why
