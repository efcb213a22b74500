"""Python calls of a training step in a block, counted against those of the same loop written by hand."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallelize import distributed, parallel_model

pytestmark = pytest.mark.slow

WARMUP = 10  # the counts of the first 8 losses are compared


def calls_of(step: Callable[[], None]) -> int:
    """Count the calls of Python functions in a step; the fewest of three."""
    numbers = []

    def profile(_frame: FrameType, event: str, _argument: Any) -> None:
        numbers[-1] += event == "call"

    for _ in range(WARMUP):
        step()
    for _ in range(3):
        numbers.append(0)
        sys.setprofile(profile)
        try:
            step()
        finally:
            sys.setprofile(None)
    return min(numbers)


def extra_calls(layers: int, amp: str | None) -> int:
    """Return how many more calls a step in a block has than one by hand, of a model with `2 * layers` parameters."""

    def stepping(model: nn.Module, called: nn.Module, autocast: Callable[[], Any]) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)

        def step() -> None:
            optimizer.zero_grad()
            with autocast():
                loss = called(x).sum()
            loss.backward()
            optimizer.step()

        return step

    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16) if amp else contextlib.nullcontext()

    def make() -> nn.Module:
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])

    x = torch.full((2, 4), dist.get_rank() + 1.0)  # equal data would be reported
    plain = make()
    by_hand = nn.parallel.DistributedDataParallel(plain) if dist.get_world_size() > 1 else plain
    expected = calls_of(stepping(plain, by_hand, autocast))
    model = make()
    with parallel_model(model, amp=amp):
        return calls_of(stepping(model, model, contextlib.nullcontext)) - expected


def measure(amp: str | None) -> tuple[int, int]:
    return extra_calls(5, amp), extra_calls(200, amp)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("amp", "bound"), [(None, 75), ("bf16", 120), ("O2", 115)], ids=str)
def test_calls_per_step_do_not_grow_with_the_parameters(amp: str | None, bound: int, size: int) -> None:
    """A step calls at most `bound` more functions than one by hand; none of them once per parameter or module."""
    few, many = distributed(processes=size)(measure)(amp)
    assert few <= bound
    assert many <= few
