"""DataParallel: the replicas' outputs are joined into the output of one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from zoo import ModelOutput

from parallelize import ConfigError
from parallelize.backends.dp_engine import data_parallel, gathered_outputs
from parallelize.gradients.target_counts import LossCount, loss_counts
from parallelize.plugins.base import Inner, Session

CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    name: str


def gather(*outputs: Any, samples: list[int] | None = None, number: object = None) -> Any:
    inputs = [(torch.zeros(each), number) for each in samples or [1] * len(outputs)]
    return gathered_outputs(outputs, inputs, device=CPU)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tensor: (tensor, [tensor]),
        lambda tensor: {"a": tensor, "b": {"c": tensor}},
        lambda tensor: Pair(tensor, tensor),
        lambda tensor: Output(tensor, "same"),
        lambda tensor: ModelOutput(logits=tensor),
    ],
    ids=["tuple", "dict", "named tuple", "dataclass", "model output"],
)
def test_tensors_are_joined_and_containers_keep_their_type(wrap: Any) -> None:
    """Along the first dimension, in the order of the replicas; the last output may be smaller."""
    expected = wrap(torch.arange(6.0).view(3, 2))
    result = gather(wrap(torch.arange(4.0).view(2, 2)), wrap(torch.tensor([[4.0, 5.0]])))
    assert type(result) is type(expected)
    if isinstance(expected, ModelOutput):
        assert torch.equal(result.logits, expected.logits)
    assert str(result) == str(expected)


@given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=5), min_size=1, max_size=4))
def test_losses_without_dimensions_are_the_mean_over_all_samples(batches: list[list[float]]) -> None:
    """The replicas' means, weighted by their samples, are the mean of the whole batch."""
    losses = [torch.tensor(batch, dtype=torch.float64).mean() for batch in batches]
    all_samples = torch.tensor([value for batch in batches for value in batch], dtype=torch.float64)
    torch.testing.assert_close(gather(*losses, samples=[len(batch) for batch in batches]), all_samples.mean())


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 300.0), (torch.bfloat16, 3.0)])
def test_losses_in_half_precision_are_weighted_exactly(dtype: torch.dtype, value: float) -> None:
    """The mean is exact, though a loss times its samples overflows fp16, and bf16 cannot represent 257 samples."""
    result = gather(*[torch.tensor(value, dtype=dtype)] * 2, samples=[333, 257])
    assert result.dtype is dtype
    assert result.item() == value


def test_losses_stay_in_the_graph() -> None:
    """backward() of the joined loss gives each replica's loss a gradient proportional to its samples."""
    losses = [torch.zeros((), requires_grad=True) for _ in range(2)]
    gather(*losses, samples=[3, 1]).backward()
    assert [loss.grad.item() for loss in losses if loss.grad is not None] == [0.75, 0.25]


LOGITS = torch.arange(12.0, dtype=torch.float64).view(4, 3).cos()
TARGETS = torch.tensor([0, -100, 2, 1])


@pytest.mark.parametrize("numbers", [(2.0, 3.0), (2.0, 2.0)])
def test_means_times_different_numbers_are_averaged_by_samples(numbers: tuple[float, float]) -> None:
    """Of 1 and 2 targets in 2 samples each: the numbers may depend on the batch, unless they are equal."""
    parts = slice(None, 2), slice(2, None)
    losses = [
        each * F.cross_entropy(LOGITS[part].requires_grad_(), TARGETS[part])
        for each, part in zip(numbers, parts, strict=True)
    ]
    weights = (1, 2) if numbers[0] == numbers[1] else (2, 2)
    expected = sum(each * weight for each, weight in zip(losses, weights, strict=True)) / sum(weights)
    torch.testing.assert_close(gather(*losses, samples=[2, 2]), expected)


@pytest.mark.parametrize(
    ("loss_of", "kind", "count"),
    [
        (F.cross_entropy, "mean", 3),
        (lambda y, t: F.cross_entropy(y, t, reduction="sum"), "sum", None),
        (lambda y, t: F.cross_entropy(y, t, reduction="sum") / 7, "divided sum", 7),
        (lambda y, t: F.cross_entropy(y, t, reduction="sum") / (t >= 0).sum(), "mean", 3),
        (lambda y, _: y.square().mean(), "mean", 12),
    ],
)
@pytest.mark.parametrize("split", [1, 2, 3])
def test_losses_add_up_to_that_of_the_batch(loss_of: Any, kind: str, count: float | None, split: int) -> None:
    """Means by targets; sums, also divided by a number that the model gets, by addition."""
    logits = LOGITS.clone().requires_grad_()
    losses = [loss_of(logits[part], TARGETS[part]) for part in (slice(None, split), slice(split, None))]
    joined = gather(*losses, samples=[split, 4 - split], number=7)
    assert loss_counts([joined / 3]) == [LossCount(joined_name(loss_of, logits), kind, count)]
    joined.backward()
    whole = LOGITS.clone().requires_grad_()
    loss_of(whole, TARGETS).backward()
    torch.testing.assert_close(logits.grad, whole.grad)


def joined_name(loss_of: Any, logits: torch.Tensor) -> str:
    return loss_counts([loss_of(logits, TARGETS)], is_in_model=True)[0].operation


def test_a_replica_without_targets_adds_nothing() -> None:
    """Its mean over no targets is nan; the loss of the batch is that of the other replicas."""
    targets = torch.tensor([-100, -100, 2, 1])
    logits = LOGITS.clone().requires_grad_()
    losses = [F.cross_entropy(logits[part], targets[part]) for part in (slice(None, 2), slice(2, None))]
    assert losses[0].isnan()
    joined = gather(*losses, samples=[2, 2])
    torch.testing.assert_close(joined, F.cross_entropy(LOGITS, targets))
    assert gather(losses[0], losses[0], samples=[2, 2]).isnan()


def test_penalties_are_not_added_up() -> None:
    """A sum that is equal on all replicas does not depend on the batch; other scalars are averaged by samples."""
    weight = torch.ones(3, requires_grad=True)
    assert gather(weight.sum(), weight.sum(), samples=[3, 1]).item() == 3
    assert gather(weight.exp().sum().log(), 0 * weight.sum().sin(), samples=[3, 1]).item() == pytest.approx(1.574, 1e-3)


def test_other_leaves() -> None:
    """Strings, numbers and None are the first replica's; integers without dimensions are stacked, as in torch."""
    assert gather((torch.ones(1), None, "name", 3), (torch.ones(1), None, "name", 3))[1:] == (None, "name", 3)
    assert gather(torch.tensor(3), torch.tensor(4)).tolist() == [3, 4]


def test_outputs_of_different_lengths_are_refused() -> None:
    """A list with one entry per sample cannot be joined value by value."""
    with pytest.raises(ConfigError, match="returns 2 and 1 values on different devices"):
        gather([torch.ones(1), torch.ones(1)], [torch.ones(1)])


def test_a_forward_that_cannot_be_replicated_is_refused() -> None:
    """A compiled forward on the instance is bound to the original model; on one device it runs unchanged."""
    model = nn.Linear(1, 1)
    inner = Inner(model, original_methods={"forward": lambda x: x}, session=Session())
    assert data_parallel(inner, devices=[CPU]) is inner
    with pytest.raises(ConfigError, match="forward set on the instance, over 2 devices"):
        data_parallel(inner, devices=[torch.device("cuda", 0), torch.device("cuda", 1)])
