"""The partition of a chain is optimal."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from parallelize.backends.balanced.partition import split

costs = st.sampled_from([0.0, 1.0, 2.0, 5.0, 20.0, math.inf])


@st.composite
def problems(draw: st.DrawFn) -> list[torch.Tensor]:
    """Generate the costs of all stages of up to 7 units, on each of up to 4 devices."""
    n, k = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    values = st.lists(costs, min_size=n * (n + 1), max_size=n * (n + 1))
    empty = torch.ones(n, n + 1, dtype=torch.bool).tril()
    found = (torch.tensor(draw(values), dtype=torch.float64).view(n, n + 1) for _ in range(k))
    return [each.masked_fill(empty, math.inf) for each in found]


def largest(bounds: tuple[int, ...], devices: list[torch.Tensor]) -> float:
    pairs = zip(devices, itertools.pairwise(bounds), strict=True)
    return max(float(each[i, j]) for each, (i, j) in pairs if i < j)


@given(problems())
def test_a_split_equals_enumeration(devices: list[torch.Tensor]) -> None:
    """No partition has a smaller largest cost; None means that each has an infinite one."""
    n = len(devices[0])
    every = itertools.combinations_with_replacement(range(n + 1), len(devices) - 1)
    best = min(largest((0, *inner, n), devices) for inner in every)
    found = split(devices)
    assert (found is None) == math.isinf(best)
    assert found is None or largest(found, devices) == best
