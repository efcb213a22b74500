"""A block with `amp` whose model is trained by calls that autocast does not cover."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parallelize import Amp, parallel_model

AMP = Amp(dtype=torch.bfloat16)


class Lit(nn.Module):
    """A module in the style of Lightning: its loss is computed in a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(x)
        self.dtype_seen = hidden.dtype
        return self.head(hidden).pow(2).mean()


def fit(model: Lit, loss_of: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> list[str]:
    """Train two steps in a block; return the warnings."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as caught, parallel_model(model, **{"amp": AMP, **options}):
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(torch.ones(2, 4)).backward()
            optimizer.step()
    return [str(warning.message) for warning in caught]


def step_of(model: Lit) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a loss by training_step, which is looked up in the block."""

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return model.training_step(x)

    return loss_of


def test_a_method_that_is_not_named_is_warned_of() -> None:
    """Once, with the option to write, which then makes the warning go away and amp effective."""
    model = Lit()
    (message,) = fit(model, step_of(model))
    assert message.startswith("amp= has no effect on Lit: ")
    assert "parallel_model(model, methods=['training_step'])" in message
    assert model.dtype_seen is torch.float32
    assert fit(model, step_of(model), methods=["training_step"]) == []
    assert model.dtype_seen is torch.bfloat16


def test_the_warning_is_at_the_line_of_the_user() -> None:
    """It can be filtered as it says."""
    model = Lit()
    with pytest.warns(UserWarning, match="no effect on Lit") as caught, parallel_model(model, amp=AMP):
        model.head(model.encoder(torch.ones(2, 4))).sum().backward()
    assert [warning.filename for warning in caught] == [__file__]


@contextlib.contextmanager
def autocast_of_the_user() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


@pytest.mark.parametrize(
    ("loss_of", "options"),
    [
        (lambda model: lambda x: model(x).sum(), {}),
        (lambda model: autocast_of_the_user()(model.training_step), {}),
        (lambda model: lambda _: model.head.weight.pow(2).sum(), {}),
        (lambda _: lambda x: F.linear(x, torch.ones(3, 4, requires_grad=True)).sum(), {}),
        (step_of, {"amp": Amp(level="O0")}),
        (step_of, {"amp": None}),
    ],
    ids=["forward", "own autocast", "no product", "another model", "O0", "no amp"],
)
def test_what_amp_covers_or_cannot_change_is_not_warned_of(
    loss_of: Callable[[Lit], Callable[[torch.Tensor], torch.Tensor]], options: dict[str, Any]
) -> None:
    """Neither is a method after a forward with gradients, or what is computed without any."""
    model = Lit()
    assert fit(model, loss_of(model), **options) == []


def test_methods_beside_a_forward_are_not_warned_of() -> None:
    """A penalty, or a second loss, may be meant to be in fp32."""
    model = Lit()
    assert fit(model, lambda x: model(x).sum() + model.training_step(x)) == []
