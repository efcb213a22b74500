"""Tensors that leave forward elsewhere than in its output: a loss on them sees the full batch, not one micro-batch."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from balanced.models import assert_equal_gradients, loss_of, not_split_once, pipelined, rows, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallelize import ConfigError, parallel_model
from parallelize.backends.balanced.plan import plan
from parallelize.backends.balanced.plugin import BalancedBackend

INPUTS = rows(8)
X = INPUTS[0][0].double()
KEPT: list[Tensor] = []


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Listing(Chain):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        KEPT[:] = [hidden.square().mean()]
        return self.c(hidden)


class Storing(Chain):
    hidden: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.a(x)
        return self.c(torch.tanh(self.hidden))


def hooked() -> Chain:
    model = Chain()
    model.b.register_forward_hook(lambda _m, _a, output: KEPT.__setitem__(slice(None), [output]))
    return model


MODELS = {
    "a hook": (hooked, "modules with forward hooks: b"),
    "a global": (Listing, "tensors that the model computed are used outside of the output"),
    "an attribute": (Storing, "forward changes hidden of the model"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_loss_on_a_captured_tensor(name: str) -> None:
    """It has the plain model's gradients: such batches are not split, and one warning tells why."""
    make, message = MODELS[name]
    model = seeded(make).double()
    plain = copy.deepcopy(model)

    def captured(each: Any) -> Tensor:
        tensor: Tensor = each.hidden if name == "an attribute" else KEPT[0]
        assert tensor.shape[:1] in {(), (8,)}
        return tensor.square().sum()

    with pipelined(model, ((X,), {})), not_split_once(message):
        for _ in range(2):
            model.zero_grad()
            (loss_of(model(X)) + captured(model)).backward()
    (loss_of(plain(X)) + captured(plain)).backward()
    assert_equal_gradients(model, plain)


def test_a_gradient_by_a_captured_tensor() -> None:
    """`torch.autograd.grad` by a tensor inside the model, with allow_unused=True, is the plain model's."""
    found = []
    for each in (model := seeded(hooked).double(), copy.deepcopy(model)):
        context = pipelined(each, ((X,), {})) if not found else contextlib.nullcontext()
        with context, not_split_once("tensors that") if not found else contextlib.nullcontext():
            loss = loss_of(each(X))
            found.append(torch.autograd.grad(loss, KEPT[0], allow_unused=True)[0])
    torch.testing.assert_close(*found)


def test_a_hook_that_is_registered_later() -> None:
    """A new hook is a new kind of batch; one that keeps numbers does not end the pipeline."""
    model = seeded(Chain).double()
    numbers: list[float] = []
    with pipelined(model, ((X,), {})):
        model(X)
        model.a.register_forward_hook(lambda _m, _a, output: numbers.append(output.mean().item()))
        model(X)
        numbers.clear()
        model(X)
        assert len(numbers) == 4
        with not_split_once("modules with forward hooks: a, b"):
            model.b.register_forward_hook(lambda _m, _a, output: KEPT.__setitem__(slice(None), [output]))
            model(X)
        assert KEPT[0].shape == (8, 8)


class Switched(Chain):
    dropout = 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.b(torch.tanh(self.a(x))))
        if SWITCH:
            KEPT[:] = [hidden]
        return self.c(nn.functional.dropout(hidden, self.dropout, training=self.training))


SWITCH: list[bool] = []


@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["threads", "one thread"])
def test_a_tensor_that_only_a_later_batch_keeps(dropout: float) -> None:
    """A backward pass that reaches one micro-batch elsewhere than at the output is refused; others are not."""
    model = seeded(Switched).double()
    model.dropout = dropout
    SWITCH.clear()
    with pipelined(model, ((X,), {})):
        model(X).sum().backward()
        SWITCH.append(True)
        output = model(X)
        for loss in (KEPT[0].sum(), KEPT[0].sum() + output.sum()):
            with pytest.raises(ConfigError, match="reaches some micro-batches elsewhere than at the model's output"):
                loss.backward(retain_graph=True)
        penalty = sum(each.square().sum() for each in model.parameters())
        (output.square().mean() + penalty).backward()
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x)[:2].sum(), x, create_graph=True)
        slope.square().sum().backward()


@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["threads", "one thread"])
def test_a_loss_on_an_argument_of_all_micro_batches(dropout: float) -> None:
    """A tensor that the user has computed, which is not split, may be in the loss besides the output."""

    class Scaling(nn.Module):
        def forward(self, scale: Tensor, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, dropout, training=self.training) * scale

    class Scaled(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.scaling = Scaling()

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.c(self.scaling(scale, self.a(x)))

    model = seeded(Scaled).double()
    source = torch.ones(1, 8).double().requires_grad_()
    with pipelined(model, ((X, source), {})):
        for _ in range(2):
            scale = source * 2
            (model(X, scale).sum() + scale.sum()).backward()
    assert source.grad is not None


def test_a_plan_tells_why_batches_are_not_split() -> None:
    """With the number of micro-batches left open, the model stays on one device, and the plan has the reason."""
    model = seeded(lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))))
    model[3].register_forward_hook(lambda _m, _a, output: KEPT.__setitem__(slice(None), [output]))
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"))):
        model(torch.randn(256, 512))
        made = plan(model)
    assert not made.is_split or made.microbatches == 1
    assert KEPT[0].shape == (256, 512)


class Wrong(torch.autograd.Function):
    """Identity, whose gradient depends on the number of samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.samples = len(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / ctx.samples


def test_gradients_are_compared_too() -> None:
    """Outputs that are equal in micro-batches, with other gradients, are found, also with a given plan."""

    class Scaled(Chain):
        def forward(self, x: Tensor) -> Tensor:
            applied: Any = Wrong.apply(self.a(x))  # type: ignore[no-untyped-call]  # torch's
            return self.c(torch.tanh(applied))

    model = seeded(Scaled).double()
    plain = copy.deepcopy(model)
    with pipelined(model, ((X,), {})), not_split_once("the gradient of a.weight, computed in micro-batches, differs"):
        loss_of(model(X)).backward()
    loss_of(plain(X)).backward()
    assert_equal_gradients(model, plain)


class Reentrant(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(checkpoint(self.b, self.a(x), use_reentrant=True))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_parameter_hooks_under_reentrant_checkpoints() -> None:
    """They run once, with the gradient of the batch; without hooks, such batches are split."""
    model = seeded(Reentrant).double()
    fired: list[Tensor] = []
    with pipelined(model, ((X,), {})):
        loss_of(model(X)).backward()
        model.zero_grad()
        model.b.weight.register_hook(lambda gradient: fired.append(gradient.clone()))
        with not_split_once("parameters with hooks, b.weight, under torch.utils.checkpoint with use_reentrant=True"):
            loss_of(model(X)).backward()
    assert len(fired) == 1
    torch.testing.assert_close(fired[0], model.b.weight.grad)
