"""Python calls and memory of a training step in a block, beside those of the same loop written by hand."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

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
@pytest.mark.parametrize(("amp", "bound"), [(None, 75), ("bf16", 90), ("O2", 100)], ids=str)
def test_calls_per_step_do_not_grow_with_the_parameters(amp: str | None, bound: int, size: int) -> None:
    """A step calls at most `bound` more functions than one by hand; none of them once per parameter or module."""
    few, many = distributed(processes=size)(measure)(amp)
    assert few <= bound
    assert many <= few


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def adamw_step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def live_bytes() -> int:
    """Return the size of all storages of tensors in this process."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type.__instancecheck__(torch.Tensor, each)]
    local = [getattr(each, "_local_tensor", each) for each in tensors]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in local}
    return sum(storages.values())


@distributed(processes=2)
def memory_of_sharded_steps() -> tuple[int, int]:
    """Return the memory that steps with fully_shard by hand need, and that of steps in a block."""
    x = torch.full((4, 64), dist.get_rank() + 1.0)
    found = []
    for is_by_hand in (True, False):
        before, model = live_bytes(), Blocks()
        for each in model.layers if is_by_hand else ():
            fully_shard(each)
        if is_by_hand:
            fully_shard(model)
        with contextlib.nullcontext() if is_by_hand else parallel_model(model, backend="fsdp"):
            step = adamw_step(model, x)
            for _ in range(3):
                step()
            found.append(live_bytes() - before)
        del model, step
    return found[0], found[1]


def test_a_sharded_step_needs_the_memory_of_fully_shard() -> None:
    """Parameters, gradients and the state of AdamW are shards."""
    by_hand, in_block = memory_of_sharded_steps()
    assert in_block <= 1.03 * by_hand
