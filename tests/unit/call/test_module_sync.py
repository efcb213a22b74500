"""Which modules come back from a call, and how their tensors do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from parallelize.call.module_sync import bring_back, modules_in, tensors_of


def test_modules_are_found_in_containers_each_once() -> None:
    """In order: positional, then by name; lists, tuples and dicts are looked into, attributes are not."""
    a, b, c = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    assert modules_in((a, [b, (a,)], 3), {"x": {"y": c}, "z": b}) == [a, b, c]
    circle: list[Any] = [a]
    circle.append(circle)
    assert modules_in((circle,), {}) == [a]


class Masked(nn.Module):
    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", mask)


def expanded() -> torch.Tensor:
    return torch.tensor(1.0).expand(2, 2)


def made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2, 2)


@pytest.mark.parametrize("make", [expanded, made_in_inference_mode])
@pytest.mark.parametrize("value", [1.0, 3.0])
def test_a_buffer_that_takes_no_copy_comes_back(make: Any, value: float) -> None:
    """Changed or not, without a word, and all else with it."""
    mine, trained = Masked(make()), Masked(torch.full((2, 2), value))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bring_back(mine, tensors_of(trained))
    assert torch.equal(mine.mask, trained.mask)
    assert torch.equal(mine.linear.weight, trained.linear.weight)


def test_an_expanded_buffer_that_is_as_it_was_stays_expanded() -> None:
    """A mask of a large size takes no more memory than before."""
    mine = Masked(expanded())
    bring_back(mine, tensors_of(Masked(torch.ones(2, 2))))
    assert mine.mask.stride() == (0, 0)


def test_a_tensor_that_takes_no_values_is_named() -> None:
    """On the meta device there is none to copy into; what can come back does."""
    with torch.device("meta"):
        mine = Masked(torch.ones(2, 2))
    mine.mask = torch.zeros(2, 2)
    with pytest.warns(UserWarning, match=r"^Masked: linear.bias, linear.weight .*did not come back; return the module"):
        bring_back(mine, tensors_of(Masked(torch.ones(2, 2))))
    assert torch.equal(mine.mask, torch.ones(2, 2))
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("error")
        bring_back(nn.Linear(2, 2), tensors_of(nn.Linear(2, 2)))
