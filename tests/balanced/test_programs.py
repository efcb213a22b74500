"""Programs whose micro-batches could compute something else than the plain model, without an error."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallelize import parallel_model
from parallelize.backends.balanced.plugin import BalancedBackend

pytestmark = pytest.mark.slow

torch.manual_seed(1)
X, Y = torch.randn(8, 4), torch.randn(8, 4)

Step = Callable[[Any], Any]


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(4))

    def inner(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x + self.scale)))))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def mse(model: Any) -> Tensor:
    return F.mse_loss(model(X), Y)


def run(make: Callable[[], nn.Module], steps: Sequence[Step], *, splits: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Train a model by SGD; return what the steps return, and the state of the model."""
    torch.manual_seed(0)
    model, values = make(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        for step in steps:
            optimizer.zero_grad()
            value = step(model)
            if isinstance(value, Tensor):
                value.backward()
            values.append(value.item() if isinstance(value, Tensor) else value)
            optimizer.step()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "batches like this one are not split")
        if splits:
            with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=2)):
                loop()
        else:
            loop()
    return values, {name: each.clone() for name, each in model.state_dict().items()}


def assert_same(make: Callable[[], nn.Module], steps: Sequence[Step]) -> None:
    got, want = (run(make, steps, splits=splits) for splits in (True, False))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


CLASSES = torch.tensor([0, 1, 2, 3, 0, 2, 1, 3])
HALF_IGNORED, SOME_IGNORED = CLASSES.clone(), CLASSES.clone()
HALF_IGNORED[:4] = SOME_IGNORED[:3] = -100  # all of one micro-batch, and some


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


class Centered(Chain):
    """Samples depend on each other in training mode only, and forward draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(1e-9)

    def forward(self, x: Tensor) -> Tensor:
        output = self.drop(self.inner(x))
        return output - output.mean(0) if self.training else output


def test_the_mode_of_the_users_modules() -> None:
    """A forward that draws numbers is compared in the mode of the user's modules, with torch's own in evaluation."""
    assert_same(Centered, [mse] * 2)


class Moded(Chain):
    def forward(self, x: Tensor, centers: bool = False) -> Tensor:
        output = self.inner(x)
        return output - output.mean(0) if centers else output


def test_a_flag_among_the_arguments() -> None:
    """Batches with another Boolean are compared, too, and run whole if their samples depend on each other."""
    assert_same(Moded, [lambda m, c=c: F.mse_loss(m(X, centers=c), Y) for c in (False, True)])  # type: ignore[misc]  # a default binds the name


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
def test_hooks_inside_the_model(kind: str) -> None:
    """A hook of the user's, also one registered later, sees the full batch."""

    def hooked(model: Any) -> float:
        sizes: list[int] = []
        handle = getattr(model.b, f"register_{kind}")(lambda *given: sizes.append(len(given[-1][-1])))
        mse(model)
        handle.remove()
        return float(sum(sizes))

    assert_same(Chain, [mse, mse, hooked])
