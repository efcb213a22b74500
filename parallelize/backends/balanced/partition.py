"""The best way to cut a chain of costs into contiguous stages.

    events     0   1   2 | 3   4 | 5   6   7          bounds = (0, 3, 5, 8)
    device         0     |   1   |     2

Stages follow the order of the devices they are given; a device may be left without a stage. The search is exact: that
a chain, not a graph, is cut costs little.

Source: PipeDream (Narayanan et al., SOSP 2019) for the dynamic programme; https://arxiv.org/abs/2311.03703
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Chain", "Seats", "smallest_cap", "split_one_phase", "split_two_phase", "stage_costs"]

_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class Chain:
    """What each event of a chain costs, in the order in which events happen.

    Args:
        forward: seconds on a device of speed 1.
        backward: seconds on a device of speed 1.
        memory: bytes that the event occupies on its device.
        cut: `cut[i]` seconds, in each direction, to bring over what crosses if a stage begins at event i.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    memory: Sequence[float]
    cut: Sequence[float]

    def __len__(self) -> int:
        return len(self.forward)


@dataclass(frozen=True, kw_only=True)
class Seats:
    """The devices, in the order of the stages.

    Args:
        caps: bytes that each may hold.
        speeds: how fast each is; twice as fast is 2.
    """

    caps: Sequence[float]
    speeds: Sequence[float]

    def __len__(self) -> int:
        return len(self.caps)


def stage_costs(costs: Sequence[float], chain: Chain, seats: Seats, bounds: Sequence[int]) -> list[float]:
    """Seconds of one phase in each stage of a partition, empty ones as 0.

    Args:
        costs: `chain.forward` or `chain.backward`.
        chain: for its cuts.
        seats: for their speeds.
        bounds: where stages begin, and the end of the chain: one more than there are seats.
    """
    return [
        0.0 if i == j else math.fsum(costs[i:j]) / speed + (chain.cut[i] if i else 0.0)
        for i, j, speed in zip(bounds, bounds[1:], seats.speeds, strict=False)
    ]


def split_one_phase(costs: Sequence[float], chain: Chain, seats: Seats) -> tuple[int, ...] | None:
    """The partition whose slowest stage is fastest in one phase; None if none fits the caps.

    Args:
        costs: `chain.forward`, `chain.backward` or their sums.
        chain: memory and cuts.
        seats: the devices.
    """
    return _search(_prefix(costs), chain, seats)


def split_two_phase(chain: Chain, seats: Seats, *, exact_up_to: int = 48) -> tuple[int, ...] | None:
    """The partition that minimises slowest forward + slowest backward; None if none fits the caps.

    A plain loop computes its loss between the phases, so that each phase fills and drains the pipeline on its own, and
    each waits for a slowest stage of its own. Every sum of neighbouring forwards is tried as the bound on forward, from
    the least possible on, and for each the best backward is found; bounds that cannot win any more end the search.

    Args:
        chain: the events.
        seats: the devices.
        exact_up_to: chains that are longer are cut by the sum of both phases.
    """
    both = [f + b for f, b in zip(chain.forward, chain.backward, strict=True)]
    best = _search(_prefix(both), chain, seats)
    if best is None or len(chain) > exact_up_to:
        return best

    def slowest(costs: Sequence[float], bounds: Sequence[int]) -> float:
        return max(stage_costs(costs, chain, seats, bounds))

    def value(bounds: Sequence[int]) -> float:
        return slowest(chain.forward, bounds) + slowest(chain.backward, bounds)

    ahead, back = _prefix(chain.forward), _prefix(chain.backward)
    fewest_back = slowest(chain.backward, _search(back, chain, seats) or best)
    limits = _interval_costs(ahead, chain, seats)
    least = value(best)
    for limit in limits[bisect.bisect_left(limits, slowest(chain.forward, _search(ahead, chain, seats) or best)) :]:
        if limit + fewest_back >= least:
            break
        found = _search(back, chain, seats, also=ahead, limit=limit * (1 + _ROUNDING))
        if found is not None and value(found) < least:
            best, least = found, value(found)
    return best


def smallest_cap(memory: Sequence[float], devices: int) -> float:
    """Bytes each of so many equal devices must have for a chain to fit."""
    n = len(memory)
    chain = Chain(forward=memory, backward=[0.0] * n, memory=[0.0] * n, cut=[0.0] * n)
    seats = Seats(caps=[math.inf] * devices, speeds=[1.0] * devices)
    bounds = _search(_prefix(memory), chain, seats)
    assert bounds is not None  # nothing is capped
    return max(stage_costs(memory, chain, seats, bounds))


def _prefix(costs: Sequence[float]) -> list[float]:
    return list(accumulate(costs, initial=0.0))


def _interval_costs(prefix: Sequence[float], chain: Chain, seats: Seats) -> list[float]:
    """What a stage may cost in one phase: of any interval, on any device; ascending."""
    n = len(chain)
    return sorted(
        {
            (prefix[j] - prefix[i]) / speed + (chain.cut[i] if i else 0.0)
            for speed in set(seats.speeds)
            for i in range(n)
            for j in range(i + 1, n + 1)
        }
    )


def _intervals(n: int) -> Iterator[tuple[int, int]]:
    """Begin and end of every stage there may be, by their ends."""
    for end in range(1, n + 1):
        for begin in range(end - 1, -1, -1):
            yield begin, end


def _search(
    prefix: Sequence[float],
    chain: Chain,
    seats: Seats,
    *,
    also: Sequence[float] | None = None,
    limit: float = math.inf,
) -> tuple[int, ...] | None:
    """Dynamic programme over (device, end): the least slowest stage for events 0..end on devices 0..device.

    Args:
        prefix: sums of the costs whose maximum is minimised.
        chain: memory and cuts.
        seats: the devices.
        also: sums of other costs, of which no stage may exceed `limit`.
        limit: see there.

    Returns:
        The bounds, or None if no partition is allowed.
    """
    n, cut, memory = len(chain), chain.cut, _prefix(chain.memory)
    also = also or [0.0] * (n + 1)
    intervals = list(_intervals(n))
    best = [0.0] + [math.inf] * n
    begins: list[list[int]] = []
    for cap, speed in zip(seats.caps, seats.speeds, strict=True):
        found, begin = list(best), list(range(n + 1))  # the device without a stage
        for i, j in intervals:
            cost, edge = (prefix[j] - prefix[i]) / speed, cut[i] if i else 0.0
            other = (also[j] - also[i]) / speed
            if memory[j] - memory[i] > cap or other + edge > limit or cost >= found[j]:
                continue
            slowest = max(best[i], cost + edge)
            if slowest < found[j]:
                found[j], begin[j] = slowest, i
        best = found
        begins.append(begin)
    if math.isinf(best[n]):
        return None
    bounds = [n]
    for begin in reversed(begins):
        bounds.append(begin[bounds[-1]])
    return tuple(reversed(bounds))
