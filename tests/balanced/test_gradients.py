"""Gradients that enter or leave a pipelined model elsewhere than through its arguments and results."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from balanced.models import assert_equal_gradients, loss_of, pipelined, rows, seeded
from torch import Tensor, nn
from torch.nn import functional as F

from parallelize import ConfigError, parallel_model
from parallelize.backends.balanced.plugin import BalancedBackend
from parallelize.runtime.loss_counts import loss_counts

INPUTS = rows(8)
X = INPUTS[0][0]
X64 = X.double()  # where sums in another order would differ by more than the tolerance in fp32


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("hooked", ["a", "b", "c"])
@pytest.mark.parametrize("loss", [lambda y, z: z.square().mean(), lambda y, z: y.mean() + z.square().mean()])
def test_a_loss_on_a_tensor_captured_by_a_hook(
    loss: Callable[[Tensor, Tensor], Tensor], hooked: str, recompute: bool
) -> None:
    """A loss on it, alone or added to the loss on the output, is refused instead of losing the model's gradients."""
    model = seeded(Chain)
    captured: dict[str, Tensor] = {}
    model.get_submodule(hooked).register_forward_hook(lambda _m, _a, output: captured.update(z=output))
    with pipelined(model, INPUTS, recompute=recompute):
        y = model(X)
        with pytest.raises(ConfigError, match="a loss on a tensor from inside a model"):
            loss(y, captured["z"]).backward()


def test_hooks_may_read_and_replace_activations() -> None:
    """Hooks that read activations, or return others, leave the gradients equal to the plain model's."""
    model = seeded(Chain)
    norms: list[float] = []
    model.b.register_forward_hook(lambda _m, _a, output: norms.append(output.detach().norm().item()))
    model.b.register_forward_pre_hook(lambda _m, args: (args[0] * 2,))
    plain = copy.deepcopy(model)
    with pipelined(model, INPUTS):
        loss_of(model(X)).backward()
    loss_of(plain(X)).backward()
    assert_equal_gradients(model, plain)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_loss_on_a_tensor_stored_by_forward(recompute: bool) -> None:
    """Gradients of tensors that forward stores in a list outside of the model are refused too."""
    kept: list[Tensor] = []

    class Keeping(Chain):
        def forward(self, x: Tensor) -> Any:
            kept.append(self.b(self.a(x)))
            return self.c(kept[-1])

    model = seeded(Keeping)
    with pipelined(model, INPUTS, recompute=recompute):
        model(X)
        with pytest.raises(ConfigError, match="a loss on a tensor from inside a model"):
            kept[-1].mean().backward()


class Conditioned(Chain):
    context: Tensor

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + self.context) * self.context.sum()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_users_tensor_that_is_no_argument(recompute: bool) -> None:
    """A tensor that the user has computed and stored on the model gets its full gradient."""
    model = seeded(Conditioned).double()
    plain = copy.deepcopy(model)
    source, other = (torch.ones(8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    plain.context = other * 3
    loss_of(plain(X64)).backward()
    model.context = torch.zeros(8, dtype=torch.float64)
    with pipelined(model, ((X64,), {}), recompute=recompute):
        model.context = source * 3
        loss_of(model(X64)).backward()
    torch.testing.assert_close(source.grad, other.grad)
    assert_equal_gradients(model, plain)


def computed(model: nn.Module, scale: Tensor) -> dict[str, Tensor]:
    return {name: each.detach() * scale for name, each in model.named_parameters()}


def test_weights_that_are_computed_for_one_call() -> None:
    """`torch.func.functional_call` differentiates to the tensors that the weights were computed from."""
    model = seeded(Chain)
    scales = [torch.tensor(0.7, requires_grad=True) for _ in range(2)]
    with pipelined(model, INPUTS):
        loss_of(torch.func.functional_call(model, computed(model, scales[0]), (X,))).backward()
    loss_of(torch.func.functional_call(model, computed(model, scales[1]), (X,))).backward()
    torch.testing.assert_close(scales[0].grad, scales[1].grad, rtol=1e-4, atol=1e-5)


def test_weights_of_one_call_that_are_gone_in_backward() -> None:
    """Recomputation would use the weights that the model has in backward, so it is refused."""
    model = seeded(Chain)
    scale = torch.tensor(0.7, requires_grad=True)
    with pipelined(model, INPUTS, recompute=True):
        output = torch.func.functional_call(model, computed(model, scale), (X,))
        with pytest.raises(ConfigError, match=r"uses a parameter of .* that forward has not used"):
            loss_of(output).backward()


def scripted(x: Tensor) -> Tensor:
    return torch.relu(x) * 2.0 + x


def test_scripted_functions() -> None:
    """Tensors that a scripted function computes belong to the segment that has called it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        scripted_function = torch.jit.script(scripted)

    class Scripted(Chain):
        def forward(self, x: Tensor) -> Any:
            return self.c(scripted_function(self.b(scripted_function(self.a(x)))))

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


@pytest.mark.parametrize("amp", [None, "bf16"])
@pytest.mark.parametrize("is_backward", [False, True])
def test_a_gradient_inside_forward(is_backward: bool, amp: str | None) -> None:
    """It would end at the start of the stage, so it is refused, also while planning, and where amp= patches torch."""
    model = seeded(Forces)
    model.is_backward = is_backward
    with (
        parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4), amp=amp),
        pytest.raises(ConfigError, match=r"forward differentiates \(torch\.autograd\.grad, or backward\)"),
    ):
        model(X)


def test_a_gradient_inside_one_submodule() -> None:
    """A submodule that differentiates by its own tensor gets the right gradient, and so does a loss on its output."""

    class Slope(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            if not x.requires_grad:
                x.requires_grad_()
            with torch.enable_grad():
                return torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)[0]

    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), Slope(), nn.Linear(8, 8))).double()
    plain = copy.deepcopy(model)
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4)):
        loss_of(model(X64)).backward()
    loss_of(plain(X64)).backward()
    assert_equal_gradients(model, plain)


class Returning(Chain):
    """Returns a view of a parameter."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.c.weight.t()


def test_an_output_that_is_a_view_of_a_parameter() -> None:
    """Without micro-batches it gets its gradient; several micro-batches cannot be joined: the error names it."""
    model = seeded(Returning)
    plain = copy.deepcopy(model)
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=1)):
        loss_of(model(X)).backward()
    loss_of(plain(X)).backward()
    assert_equal_gradients(model, plain)
    backend = BalancedBackend(devices=("cpu", "cpu"), microbatches=4)
    with parallel_model(model, backend=backend), pytest.raises(ConfigError, match="output 1 of the model"):
        model(X)


def test_an_activation_made_to_require_grad() -> None:
    """Behind frozen layers, an activation after `requires_grad_` is differentiable on later stages too."""

    class Adapted(Chain):
        def forward(self, x: Tensor) -> Any:
            x = self.a(x).requires_grad_()
            return self.c(torch.tanh(self.b(x)))

    model = seeded(Adapted)
    model.a.requires_grad_(requires_grad=False)
    plain = copy.deepcopy(model)
    with pipelined(model, INPUTS, stages=3):
        loss_of(model(X)).backward()
    loss_of(plain(X)).backward()
    assert_equal_gradients(model, plain)


class WithLoss(nn.Module):
    """Computes its loss in forward, as models of transformers do."""

    def __init__(self, loss_of: Any) -> None:
        super().__init__()
        self.a, self.b, self.loss_of = nn.Linear(8, 8), nn.Linear(8, 5), loss_of

    def forward(self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return self.loss_of(self.b(self.a(x)), labels, num_items_in_batch)


def of_items(y: torch.Tensor, labels: torch.Tensor, items: Any) -> torch.Tensor:
    return F.cross_entropy(y, labels, reduction="sum") / items


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
        assert [each.kind for each in loss_counts([loss])] == [{"sum": "sum", "items": "divided sum"}.get(name, "mean")]
        loss.backward()
    expected = plain(x, labels, num_items_in_batch=items)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert_equal_gradients(model, plain, rtol=1e-5, atol=1e-6)
