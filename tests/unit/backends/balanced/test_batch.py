"""Splitting a batch and joining the parts gives the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallelize import ConfigError
from parallelize.backends.balanced.batch import Batch, named_leaves
from parallelize.backends.balanced.outputs import infer_batch_dims, join_outputs, scalar_weights
from parallelize.backends.balanced.refusals import UnjoinedOutput
from parallelize.runtime.containers import leaves

CPU = torch.device("cpu")


def join(rows: list[list[Any]], sizes: tuple[int, ...], *, dims: dict[int, int | None]) -> list[Any]:
    return join_outputs(rows, device=CPU, dims=dims, weights=scalar_weights(rows, sizes, inputs=()))


@dataclass
class Point:
    at: torch.Tensor
    weight: int


@given(samples=st.integers(1, 9), microbatches=st.integers(1, 12), dim=st.integers(0, 1))
def test_joining_undoes_splitting(samples: int, microbatches: int, dim: int) -> None:
    """Sizes differ by at most one sample; every sample is in one part, in order; other values are passed unchanged."""
    x = torch.arange(samples * 3.0).reshape(3, samples) if dim else torch.arange(samples * 3.0).reshape(samples, 3)
    constant = torch.ones(20, 20)
    batch = Batch((({"x": x, "name": "a"}, constant), {"flag": None}), dim=dim).split(microbatches)
    assert sum(batch.sizes) == samples
    assert len(batch.sizes) == min(samples, microbatches)
    assert max(batch.sizes) - min(batch.sizes) <= 1
    for args, kwargs in batch.inputs:
        assert args[0]["name"] == "a"
        assert args[1] is constant
        assert kwargs == {"flag": None}
    rows = [[args[0]["x"]] for args, _ in batch.inputs]
    (joined,) = join(rows, batch.sizes, dims={0: dim})
    assert torch.equal(joined, x)


@given(sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4), factor=st.integers(1, 3), dim=st.integers(0, 1))
def test_the_dimension_of_the_full_batch_is_found(sizes: list[int], factor: int, dim: int) -> None:
    """Also if an output has several rows per sample: its length is the sum of the micro-batches' lengths."""

    def output(samples: int) -> torch.Tensor:
        return torch.zeros(samples * factor, 5).transpose(0, dim)

    rows = [[output(size), torch.ones(3)] for size in sizes]
    assert infer_batch_dims([output(sum(sizes)), torch.ones(3)], rows) == {0: dim, 1: None}


def test_scalars_are_averaged_by_samples() -> None:
    """Means of micro-batches of 3 and 1 samples are weighted 3 to 1."""
    (joined,) = join([[torch.tensor(1.0)], [torch.tensor(5.0)]], (3, 1), dims={})
    assert joined == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (("a", "a"), "a"),
        ((None, None), None),
        ((3, 3), 3),
        ((torch.arange(3), torch.arange(3)), torch.arange(3)),
    ],
)
def test_equal_values_are_returned_once(values: tuple[Any, ...], expected: Any) -> None:
    """Constants of any kind are returned unchanged."""
    (joined,) = join([[value] for value in values], (2, 2), dims={})
    assert torch.equal(joined, expected) if isinstance(expected, torch.Tensor) else joined == expected


@pytest.mark.parametrize(
    "values", [("a", "b"), (1, 2), (torch.zeros(3), torch.ones(3)), (torch.tensor(1), torch.tensor(2))]
)
def test_values_that_differ_and_are_not_per_sample_are_refused_on_use(values: tuple[Any, ...]) -> None:
    """Counts, names and tensors without a batch dimension are placeholders, which name themselves."""
    (joined,) = join([[value] for value in values], (2, 2), dims={0: None})
    assert isinstance(joined, UnjoinedOutput)
    for use in (lambda: joined.shape, lambda: joined + 1, lambda: torch.sum(joined), lambda: list(joined)):
        with pytest.raises(ConfigError, match="output 0 of the model"):
            use()


def test_lengths_that_depend_on_the_samples_are_refused_on_use() -> None:
    """Sequences padded to the longest of their micro-batch cannot be joined; the error names a fix."""
    (joined,) = join([[torch.zeros(2, 6, 3)], [torch.zeros(2, 4, 3)]], (2, 2), dims={0: 0})
    with pytest.raises(ConfigError, match=r"tensors of \(2, 6, 3\) and \(2, 4, 3\)(.|\n)*total_length"):
        joined.mean()


def test_names_are_in_the_order_of_leaves() -> None:
    """Every leaf has one name, in the order of `leaves`; names of tensors include their number of dimensions."""
    inputs = (
        ({"x": torch.zeros(4, 2), "of": [1, torch.zeros(3)]}, Point(torch.zeros(2), 5)),
        {"flag": None, "sizes": (torch.Size((1,)), 2)},
    )
    found = list(named_leaves(inputs))
    assert [leaf for _, leaf in found] == list(leaves(inputs))
    assert [name for name, _ in found] == [
        *("0.x (2-D)", "0.of.0", "0.of.1 (1-D)", "1.at (1-D)", "1.weight"),
        *("flag", "sizes.0.0", "sizes.1"),
    ]


def test_tensors_longer_than_an_earlier_batch_are_not_split() -> None:
    """Tensors that are not per sample are named, and not split when a later batch is as long as they are."""
    classes = torch.zeros(5)
    seen = Batch(((torch.zeros(8, 2),), {"weight": classes, "mask": torch.zeros(1, 8)}), dim=0).not_per_sample
    assert seen == {"weight (1-D)"}
    rest = ((torch.zeros(5, 2),), {"weight": classes, "mask": torch.zeros(5, 8)})
    batch = Batch(rest, dim=0, whole_inputs=seen)
    args, kwargs = batch.split(5).inputs[0]
    assert [args[0].shape, kwargs["weight"].shape, kwargs["mask"].shape] == [(1, 2), (5,), (1, 8)]
    _, kwargs = batch.first(2)
    assert [kwargs["weight"].shape, kwargs["mask"].shape] == [(5,), (2, 8)]


def test_one_number_per_sample_is_split_for_any_batch_dim() -> None:
    """1-D tensors such as sequence lengths are split along dimension 0 even if batch_dim is 1."""
    inputs = ((torch.zeros(6, 4, 2), torch.arange(4)), {})
    batch = Batch(inputs, dim=1)
    args, _ = batch.split(2).inputs[1]
    assert args[0].shape == (6, 2, 2)
    assert args[1].tolist() == [2, 3]
    assert batch.first(3)[0][1].tolist() == [0, 1, 2]
    assert batch.split_dims == {"0 (3-D)": 1, "1 (1-D)": 0}


def test_the_first_samples() -> None:
    """A part of a batch contains other values unchanged."""
    inputs = ((torch.zeros(8, 2), torch.zeros(3)), {"flag": True})
    batch = Batch(inputs, dim=0)
    (x, other), kwargs = batch.first(5)
    assert x.shape == (5, 2)
    assert other.shape == (3,)
    assert kwargs == {"flag": True}
    assert batch.size == 8
