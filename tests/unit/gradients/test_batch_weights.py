"""Weighted backward passes: backward starts from the weight of the current batch."""

from __future__ import annotations

import contextlib

import pytest
import torch

from parallelize import SyncError
from parallelize.gradients.batch_weights import refusing_lost_weights, weighing_loop
from parallelize.run.loader_weights import LoaderLoop, LoaderWeights


@contextlib.contextmanager
def batch_of(value):
    """Run a loop over a loader that has yielded one batch, alone in its run."""
    weights, loop = LoaderWeights(), LoaderLoop()
    with weighing_loop(weights, loop):
        weights.take_batch(loop, value)
        yield


class Marked(torch.Tensor):
    """A subclass, for which torch calls backward twice."""


def test_every_kind_of_backward_is_weighted():
    """Tensor.backward and torch.autograd.backward, with one root or several, with or without a gradient."""
    calls = [
        lambda x: (x * 2).sum().backward(),
        lambda x: torch.autograd.backward((x * 2).sum()),
        lambda x: torch.autograd.backward([x.sum(), x.sum()]),
        lambda x: (x * 2).backward(torch.ones(3)),
        lambda x: torch.autograd.backward([x, x.sum()], [torch.ones(3), None]),
        lambda x: torch.autograd.backward(x.sum() * 2, inputs=[x]),
        lambda x: torch.autograd.backward(torch.autograd.graph.get_gradient_edge(x.sum() * 2)),
        lambda x: x.as_subclass(Marked).mul(2).sum().backward(),
    ]
    original = torch.autograd.backward
    for call in calls:
        x = torch.zeros(3, requires_grad=True)
        with batch_of(0.25):
            call(x)
        assert x.grad.tolist() == [0.5] * 3
    assert torch.autograd.backward is original


class Recomputed(torch.autograd.Function):
    """Runs a backward inside of backward, as reentrant activation checkpointing does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.detach() ** 2

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = x**2
        torch.autograd.backward(y, grad)
        return x.grad


def test_a_backward_inside_a_backward_is_not_weighted_twice():
    """The inner one starts from a gradient that is already weighted."""
    x = torch.ones(2, requires_grad=True)
    with batch_of(0.5):
        Recomputed.apply(x).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda x: x.backward(), "only for scalar"),
        (lambda x: x.sum().to(torch.complex64).backward(), "only for real"),
        (lambda x: torch.autograd.backward([x.sum(), x.sum()], torch.ones(())), "got 2 tensors and 1 gradients"),
    ],
)
def test_a_root_without_a_gradient_is_still_torchs_error(refused, message):
    """A loss of several values, a complex one, and too few gradients are refused with torch's messages."""
    with batch_of(0.5), pytest.raises(RuntimeError, match=message):
        refused(torch.zeros(2, requires_grad=True))


def test_two_weights_at_once_are_refused():
    """A loss from batches of two loaders has no weight, unless their weights are equal."""
    x = torch.zeros(1, requires_grad=True)
    weights, first, second = LoaderWeights(), LoaderLoop(), LoaderLoop()
    with weighing_loop(weights, first), weighing_loop(weights, second):
        weights.take_batch(first, 0.5)
        weights.take_batch(second, 0.5)
        x.sum().backward()
        assert x.grad.item() == 0.5
        weights.take_batch(first, 0.5)
        weights.take_batch(second, 2.0)
        with pytest.raises(SyncError, match=r"two loaders, of weights 0\.5 and 2\.0") as caught:
            x.sum().backward()
        assert "next() after the backward pass of the first" in caught.value.faults[0].fix
        weights.take_batch(first, 0.5)
        x.sum().backward()
        weights.take_batch(second, 2.0)  # the advice is followed
        x.sum().backward()
        assert x.grad.item() == 0.5 + 0.5 + 2.0


def gradient_after(order, values):
    """Return the gradient after taking batches (letters), running backward (!) and exhausting the loader (.)."""
    weights, loop = LoaderWeights(), LoaderLoop()
    x, remaining = torch.zeros(1, requires_grad=True), iter(values)
    with weighing_loop(weights, loop):
        for event in order:
            if event == ".":
                loop.end_epoch()
            elif event == "!":
                x.sum().backward()
            else:
                weights.take_batch(loop, next(remaining))
    return None if x.grad is None else x.grad.item()


@pytest.mark.parametrize(
    ("order", "values", "gradient"),
    [
        ("a!b!c!.", (0.5, 0.25, 0.0), 0.75),
        ("a!!b!.", (1, 2), 4),  # two losses of a batch
        ("ab!!c!d!.", (2, 2, 2, 2), 8),  # equal weights: any batch
        ("abc.", (1, 1, 2), None),  # an evaluation
        ("a!bc", (1, 1, 2), 1),  # a loop that was left
    ],
)
def test_a_backward_has_the_weight_of_the_batch_before_it(order, values, gradient):
    """If each batch has its backward pass before the next one, or the weights are equal; gradients accumulate."""
    assert gradient_after(order, values) == gradient


@pytest.mark.parametrize("order", ["ab!!c!", "abc!!!.", "ab!c!.!", "abc!", "a!b!c.!"])
def test_batches_that_are_taken_ahead_are_refused(order):
    """Look-ahead by one batch, groups of batches, and a loader that ends before the last backward."""
    with pytest.raises(SyncError, match=r"tail='weighted': .* backward") as caught:
        gradient_after(order, (1, 1, 2))
    assert "take one batch at a time" in caught.value.faults[0].fix


def test_loaders_may_end_in_any_order():
    """The original backward is restored when the last of several loaders ends, not when the first one does."""
    original = torch.autograd.backward
    weights = LoaderWeights()
    first, second = weighing_loop(weights, LoaderLoop()), weighing_loop(weights, LoaderLoop())
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.autograd.backward is not original
    second.__exit__(None, None, None)
    assert torch.autograd.backward is original


def test_a_lost_weight_concerns_its_own_run_only():
    """A pass after the loop is refused once; in another run of the process it is not, whatever happened there."""
    x, run, next_run = torch.zeros(1, requires_grad=True), LoaderWeights(), LoaderWeights()
    loop = LoaderLoop()
    with weighing_loop(run, loop):
        run.take_batch(loop, 0.5)
    with refusing_lost_weights(next_run):
        x.sum().backward()
    with refusing_lost_weights(run), pytest.raises(SyncError, match="the loop over a loader ended before"):
        x.sum().backward()
