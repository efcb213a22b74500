"""Optimizers that evaluate a closure train what one process would train on the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from zoo import Mlp

from parallelize import distributed, parallel_model, rank, shard_loader

WORLD = 2


class Halving(torch.optim.SGD):
    """Halves the step until the loss decreases."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        parameters = self.param_groups[0]["params"]
        before = [(each.detach().clone(), each.grad.clone()) for each in parameters]
        lr = self.param_groups[0]["lr"]
        for _ in range(12):
            with torch.no_grad():
                for each, (value, gradient) in zip(parameters, before, strict=True):
                    each.copy_(value - lr * gradient)
            if closure() < loss:
                break
            lr /= 2
        return loss


class GradientFree(torch.optim.SGD):
    """Compares the losses at two random points, without gradients."""

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        generator = torch.Generator().manual_seed(0)
        noise = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in parameters]
        with torch.no_grad():
            losses = []
            for size in (0.01, -0.02, 0.01):
                torch._foreach_add_(parameters, noise, alpha=size)
                losses.append(closure(False))
            torch._foreach_add_(parameters, noise, alpha=float(losses[1] - losses[0]))
        return losses[-1]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "strong Wolfe": lambda parameters: torch.optim.LBFGS(parameters, max_iter=5, line_search_fn="strong_wolfe"),
    "halving": lambda parameters: Halving(parameters, lr=8.0),
    "gradient-free": GradientFree,
}


def made(name: str) -> tuple[Mlp, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = Mlp().double().requires_grad_(name != "gradient-free")
    return model, OPTIMIZERS[name](model.parameters())


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> list[Any]:
    """Take a step on one batch; return the step's value, the number of evaluations and the weights."""
    evaluations = 0

    def closure(calls_backward: bool = True) -> torch.Tensor:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
        if calls_backward:
            loss.backward()
        return loss

    value = optimizer.step(closure).detach()
    return [value, evaluations, {name: each.detach().clone() for name, each in model.named_parameters()}]


def samples(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_optimizers_with_a_closure_equal_one_process() -> None:
    """Line searches, rejected steps, SAM, gradient-free steps: bitwise equal on all ranks, and as in one process."""

    @distributed(processes=WORLD)
    def train() -> dict[str, list[Any]]:
        results = {}
        for name in OPTIMIZERS:
            model, optimizer = made(name)
            with parallel_model(model):
                results[name] = [fit(model, optimizer, samples().chunk(WORLD)[rank()]) for _ in range(4)]
        return results

    ranks = train.all_ranks()
    for name in OPTIMIZERS:
        model, optimizer = made(name)
        expected = [fit(model, optimizer, samples()) for _ in range(4)]
        torch.testing.assert_close(ranks[0][name], expected, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(ranks[1][name], ranks[0][name], rtol=0, atol=0)


def test_a_line_search_on_uneven_batches() -> None:
    """On batches of 3 and 2 samples, whose losses are weighted; tests/one_word has line searches under fsdp."""

    @distributed(processes=WORLD)
    def train() -> list[Any]:
        model, optimizer = made("strong Wolfe")
        loader = shard_loader(DataLoader(TensorDataset(samples(5)), batch_size=3), tail="weighted")
        with parallel_model(model):
            return [fit(model, optimizer, x) for (x,) in loader]

    for found in train.all_ranks():
        torch.testing.assert_close(found, [fit(*made("strong Wolfe"), samples(5))], rtol=1e-6, atol=1e-9)


def test_a_line_search_over_summed_losses() -> None:
    """average="sum" adds the values, as it adds the gradients."""

    def fit_sum(x: torch.Tensor) -> list[Any]:
        model, optimizer = made("strong Wolfe")
        with parallel_model(model, average="sum"):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model(x) - x.sin().sum(1, keepdim=True)).square().sum() / 10
                loss.backward()
                return loss

            values = [optimizer.step(closure).detach() for _ in range(3)]
        return [values, dict(model.state_dict())]

    @distributed(processes=WORLD)
    def train() -> list[Any]:
        return fit_sum(samples().chunk(WORLD)[rank()])

    expected = fit_sum(samples())
    for found in train.all_ranks():
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
