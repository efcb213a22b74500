"""Which values of which closures are averaged; a batch weight of 3 shows how often: one rank is its own mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallelize.inplace.closure_averaging import average_closures
from parallelize.runtime.weighted_backward import weigh_batches


class Batch:
    value = 3.0

    def start_backward(self) -> None:
        """Nothing to record."""


def stepped(optimizer: torch.optim.Optimizer, value: Any, **named: Any) -> Any:
    """Return what an optimizer's step gets from a closure that returns `value`, with a batch weight of 3."""
    with weigh_batches(Batch()):
        return optimizer.step(**named) if named else optimizer.step(lambda: value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2.0, 6.0),
        (2, 6.0),
        (None, None),
        (True, True),
        ("loss", "loss"),
        (torch.tensor(2.0), torch.tensor(6.0)),
        (torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor(6.0, dtype=torch.bfloat16)),
        (torch.tensor(2), torch.tensor(2)),
        ({"loss": torch.ones(2), "parts": [1.0, None]}, {"loss": torch.full((2,), 3.0), "parts": [3.0, None]}),
    ],
    ids=repr,
)
def test_real_numbers_are_averaged(value: Any, expected: Any) -> None:
    """Numbers and floating-point tensors are averaged, also in containers; all other values are unchanged."""
    model = nn.Linear(1, 1)
    with average_closures(model):
        got = stepped(torch.optim.SGD(model.parameters()), value)
    assert type(got) is type(expected)
    assert repr(got) == repr(expected)


def test_only_closures_of_the_model_are_averaged_while_the_context_lasts() -> None:
    """Optimizers of other models, and all optimizers after the context, get the closure's own value."""
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with average_closures(model):
        assert stepped(optimizer, None, closure=lambda: 2.0) == 6.0
        assert stepped(torch.optim.SGD(other.parameters()), 2.0) == 2.0
        model.bias = nn.Parameter(torch.zeros(1))
        assert stepped(torch.optim.SGD([model.bias]), 2.0) == 6.0
        assert optimizer.step() is None
    assert stepped(optimizer, 2.0) == 2.0


def test_a_value_is_averaged_once() -> None:
    """One optimizer of two models averages once, and so does an optimizer that passes its closure to another one."""

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(torch.enable_grad()(closure))

    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    with average_closures(first), average_closures(second):
        assert stepped(Outer([*first.parameters(), *second.parameters()]), 2.0) == 6.0


def test_gradients_flow_to_the_loss_of_this_rank() -> None:
    """An optimizer may call backward on the averaged loss: the engine averages the gradients, not the closure."""
    model = nn.Linear(1, 1)
    with average_closures(model):
        loss = stepped(torch.optim.SGD(model.parameters(), 0.0), model.bias.sum())
    loss.backward()
    assert loss.item() == pytest.approx(3 * model.bias.item())
    assert model.bias.grad is not None
    assert model.bias.grad.item() == 1.0


def test_an_argument_that_cannot_be_called_is_no_closure() -> None:
    """The first argument of a `step` of one's own may be anything."""

    class OfNumbers(torch.optim.SGD):
        def step(self, numbers: Any = None) -> Any:  # type: ignore[override]  # the signature under test
            return numbers

    model = nn.Linear(1, 1)
    with average_closures(model):
        assert OfNumbers(model.parameters()).step([1.0]) == [1.0]
