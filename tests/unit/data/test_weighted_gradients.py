"""Backward that starts from a loader's weight."""

from __future__ import annotations

import pytest
import torch

from parallelize import SyncError
from parallelize.data.weighted_gradients import Weight, weighing


class Marked(torch.Tensor):
    """A subclass, for which torch calls backward twice."""


def test_gradients_are_weighted_whatever_backward_is_called():
    """Tensor.backward, torch.autograd.backward, of one root or several, with a gradient or without."""
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
        with weighing(Weight(0.25)):
            call(x)
        assert x.grad.tolist() == [0.5] * 3
    assert torch.autograd.backward is original


def test_accumulated_gradients_keep_their_own_weights():
    """Each backward counts with the weight of its own batch."""
    current, x = Weight(), torch.zeros(1, requires_grad=True)
    with weighing(current):
        for value in (0.5, 0.25, 0.0):
            current.value = value
            x.sum().backward()
    assert x.grad.item() == 0.75


class Recomputed(torch.autograd.Function):
    """What reentrant activation checkpointing does: another backward inside of backward."""

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
    """It goes on with a gradient that is weighted already."""
    x = torch.ones(2, requires_grad=True)
    with weighing(Weight(0.5)):
        Recomputed.apply(x).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


def test_a_root_without_a_gradient_is_still_torchs_error():
    """A loss of several values is refused as it always was."""
    with weighing(Weight(0.5)), pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar"):
        torch.zeros(2, requires_grad=True).backward()


def test_two_weights_at_once_are_refused():
    """One loss of batches of two weighted loaders has no weight; equal ones are no contradiction."""
    x = torch.zeros(1, requires_grad=True)
    first, second = Weight(0.5), Weight(0.5)
    with weighing(first), weighing(second):
        x.sum().backward()
        assert x.grad.item() == 0.5
        second.value = 2.0
        with pytest.raises(SyncError, match=r"two weighted loaders, of weights 0\.5 and 2\.0"):
            x.sum().backward()


def trained(order, values):
    """The gradient after batches were taken (a letter), the loader's end was seen (.), or a backward was made (!)."""
    current, x, left = Weight(), torch.zeros(1, requires_grad=True), iter(values)
    with weighing(current):
        for each in order:
            if each == ".":
                current.end()
            elif each == "!":
                x.sum().backward()
            else:
                current.give(next(left))
    return None if x.grad is None else x.grad.item()


@pytest.mark.parametrize(
    ("order", "values", "gradient"),
    [
        ("a!b!c!.", (1, 1, 2), 4),
        ("a!!b!.", (1, 2), 4),  # two losses of a batch
        ("ab!!c!d!.", (2, 2, 2, 2), 8),  # all alike: whichever it is
        ("abc.", (1, 1, 2), None),  # an evaluation
        ("a!bc", (1, 1, 2), 1),  # a loop that was left
    ],
)
def test_a_backward_counts_as_the_batch_before_it(order, values, gradient):
    """Where there is a backward between any two batches, and where it makes no difference."""
    assert trained(order, values) == gradient


@pytest.mark.parametrize("order", ["ab!!c!", "abc!!!.", "ab!c!.!", "abc!", "a!b!c.!"])
def test_batches_that_are_taken_ahead_are_refused(order):
    """A look at the next one, groups, and a loader that ends before the last backward."""
    with pytest.raises(SyncError, match=r"tail='weighted': .* backward") as caught:
        trained(order, (1, 1, 2))
    assert "take one batch at a time" in caught.value.faults[0].fix


def test_loaders_may_end_in_any_order():
    """What the first one has replaced comes back when the last one ends, and not over somebody else's."""
    original = torch.autograd.backward
    first, second = weighing(Weight()), weighing(Weight())
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.autograd.backward is not original
    second.__exit__(None, None, None)
    assert torch.autograd.backward is original
