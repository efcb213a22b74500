"""The simulated time of the pretended CUDA, and how near a pipeline's step is to its schedule."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from parallelize import parallel_model
from parallelize.backends.balanced.plan import ideal_speedup, plan
from parallelize.backends.balanced.planner import step_s
from parallelize.backends.balanced.plugin import BalancedBackend
from parallelize.backends.measuring import seconds_of

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif("FAKE_CUDA" not in os.environ, reason="needs the pretended CUDA of tests/fake_cuda"),
]


@pytest.fixture
def durations() -> object:
    """Return the class of durations; at the end, kernels take a microsecond again."""
    from fake_cuda.durations import Durations

    yield Durations
    Durations(launch_us=1.0, tera_flops=0.0, memory_gb_per_s=0.0).use()


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 0.5)])
def test_a_step_takes_the_time_of_its_schedule(speeds: tuple[float, float], durations) -> None:
    """At 8 micro-batches, a step of equal layers takes at most 5 % more than its schedule, 6 % more than is ideal."""
    durations(launch_us=0.1, tera_flops=0.05, memory_gb_per_s=15.0, link_gb_per_s=10.0, speeds=speeds).use()
    devices = [torch.device("cuda", index) for index in range(2)]
    # The planner takes a backward as two forwards, which is right for these layers.
    layers = (nn.Linear(64, 64) for _ in range(32))
    model, x = nn.Sequential(*layers).cuda(), torch.randn(2048, 64, device="cuda:0")

    def step() -> None:
        model(x)[:, 0].mean().backward()

    unsplit_s = [seconds_of(step, devices[:1]) for _ in range(2)][1]
    model.zero_grad()
    with parallel_model(model, backend=BalancedBackend(devices=("cuda:0", "cuda:1"), microbatches=8)):
        split_s = [seconds_of(step, devices) for _ in range(3)][2]
        made = plan(model)
    assert split_s < 1.05 * step_s(made.forward_s, made.backward_s, 8)
    assert unsplit_s / split_s > 0.94 * ideal_speedup(2, 8) * sum(speeds) / 2
