"""Mixed precision across ranks: gloo processes compared with hand-written loops."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parallelize import Amp, all_reduce, distributed, no_sync, parallel_model, rank
from parallelize.torch_patches.forward import route_of

pytestmark = []  # shown by workers

STEPS = 5


def fp16(**rules: Any) -> Amp:
    """Return the request for fp16, which this process then accepts on the CPU."""
    from parallelize.precision.native import NativePrecision

    NativePrecision.dtypes = {"cpu": frozenset({torch.bfloat16, torch.float16})}
    return Amp(dtype=torch.float16, **{"init_scale": 2.0**10, **rules})


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))


def batch(step: int, of: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + of)
    return torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def fit(model, optimizer, *, call=None, clip=None):
    """Train an unchanged loop; return the losses."""
    losses = []
    for step in range(STEPS):
        x, y = batch(step, rank())
        loss = F.cross_entropy((call or model)(x), y)
        optimizer.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def weights_of(model):
    return [each.detach().clone() for each in model.parameters()]


def test_bf16_equals_autocast_around_ddp_by_hand():
    """Two ranks, an unchanged loop: the weights equal those of hand-written autocast over DistributedDataParallel."""

    @distributed(processes=2)
    def train():
        from torch.nn.parallel import DistributedDataParallel

        hand, ours = net(), net()
        wrapped = DistributedDataParallel(hand)

        def call(x):
            with torch.autocast("cpu", torch.bfloat16):
                return wrapped(x).float()  # as autocast casts it for the loss

        fit(hand, torch.optim.AdamW(hand.parameters(), lr=0.01), call=call)
        with parallel_model(ours, amp="bf16"):
            fit(ours, torch.optim.AdamW(ours.parameters(), lr=0.01))
        return weights_of(hand), weights_of(ours)

    for expected, found in train.all_ranks():
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_inf_on_one_rank_skips_the_step_on_all_under_ddp():
    """Averaged gradients have the inf of one rank's batch on all ranks: all skip that step."""

    @distributed(processes=2)
    def train(infinite):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scales = []
        with parallel_model(model, amp=fp16(growth_interval=2)):
            for step in range(STEPS):
                x, y = batch(step, rank())
                if infinite and step == 2 and rank() == 1:
                    x[0, 0] = float("inf")
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                scales.append(route_of(model).owner.session.state_dict()["scale"])
        return [each.detach().clone() for each in model.parameters()], scales

    (one, scales), (other, others) = train.all_ranks(infinite=True)
    assert scales == others == [1024, 2048, 1024, 1024, 2048]
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(each.isfinite().all() for each in one)
    (clean, clean_scales), _ = train.all_ranks(infinite=False)
    assert clean_scales == [1024, 2048, 2048, 4096, 4096]
    assert not torch.equal(clean[0], one[0])


def test_fp16_equals_grad_scaler_around_ddp():
    """Block, engine and loss scaling on two ranks: accumulation, no_sync, clipping, a scheduler."""

    @distributed(processes=2)
    def train(by_hand):
        from torch.nn.parallel import DistributedDataParallel

        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=by_hand)
        engine = DistributedDataParallel(model) if by_hand else model
        unsynced = engine.no_sync if by_hand else lambda: no_sync(model)

        def call(x):
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
        return [each.detach() for each in model.parameters()]

    expected = train(by_hand=True)
    assert all(each.isfinite().all() for each in expected)
    for found in train.all_ranks(by_hand=False):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_each_of_two_models_skips_its_own_steps():
    """In a GAN on two ranks, inf in the critic's gradients, on one rank, leaves the generator's steps as they are."""

    @distributed(processes=2)
    def train():
        torch.manual_seed(0)
        models = generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
        optimizers = [torch.optim.Adam(model.parameters(), 0.01) for model in models]
        moved = []
        with parallel_model(generator, critic, amp=fp16()):
            for step in range(3):
                x, _ = batch(step, rank())
                for optimizer, sign in zip(optimizers, (-1, 1), strict=True):
                    optimizer.zero_grad()
                    fake = generator(x) if sign < 0 else generator(x).detach()
                    loss = sign * critic(fake).mean()
                    is_spiked = sign > 0 and step == 1 and rank() == 1
                    (loss * float("inf") if is_spiked else loss).backward()
                    before = [each.detach().clone() for model in models for each in model.parameters()]
                    optimizer.step()
                    after = [each.detach() for model in models for each in model.parameters()]
                    moved.append(not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        return moved, after

    (moved, one), (other_moved, other) = train.all_ranks()
    assert moved == other_moved == [True, True, True, False, True, True]
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


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


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_inf_in_one_shard_skips_the_step_on_all_ranks(level):
    """Under fsdp inf is in one rank's shard: all ranks skip the step, with accumulation under no_sync, too."""

    @distributed(processes=2, backend="fsdp")
    def train():
        model = Spiked()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        with parallel_model(model, amp=dataclasses.replace(fp16(growth_interval=1), level=level)):
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
        return seen, model.weight.detach()

    (one, weight), (other, other_weight) = train.all_ranks()
    assert one == other == [(True, True, 2048), (False, False, 1024), (True, True, 2048), (True, True, 4096)]
    assert torch.equal(weight, other_weight)


def test_an_error_of_the_user_leaves_a_sharded_block_in_half():
    """Under O3, the dtypes of shards are not restored: the user's error is the one that is raised."""

    @distributed(processes=2, backend="fsdp")
    def train():
        with parallel_model(net(), amp="O3") as model:
            model(batch(0, 0)[0])
            raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        train()


LEVELS = {"O1": (torch.float32,) * 2, "O2": (torch.bfloat16, torch.float32), "O3": (torch.bfloat16,) * 2}


def test_fsdp_trains_like_ddp():
    """The same loop under fsdp and ddp: equal losses up to rounding, weights unsharded and in fp32 after."""

    @distributed(processes=2)
    def train():
        def run(amp, backend):
            model, seen = nn.Sequential(net(), nn.BatchNorm1d(3)), set()
            model[0][0].register_forward_pre_hook(lambda each, _: seen.add(("linear", each.weight.dtype)))
            model[1].register_forward_pre_hook(lambda each, _: seen.add(("batch norm", each.weight.dtype)))
            with parallel_model(model, amp=amp, backend=backend):
                losses = fit(model, torch.optim.SGD(model.parameters(), lr=0.1))
            return all_reduce(torch.stack(losses), "mean"), weights_of(model), seen

        return {amp: [run(amp, backend) for backend in ("fsdp", "ddp")] for amp in LEVELS}

    for amp, ((losses, weights, seen), (expected, expected_weights, expected_seen)) in train().items():
        assert seen == expected_seen == {("linear", LEVELS[amp][0]), ("batch norm", LEVELS[amp][1])}
        assert {each.dtype for each in weights} == {torch.float32}
        torch.testing.assert_close(losses, expected, rtol=0.02, atol=0.02)
        torch.testing.assert_close(weights, expected_weights, rtol=0.05, atol=0.05)


def test_levels_under_ddp_follow_full_precision():
    """Each level follows the fp32 trajectory, ranks stay equal, and weights are fp32 after."""

    @distributed(processes=2)
    def train():
        found = {}
        for amp in (None, *LEVELS):
            model = net()
            with parallel_model(model, amp=amp):
                fit(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), clip=1.0)
            found[amp] = weights_of(model)
        return found

    first, second = train.all_ranks()
    for amp in LEVELS:
        one, other, full = first[amp], second[amp], first[None]
        assert all(torch.equal(a, b) and a.dtype is torch.float32 for a, b in zip(one, other, strict=True))
        torch.testing.assert_close(one, full, rtol=0.05, atol=0.02)
        assert not all(torch.equal(a, b) for a, b in zip(one, full, strict=True))
