"""Partition: splits a chain of units into stages, so that the slowest stage is as fast as possible.

    units      0   1   2 | 3   4 | 5   6   7          bounds = (0, 3, 5, 8)
    device         0     |   1   |     2

Stages follow the order of the given devices; a device may get no stage. The search is exact for a chain. A model with
branches is treated as the chain of its units in the order in which they run, which loses little.

Costs of stages are tensors with a row for the first unit of a stage, and a column for the unit before which it ends.

Source: PipeDream (Narayanan et al., SOSP 2019) for the dynamic program; https://arxiv.org/abs/2311.03703
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

__all__ = ["split", "sums"]


def sums(costs: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Return the cost of each stage: the sum of its units' costs, infinite for stages without units.

    Args:
        costs: of each unit.
        places: the units at which stages begin and end.
    """
    total = nn.functional.pad(costs.double().cumsum(0), (1, 0))[list(places)]
    found = total - total[:-1, None]
    return found.masked_fill(torch.ones_like(found, dtype=torch.bool).tril(), math.inf)


def split(costs: Iterable[torch.Tensor]) -> tuple[int, ...] | None:
    """Return the bounds of the stages whose largest cost is the least; None if it is infinite.

    Args:
        costs: of each device, in the order of the stages: the costs of all stages on it, infinite for those without
            units.
    """
    best = torch.zeros(1, dtype=torch.float64, device="cpu")
    begins = []
    for cost in costs:
        # best[j]: the largest cost if the units before j are on the devices handled so far.
        best = nn.functional.pad(best, (0, cost.shape[1] - len(best)), value=math.inf)
        found, begin = torch.maximum(cost, best[:-1, None]).min(0)
        # First choice: this device has no stage.
        begins.append(torch.where(found < best, begin, torch.arange(len(best), device="cpu")).tolist())
        best = torch.minimum(best, found)
    if math.isinf(best[-1]):
        return None
    bounds = [len(best) - 1]
    for begin in reversed(begins):
        bounds.append(begin[bounds[-1]])
    return tuple(reversed(bounds))
