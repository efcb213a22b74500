"""Calls of a pipelined model in threads with state of their own, after interrupts, and with unusual tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from balanced.programs import Chain, Step, X, Y, assert_same, mse
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from parallelize import parallel_model
from parallelize.backends.balanced.plugin import BalancedBackend

pytestmark = pytest.mark.slow

LOCAL = threading.local()


def jvp(model: Any) -> float:
    mse(model)
    return torch.func.jvp(model, (X,), (torch.ones_like(X),))[1].sum().item()


def tangent(model: Any) -> float:
    mse(model)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(model(forward_ad.make_dual(X, torch.ones_like(X)))).tangent
        assert found is not None
        return found.sum().item()


def tangent_without_graph(model: Any) -> float:
    with torch.no_grad():
        return tangent(model)


def jacobian(model: Any) -> float:
    mse(model)
    found = torch.autograd.functional.jacobian(lambda x: model(x).sum(0), X, vectorize=True)
    return float(torch.as_tensor(found).abs().sum())


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # of torch's own formulas, when first used
@pytest.mark.parametrize("step", [jvp, tangent, tangent_without_graph, jacobian])
def test_state_of_the_thread(step: Step) -> None:
    """Transforms and forward-mode differentiation, which belong to a thread, are not lost in other threads."""
    assert_same(Chain, [step] * 2)


class Local(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * getattr(LOCAL, "scale", 1.0)


def set_local(model: Any) -> Tensor:
    LOCAL.scale = 3.0
    return mse(model)


def test_thread_local_values_of_the_user() -> None:
    """A forward that reads a `threading.local` is compared in the threads that would run it."""
    assert_same(Local, [set_local] * 2)


class Penalized(Chain):
    """Adds to its output the size of the gradient of an earlier loss of its own."""

    earlier: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.earlier is None:
            return self.inner(x)
        return self.inner(x) + torch.autograd.grad(self.earlier, self.a.weight, retain_graph=True)[0].square().sum()


def penalized(model: Any) -> Tensor:
    model.earlier = None
    earlier = mse(model)
    model.earlier = earlier
    return mse(model)


@pytest.mark.timeout(60)
def test_a_backward_in_the_threads_of_a_forward() -> None:
    """A forward may compute gradients of an earlier output of its model, while its micro-batches use all threads."""
    assert_same(Penalized, [penalized] * 2)


class InterruptedNorm(nn.BatchNorm1d):
    is_interrupted = False

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if self.is_interrupted:
            raise KeyboardInterrupt
        return output


class Interrupted(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = InterruptedNorm(4), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.inner(x)))


def test_an_interrupt_in_batch_norm() -> None:
    """Ctrl-C while a batch norm computes leaves its momentum and running statistics as they were."""
    model = Interrupted()
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=2)):
        mse(model).backward()
        before = model.norm.running_mean.clone()  # type: ignore[union-attr]  # it tracks them
        InterruptedNorm.is_interrupted = True
        try:
            with pytest.raises(KeyboardInterrupt):
                mse(model)
        finally:
            InterruptedNorm.is_interrupted = False
    assert model.norm.momentum == 0.1
    torch.testing.assert_close(model.norm.running_mean, before)


class Rooted(Chain):
    """Its scalar is a mean, or for one batch nothing that micro-batches can compute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(self.norm(x)).square()
        return found.sum().sqrt() if x[0, 0] > 50 else found.mean()


def test_a_batch_that_is_refused_after_it_has_run() -> None:
    """A batch whose micro-batches cannot be joined, and which then runs whole, counts once in batch norm."""
    other = X.clone()
    other[0, 0] = 100

    def batches(model: Any) -> float:
        model(other)
        return model.norm.num_batches_tracked.item()

    def first(model: Any) -> float:
        model(X)
        return 0.0

    assert_same(Rooted, [first, batches])


def test_backward_after_the_block() -> None:
    """A loss that was computed in the block has its gradients after the block, too."""
    model = Chain()
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=2)):
        loss = mse(model)
    got = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(got, torch.autograd.grad(mse(model), list(model.parameters())), rtol=1e-4, atol=1e-5)


class Spectrum(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(self.inner(x), dim=0)  # over the samples


def spectrum(model: Any) -> float:
    with torch.no_grad():
        return model(X).abs().sum().item()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.c = nn.Embedding(10, 8, sparse=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.e(x).mean(1))


class Halving(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mul_(0.5))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.a(x)))


def ragged(model: Any) -> Tensor:
    parts = model(torch.nested.nested_tensor([X[:1], X[:2], X[:3], X[:2]], layout=torch.jagged)).unbind()
    return torch.cat([each.square().flatten() for each in parts]).mean()


TOKENS = torch.arange(24).view(8, 3) % 10


@pytest.mark.parametrize(
    ("model", "step"),
    [
        (Spectrum, spectrum),
        (Sparse, lambda m: m(TOKENS).square().mean()),
        (Halving, lambda m: F.mse_loss(m(X.clone()), Y)),
        (Nested, ragged),
    ],
    ids=["complex", "sparse gradient", "argument changed in place", "nested"],
)
def test_unusual_tensors(model: Callable[[], nn.Module], step: Step) -> None:
    """Complex outputs, sparse gradients, arguments that forward changes and nested tensors give the plain results."""
    assert_same(model, [step] * 2)
