"""Partition: splits a chain of unit calls into contiguous stages, so that the slowest stage is as fast as possible.

    calls      0   1   2 | 3   4 | 5   6   7          bounds = (0, 3, 5, 8)
    device         0     |   1   |     2

Stages follow the order of the given devices; a device may get no stage. The search is exact for a chain. A model with
branches is treated as the chain of its calls in the order in which they run, which loses little.

Source: PipeDream (Narayanan et al., SOSP 2019) for the dynamic program; https://arxiv.org/abs/2311.03703
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Chain", "Memory", "smallest_cap", "split"]

# Of a stage of calls i to j - 1: a lower limit of the costs of this and of all longer stages, and its own cost.
_Cost = Callable[[int, int], tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a model's unit calls, in call order; what is not given is none.

    Args:
        held: what each call holds at the end of forward.
        backward: what each call holds when the backward of one micro-batch has ended, and gradients have their memory.
        working: what each call needs besides while it runs; a stage runs one call at a time.
        step: what each call needs in an optimizer step, when activations are free.
        received: what a stage gets if it begins at this call.
        returned: the gradients that a stage gets back if it ends before this call.
    """

    held: Sequence[float]
    backward: Sequence[float] = ()
    working: Sequence[float] = ()
    step: Sequence[float] = ()
    received: Sequence[float] = ()
    returned: Sequence[float] = ()

    def of(self, i: int, j: int) -> float:
        """Return the bytes of a stage of calls i to j - 1."""
        return self.table[i][j - i][1]

    @functools.cached_property
    def table(self) -> list[list[tuple[float, float]]]:
        """For i and j - i: a lower limit of the bytes of this and of all longer stages, and its own."""
        n = len(self.held)
        nothing = [0.0] * n
        phases = (self.held, self.backward, self.step)
        held, backward, step = ([*itertools.accumulate(each or nothing, initial=0.0)] for each in phases)
        received, returned = self.received or nothing, [*(self.returned or nothing), 0.0]
        found = []
        for i in range(n):
            most = itertools.accumulate((self.working or nothing)[i:], max, initial=0.0)
            rows = [
                (max(held[j] - held[i], backward[j] - backward[i]) + received[i] + each, step[j] - step[i])
                for j, each in enumerate(most, i)
            ]
            found.append([(max(a, b), max(a + returned[j], b)) for j, (a, b) in enumerate(rows, i)])
        return found


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Costs of a model's unit calls, in call order; a unit is a submodule that is not split further.

    Args:
        seconds: time of each call on a device of speed 1.
        memory: bytes of each call.
        transfer: if a stage begins at call i, moving tensors to it takes `transfer[i]` seconds; default: none.
    """

    seconds: Sequence[float]
    memory: Memory
    transfer: Sequence[float] = ()

    def stages_s(self, bounds: Sequence[int], speeds: Sequence[float]) -> tuple[float, ...]:
        """Return the seconds of each stage that is not empty."""
        transfer = self.transfer or [0.0] * len(self.seconds)
        return tuple(
            math.fsum(self.seconds[i:j]) / speed + (transfer[i] if i else 0.0)
            for (i, j), speed in zip(itertools.pairwise(bounds), speeds, strict=True)
            if i < j
        )


def split(chain: Chain, *, caps: Sequence[float], speeds: Sequence[float]) -> tuple[int, ...] | None:
    """Return the bounds of the stages of which the slowest is as fast as possible; None if no stages fit the caps.

    Args:
        chain: the costs of all calls.
        caps: bytes that each device may hold, in the order of the stages.
        speeds: compute speed of each device, relative to the device on which the costs were measured.
    """
    table, seconds = chain.memory.table, [*itertools.accumulate(chain.seconds, initial=0.0)]
    transfer = [0.0, *chain.transfer[1:]] if chain.transfer else [0.0] * len(chain.seconds)

    def cost_on(cap: float, speed: float) -> _Cost:
        def cost(i: int, j: int) -> tuple[float, float]:
            (least, needed), slow = table[i][j - i], (seconds[j] - seconds[i]) / speed + transfer[i]
            return math.inf if least > cap else slow, math.inf if needed > cap else slow

        return cost

    return _least_maximum(len(chain.seconds), [cost_on(*pair) for pair in zip(caps, speeds, strict=True)])


def smallest_cap(memory: Memory, devices: int) -> float:
    """Return the smallest memory limit, in bytes, under which a chain fits on `devices` equal devices."""
    bounds = _least_maximum(len(memory.held), [lambda i, j: memory.table[i][j - i]] * devices)
    assert bounds is not None  # no cap can be exceeded
    return max(memory.of(i, j) for i, j in itertools.pairwise(bounds) if i < j)


def _least_maximum(n: int, costs: Sequence[_Cost]) -> tuple[int, ...] | None:
    """Return the bounds of the stages whose largest cost is the least, given the cost function of each device."""
    best = [0.0] + [math.inf] * n  # best[j]: largest cost if calls before j are on the devices handled so far
    begins: list[list[int]] = []
    for cost in costs:
        best, begin = _add_device(best, cost)
        begins.append(begin)
    if math.isinf(best[n]):
        return None
    bounds = [n]
    for begin in reversed(begins):
        bounds.append(begin[bounds[-1]])
    return tuple(reversed(bounds))


def _add_device(best: Sequence[float], cost: _Cost) -> tuple[list[float], list[int]]:
    """Return `best` with one more device, and the begin of this device's stage for each of its ends."""
    n = len(best) - 1
    found, begin = list(best), list(range(n + 1))  # first choice: this device has no stage
    for i in range(n):
        for j in range(i + 1, n + 1):
            least, own = cost(i, j)
            if max(best[i], least) >= found[n]:
                break  # longer stages are no better
            if max(best[i], own) < found[j]:
                found[j], begin[j] = max(best[i], own), i
    return found, begin
