"""Partition: splits a chain of unit calls into contiguous stages, so that the slowest stage is as fast as possible.

    calls      0   1   2 | 3   4 | 5   6   7          bounds = (0, 3, 5, 8)
    device         0     |   1   |     2

Stages follow the order of the given devices; a device may get no stage. The search is exact for a chain. A model with
branches is treated as the chain of its calls in the order in which they run, which loses little.

Source: PipeDream (Narayanan et al., SOSP 2019) for the dynamic program; https://arxiv.org/abs/2311.03703
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Chain", "smallest_cap", "split"]


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Costs of a model's unit calls, in call order; a unit is a submodule that is not split further.

    Args:
        seconds: time of each call on a device of speed 1.
        memory: bytes that each call needs on its device.
        transfer: if a stage begins at call i, moving tensors to it takes `transfer[i]` seconds; default: none.
        copied: if a stage begins at call i, what it gets, and the gradients that the stage before gets back, take
            `copied[i]` bytes each; default: none.
    """

    seconds: Sequence[float]
    memory: Sequence[float]
    transfer: Sequence[float] = ()
    copied: Sequence[float] = ()

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
    n = len(chain.seconds)
    best = [0.0] + [math.inf] * n  # best[j]: slowest stage if calls before j are on the devices handled so far
    begins: list[list[int]] = []
    for cap, speed in zip(caps, speeds, strict=True):
        best, begin = _add_device(best, chain, cap=cap, speed=speed)
        begins.append(begin)
    if math.isinf(best[n]):
        return None
    bounds = [n]
    for begin in reversed(begins):
        bounds.append(begin[bounds[-1]])
    return tuple(reversed(bounds))


def _add_device(best: Sequence[float], chain: Chain, *, cap: float, speed: float) -> tuple[list[float], list[int]]:
    """Return `best` with one more device, and the begin of this device's stage for each of its ends."""
    n = len(chain.seconds)
    seconds, memory = (list(itertools.accumulate(each, initial=0.0)) for each in (chain.seconds, chain.memory))
    transfer, edges = chain.transfer or [0.0] * n, _edges(chain.copied, n)
    found, begin = list(best), list(range(n + 1))  # first choice: this device has no stage
    for i in range(n):
        moved = transfer[i] if i else 0.0
        for j in range(i + 1, n + 1):
            slowest = max(best[i], (seconds[j] - seconds[i]) / speed + moved)
            if slowest >= found[n] or memory[j] - memory[i] > cap:
                break  # longer stages are no better
            if slowest < found[j] and memory[j] - memory[i] + edges[i] + edges[j] <= cap:
                found[j], begin[j] = slowest, i
    return found, begin


def smallest_cap(memory: Sequence[float], devices: int, *, copied: Sequence[float] = ()) -> float:
    """Return the smallest memory limit, in bytes, under which a chain fits on `devices` equal devices."""
    edges, nothing = _edges(copied, len(memory)), [0.0] * len(memory)
    # A stage's bytes and both of its edges, as seconds of calls and twice the edge where it begins.
    summed = [each + after - before for each, before, after in zip(memory, edges, edges[1:], strict=False)]
    chain = Chain(seconds=summed, memory=nothing, transfer=[2 * each for each in edges[:-1]])
    speeds = [1.0] * devices
    bounds = split(chain, caps=[math.inf] * devices, speeds=speeds)
    assert bounds is not None  # no cap can be exceeded
    return max(chain.stages_s(bounds, speeds))


def _edges(copied: Sequence[float], n: int) -> list[float]:
    """Return the bytes of copies at each possible begin or end of a stage."""
    return [0.0, *(copied or [0.0] * n)[1:], 0.0]
