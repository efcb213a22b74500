"""Partition: splits a chain of units into stages, so that the slowest stage is as fast as possible.

    units      0   1   2 | 3   4 | 5   6   7          bounds = (0, 3, 5, 8)
    device         0     |   1   |     2

Stages follow the order of the given devices; a device may get no stage. The search is exact for a
chain. A model with branches is treated as the chain of its units in the order in which they run,
which loses little.

A matrix of stages, with n places at which a stage may begin, has the shape (n, n + 1). Its element
[begin, end] is of the stage from place `begin` to just before place `end`; place n is the end of
the chain. Where end <= begin, there is no stage, and the element is infinite.

Source: PipeDream (Narayanan et al., SOSP 2019) for the dynamic program; that it loses little:
https://arxiv.org/abs/2311.03703
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn


def sums(costs: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Return the cost of each stage, which is the sum of its units' costs.

    Args:
        costs: of each unit. Shape (units,).
        places: the units at which a stage may begin, and the number of units. Length n + 1.

    Returns:
        a matrix of stages. Shape (n, n + 1).
    """
    # The cost of all units before a place. Shape (n + 1,).
    before = nn.functional.pad(costs.double().cumsum(0), (1, 0))[list(places)]
    stages = before - before[:-1, None]
    is_empty = torch.ones_like(stages, dtype=torch.bool).tril()
    return stages.masked_fill(is_empty, math.inf)


def split(costs_by_device: Iterable[torch.Tensor]) -> tuple[float, tuple[int, ...]]:
    """Return the least that the most expensive stage can cost, and the bounds of these stages.

    Args:
        costs_by_device: for each device, in the order of the stages, what each stage would cost
            there. Shape (n, n + 1) each.

    Returns:
        cost: of the most expensive stage; infinity: no split is possible.
        bounds: the place where the first stage begins, and where the stage of each device ends. A
            device without a stage ends where it begins.
    """
    # least[end]: the largest cost of a stage, in the best split of the places before `end` over the
    # devices that the loop has seen. Shape (n + 1,); before the first device, nothing is split.
    least = torch.zeros(1, dtype=torch.float64, device="cpu")
    # For each device and end, where the device's stage begins in this split.
    begins_by_device: list[list[int]] = []
    for costs in costs_by_device:
        ends = costs.shape[1]
        least = nn.functional.pad(least, (0, ends - len(least)), value=math.inf)
        with_stage, begins = torch.maximum(costs, least[:-1, None]).min(0)
        # A device has no stage where a stage gains nothing.
        no_stage = torch.arange(ends, device="cpu")
        begins_by_device.append(torch.where(with_stage < least, begins, no_stage).tolist())
        least = torch.minimum(least, with_stage)
    bounds = [len(least) - 1]
    for begins_by_end in reversed(begins_by_device):
        bounds.append(begins_by_end[bounds[-1]])
    return float(least[-1]), tuple(reversed(bounds))
