"""What replicas return is put together as one device would have returned it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from zoo import ModelOutput

from parallelize import ConfigError
from parallelize.backends.dp_engine import gathered, splitter
from parallelize.plugins.base import Inner, Session

CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    name: str


def put(*outputs: Any, samples: list[int] | None = None) -> Any:
    return gathered(outputs, samples=samples or [1] * len(outputs), device=CPU)


def test_tensors_are_joined_along_the_first_dimension() -> None:
    """Replicas' shares in order; the last may be smaller."""
    assert torch.equal(put(torch.zeros(2, 3), torch.ones(1, 3)), torch.tensor([[0.0] * 3, [0.0] * 3, [1.0] * 3]))


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
def test_containers_keep_their_type(wrap: Any) -> None:
    """Tuples, dictionaries, named tuples, dataclasses and dictionaries that refuse update."""
    whole = wrap(torch.arange(3.0))
    result = put(wrap(torch.arange(2.0)), wrap(torch.tensor([2.0])))
    assert type(result) is type(whole)
    if isinstance(whole, ModelOutput):
        assert torch.equal(result.logits, whole.logits)
    assert str(result) == str(whole)


@given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=5), min_size=1, max_size=4))
def test_losses_without_dimensions_are_the_mean_over_all_samples(shares: list[list[float]]) -> None:
    """The mean of each share, weighted by its samples, is the mean of all."""
    losses = [torch.tensor(share, dtype=torch.float64).mean() for share in shares]
    everything = torch.tensor([value for share in shares for value in share], dtype=torch.float64)
    torch.testing.assert_close(put(*losses, samples=[len(share) for share in shares]), everything.mean())


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 300.0), (torch.bfloat16, 3.0)])
def test_losses_in_half_precision_are_weighted_exactly(dtype: torch.dtype, value: float) -> None:
    """A loss times its samples is beyond fp16, and samples beyond 256 are no bf16 numbers: the mean is exact anyway."""
    result = put(*[torch.tensor(value, dtype=dtype)] * 2, samples=[333, 257])
    assert result.dtype is dtype
    assert result.item() == value


def test_losses_stay_in_the_graph() -> None:
    """backward() of the joined loss reaches each replica by its share of the samples."""
    losses = [torch.zeros((), requires_grad=True) for _ in range(2)]
    put(*losses, samples=[3, 1]).backward()
    assert [loss.grad.item() for loss in losses if loss.grad is not None] == [0.75, 0.25]


def test_what_is_no_tensor_is_the_first_replicas() -> None:
    """Names and options are the same on every replica."""
    assert put((torch.ones(1), None, "name", 3), (torch.ones(1), None, "name", 3))[1:] == (None, "name", 3)


def test_whole_numbers_without_dimensions_are_kept_apart() -> None:
    """Nobody knows whether a count is to be added or averaged: one value per replica, as torch has it."""
    assert put(torch.tensor(3), torch.tensor(4)).tolist() == [3, 4]


def test_outputs_of_different_lengths_are_refused() -> None:
    """A list per sample cannot be joined value by value."""
    with pytest.raises(ConfigError, match="returns 2 and 1 values for its shares"):
        put([torch.ones(1), torch.ones(1)], [torch.ones(1)])


def test_a_forward_that_cannot_be_replicated_is_refused() -> None:
    """A compiled forward on the instance is bound to the one model; on one device it runs as it is."""
    model = nn.Linear(1, 1)
    inner = Inner(model, found={"forward": lambda x: x}, session=Session())
    assert splitter(inner, devices=[CPU]) is inner
    with pytest.raises(ConfigError, match="forward of its own on the instance, over 2 devices"):
        splitter(inner, devices=[torch.device("cuda", 0), torch.device("cuda", 1)])
