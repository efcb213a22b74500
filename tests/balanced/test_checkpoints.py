"""torch.utils.checkpoint, called by the user inside a pipelined model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from balanced.models import pipelined, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.slow

INPUTS: tuple[Any, dict[str, Any]] = ((torch.randn(8, 8, dtype=torch.double),), {})


class Chain(nn.Module):
    """Four blocks with dropout; each subclass checkpoints them differently."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.4), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        )
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(self.first(x)))

    def body(self, x: Tensor) -> Any:
        return self.blocks(x)


class Modules(Chain):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Reentrant(Chain):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class Functions(Chain):
    """Regions that begin with an operation instead of a module, and draw random numbers."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(self.noisy, block, x, use_reentrant=False)
        return x

    def noisy(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x + torch.rand_like(x)) * torch.rand(8, dtype=torch.double)


def assert_true_gradient(model: Any, x: Tensor) -> None:
    """Compare each weight's gradient along a random direction with the loss's difference quotient."""

    def loss() -> Tensor:
        torch.manual_seed(3)
        output: Tensor = model(x)
        return output.square().sum()

    model.zero_grad()
    loss().backward()
    step = 1e-6
    for name, weight in model.named_parameters():
        direction = torch.randn(weight.shape, dtype=weight.dtype, generator=torch.Generator().manual_seed(0))
        found = []
        for signed in (step, -2 * step):
            with torch.no_grad():
                weight.add_(direction, alpha=signed)
            found.append(loss().detach())
        with torch.no_grad():
            weight.add_(direction, alpha=step)
        slope = (weight.grad * direction).sum()
        torch.testing.assert_close((found[0] - found[1]) / (2 * step), slope, rtol=1e-4, atol=1e-5, msg=name)


# `call_order` runs forward without gradients.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("kind", [Modules, Reentrant, Functions])
def test_random_numbers_are_drawn_again(kind: type[Chain], microbatches: int) -> None:
    """Recomputation uses forward's dropout masks, wherever a region begins and whatever surrounds it."""
    model = seeded(kind)
    with pipelined(model, INPUTS, stages=3, microbatches=microbatches):
        assert_true_gradient(model, INPUTS[0][0])
