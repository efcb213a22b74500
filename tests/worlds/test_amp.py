"""Mixed precision across ranks: gloo processes compared with hand-written loops."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from ranks import Checks
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from parallelize import Amp, all_gather, all_reduce, no_sync, parallel_model, rank
from parallelize.precision.native import NativePrecision
from parallelize.torch_patches.forward import route_of

STEPS = 5


def fp16(**rules: Any) -> Amp:
    """Return the request for fp16, which this process then accepts on the CPU."""
    NativePrecision.dtypes = {"cpu": frozenset({torch.bfloat16, torch.float16})}
    return Amp(dtype=torch.float16, **{"init_scale": 2.0**10, **rules})


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))


def batch(step: int, of: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + of)
    return torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def fit(model, optimizer):
    """Train an unchanged loop; return the losses."""
    losses = []
    for step in range(STEPS):
        x, y = batch(step, rank())
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def weights_of(model):
    return [each.detach().clone() for each in model.parameters()]


check = Checks(processes=2)


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def assert_same_on_all_ranks(tensors: list[torch.Tensor]) -> None:
    for one, other in all_gather(tensors):
        assert torch.equal(one, other)


@check
def fp16_equals_grad_scaler_around_ddp() -> None:
    """Accumulation, no_sync, clipping, a scheduler, and inf on one rank, which skips the step on all."""

    def train(*, by_hand: bool) -> list[torch.Tensor]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=by_hand)
        engine = DistributedDataParallel(model) if by_hand else model
        unsynced = engine.no_sync if by_hand else lambda: no_sync(model)

        def call(x: torch.Tensor) -> torch.Tensor:
            if not by_hand:
                return model(x)
            with torch.autocast("cpu", torch.float16):
                return engine(x).float()

        with contextlib.nullcontext() if by_hand else parallel_model(model, amp=fp16()):
            for step in range(STEPS):
                optimizer.zero_grad()
                for micro in range(2):
                    x, y = batch(10 * step + micro, rank())
                    if step == 3 and micro == 1 and rank() == 0:
                        x[0, 0] = float("inf")
                    with unsynced() if micro == 0 else contextlib.nullcontext():
                        scaler.scale(F.cross_entropy(call(x), y) / 2).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
        return weights_of(model)

    found = train(by_hand=False)
    assert all(each.isfinite().all() for each in found)
    assert_same(found, train(by_hand=True))


class Spiked(nn.Module):
    """A model with one weight that gets an infinite gradient on request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor, infinite: bool) -> torch.Tensor:
        loss = F.linear(x, self.weight, self.bias).square().mean()
        # Row 0 is in the shard of rank 0.
        spike = torch.zeros(4, 3)
        spike[0, 0] = float("inf") if infinite else 0.0
        return loss + (self.weight * spike).sum()


@check
def inf_in_one_shard_skips_the_step_on_all_ranks() -> None:
    """Under fsdp, at both levels that scale the loss, with accumulation under no_sync, too."""
    for level in ("O1", "O2"):
        model, seen = Spiked(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp = dataclasses.replace(fp16(growth_interval=1), level=level)
        with parallel_model(model, backend="fsdp", amp=amp):
            for step in range(4):
                optimizer.zero_grad()
                before = model.weight.detach().clone()
                with no_sync(model) if step == 3 else contextlib.nullcontext():
                    model(batch(step, rank())[0][:, :3], infinite=step == 1).backward()
                if step == 3:
                    model(batch(step, rank())[0][:, :3], infinite=False).backward()
                largest = model.weight.grad.abs().max().item()
                optimizer.step()
                moved = not torch.equal(before, model.weight)
                seen.append((moved, largest < 10, route_of(model).owner.session.state_dict()["scale"]))
        assert seen == [(True, True, 2048), (False, False, 1024), (True, True, 2048), (True, True, 4096)]
        assert_same_on_all_ranks(weights_of(model))


LEVELS = {"O1": (torch.float32,) * 2, "O2": (torch.bfloat16, torch.float32), "O3": (torch.bfloat16,) * 2}


@check
def levels_follow_full_precision() -> None:
    """Under ddp and fsdp, which train alike up to rounding; weights are in fp32 and on all ranks after the block."""

    def run(amp: str | None, backend: str) -> tuple[torch.Tensor, list[torch.Tensor], Any]:
        model, seen = nn.Sequential(net(), nn.BatchNorm1d(3)), set()
        model[0][0].register_forward_pre_hook(lambda each, _: seen.add(("linear", each.weight.dtype)))
        model[1].register_forward_pre_hook(lambda each, _: seen.add(("batch norm", each.weight.dtype)))
        with parallel_model(model, amp=amp, backend=backend):
            losses = fit(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert_same_on_all_ranks(weights_of(model))
        return all_reduce(torch.stack(losses), "mean"), weights_of(model), seen

    full_losses, full_weights, _ = run(None, "ddp")
    for amp, (linear, batch_norm) in LEVELS.items():
        for backend in ("ddp", "fsdp"):
            losses, weights, seen = run(amp, backend)
            assert seen == {("linear", linear), ("batch norm", batch_norm)}
            assert {each.dtype for each in weights} == {torch.float32}
            assert not all(map(torch.equal, weights, full_weights))
            torch.testing.assert_close(losses, full_losses, rtol=0.02, atol=0.02)
            torch.testing.assert_close(weights, full_weights, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", check)
def test_a_check_holds_on_all_ranks(name: str) -> None:
    """What the check's docstring says."""
    check.assert_holds(name)
