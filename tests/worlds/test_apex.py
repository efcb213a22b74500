"""Apex through parallel_model on two ranks, compared with a hand-written loop over DistributedDataParallel."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from apex_amp import SCALE, install
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallelize import ConfigError, distributed, parallel_model, rank
from parallelize.precision.apex import ApexPrecision

pytestmark = pytest.mark.slow

STEPS, INF_STEP = 5, 2
LEVELS = ["O0", "O1", "O2", "O3"]


@pytest.fixture(autouse=True)
def apex() -> Iterator[None]:
    before = ApexPrecision.dtypes
    install()
    yield
    ApexPrecision.dtypes = before
    del sys.modules["apex"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def batch(step: int, part: int, *, infinite: bool) -> torch.Tensor:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank()))
    return x * float("inf") if infinite and step == INF_STEP and rank() == 1 else x


def trained(level: str, *, clipped: bool, by_hand: bool) -> tuple[list[torch.Tensor], float]:
    """Train with accumulation, in a loop with Apex and DistributedDataParallel, or in a block; under O2 with inf."""
    amp, model = install(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    call: Any = model
    if by_hand:
        amp.initialize([model], [optimizer], opt_level=level, loss_scale="dynamic" if level in {"O1", "O2"} else 1.0)
        call = DistributedDataParallel(model)
    with contextlib.nullcontext() if by_hand else parallel_model(model, amp=level):
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(2):
                loss = call(batch(step, part, infinite=level == "O2")).float().square().mean() / 2
                with amp.scale_loss(loss, [optimizer]) if by_hand else contextlib.nullcontext(loss) as scaled:
                    scaled.backward()
            if clipped:
                masters = [each for group in optimizer.param_groups for each in group["params"]]
                torch.nn.utils.clip_grad_norm_(masters if by_hand else model.parameters(), 0.1)
            optimizer.step()
    if by_hand and level == "O1":
        amp._amp_state.handle._deactivate()
    return [each.detach() for group in optimizer.param_groups for each in group["params"]], amp.scale


def test_a_block_trains_what_the_hand_written_loop_trains() -> None:
    """At each level weights are bitwise equal and in fp32; under O2 one step with inf is skipped."""
    cases = list(itertools.product(LEVELS, (False, True)))

    @distributed(processes=2, amp_engine="apex")
    def run() -> list[Any]:
        return [[trained(level, clipped=clipped, by_hand=each) for each in (False, True)] for level, clipped in cases]

    for found in run.all_ranks():
        for (level, _), ((weights, scale), (expected, expected_scale)) in zip(cases, found, strict=True):
            for one, other in zip(weights, expected, strict=True):
                assert one.dtype is torch.float32
                assert torch.equal(one, other.float())
            assert scale == expected_scale == {"O1": SCALE, "O2": SCALE / 4}.get(level, 1.0)


def test_a_gradient_that_bypasses_the_model_is_averaged() -> None:
    """A call of a submodule trains equal weights on all ranks, at each level, also through master parameters."""

    @distributed(processes=2, amp_engine="apex")
    def train() -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for level in LEVELS:
            install()
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 1))
            before = model[0].weight.detach().clone()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with parallel_model(model, amp=level):
                x = torch.full((2, 3), float(rank())).to(model[0].weight.dtype)
                for _ in range(4):  # a step whose scaled gradients overflow is skipped
                    optimizer.zero_grad()
                    model[0](x).float().square().mean().backward()
                    optimizer.step()
            found.append((model[0].weight.detach().float(), before))
        return found

    for (first, before), (second, _) in zip(*train.all_ranks(), strict=True):
        assert torch.equal(first, second)
        assert not torch.equal(first, before)


@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_runs_its_own_weights(level: str) -> None:
    """A deep copy that is made in the block, such as an EMA, does not run the forward of the original."""
    torch.manual_seed(0)  # of weights whose sum is not 0
    model: Any = nn.Sequential(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel_model(model, amp=level, amp_engine="apex", processes=1, optimizers=optimizer), torch.no_grad():
        ema = copy.deepcopy(model)
        expected = model(torch.ones(2, 3))
        for each in model.parameters():
            each.mul_(2)
        assert torch.equal(ema(torch.ones(2, 3)), expected)
        assert not torch.equal(model(torch.ones(2, 3)), expected)


@pytest.mark.parametrize("average", ["sum", "tokens"])
def test_weighted_averages_are_refused(average: Any) -> None:
    """Apex copies gradients to its masters at the end of backward, before they could be weighted."""
    block = parallel_model(net(), amp="O2", amp_engine="apex", processes=1, average=average)
    with pytest.raises(ConfigError, match=f"average='{average}' with amp_engine='apex'"), block:
        pass
