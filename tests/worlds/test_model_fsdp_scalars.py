"""Tests of scalar parameters under fsdp: replicated, with averaged gradients, also in lists of all parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallelize import distributed, parallel_model, rank

pytestmark = pytest.mark.slow


class Scaled(nn.Module):
    """A linear layer whose output is multiplied by a learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones([]))
        self.shift = nn.Parameter(torch.zeros([]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale.exp() + self.shift


def train(*, foreach: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = Scaled().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, foreach=foreach)
    x = torch.randn(2, 4, dtype=torch.float64)
    (model(x).square().mean() * (1 + rank())).backward()  # gradients from before the block
    with parallel_model(model):
        for step in range(4):
            if step == 2:
                model.shift.requires_grad_()
            model(x + rank()).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
            optimizer.step()
            if step != 1:  # else the next gradients are added
                optimizer.zero_grad()
    return {name: each.detach().clone() for name, each in model.named_parameters()}


@pytest.mark.parametrize("foreach", [False, True])
def test_scalars_train_as_under_ddp(foreach: bool) -> None:
    """Clipping and steps act on shards and scalars alike; a scalar may be unfrozen."""
    got, want = (run(name, foreach=foreach) for name in ("fsdp", "ddp"))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def run(backend: str, **kwargs: Any) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = distributed(backend=backend, processes=2)(train)(**kwargs)
    return weights
