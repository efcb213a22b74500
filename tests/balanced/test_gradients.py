"""Gradients that enter or leave a pipelined model elsewhere than through its arguments and results."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
from balanced.models import assert_equal_gradients, loss_of, not_split_once, pipelined, plan_for, rows, seeded
from torch import Tensor, nn
from torch.nn import functional as F

import parallelize
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


def test_gradients_of_weights_that_are_computed_for_one_call() -> None:
    """`torch.autograd.grad` returns the gradients of tensors that functional_call uses as weights."""
    model = seeded(Chain)
    weights = computed(model, torch.tensor(0.7, requires_grad=True))
    with pipelined(model, INPUTS):
        output = torch.func.functional_call(model, weights, (X,))
        got = torch.autograd.grad(loss_of(output), list(weights.values()))
    want = torch.autograd.grad(loss_of(torch.func.functional_call(model, weights, (X,))), list(weights.values()))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_gradient_inside_forward(microbatches: int) -> None:
    """Forces computed by torch.autograd.grad over all stages have the plain model's values and gradients."""
    model = seeded(Forces).double()
    plain = copy.deepcopy(model)
    with pipelined(model, ((X64,), {}), stages=3, microbatches=microbatches):
        forces = model(X64)
        loss_of(forces).backward()
    expected = plain(X64)
    loss_of(expected).backward()
    torch.testing.assert_close(forces, expected)
    assert_equal_gradients(model, plain)


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


def test_a_backward_inside_forward() -> None:
    """It would accumulate gradients for each micro-batch, and while planning: it is refused, and leaves none."""
    model = seeded(Forces)
    model.is_backward = True
    message = "forward accumulates gradients of a.weight, a.bias"
    with pipelined(model, INPUTS):
        model.zero_grad()  # `call_order` has run forward
        with pytest.raises(ConfigError, match=message):
            model(X)
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("microbatches", [1, 4])
def test_two_losses_of_what_is_recomputed(microbatches: int) -> None:
    """Each backward with retain_graph=True recomputes."""
    model = seeded(Chain).double()
    plain = copy.deepcopy(model)
    with pipelined(model, ((X64,), {}), microbatches=microbatches, recompute=True):
        output = model(X64)
        loss_of(output).backward(retain_graph=True)
        output.square().mean().backward()
    output = plain(X64)
    (loss_of(output) + output.square().mean()).backward()
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
    """Without micro-batches it gets its gradient; those of several cannot be joined: using it raises, by name."""
    model = seeded(Returning)
    plain = copy.deepcopy(model)
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=1)):
        loss_of(model(X)).backward()
    loss_of(plain(X)).backward()
    assert_equal_gradients(model, plain)
    backend = BalancedBackend(devices=("cpu", "cpu"), microbatches=4)
    with parallel_model(model, backend=backend):
        _, view = model(X)
        for use in (lambda: view.sum, lambda: view[0], lambda: torch.relu(view), lambda: view + 1):
            with pytest.raises(ConfigError, match="output 1 of the model"):
                use()


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


def test_a_scalar_that_does_not_show_what_it_averages_over() -> None:
    """It is weighted by samples, with a warning, if that is true for the batch; other batches are not split."""
    model = seeded(lambda: WithLoss(lambda y, weight, _: (y.square() * weight).sum() / weight.sum() * 2.0 + y.mean()))
    plain = copy.deepcopy(model)
    even, odd = torch.ones(8, 1), torch.arange(8.0)[:, None]
    with pipelined(model, ((X, even), {})) as same, pytest.warns(UserWarning, match="taken for a mean over samples"):
        same(X, even).backward()
    plain(X, even).backward()
    assert_equal_gradients(model, plain)
    with pipelined(model, ((X, odd), {})) as same, not_split_once("output 0 of the model"):
        same(X, odd).backward()
    plain(X, odd).backward()
    assert_equal_gradients(model, plain)


def test_average_decides_how_other_scalars_are_joined() -> None:
    """Under average="sum" a scalar that is no known reduction is added, as the losses of ranks are."""
    model = seeded(lambda: WithLoss(lambda y, weight, _: (y * weight).square().sum().exp2().log2())).double()
    plain = copy.deepcopy(model)
    weight = torch.ones(8, 1).double()
    backend = BalancedBackend(devices=("cpu", "cpu"), plan=plan_for(model, ((X64, weight), {})))
    with not_split_once(None), parallel_model(model, backend=backend, average="sum"):
        model(X64, weight).backward()
    plain(X64, weight).backward()
    assert_equal_gradients(model, plain)


def test_a_sum_that_looks_like_one_divided_by_an_argument() -> None:
    """A divisor that equals an argument in one batch only changes how the loss is joined: the batch is compared."""
    model = seeded(lambda: WithLoss(lambda y, _, items: y.square().sum() / len(y))).double()
    plain = copy.deepcopy(model)
    labels = torch.zeros(8, 1)
    with pipelined(model, ((X64, labels, 8), {})):
        for items in (8, 2):  # 2: samples in a micro-batch
            for each in (model, plain):
                each.zero_grad()
            with not_split_once(None if items == 8 else "output 0 of the model"):
                model(X64, labels, items).backward()
            plain(X64, labels, items).backward()
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
        assert [each.kind for each in loss_counts([loss])] == [{"sum": "sum", "items": "divided sum"}.get(name, "mean")]
        loss.backward()
    expected = plain(x, labels, num_items_in_batch=items)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert_equal_gradients(model, plain, rtol=1e-5, atol=1e-6)


class Viewing(Chain):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1.0
        view = h[:, :4]
        y = self.b(x)
        view.mul_(2.0)
        return self.c(y) + h


def test_a_view_changed_in_place_on_another_stage() -> None:
    """The tensor that shares memory with the view has the new values and their gradients."""
    model = seeded(Viewing)
    plain = copy.deepcopy(model)
    with pipelined(model, INPUTS, stages=3):
        loss_of(model(X)).backward()
    loss_of(plain(X)).backward()
    assert_equal_gradients(model, plain)


@pytest.mark.filterwarnings("ignore:.*torch.compile:UserWarning")
@pytest.mark.parametrize("is_module", [False, True])
def test_compiled_blocks(is_module: bool) -> None:
    """Blocks of the model may be compiled, by torch.compile or Module.compile."""
    model = seeded(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))))
    plain = copy.deepcopy(model)
    for index, block in enumerate(list(model)):
        if is_module:
            model[index] = torch.compile(block, backend="eager")
        else:
            block.compile(backend="eager")
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4)):
        for _ in range(2):
            model.zero_grad()
            loss_of(model(X)).backward()
    loss_of(plain(X)).backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)
