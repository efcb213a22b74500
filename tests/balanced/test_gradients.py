"""Gradients that enter or leave a pipelined model elsewhere than through its arguments and results."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from balanced.models import Chain, assert_equal_gradients, loss_of, not_split_once, pipelined, rows, seeded
from torch import Tensor, nn
from torch.nn import functional as F

import parallelize
from parallelize import parallel_model
from parallelize.backends.balanced.plugin import BalancedBackend
from parallelize.gradients.target_counts import loss_counts

INPUTS = rows(8)
X = INPUTS[0][0]
X64 = X.double()  # where sums in another order would differ by more than the tolerance in fp32


class Forces(Chain):
    """The derivative of an energy by the positions, computed inside forward."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).square().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("memory", [None, 10**7])
def test_planning_with_a_gradient_inside_forward(memory: int | None) -> None:
    """Such a forward is profiled and split, also under a memory limit: its first run would keep nothing."""
    model = seeded(Forces).double()
    plain = copy.deepcopy(model)
    backend = BalancedBackend(devices=("cpu", "cpu"), microbatches=4, memory=memory)
    with not_split_once(None), parallel_model(model, backend=backend):
        loss_of(model(X64)).backward()
        assert parallelize.plan(model).is_split
    loss_of(plain(X64)).backward()
    assert_equal_gradients(model, plain)


def test_second_derivatives_and_a_second_backward() -> None:
    """A gradient penalty and two losses with retain_graph have the plain model's gradients; a third one is torch's."""
    found = []
    for each in (seeded(Chain).double(), seeded(Chain).double()):
        x = X64.clone().requires_grad_()
        with pipelined(each, ((X64,), {})) if not found else contextlib.nullcontext():
            output = each(x)
            (slope,) = torch.autograd.grad(loss_of(output), x, create_graph=True)
            (slope.square().sum() + loss_of(output)).backward(retain_graph=True)
            output.square().mean().backward()
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                output.sum().backward()
        found.append((each, x.grad))
    torch.testing.assert_close(found[0][1], found[1][1])
    assert_equal_gradients(found[0][0], found[1][0])


class WithLoss(nn.Module):
    """Computes its loss in forward, as models of transformers do."""

    def __init__(self, loss_of: Any) -> None:
        super().__init__()
        self.a, self.b, self.loss_of = nn.Linear(8, 8), nn.Linear(8, 5), loss_of

    def forward(self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return self.loss_of(self.b(self.a(x)), labels, num_items_in_batch)


def of_items(y: torch.Tensor, labels: torch.Tensor, items: Any) -> torch.Tensor:
    return F.cross_entropy(y, labels, reduction="sum") / items


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, weight, _: (y.square() * weight).sum() / weight.sum() * 2.0 + y.mean(),
        lambda y, weight, _: (y * weight).square().sum().exp2().log2(),
    ],
)
def test_a_scalar_that_does_not_show_what_it_averages_over(loss: Any) -> None:
    """Such batches are not split; a warning names the output."""
    model = seeded(lambda: WithLoss(loss)).double()
    plain, weight = copy.deepcopy(model), torch.arange(8.0)[:, None].double()
    with pipelined(model, ((X64, weight), {})) as same, not_split_once("the number of targets"):
        same(X64, weight).backward()
    plain(X64, weight).backward()
    assert_equal_gradients(model, plain)


LOSSES_IN_FORWARD = {
    "ignored targets": lambda y, labels, _: F.cross_entropy(y, labels),
    "masked mean": lambda y, labels, _: of_items(y, labels, (labels >= 0).sum()),
    "sum": lambda y, labels, _: F.cross_entropy(y, labels, reduction="sum"),
    "items": of_items,
}


@pytest.mark.parametrize("items", [11, torch.tensor(11)], ids=["int", "tensor"])
@pytest.mark.parametrize("name", LOSSES_IN_FORWARD)
def test_losses_in_forward_have_the_gradients_of_the_full_batch(name: str, items: Any) -> None:
    """Means over unequal numbers of targets, sums, and sums divided by num_items_in_batch."""
    model = seeded(lambda: WithLoss(LOSSES_IN_FORWARD[name]))
    x, labels = torch.randn(8, 8), torch.tensor([0, 1, -100, -100, 2, 3, 4, -100])
    plain = copy.deepcopy(model)
    inputs = ((x, labels), {"num_items_in_batch": items})
    with pipelined(model, inputs, microbatches=3):
        loss = model(x, labels, num_items_in_batch=items)
        (count,) = loss_counts([loss])
        assert count.reduction == {"sum": "sum", "items": "divided sum"}.get(name, "mean")
        loss.backward()
    expected = plain(x, labels, num_items_in_batch=items)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert_equal_gradients(model, plain, rtol=1e-5, atol=1e-6)
