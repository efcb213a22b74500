"""Programs whose micro-batches could compute something else than the plain model, without an error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from balanced.models import not_split_once
from balanced.programs import Chain, Step, X, Y, assert_same, mse, run
from torch import Tensor, nn
from torch.nn import functional as F

from parallelize import parallel_model
from parallelize.backends.balanced.plugin import BalancedBackend
from parallelize.backends.balanced.refusals import CannotSplitError
from parallelize.errors import ConfigError

pytestmark = pytest.mark.slow

CLASSES = torch.tensor([0, 1, 2, 3, 0, 2, 1, 3])
HALF_IGNORED, SOME_IGNORED = CLASSES.clone(), CLASSES.clone()
HALF_IGNORED[:4] = SOME_IGNORED[:3] = -100  # all of one micro-batch, and some


def whole_then_split(model: Any) -> Tensor:
    return F.mse_loss(model(torch.cat([model(each) for each in X.split(1)])), Y)


@pytest.mark.parametrize(
    "step",
    [
        lambda m: F.mse_loss(m(m(X)), Y),
        whole_then_split,
        lambda m: F.mse_loss(m(m.a(X)), Y),
        lambda m: F.mse_loss(m(X @ m.a.weight), Y),
        lambda m: F.mse_loss(m(X + m.scale), Y),
    ],
    ids=["its own output", "outputs of single samples", "a submodule's", "of a weight", "plus a parameter"],
)
def test_an_input_that_is_computed_with_parameters_of_the_model(step: Step) -> None:
    """Gradients go on behind the input, to parameters of the same model, without a deadlock."""
    assert_same(Chain, [step] * 2)


class Conditioned(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.condition


def retained(model: Any) -> float:
    model.condition = torch.ones(1, requires_grad=True) * 3
    model.condition.retain_grad()
    mse(model).backward()
    return model.condition.grad.item()


def clamped(model: Any) -> float:
    source = torch.ones(1, requires_grad=True)
    model.condition = source * 3
    model.condition.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    mse(model).backward()
    assert source.grad is not None
    return source.grad.item()


@pytest.mark.parametrize("step", [retained, clamped])
def test_hooks_of_an_attribute_that_is_no_leaf(step: Step) -> None:
    """Hooks of a computed tensor on the model see the gradient of the batch, once."""
    assert_same(Conditioned, [step] * 2)


class Momentum(Chain):
    """A second encoder that follows the first one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.k = how, nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "replaced":
                self.k.weight = nn.Parameter(self.k.weight * 0.9 + self.a.weight * 0.1)
            elif self.how == "new data":
                self.k.weight.data = self.k.weight.data * 0.9 + self.a.weight.data * 0.1
            elif self.how == "in place":
                self.k.weight.mul_(0.9).add_(self.a.weight, alpha=0.1)
            else:
                self.b.weight.data.clamp_(-0.2, 0.2).mul_(0.9)
        return self.inner(x) + self.k(x)


@pytest.mark.parametrize("how", ["replaced", "new data", "in place", "trained"])
def test_parameters_that_forward_changes(how: str) -> None:
    """A forward that writes parameters does so once per step, and never while the pipeline is planned."""
    assert_same(lambda: Momentum(how), [mse] * 3)


class Stored(Chain):
    """A forward that stores something on the model."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, None
        self.history: list[int] = []
        self.counts = {"samples": 0}
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        if self.how == "buffer":
            self.average.data.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        elif self.how == "list":
            self.history.append(1)
        elif self.how == "dict":
            self.counts["samples"] += len(x)
        else:
            self.calls = (self.calls or 0) + 1
        return hidden


class Constant(Chain):
    """A model with a matrix that it does not change, such as the adjacency of a graph."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("matrix", make(torch.eye(4)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.matrix if self.matrix.is_sparse else self.matrix.float()
        return torch.mm(matrix, self.inner(x).t()).t()


@pytest.mark.parametrize(
    "make", [lambda x: x.to_sparse(), lambda x: x.to(torch.float8_e4m3fn)], ids=["sparse", "8 bits"]
)
def test_buffers_whose_values_torch_does_not_compare(make: Callable[[Tensor], Tensor]) -> None:
    """Batches of a model with a sparse buffer, or one in 8 bits, are split."""
    assert_same(lambda: Constant(make), [mse] * 2)


class Counting(Chain):
    """A forward that changes a buffer in every batch, whether micro-batches do so as the full batch does or not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("count", torch.zeros(4))
        if how == "shared":
            self.a.register_buffer("count", self.count)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count.add_(len(x) if self.how == "samples" else 1)
        return self.inner(x) / self.count


@pytest.mark.parametrize("how", ["samples", "batches", "shared"])
def test_counts_that_forward_keeps_in_a_buffer(how: str) -> None:
    """A count of samples is that of the batch; backward may need the values that the first micro-batch has read."""
    assert_same(lambda: Counting(how), [mse] * 3)


class Periodic(Chain):
    """A forward that changes a buffer in every third batch, which it counts in another one."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("target", torch.zeros(4))
        self.register_buffer("unknown", torch.full((4,), torch.nan), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count.add_(1)
            if self.count % 3 == 0:
                self.target.add_(self.c.bias if self.source == "model" else x.mean(0))
        return self.inner(x) + self.target


@pytest.mark.parametrize("source", ["model", "batch"])
def test_a_buffer_that_changes_in_every_third_batch(source: str) -> None:
    """It is changed once in such a batch, which runs whole if micro-batches change it differently."""
    assert_same(lambda: Periodic(source), [mse] * 7)
    model, reason = Periodic(source), "forward changes target of the model" if source == "batch" else None
    with not_split_once(reason), parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=2)):
        for _ in range(4):
            mse(model).backward()


class Revived(Chain):
    """A forward that changes a tensor of the model for some batches only."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("code", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 100:
            with torch.no_grad():
                self.get_parameter(self.name).mul_(0.5) if self.name == "c.weight" else self.code.mul_(0.5)
        return self.inner(x) * self.code


@pytest.mark.parametrize("name", ["code", "c.weight"])
def test_a_tensor_that_only_a_later_batch_changes(name: str) -> None:
    """The error names it: each micro-batch has changed it, and not the batch once."""
    with pytest.raises(ConfigError, match=f"forward changes {name} of the model, which it did not"):
        run(lambda: Revived(name), [mse, lambda m: m(X + 200.0).sum()], splits=True)


def stored(model: Any) -> float:
    mse(model)
    return float(len(model.history) + model.counts["samples"] + (model.calls or 0) + model.average.sum().item())


@pytest.mark.parametrize("how", ["buffer", "list", "dict", "None"])
def test_values_that_forward_stores(how: str) -> None:
    """Buffers written through `data` and containers have the values of one forward per step; planning leaves none."""
    assert_same(lambda: Stored(how), [stored] * 2)


class WithLoss(Chain):
    """A forward that returns a loss, and what is given of it."""

    def __init__(self, returned: Callable[..., Any]) -> None:
        super().__init__()
        self.returned = returned

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.returned(self.inner(x), y)


def masked(output: Tensor, y: Tensor, *, least: float = 0.0) -> Tensor:
    kept = (y != -100).float()
    return (F.cross_entropy(output, y, reduction="none") * kept).sum() / kept.sum().clamp(min=least)


@pytest.mark.parametrize("returned", [len, lambda o: torch.tensor(len(o)), lambda o: o.isfinite().sum()])
def test_counts_that_forward_returns(returned: Callable[[Tensor], Any]) -> None:
    """A loss divided by a number of samples that forward returns is divided by that of the batch."""

    def loss(model: Any) -> Tensor:
        total, count = model(X, Y)
        return total / count

    assert_same(lambda: WithLoss(lambda o, y: (F.mse_loss(o, y, reduction="sum"), returned(o))), [loss] * 2)


def test_a_count_that_is_equal_by_chance() -> None:
    """A count that is 0 in the batch that was compared, and later 1 in each micro-batch, is not taken for 1."""
    later = Y.clone()
    later[0, 0] = later[7, 0] = -100
    with pytest.raises(CannotSplitError, match="it may be a count"):
        run(
            lambda: WithLoss(lambda o, y: (F.mse_loss(o, y), (y == -100).sum())),
            [lambda m: float(m(X, Y)[1]), lambda m: float(m(X, later)[1])],
            splits=True,
        )


@pytest.mark.parametrize(
    "loss",
    [F.cross_entropy, lambda o, y: F.cross_entropy(o[y != -100], y[y != -100]), functools.partial(masked, least=1.0)],
    ids=["ignore_index", "selected", "clamped"],
)
def test_a_micro_batch_without_targets(loss: Callable[..., Tensor]) -> None:
    """Micro-batches without targets add nothing to a mean, instead of nan."""
    assert_same(lambda: WithLoss(loss), [lambda m: m(X, CLASSES), lambda m: m(X, HALF_IGNORED)])


def of_kept(output: Tensor, y: Tensor) -> Tensor:
    kept = (y != -100).float()
    losses = F.cross_entropy(output, y, reduction="none") * kept
    return losses.mean() * (len(y) / kept.sum())


def of_each_class(output: Tensor, y: Tensor) -> Tensor:
    return sum((F.cross_entropy(output[y == i], y[y == i]) for i in range(4) if (y == i).any()), output.new_zeros(()))


@pytest.mark.parametrize(
    "loss", [of_kept, lambda o, y: of_kept(o, y) / 2.0 + 1.0, of_each_class], ids=["scaled", "divided", "classes"]
)
def test_means_of_other_terms_in_each_micro_batch(loss: Callable[..., Tensor]) -> None:
    """A mean is not weighted by its count where micro-batches scale it by other numbers, or add other terms."""
    assert_same(lambda: WithLoss(loss), [lambda m: m(X, CLASSES), lambda m: m(X, SOME_IGNORED)])


def test_a_loss_that_is_returned_detached_too() -> None:
    """`loss.detach()` is joined as the loss is."""
    steps = [lambda m, y=y: m(X, y)[1].item() for y in (CLASSES, SOME_IGNORED)]  # type: ignore[misc]  # a default binds the name
    assert_same(lambda: WithLoss(lambda o, y: ((loss := F.cross_entropy(o, y)), loss.detach())), steps)


class Noisy(Chain):
    """A forward with a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + torch.randn(x.shape, generator=self.generator)


def test_a_generator_of_the_models_own() -> None:
    """Micro-batches draw other numbers from it than the full batch would; a warning says so, once."""
    with pytest.warns(UserWarning, match="Noisy draws from .* a generator of its own") as caught:
        run(Noisy, [mse] * 2, splits=True)
    assert sum("generator" in str(each.message) for each in caught) == 1


class Deep(nn.Module):
    """An auxiliary loss whose value is 0, but whose gradient by `r` depends on all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.r = nn.ModuleList(nn.Linear(4, 4) for _ in range(8)), nn.Linear(4, 4)
        self.c = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.r(x).softmax(1).mean(0)
        auxiliary = mean.square().sum() * 10
        for each in self.l:
            x = torch.tanh(each(x))
        return F.mse_loss(self.c(x), x.detach()) + auxiliary - auxiliary.detach()


def test_the_gradients_of_all_parameters_are_compared() -> None:
    """A gradient that micro-batches would compute otherwise is found in each parameter."""
    assert_same(Deep, [lambda m: m(X)] * 2)


class Lora(nn.Linear):
    """As loralib's layer: it merges its weights in evaluation mode."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))
        self.merged, self.drop = False, nn.Dropout(1e-9)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (self.up @ self.down) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        added = 0 if self.merged else self.drop(x) @ self.down.T @ self.up.T
        return F.linear(x, self.weight, self.bias) + added


class Adapted(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.b = Lora()


class Centered(Chain):
    """Samples depend on each other in training mode only, and forward draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(1e-9)

    def forward(self, x: Tensor) -> Tensor:
        output = self.drop(self.inner(x))
        return output - output.mean(0) if self.training else output


@pytest.mark.parametrize("model", [Adapted, Centered])
def test_the_mode_of_the_users_modules(model: type[nn.Module]) -> None:
    """A forward that draws numbers is compared in training mode, and `eval` of the user's classes is not called."""
    assert_same(model, [mse] * 2)


class Moded(Chain):
    mode = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.mode = "plain"

    def forward(self, x: Tensor, centers: bool = False, mode: str = "plain") -> Tensor:
        output = self.inner(x)
        return output - output.mean(0) if centers or "centered" in {mode, self.mode} else output


def set_mode(model: Any) -> Tensor:
    model.mode = "centered"
    return mse(model)


def pre_hook(model: Any) -> Tensor:
    model.b.register_forward_pre_hook(lambda _m, args: (args[0] - args[0].mean(0),))
    return mse(model)


def another_partial(model: Any) -> float:
    kept: dict[str, Tensor] = {}
    model.b.register_forward_hook(functools.partial(lambda found, _m, _a, o: found.update(x=o.detach()), kept))
    mse(model)
    return float(len(kept["x"]))


def first_partial(model: Any) -> Tensor:
    model.b.register_forward_hook(functools.partial(lambda _m, _a, _o: None))
    return mse(model)


def of_every_module(model: Any) -> float:
    sizes: list[Tensor] = []
    hook = nn.modules.module.register_module_forward_hook(lambda m, _a, o: sizes.append(o) if m is model.b else None)
    mse(model)
    hook.remove()
    return float(len(sizes[-1]))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda m: F.mse_loss(m(X, centers=False), Y), lambda m: F.mse_loss(m(X, centers=True), Y)),
        (lambda m: F.mse_loss(m(X, mode="plain"), Y), lambda m: F.mse_loss(m(X, mode="centered"), Y)),
        (mse, set_mode),
        (mse, pre_hook),
        (first_partial, another_partial),
        (mse, of_every_module),
    ],
    ids=["bool", "str", "attribute", "pre-hook", "partial hook", "hook of every module"],
)
def test_what_makes_another_kind_of_batch(first: Step, second: Step) -> None:
    """A later batch for which forward computes something else is compared anew."""
    assert_same(Moded, [first, second])
