"""Partition: splits a chain of unit calls into contiguous stages, so that the slowest stage is as fast as possible.

    calls      0   1   2 | 3   4 | 5   6   7          split_points = (0, 3, 5, 8)
    device         0     |   1   |     2

Stages follow the order of the given devices; a device may get no stage. The search is exact for a chain. A model with
branches is treated as the chain of its calls in the order in which they run, which loses little.

Source: PipeDream (Narayanan et al., SOSP 2019) for the dynamic program; https://arxiv.org/abs/2311.03703
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Chain", "Slots", "smallest_cap", "split_one_phase", "split_two_phase", "stage_costs"]

_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Costs of a model's unit calls, in call order; a unit is a submodule that is not split further.

    Args:
        forward: seconds of each call's forward on a device of speed 1.
        backward: seconds of each call's backward on a device of speed 1.
        memory: bytes that each call needs on its device.
        transfer: if a stage begins at call i, moving tensors to it, or gradients back, takes `transfer[i]` seconds.
        copied: if a stage begins at call i, what it gets, and the gradients that the stage before gets back, take
            `copied[i]` bytes each.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    memory: Sequence[float]
    transfer: Sequence[float]
    copied: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.forward)


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Memory limit and speed of each device, in the order of the stages.

    Args:
        caps: bytes that each device may hold.
        speeds: compute speed of each device, relative to the device on which the costs were measured.
    """

    caps: Sequence[float]
    speeds: Sequence[float]

    def __len__(self) -> int:
        return len(self.caps)


def stage_costs(costs: Sequence[float], chain: Chain, slots: Slots, split_points: Sequence[int]) -> list[float]:
    """Return how many seconds each stage needs for `costs`, the forward or backward of all calls; 0 if empty."""
    return [
        0.0 if i == j else math.fsum(costs[i:j]) / speed + (chain.transfer[i] if i else 0.0)
        for i, j, speed in zip(split_points, split_points[1:], slots.speeds, strict=False)
    ]


def split_one_phase(costs: Sequence[float], chain: Chain, slots: Slots) -> tuple[int, ...] | None:
    """Return the split points that minimize the slowest stage for `costs`; None if no partition fits the caps."""
    return _search(_prefix(costs), chain, slots)


def split_two_phase(chain: Chain, slots: Slots, *, exact_up_to: int = 48) -> tuple[int, ...] | None:
    """Return the split points that minimize slowest forward + slowest backward; None if no partition fits the caps.

    The loss is computed between forward and backward, so each phase fills and drains the pipeline separately and is
    limited by its own slowest stage. Each possible time of a forward stage, in ascending order, serves as a limit on
    forward, and the fastest backward under this limit is found. The search ends when a larger limit cannot be better.
    Chains of more than `exact_up_to` calls are split by the sum of forward and backward instead.
    """
    both = [f + b for f, b in zip(chain.forward, chain.backward, strict=True)]
    best = _search(_prefix(both), chain, slots)
    if best is None or len(chain) > exact_up_to:
        return best

    def slowest(costs: Sequence[float], split_points: Sequence[int]) -> float:
        return max(stage_costs(costs, chain, slots, split_points))

    def value(split_points: Sequence[int]) -> float:
        return slowest(chain.forward, split_points) + slowest(chain.backward, split_points)

    ahead, back = _prefix(chain.forward), _prefix(chain.backward)
    fewest_back = slowest(chain.backward, _search(back, chain, slots) or best)
    limits = _interval_costs(ahead, chain, slots)
    least = value(best)
    for limit in limits[bisect.bisect_left(limits, slowest(chain.forward, _search(ahead, chain, slots) or best)) :]:
        if limit + fewest_back >= least:
            break
        found = _search(back, chain, slots, also=ahead, limit=limit * (1 + _ROUNDING))
        if found is not None and value(found) < least:
            best, least = found, value(found)
    return best


def smallest_cap(memory: Sequence[float], devices: int, *, copied: Sequence[float] = ()) -> float:
    """Return the smallest memory limit, in bytes, under which a chain fits on `devices` equal devices."""
    n = len(memory)
    edges = _edges(copied, n)
    # A stage's bytes and both of its edges, as costs of calls and twice the edge where it begins.
    memory = [each + after - before for each, before, after in zip(memory, edges, edges[1:], strict=False)]
    chain = Chain(forward=memory, backward=[0.0] * n, memory=[0.0] * n, transfer=[2 * each for each in edges[:-1]])
    slots = Slots(caps=[math.inf] * devices, speeds=[1.0] * devices)
    split_points = _search(_prefix(memory), chain, slots)
    assert split_points is not None  # no cap can be exceeded
    return max(stage_costs(memory, chain, slots, split_points))


def _edges(copied: Sequence[float], n: int) -> list[float]:
    """Return the bytes of copies at each possible begin or end of a stage."""
    return [0.0, *(copied or [0.0] * n)[1:], 0.0]


def _prefix(costs: Sequence[float]) -> list[float]:
    return list(accumulate(costs, initial=0.0))


def _interval_costs(prefix: Sequence[float], chain: Chain, slots: Slots) -> list[float]:
    """Return, in ascending order, every time that a stage can take in one phase: any range of calls, any device."""
    n = len(chain)
    return sorted(
        {
            (prefix[j] - prefix[i]) / speed + (chain.transfer[i] if i else 0.0)
            for speed in set(slots.speeds)
            for i in range(n)
            for j in range(i + 1, n + 1)
        }
    )


def _intervals(n: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of every possible stage, in ascending order of end."""
    for end in range(1, n + 1):
        for begin in range(end - 1, -1, -1):
            yield begin, end


def _search(
    prefix: Sequence[float],
    chain: Chain,
    slots: Slots,
    *,
    also: Sequence[float] | None = None,
    limit: float = math.inf,
) -> tuple[int, ...] | None:
    """Return the split points that minimize the slowest stage, by dynamic programming; None if no partition fits.

    `prefix` holds prefix sums of the costs; `also`, those of a second cost that is at most `limit` in every stage.
    """
    n, transfer, memory = len(chain), chain.transfer, _prefix(chain.memory)
    edges = _edges(chain.copied, n)
    also = also or [0.0] * (n + 1)
    intervals = list(_intervals(n))
    best = [0.0] + [math.inf] * n  # best[j]: slowest stage if calls before j are on the devices handled so far
    begins: list[list[int]] = []
    for cap, speed in zip(slots.caps, slots.speeds, strict=True):
        found, begin = list(best), list(range(n + 1))  # first choice: this device has no stage
        for i, j in intervals:
            cost, edge = (prefix[j] - prefix[i]) / speed, transfer[i] if i else 0.0
            other = (also[j] - also[i]) / speed
            if memory[j] - memory[i] + edges[i] + edges[j] > cap or other + edge > limit or cost >= found[j]:
                continue
            slowest = max(best[i], cost + edge)
            if slowest < found[j]:
                found[j], begin[j] = slowest, i
        best = found
        begins.append(begin)
    if math.isinf(best[n]):
        return None
    split_points = [n]
    for begin in reversed(begins):
        split_points.append(begin[split_points[-1]])
    return tuple(reversed(split_points))
