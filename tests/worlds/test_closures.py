"""Optimizers that take a closure: every rank decides by the mean loss of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parallelize import distributed, parallel_model, rank, world_size

# torch's own LBFGS converts the loss.
pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")

INPUTS = torch.linspace(-2, 2, 48, dtype=torch.float64).view(8, 6).sin()
TARGETS = INPUTS.cumsum(1)[:, :1].cos() * torch.linspace(0.1, 3, 8, dtype=torch.float64).view(8, 1)


class Backtracking(torch.optim.SGD):
    """Halves its step until the loss falls: it takes decisions by what its closure returns."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        loss = closure()
        parameters = self.param_groups[0]["params"]
        before = [each.detach().clone() for each in parameters]
        directions = [each.grad.clone() for each in parameters]
        size = 8.0
        while True:
            with torch.no_grad():
                for each, old, direction in zip(parameters, before, directions, strict=True):
                    each.copy_(old - size * direction)
            if closure() < loss or size < 1e-6:
                return loss
            size /= 2


def lbfgs(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), max_iter=5, **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "strong_wolfe": lambda model: lbfgs(model, line_search_fn="strong_wolfe"),
    "lbfgs": lbfgs,
    "backtracking": lambda model: Backtracking(model.parameters(), lr=1.0),
}


@distributed(processes=2)
def train(name: str, average: Any = "ranks", value: type = torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    optimizer = OPTIMIZERS[name](model)
    part = slice(rank() * len(INPUTS) // world_size(), (rank() + 1) * len(INPUTS) // world_size())
    losses = []
    with parallel_model(model, average=average):

        def closure() -> Any:
            optimizer.zero_grad()
            reduction = "sum" if average == "sum" else "mean"
            loss = F.mse_loss(model(INPUTS[part]), TARGETS[part], reduction=reduction)
            loss.backward()
            return loss.item() if value is float else loss

        for _ in range(4):
            loss = optimizer.step(closure)
            assert isinstance(loss, value)
            losses.append(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))
    return torch.cat([each.detach().flatten() for each in model.parameters()]), losses


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("average", "value"), [("ranks", torch.Tensor), ("ranks", float), ("sum", torch.Tensor)])
def test_two_ranks_search_as_one_process(name: str, average: str, value: type) -> None:
    """Weights and losses of all ranks are those of one process on the whole batch."""
    expected, losses = train.options(processes=1)(name, average, value)
    for weights, found in train.all_ranks(name, average, value):
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-8)
        assert found == pytest.approx(losses)


def test_other_optimizers_and_other_values_are_left_alone() -> None:
    """An optimizer of a model outside of blocks gets its own rank's loss; None, True and text stay as they are."""

    @distributed(processes=2)
    def run() -> list[Any]:
        inside, outside = nn.Linear(1, 1), nn.Linear(1, 1)
        with parallel_model(inside):
            inside(torch.ones(1, 1)).sum().backward()
            own = torch.optim.SGD(outside.parameters(), lr=0.1).step(lambda: float(rank()))
            optimizer = torch.optim.SGD(inside.parameters(), lr=0.1)
            return [own, *(optimizer.step(lambda each=each: each) for each in (None, True, "text", float(rank())))]

    assert run.all_ranks() == [[0.0, None, True, "text", 0.5], [1.0, None, True, "text", 0.5]]
