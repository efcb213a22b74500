"""loss_counts: what a loss averages over, from its graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize.gradients.autograd_graph import mark_outputs
from parallelize.gradients.target_counts import LossCount, attach_count, loss_counts, required_count

T = torch.tensor([0, 1, -100, 2, 3, -100])
W = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0])
ONES = torch.ones(6, 5)

LOSSES = {
    "cross_entropy": (lambda x: F.cross_entropy(x, T), 4),
    "class weights": (lambda x: nn.CrossEntropyLoss(weight=W)(x, T), 7.5),
    "smoothing": (lambda x: F.cross_entropy(x, T, label_smoothing=0.1) / 3, 4),
    "smoothing with weights": (lambda x: F.cross_entropy(x, T, weight=W, label_smoothing=0.1), 7.5),
    "probabilities": (lambda x: F.cross_entropy(x, ONES / 5), 6),
    "2d": (lambda x: F.cross_entropy(x.view(2, 5, 3), T.view(2, 3)), 4),
    "nll": (lambda x: F.nll_loss(x.log_softmax(1), T), 4),
    "mse": (lambda x: F.mse_loss(x, ONES) / 7, 30),
    "l1": (lambda x: F.l1_loss(x, ONES), 30),
    "smooth_l1": (lambda x: F.smooth_l1_loss(x, ONES), 30),
    "huber": (lambda x: F.huber_loss(x, ONES), 30),
    "bce": (lambda x: F.binary_cross_entropy(x.sigmoid(), ONES), 30),
    "bce logits": (lambda x: F.binary_cross_entropy_with_logits(x, ONES, pos_weight=W), 30),
    "soft margin": (lambda x: F.soft_margin_loss(x, ONES), 30),
    "triplet": (lambda x: F.triplet_margin_loss(x, x + 1, x - 1), 6),
    "kl": (lambda x: F.kl_div(x.log_softmax(1), ONES / 5, reduction="batchmean"), 6),
    "mean": (lambda x: 1 - 0.5 * x.mean(), 30),
    "mean over dims": (lambda x: x.mean((0, 1)), 30),
    "mean of a mean": (lambda x: F.mse_loss(x, ONES).mean().half().float(), 30),
    "mean of means of rows": (lambda x: x.mean(1).mean(), 6),
    "masked mean": (lambda x: -(x.mean(1) * (T >= 0)).sum() / (T >= 0).sum() / 2, 8),
    "sum divided by an int": (lambda x: F.cross_entropy(x, T, reduction="sum") / 4, 4),
    "equal terms": (lambda x: x.mean() + 2 * F.mse_loss(x, ONES), 30),
    "stacked terms": (lambda x: torch.stack([x.mean(), x.abs().mean()]).sum(), 30),
    "divided sum of sums": (lambda x: (x.sum() + x.abs().sum()) / 6, 6),
    "a batch of one": (lambda x: (x[0, 0].squeeze() ** 2).mean(), 1),
    "one element": (lambda x: x.mean().view(1)[0], 30),
    "a penalty on weights": (lambda x: x.mean() + 0.1 * nn.Linear(2, 2).weight.pow(2).sum(), 30),
    "a learned weight": (lambda x: x.mean() * nn.Parameter(torch.zeros(())).exp(), 30),
}


def outputs():
    """Return the outputs of a model."""
    x = torch.randn(6, 5, requires_grad=True) * 1
    mark_outputs({"logits": [x]}, inputs=(), owners=["net"])
    return x


@pytest.mark.parametrize(("loss", "count"), LOSSES.values(), ids=LOSSES)
def test_losses_have_the_number_of_their_targets(loss, count):
    """Means, with ignored targets and class weights; sums divided by a count; linear combinations of them."""
    assert {each.count for each in loss_counts([loss(outputs())])} == {count}


def test_a_recurrence_is_searched_once():
    """Each of its steps leads to the last one in two ways: 2 ** 100 ways in all."""
    loss = outputs().mean()
    for _ in range(100):
        loss = loss + 0.01 * loss
    assert {each.count for each in loss_counts([loss])} == {30}


def test_terms_of_different_counts_are_all_found():
    """Also of several roots."""
    x = outputs()
    assert {each.count for each in loss_counts([x.mean() + F.cross_entropy(x, T)])} == {30, 4}
    assert {each.count for each in loss_counts([x.mean(), F.cross_entropy(x, T)])} == {30, 4}


class Custom(torch.autograd.Function):
    """A loss without a known reduction."""

    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(6, 5)


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (lambda x: x.sum(), "sum"),
        (lambda x: F.mse_loss(x, ONES, reduction="sum") * 2, "sum"),
        (Custom.apply, "unknown"),
        (lambda x: x.mean() ** 2, "unknown"),
        (lambda x: 1 / x.mean(), "unknown"),
        (lambda x: x.mean() * x.mean(), "unknown"),
        (lambda x: x.sum() / x.sum(), "unknown"),
        (lambda x: x[0, 0], "unknown"),
        (lambda x: x.mean(1), "unknown"),
    ],
)
def test_other_losses_have_no_count(loss, reduction):
    """Sums, custom functions and functions that are not linear in a loss."""
    (found,) = loss_counts([loss(outputs())])
    assert (found.reduction, found.count) == (reduction, None)


LEARNED_WEIGHTS = {
    "a parameter": lambda weight: weight,
    "its exponential": lambda weight: weight.exp(),
    "of a vector of one": lambda weight: weight.view(1).squeeze(0).neg(),
}


@pytest.mark.parametrize("learned", LEARNED_WEIGHTS.values(), ids=LEARNED_WEIGHTS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_learned_weight_in_a_forward_changes_no_reduction(learned, reduction):
    """In a forward no output of a model is behind the loss: a factor is a weight if only parameters are behind it."""
    x = torch.randn(6, 5, requires_grad=True)
    weight = nn.Parameter(torch.tensor(1.5))
    loss = F.cross_entropy(x * 2, T, reduction=reduction) * learned(weight)
    (count,) = loss_counts([loss], is_in_model=True)
    assert count.reduction == reduction


def test_a_factor_of_data_in_a_forward_is_no_weight():
    """A product of two values of a batch is linear in neither."""
    x = torch.randn(6, 5, requires_grad=True)
    weight = nn.Parameter(torch.tensor(1.5))
    factor = weight * x.detach().mean()
    (count,) = loss_counts([F.cross_entropy(x * 2, T, reduction="sum") * factor], is_in_model=True)
    assert count.reduction == "unknown"


def test_a_given_count_is_used():
    """For a loss that a backend has joined from several ones."""
    loss = Custom.apply(outputs())
    attach_count(loss, LossCount("NllLoss", "mean", 12))
    assert loss_counts([loss / 2]) == [LossCount("NllLoss", "mean", 12)]


def test_counts_that_differ_by_rounding_are_one_count() -> None:
    """The terms of a smoothed loss with class weights add up the same weights in another order."""
    torch.manual_seed(0)
    for size in range(3, 40):
        logits, targets, weights = torch.randn(size, 5, requires_grad=True), torch.randint(5, (size,)), torch.rand(5)
        loss = F.cross_entropy(logits, targets, weight=weights, label_smoothing=0.1)
        assert float(required_count([loss]).count or 0) == pytest.approx(float(weights[targets].sum()), rel=1e-5)


@pytest.mark.parametrize(("targets", "count"), [(4, 4), (0, 0)], ids=["margins that are met", "all targets are masked"])
def test_a_loss_of_zero(targets: int, count: int) -> None:
    """Targets of which none has a loss are targets; the 1 of a divisor that is clamped is none."""
    margins = torch.ones(4, requires_grad=True)
    is_target = torch.arange(4) < targets
    losses = (1 - margins).relu() * is_target
    assert required_count([losses.sum() / is_target.sum().clamp(min=1)]).count == count
