"""Modules among the arguments of a call, and the copy of trained weights into them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from parallelize.call.module_sync import copy_weights_back, modules_in, named_tensors


def test_modules_are_found_in_containers_each_once() -> None:
    """Positional arguments first, then keywords; lists, tuples and dicts are searched, attributes are not."""
    a, b, c = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    assert modules_in((a, [b, (a,)], 3), {"x": {"y": c}, "z": b}) == [a, b, c]
    recursive: list[Any] = [a]
    recursive.append(recursive)
    assert modules_in((recursive,), {}) == [a]


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
def test_a_buffer_that_refuses_an_in_place_copy_is_updated(make: Any, value: float) -> None:
    """Changed or not, without a warning, together with all other tensors."""
    module, trained = Masked(make()), Masked(torch.full((2, 2), value))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy_weights_back(module, named_tensors(trained))
    assert torch.equal(module.mask, trained.mask)
    assert torch.equal(module.linear.weight, trained.linear.weight)


def test_an_unchanged_expanded_buffer_stays_expanded() -> None:
    """A large mask takes no more memory than before."""
    module = Masked(expanded())
    copy_weights_back(module, named_tensors(Masked(torch.ones(2, 2))))
    assert module.mask.stride() == (0, 0)


def test_tensors_that_cannot_be_written_are_named() -> None:
    """Tensors on the meta device have no values to write; all others are updated."""
    with torch.device("meta"):
        module = Masked(torch.ones(2, 2))
    module.mask = torch.zeros(2, 2)
    with pytest.warns(UserWarning, match=r"^Masked: linear.bias, linear.weight .*not copied back; return the module"):
        copy_weights_back(module, named_tensors(Masked(torch.ones(2, 2))))
    assert torch.equal(module.mask, torch.ones(2, 2))
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("error")
        copy_weights_back(nn.Linear(2, 2), named_tensors(nn.Linear(2, 2)))
