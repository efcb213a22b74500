"""Means of a tensor's parts, in which errors of opposite signs do not cancel."""

from __future__ import annotations

import math

import pytest
import torch

from parallelize.runtime.signed_means import signed_means


def difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((signed_means(first) - signed_means(second)).norm())


@pytest.mark.parametrize("size", [16, 1_000_000])
def test_opposite_errors_do_not_cancel(size: int) -> None:
    """Neither in a small tensor, whose elements are all kept, nor in the parts of a large one."""
    right = torch.ones(size)
    wrong = right.clone()
    wrong[:8] += 1
    wrong[8:16] -= 1
    assert difference(right, right.clone()) == 0
    assert difference(right, wrong) > 0.001
    assert len(signed_means(right).flatten()) == min(size, 4096)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_tensors_that_overflow_alike_are_equal(value: float) -> None:
    """Of two runs that diverge in the same step, neither is wrong."""
    assert difference(torch.tensor([value, 1.0]), torch.tensor([value, 1.0])) == 0
    assert difference(torch.tensor([value, 1.0]), torch.ones(2)) > 1
