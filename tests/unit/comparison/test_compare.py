"""`train.compare`: refused calls, and means of a tensor's parts, in which opposite errors do not cancel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import as_rank

from parallelize import ConfigError, distributed
from parallelize.comparison.compare import signed_means


@distributed(processes=2)
def train() -> None: ...


@pytest.mark.parametrize(
    ("options", "steps", "message"),
    [
        ({}, 0, r"train.compare\(0, ...\)(.|\n)*number of optimizer steps"),
        ({}, "data", r"train.compare\('data', ...\)(.|\n)*use train.compare\(5, ...\)"),
        ({"processes": 1}, 5, r"on one device(.|\n)*options\(processes=2\)"),
        ({"num_nodes": 2}, 5, r"num_nodes=2(.|\n)*options\(num_nodes=1\)"),
    ],
    ids=["no step", "no number", "one device", "nodes"],
)
def test_calls_that_cannot_be_compared_are_refused(options: dict[str, Any], steps: Any, message: str) -> None:
    """Each error names the reason and what to do."""
    with pytest.raises(ConfigError, match=message):
        train.options(**options).compare(steps)


def test_ranks_cannot_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of a run and under torchrun the processes are already there."""
    with as_rank(0, 2), pytest.raises(ConfigError, match="a process of a run"):
        train.compare(5)
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    for name, value in world.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError, match="without torchrun"):
        train.compare(5)


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


def test_imaginary_parts_are_compared() -> None:
    """A complex parameter has real numbers twice as many as its elements, of the precision of its dtype."""
    value = torch.randn(8, dtype=torch.complex64)
    assert difference(value, value.clone()) == 0
    assert difference(value, value.conj()) > 0.1
    assert signed_means(value).dtype is torch.float32
    assert signed_means(value).numel() == 16
