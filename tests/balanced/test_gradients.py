"""Gradients that cross the border of a divided model elsewhere than at its arguments and results."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from balanced.models import assert_equal_gradients, divided, loss_of, rows, seeded
from torch import Tensor, nn

from parallelize import ConfigError, parallel_model
from parallelize.backends.balanced.plugin import BalancedBackend

INPUTS = rows(8)
X = INPUTS[0][0]


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("hooked", ["a", "b", "c"])
@pytest.mark.parametrize("loss", [lambda y, z: z.square().mean(), lambda y, z: y.mean() + z.square().mean()])
def test_a_loss_on_what_a_hook_has_caught(
    loss: Callable[[Tensor, Tensor], Tensor], hooked: str, recompute: bool
) -> None:
    """It is refused, alone and beside the loss on the output, instead of leaving the model without its gradients."""
    model = seeded(Chain)
    caught: dict[str, Tensor] = {}
    model.get_submodule(hooked).register_forward_hook(lambda _m, _a, output: caught.update(z=output))
    with divided(model, INPUTS, recompute=recompute):
        y = model(X)
        with pytest.raises(ConfigError, match="a loss on a tensor from inside a model"):
            loss(y, caught["z"]).backward()


def test_what_a_hook_has_caught_may_be_looked_at() -> None:
    """Hooks that read activations, and change them by what they return, leave the gradients as they are."""
    model = seeded(Chain)
    norms: list[float] = []
    model.b.register_forward_hook(lambda _m, _a, output: norms.append(output.detach().norm().item()))
    model.b.register_forward_pre_hook(lambda _m, args: (args[0] * 2,))
    plain = copy.deepcopy(model)
    with divided(model, INPUTS):
        loss_of(model(X)).backward()
    loss_of(plain(X)).backward()
    assert_equal_gradients(model, plain)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_loss_on_what_forward_has_put_elsewhere(recompute: bool) -> None:
    """A list outside of the model that forward fills holds tensors whose gradients are refused too."""
    kept: list[Tensor] = []

    class Keeping(Chain):
        def forward(self, x: Tensor) -> Any:
            kept.append(self.b(self.a(x)))
            return self.c(kept[-1])

    model = seeded(Keeping)
    with divided(model, INPUTS, recompute=recompute):
        model(X)
        with pytest.raises(ConfigError, match="a loss on a tensor from inside a model"):
            kept[-1].mean().backward()


class Conditioned(Chain):
    context: Tensor

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + self.context) * self.context.sum()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_tensor_of_the_users_that_is_no_argument(recompute: bool) -> None:
    """What the user has computed and put on the model has its gradient, as a whole, in its own graph."""
    model = seeded(Conditioned)
    plain = copy.deepcopy(model)
    source, other = torch.ones(8, requires_grad=True), torch.ones(8, requires_grad=True)
    plain.context = other * 3
    loss_of(plain(X)).backward()
    model.context = torch.zeros(8)
    with divided(model, INPUTS, recompute=recompute):
        model.context = source * 3
        loss_of(model(X)).backward()
    torch.testing.assert_close(source.grad, other.grad)
    assert_equal_gradients(model, plain)


def computed(model: nn.Module, scale: Tensor) -> dict[str, Tensor]:
    return {name: each.detach() * scale for name, each in model.named_parameters()}


def test_weights_that_are_computed_for_one_call() -> None:
    """`torch.func.functional_call` differentiates through the pipeline into what the weights were computed from."""
    model = seeded(Chain)
    scales = [torch.tensor(0.7, requires_grad=True) for _ in range(2)]
    with divided(model, INPUTS):
        loss_of(torch.func.functional_call(model, computed(model, scales[0]), (X,))).backward()
    loss_of(torch.func.functional_call(model, computed(model, scales[1]), (X,))).backward()
    torch.testing.assert_close(scales[0].grad, scales[1].grad, rtol=1e-4, atol=1e-5)


def test_weights_of_one_call_that_are_gone_in_backward() -> None:
    """Recomputing would take the weights that the model has by then: it is refused."""
    model = seeded(Chain)
    scale = torch.tensor(0.7, requires_grad=True)
    with divided(model, INPUTS, recompute=True):
        output = torch.func.functional_call(model, computed(model, scale), (X,))
        with pytest.raises(ConfigError, match=r"uses a parameter of .* that forward has not used"):
            loss_of(output).backward()


def scripted(x: Tensor) -> Tensor:
    return torch.relu(x) * 2.0 + x


def test_operations_that_nobody_sees() -> None:
    """What a scripted function computes belongs to the segment that has called it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        unseen = torch.jit.script(scripted)

    class Scripted(Chain):
        def forward(self, x: Tensor) -> Any:
            return self.c(unseen(self.b(unseen(self.a(x)))))

    model = seeded(Scripted)
    plain = copy.deepcopy(model)
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4)):
        loss_of(model(X)).backward()
    loss_of(plain(X)).backward()
    assert_equal_gradients(model, plain)


class Forces(Chain):
    """The derivative of an energy by the positions, computed inside forward."""

    is_backward = False

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).square().sum()
            if self.is_backward:
                energy.backward()
                return x.grad
            return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("is_backward", [False, True])
def test_a_gradient_inside_forward(is_backward: bool) -> None:
    """It would end where the stage begins: it is refused, while planning too."""
    model = seeded(Forces)
    model.is_backward = is_backward
    with (
        parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4)),
        pytest.raises(ConfigError, match=r"forward differentiates \(torch\.autograd\.grad, or backward\)"),
    ):
        model(X)


def test_a_gradient_inside_one_operation_of_forward() -> None:
    """What a submodule differentiates by a tensor of its own is right, for the loss behind it too."""

    class Slope(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            if not x.requires_grad:
                x.requires_grad_()
            with torch.enable_grad():
                return torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)[0]

    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), Slope(), nn.Linear(8, 8)))
    plain = copy.deepcopy(model)
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4)):
        loss_of(model(X)).backward()
    loss_of(plain(X)).backward()
    assert_equal_gradients(model, plain)


class Returning(Chain):
    """Returns a view of a parameter."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.c.weight.t()


def test_an_output_that_is_a_view_of_a_parameter() -> None:
    """Whole batches have its gradient; from several micro-batches it cannot be joined, and the error says so."""
    model = seeded(Returning)
    plain = copy.deepcopy(model)
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=1)):
        loss_of(model(X)).backward()
    loss_of(plain(X)).backward()
    assert_equal_gradients(model, plain)
    backend = BalancedBackend(devices=("cpu", "cpu"), microbatches=4)
    with parallel_model(model, backend=backend), pytest.raises(ConfigError, match="output 1 of the model"):
        model(X)


def test_a_leaf_that_forward_makes_want_a_gradient() -> None:
    """Behind frozen layers, what `requires_grad_` has made of an activation is differentiable on later stages too."""

    class Adapted(Chain):
        def forward(self, x: Tensor) -> Any:
            x = self.a(x).requires_grad_()
            return self.c(torch.tanh(self.b(x)))

    model = seeded(Adapted)
    model.a.requires_grad_(requires_grad=False)
    plain = copy.deepcopy(model)
    with divided(model, INPUTS, stages=3):
        loss_of(model(X)).backward()
    loss_of(plain(X)).backward()
    assert_equal_gradients(model, plain)
