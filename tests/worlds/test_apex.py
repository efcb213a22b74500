"""Apex through parallel_model on two ranks, compared with a hand-written loop over DistributedDataParallel."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from apex_amp import SCALE, install
from torch import nn

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


@distributed(processes=2)
def by_hand(level, clipped):
    from torch.nn.parallel import DistributedDataParallel

    amp, model = install(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp.initialize([model], [optimizer], opt_level=level, loss_scale="dynamic" if level in {"O1", "O2"} else 1.0)
    wrapped = DistributedDataParallel(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            loss = wrapped(batch(step, part, infinite=level == "O2")).float().square().mean() / 2
            with amp.scale_loss(loss, [optimizer]) as scaled:
                scaled.backward()
        if clipped:
            torch.nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 0.1)
        optimizer.step()
    return [each.detach().float() for group in optimizer.param_groups for each in group["params"]], amp.scale


@distributed(processes=2, amp_engine="apex")
def in_a_block(level, clipped):
    amp, model = install(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with parallel_model(model, amp=level):
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(2):
                loss = model(batch(step, part, infinite=level == "O2")).float().square().mean() / 2
                loss.backward()
            if clipped:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    return [each.detach() for each in model.parameters()], amp.scale


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_block_trains_what_the_hand_written_loop_trains(level: str, clipped: bool) -> None:
    """An unchanged loop with accumulation has bitwise equal weights in fp32; under O2 one step with inf is skipped."""
    expected, scale = by_hand(level, clipped)
    for weights, found_scale in in_a_block.all_ranks(level, clipped):
        assert all(torch.equal(a, b) and a.dtype is torch.float32 for a, b in zip(weights, expected, strict=True))
        assert found_scale == scale
    assert scale == {"O1": SCALE, "O2": SCALE / 4}.get(level, 1.0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_that_bypasses_the_model_is_averaged(level: str) -> None:
    """A call of a submodule trains equal weights on all ranks, also through master parameters."""

    @distributed(processes=2, amp_engine="apex")
    def train():
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
        return model[0].weight.detach().float(), before

    (first, before), (second, _) = train.all_ranks()
    assert torch.equal(first, second)
    assert not torch.equal(first, before)


@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_runs_its_own_weights(level: str) -> None:
    """A deep copy that is made in the block, such as an EMA, does not run the forward of the original."""
    model: Any = nn.Sequential(nn.Linear(3, 1))
    torch.optim.SGD(model.parameters(), lr=0.1)
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
