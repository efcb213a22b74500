"""Gradients of unknown origin pass if they are equal on all ranks; else the error says where they come from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import SyncError, all_reduce, distributed, no_sync, parallel_model, rank

pytestmark = pytest.mark.slow

WORLD = 2

imported_backward = torch.autograd.backward  # the name is bound before any block

Program = Callable[[nn.Module, torch.optim.Optimizer], None]


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank())).double()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step)).square().mean()


def penalty_of(model: nn.Module) -> torch.Tensor:
    return sum((each.square().sum() for each in model.parameters()), torch.zeros(())) / 10


def run(program: Program) -> list[dict[str, torch.Tensor]]:
    """Return the weights of each rank after a program; ranks that differ raise an error."""

    @distributed(processes=WORLD)
    def train() -> dict[str, torch.Tensor]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with parallel_model(model, verify_every=1):
            program(model, optimizer)
        return model.state_dict()

    return train.all_ranks()


def hand_averaged_under_no_sync(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        with no_sync(model):
            loss_of(model, step).backward()
        for each in model.parameters():
            each.grad = all_reduce(each.grad)
        optimizer.step()


def hand_averaged_in_place(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        model[2](model[1](model[0](batch(step)))).square().mean().backward()
        for each in model.parameters():
            each.grad.copy_(all_reduce(each.grad))
        optimizer.step()


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def penalty_of_its_own(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        penalty_of(model).backward()
        optimizer.step()


def penalty_in_the_loss(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        (loss_of(model, step) + penalty_of(model)).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("program", "equivalent"),
    [
        (hand_averaged_under_no_sync, plain),
        (hand_averaged_in_place, plain),
        (penalty_of_its_own, penalty_in_the_loss),
    ],
)
def test_equal_gradients_are_accepted(program: Program, equivalent: Program) -> None:
    """Gradients averaged by hand, and penalties in a backward of their own, train as their equivalents do."""
    for weights, expected in zip(run(program), run(equivalent), strict=True):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)


def test_gradient_surgery_is_accepted() -> None:
    """PCGrad projects the averaged gradients of two tasks and assigns the sum, which is equal on all ranks."""

    def surgery(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        parameters = list(model.parameters())
        for step in range(3):
            output = model(batch(step))
            first, second = (
                [all_reduce(each) for each in torch.autograd.grad(loss, parameters, retain_graph=True)]
                for loss in (output.square().mean(), output.abs().mean())
            )
            for parameter, one, other in zip(parameters, first, second, strict=True):
                conflict = (one * other).sum().clamp(max=0) / other.square().sum()
                parameter.grad = one + other - conflict * other
            optimizer.step()

    first, second = run(surgery)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_equal_changes_after_averaging_are_accepted() -> None:
    """Clipping, noise from equal generators and centralization, in place or with new tensors."""

    def changed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        generator = torch.Generator().manual_seed(3)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for each in model.parameters():
                each.grad.add_(torch.randn(each.shape, generator=generator, dtype=each.dtype))
                each.grad = each.grad - each.grad.mean()
            optimizer.step()

    run(changed)


def added(model: nn.Module, step: int, *, in_place: bool) -> None:
    loss_of(model, step).backward()
    loss = loss_of(model, step + 1)
    for each in model.parameters():
        (more,) = torch.autograd.grad(loss, each, retain_graph=True)
        each.grad = each.grad.add_(more) if in_place else each.grad + more


def noise(model: nn.Module, step: int) -> None:
    loss_of(model, step).backward()
    for each in model.parameters():
        each.grad += torch.randn_like(each)


def under_no_sync(model: nn.Module, step: int) -> None:
    with no_sync(model):
        loss_of(model, step).backward()


@pytest.mark.parametrize(
    ("accumulate", "reason"),
    [
        (lambda model, step: added(model, step, in_place=False), "it was replaced after its averaging"),
        (lambda model, step: added(model, step, in_place=True), "it was changed after its averaging"),
        (noise, "it was changed after its averaging"),
        (under_no_sync, "it was accumulated under no_sync"),
    ],
    ids=["added", "added in place", "noise", "local SGD"],
)
def test_different_gradients_are_refused(accumulate: Callable[[nn.Module, int], None], reason: str) -> None:
    """The first step raises an error with the reason, and the weights remain those of before."""

    def refused(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        before = [each.clone() for each in model.parameters()]
        accumulate(model, 0)
        with pytest.raises(SyncError, match=rf"(?s)0.weight of Sequential is not averaged.*rank 1.*{reason}"):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
        optimizer.zero_grad()
        plain(model, optimizer)

    run(refused)


@pytest.mark.parametrize("from_step", [0, 5])
def test_a_backward_on_one_rank_only_is_refused(from_step: int) -> None:
    """No rank waits for long, and the error says what the other rank does instead, or why gradients differ."""

    def penalty_on_rank_0(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if rank() == 0 and step >= from_step:
                penalty_of(model).backward()
            optimizer.step()

    with pytest.raises(SyncError, match=r"(?s)rank [01] (is|waits) at .*`if rank\(\) == 0`"):
        run(penalty_on_rank_0)


def test_different_backwards_on_two_ranks_are_refused() -> None:
    """Ranks that compare the gradients of different parameters are told so, before any collective."""

    def different(model: Any, optimizer: torch.optim.Optimizer) -> None:
        plain(model, optimizer)
        model[2 * rank()].weight.square().sum().backward()
        optimizer.step()

    with pytest.raises(SyncError, match=r"(?s)cannot be compared: rank [01] is at SGD.step with the gradient of"):
        run(different)


@pytest.mark.parametrize("bypasses", [False, True])
@pytest.mark.parametrize("when", ["before the block", "inside"])
def test_an_optimizer_in_backward_gets_its_own_message(when: str, bypasses: bool) -> None:
    """The error of a step in a gradient hook, as in torch's tutorial, comes before any other one."""

    def register(model: nn.Module) -> None:
        optimizers = {each: torch.optim.SGD([each], 0.1) for each in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for each in model.parameters():
            each.register_post_accumulate_grad_hook(step)

    @distributed(processes=WORLD)
    def train() -> None:
        model = net()
        if when == "before the block":
            register(model)
        with parallel_model(model):
            if when == "inside":
                register(model)
            refused = pytest.raises(SyncError, match=r"(?s)SGD.step\(\) inside backward.*call step\(\) after backward")
            with refused, no_sync(model) if bypasses else contextlib.nullcontext():
                loss_of(model, 0).backward()

    train()


def test_an_optimizer_that_ignores_its_closure_is_checked() -> None:
    """An optimizer that steps on the gradients that are there is checked, although it was given a closure."""

    class Deaf(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            del closure
            super().step()

    def ignoring(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        under_no_sync(model, 0)
        with pytest.raises(SyncError, match="under no_sync"):
            Deaf(model.parameters(), 0.0).step(lambda: 0.0)

    run(ignoring)


@pytest.mark.parametrize(("forwards", "why"), [(1, None), (2, "backward ran more often than the model's forward")])
def test_a_backward_that_was_imported_before_the_block_is_seen(forwards: int, why: str | None) -> None:
    """Hooks on the outputs see backward passes that do not run through the block's patch of torch.autograd.backward."""
    backward = torch.autograd.backward

    @distributed(processes=WORLD)
    def train() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with parallel_model(model):
            losses = [loss_of(model, step) for step in range(forwards)]
            for loss in losses:
                backward([loss])
            with contextlib.nullcontext() if why is None else pytest.raises(SyncError, match=why):
                optimizer.step()

    train()


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(_: Any, *__: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_backward_that_raised_is_named_before_the_next_forward_or_step(is_cleared: bool) -> None:
    """The averaging is half done, even if the gradients that show it are cleared."""

    @distributed(processes=WORLD)
    def train() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with parallel_model(model):
            output = model(Raising.apply(batch(0).requires_grad_()))  # after all gradients of the model
            with pytest.raises(ZeroDivisionError):
                output.square().mean().backward()
            if is_cleared:
                optimizer.zero_grad()
            with pytest.raises(SyncError, match="backward raised ZeroDivisionError"):
                model(batch(1)) if is_cleared else optimizer.step()
        with parallel_model(model):
            optimizer.zero_grad()
            loss_of(model, 1).backward()
            optimizer.step()

    train()


def removed_on_one_rank(model: nn.Module) -> None:
    if rank() == 1:
        next(model.parameters()).grad = None


def doubled_on_one_rank(model: Any) -> None:
    if rank() == 1:
        model[0].weight.grad *= 2


def of_an_imported_backward(model: Any) -> None:
    imported_backward(model[0].weight.sum() * rank())


@pytest.mark.parametrize("change", [removed_on_one_rank, doubled_on_one_rank, of_an_imported_backward])
def test_weights_that_differ_after_a_step_that_is_not_compared_are_found(change: Callable[[nn.Module], None]) -> None:
    """Step 5 is not compared: the next comparison, after step 8, finds that its ranks trained different weights."""

    @distributed(processes=WORLD)
    def train() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with parallel_model(model):
            for step in range(1, 9):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                if step == 5:
                    change(model)
                expected = "0.weight of Sequential differs between rank 0 and rank 1 after step 8 of SGD"
                with pytest.raises(SyncError, match=expected) if step == 8 else contextlib.nullcontext():
                    optimizer.step()

    train()


class Sharpness(torch.optim.Optimizer):
    """m-SAM: the closure runs with weights that each rank moved along its own gradient; the step moves them back."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any) -> None:
        parameters = self.param_groups[0]["params"]
        before = [each.clone() for each in parameters]
        for each in parameters:
            each.add_(each.grad)
            each.grad = None
        with torch.enable_grad():
            closure()
        for each, old in zip(parameters, before, strict=True):
            each.copy_(old - 0.1 * each.grad)


def perturbed_in_a_closure(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    optimizer = Sharpness(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        with no_sync(model):
            loss_of(model, step).backward()
        optimizer.step(lambda step=step: loss_of(model, step).backward())


def perturbed_before_the_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(4):
        optimizer.zero_grad()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for each in model.parameters():
                each.add_(rank())
        loss_of(model, step).backward()
        model.load_state_dict(before)
        optimizer.step()


@pytest.mark.parametrize("program", [perturbed_in_a_closure, perturbed_before_the_step])
def test_weights_that_each_rank_perturbs_until_the_step_are_not_refused(program: Program) -> None:
    """The gradients at the perturbed weights are averaged, and the ranks end with equal weights."""
    first, second = run(program)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def raised_before_a_backward_of_one_rank(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    own = nn.Linear(2, 1)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step == 1:
            with pytest.raises(ZeroDivisionError):
                Raising.apply(loss).backward()
            if rank() == 0:
                own(torch.ones(2)).backward()
            continue
        loss.backward()
        optimizer.step()


def test_a_backward_of_one_rank_may_follow_one_that_has_raised() -> None:
    """The numbers of targets of the raised pass are not compared by a backward through a model of this rank alone."""
    first, second = run(raised_before_a_backward_of_one_rank)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
