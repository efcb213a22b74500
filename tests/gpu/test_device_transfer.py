"""Operations on tensors of two stages that change some of them: values and gradients are those of one device."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from balanced.models import assert_equal_gradients, loss_of, plan_for, seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from parallelize import ConfigError, parallel_model
from parallelize.backends.balanced.plugin import BalancedBackend

pytestmark = pytest.mark.gpu

PAIRS = [("cpu", "cuda:0"), ("cuda:0", "cpu"), pytest.param(("cuda:1", "cuda:0"), marks=pytest.mark.gpu2)]
Body = Callable[[Any, Tensor, Tensor], Any]


class TwoStages(nn.Module):
    """A function of h, which the first stage computes, and k, which the second one does."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.a, self.b, self.same = nn.Linear(8, 8), nn.Linear(8, 8), nn.Identity()
        self.table = nn.Embedding(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        k = self.b(h * 1.0)
        return h, k, self.body(self, h, k)


def lists(_model: Any, h: Tensor, k: Tensor) -> None:
    torch._foreach_add_([h, k], [k.detach() * 2.0, h.detach() * 2.0])
    torch._foreach_mul_([k, h], 0.5)


def views_in_lists(_model: Any, h: Tensor, k: Tensor) -> None:
    others = [k.detach()[:, :4] * 1.0, h.detach()[:, 4:] * 1.0]
    torch._foreach_add_([h[:, :4], h[:, 4:], k[:, :4]], [*others, others[0]])


def results_elsewhere(_model: Any, h: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, places, total = torch.empty_like(h[:, 0]), torch.empty_like(k[:, 0], dtype=torch.long), torch.empty_like(h)
    with torch.no_grad():
        torch.max(k, 1, out=(values, places))
        torch.max(h, 1, out=(k.new_empty(len(k)), places))
        torch.add(h, k, out=total)
        torch.where(k > 0, h, k, out=total[:])
    return values, places, total


def parts(_model: Any, h: Tensor, k: Tensor) -> None:
    h[:, :4].copy_(k[:, 4:])
    k[:, 2] = h[:, 1]
    k[h.argmax(1) == 0] = 0.5
    h.masked_fill_(k > 0.3, 0.1)


def scattered(_model: Any, h: Tensor, k: Tensor) -> None:
    rows = torch.arange(len(h), device=h.device)
    h.scatter_(1, k.argmax(1, keepdim=True), k[:, :1])
    k.index_put_((rows, h.argmax(1)), h[:, 0], accumulate=True)
    torch.index_put_(h, (rows, k.argmax(1)), k[:, 0])


def initialized(_model: Any, h: Tensor, k: Tensor) -> Tensor:
    total = h + k
    with torch.no_grad():
        nn.init.constant_(total[:, :1], 0.5)
        nn.init.zeros_(h)
    return total + h


def embedding_of_limited_norm(model: Any, h: Tensor, k: Tensor) -> Tensor:
    return F.embedding(k.argmax(1), model.table.weight, max_norm=0.5) + h


def an_option(_model: Any, h: Tensor, k: Tensor) -> Tensor:
    copied = h * 1.0
    product = copied + k
    F.relu(copied, inplace=True)
    F.dropout(copied, 0.0, inplace=True)
    return product + (copied + k)


BODIES: list[Body] = [
    lists,
    views_in_lists,
    results_elsewhere,
    parts,
    scattered,
    initialized,
    embedding_of_limited_norm,
    an_option,
]


# Operations that change tensors of two stages at once.
REFUSED = (lists, views_in_lists, results_elsewhere)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("devices", PAIRS, ids="+".join)
@pytest.mark.parametrize("body", BODIES)
def test_tensors_that_an_operation_changes(body: Body, devices: tuple[str, str], mode: Any) -> None:
    """Outputs, gradients and buffers are the plain model's; a change of tensors of two stages at once is refused."""
    model, x = seeded(lambda: TwoStages(body)).cuda(), torch.randn(8, 8).cuda()
    alone = copy.deepcopy(model)
    made = plan_for(model, ((x,), {}), devices=devices)
    made = replace(made, bounds=(0, 1, len(made.units)))
    model.load_state_dict(alone.state_dict())
    found = []
    refused = body in REFUSED
    raising = pytest.raises(ConfigError, match="operands on several devices") if refused else contextlib.nullcontext()
    with warnings.catch_warnings(), mode():
        warnings.filterwarnings("ignore", "batches like this one are not split")
        with raising, parallel_model(model, backend=BalancedBackend(devices=devices, plan=made)):
            found.append(model(x))
            if mode is torch.enable_grad:
                loss_of(found[0]).backward()
        if refused:
            return
        found.append(alone(x))
        if mode is torch.enable_grad:
            loss_of(found[1]).backward()
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert_equal_gradients(model, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), alone.state_dict())


class Late(nn.Module):
    """Draws random numbers, and adds a value of the first stage to one of the second: always, or for large inputs."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.a, self.drop, self.b, self.c = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 8)
        self.least, self.calls = least, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.least == 0.0:
            self.calls += 1
        h = self.drop(self.a(x))
        y = self.c(self.b(h))
        return y + h if x.max() > self.least else y


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("devices", PAIRS, ids="+".join)
def test_a_forward_that_changes_state_runs_once(devices: tuple[str, str], microbatches: int) -> None:
    """An operation on tensors of two stages lets no forward begin again that has changed state, or drawn numbers."""
    model = seeded(lambda: Late(0.0))
    alone = copy.deepcopy(model)
    x = torch.rand(8, 8) + 1.0
    made = plan_for(model, ((x,), {}), devices=devices, microbatches=microbatches)
    model.calls = 0
    with warnings.catch_warnings(), parallel_model(model, backend=BalancedBackend(devices=devices, plan=made)):
        warnings.filterwarnings("ignore", "batches like this one are not split")
        for _ in range(2):
            torch.manual_seed(3)
            outputs = [model(x).cpu() for _ in range(2)]
    assert model.calls == 4
    torch.manual_seed(3)
    if devices[0] == "cpu":
        for output in outputs:
            torch.testing.assert_close(output, alone(x))


@pytest.mark.parametrize("devices", PAIRS, ids="+".join)
def test_a_forward_that_begins_again_draws_its_numbers_again(devices: tuple[str, str]) -> None:
    """The first batch with an operation on tensors of two stages draws the numbers that a later one draws."""
    model = seeded(lambda: Late(9.0))
    x = torch.rand(8, 8)
    made = plan_for(model, ((x,), {}), devices=devices, microbatches=2)
    outputs = []
    with parallel_model(model, backend=BalancedBackend(devices=devices, plan=made)):
        model(x)
        for _ in range(2):
            torch.manual_seed(3)
            outputs.append(model(x * 20.0))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("devices", [*PAIRS, pytest.param(("cuda:0", "cuda:1"), marks=pytest.mark.gpu2)], ids="+".join)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("trains", [True, False])
def test_outputs_are_on_the_first_device(devices: tuple[str, str], mode: Any, trains: bool) -> None:
    """In training and evaluation, outputs and losses of forward are there, wherever the last stage is."""
    model = seeded(Scored).train(trains)
    alone = copy.deepcopy(model).cuda()
    x, targets = torch.randn(8, 8, device="cuda:0"), torch.arange(8, device="cuda:0")
    made = plan_for(model, ((x.cpu(), targets.cpu()), {}), devices=devices, microbatches=2)
    with mode(), parallel_model(model, backend=BalancedBackend(devices=devices, plan=made)):
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "batches like this one are not split")
                output, loss = model(x, targets)
            assert {output.device, loss.device} == {torch.device("cuda:0")}
            expected, expected_loss = alone(x, targets)
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(loss, expected_loss, rtol=1e-4, atol=1e-5)


class _CountingCopies(TorchDispatchMode):
    """Counts copies to another device or dtype of tensors with 5 columns, of which only the head's output has any."""

    copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.shape[-1:] == (5,):
            self.copies += 1
        return result


@pytest.mark.parametrize(
    "devices", [("cuda:0", "cpu"), pytest.param(("cuda:0", "cuda:1"), marks=pytest.mark.gpu2)], ids="+".join
)
def test_joined_outputs_are_copied_once(devices: tuple[str, str]) -> None:
    """Outputs of a last stage on another device are joined there, and sent as one tensor."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5))
    x = torch.randn(8, 8)
    made = plan_for(model, ((x,), {}), devices=devices, microbatches=4)
    with parallel_model(model, backend=BalancedBackend(devices=devices, plan=made)):
        model(x)
        with _CountingCopies() as counting:
            assert model(x).device == torch.device("cuda:0")
    assert counting.copies == 1


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        y = self.b(torch.tanh(self.a(x)))
        return y, F.cross_entropy(y, targets)
