"""How long a step will take, and with how many micro-batches, stages and devices it takes least.

The loop is the user's, so the loss lies between the phases: all forwards, then all backwards, last micro-batch first.
Each phase fills and drains the pipeline on its own. k = 3 stages, m = 4 micro-batches:

    stage 0   0 1 2 3                         3 2 1 0
    stage 1     0 1 2 3          loss       3 2 1 0
    stage 2       0 1 2 3                 3 2 1 0
              ───────────── time ──────────────────────>

    T = sum of the stages' forwards  + (m - 1) * the slowest forward
      + sum of the stages' backwards + (m - 1) * the slowest backward

Of k equal stages the pipeline is at best k * m / (m + k - 1) times as fast as one device. Starting backwards before all
forwards have ended (1F1B) needs the loss inside the pipeline; it would save memory, not time.

Source: GPipe, https://arxiv.org/abs/1811.06965
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from parallelize.backends.balanced.costs import Profile, Spot
from parallelize.backends.balanced.partition import Chain, Seats, smallest_cap, split_two_phase, stage_costs

__all__ = ["Memory", "Schedule", "best", "candidates", "fits_whole", "ideal_speedup", "needed_cap", "step_s"]

# Orders of unlike devices that are tried at most.
_ORDERS = 24


@dataclass(frozen=True, kw_only=True)
class Memory:
    """How much a parameter and an activation take.

    Args:
        optimizer_state: bytes that the optimizer keeps, per byte of a trained parameter.
        recompute: whether activations are computed again in backward.
    """

    optimizer_state: float = 2.0
    recompute: bool = False


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One way to run a step.

    Args:
        spots: the device of each stage, in order; no stage is empty.
        bounds: the events of stage j are `bounds[j]` to `bounds[j + 1]`.
        microbatches: how many.
        recompute: whether activations are computed again in backward.
        forward_s: predicted, of one micro-batch in each stage.
        backward_s: predicted, of one micro-batch in each stage.
        memory_bytes: predicted, of each stage.
        predicted_s: of a step.
    """

    spots: tuple[Spot, ...]
    bounds: tuple[int, ...]
    microbatches: int
    recompute: bool
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    predicted_s: float


def step_s(forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int) -> float:
    """Seconds of a step whose stages take so long for one micro-batch."""
    return sum(math.fsum(phase) + (microbatches - 1) * max(phase) for phase in (forward_s, backward_s))


def ideal_speedup(stages: int, microbatches: int) -> float:
    """How many times as fast as one device equal stages are, were there nothing but the bubble."""
    return stages * microbatches / (microbatches + stages - 1)


def candidates(
    profile: Profile, spots: Sequence[Spot], *, microbatches: int | None, memory: Memory
) -> Iterator[Schedule]:
    """Every schedule worth a comparison: the best partition for each number of micro-batches and order of devices.

    Args:
        profile: the model.
        spots: the devices there are; the last stage goes to the first of them if all are alike.
        microbatches: how many; None: 1, 2, 4, ... up to the number of samples.
        memory: what is kept.
    """
    choices = _powers(profile) if microbatches is None else [min(microbatches, profile.samples)]
    for m, order in itertools.product(choices, _orders(spots)):
        found = _fitted(profile, order, m=m, memory=memory)
        if found is not None:
            yield found


def best(profile: Profile, spots: Sequence[Spot], *, microbatches: int | None, memory: Memory) -> Schedule | None:
    """The fastest of the candidates; None: nothing fits."""
    found = candidates(profile, spots, microbatches=microbatches, memory=memory)
    return min(found, key=lambda each: each.predicted_s, default=None)


def needed_cap(profile: Profile, spots: Sequence[Spot], *, microbatches: int | None, memory: Memory) -> float:
    """Bytes that each device would have to hold for the most frugal schedule to fit."""
    m = min(microbatches or profile.samples, profile.samples)
    return smallest_cap(_memory(profile, m=m, memory=memory), len(spots))


def fits_whole(profile: Profile, spot: Spot, *, memory: Memory) -> bool:
    """Whether one device holds the model and what the whole batch keeps for backward."""
    return math.fsum(_memory(profile, m=1, memory=replace(memory, recompute=False))) <= spot.cap_bytes


def _powers(profile: Profile) -> list[int]:
    # More micro-batches than 64 only add overhead; smaller ones than were measured may behave in another way.
    most = profile.samples // profile.least_samples
    return [2**power for power in range(7) if 2**power <= max(1, most)]


def _orders(spots: Sequence[Spot]) -> Iterator[tuple[Spot, ...]]:
    """Orders of the devices over the stages, each kind of order once.

    The loop's targets are on the first device, so the last stage is there where devices are alike: outputs, targets and
    loss then meet without a copy, and only the input travels.
    """
    seen: set[tuple[tuple[float, float, float], ...]] = set()
    first, *others = spots
    for order in itertools.islice(itertools.permutations((*others, first)), _ORDERS):
        kinds = tuple((spot.cap_bytes, spot.speed, spot.bytes_per_s) for spot in order)
        if kinds not in seen:
            seen.add(kinds)
            yield order


def _memory(profile: Profile, *, m: int, memory: Memory) -> list[float]:
    """Bytes per event: parameters with gradients and optimizer state, and what all m micro-batches keep for backward.

    With recomputing that is each event's input, and what one micro-batch's event keeps while it is computed again.
    """
    weight = 1 + profile.trained_share * (1 + memory.optimizer_state)
    samples = math.ceil(profile.samples / m)
    return [
        weight * event.parameter_bytes
        + (event.input_bytes * profile.samples + event.saved_bytes * samples if memory.recompute else 0.0)
        + (0.0 if memory.recompute else event.saved_bytes * profile.samples)
        for event in profile.events
    ]


def _fitted(profile: Profile, order: tuple[Spot, ...], *, m: int, memory: Memory) -> Schedule | None:
    samples = profile.samples / m
    forward = [event.forward_s(samples) for event in profile.events]
    backward = [event.backward_s(samples) for event in profile.events]
    if memory.recompute:
        backward = [b + f for b, f in zip(backward, forward, strict=True)]
    rate = min(spot.bytes_per_s for spot in order)
    needs = _memory(profile, m=m, memory=memory)
    cut = [event.input_bytes * samples / rate for event in profile.events]
    chain = Chain(forward=forward, backward=backward, memory=needs, cut=cut)
    seats = Seats(caps=[spot.cap_bytes for spot in order], speeds=[spot.speed for spot in order])
    bounds = split_two_phase(chain, seats)
    if bounds is None:
        return None
    used = [j for j in range(len(order)) if bounds[j] < bounds[j + 1]]
    ahead, back = stage_costs(forward, chain, seats, bounds), stage_costs(backward, chain, seats, bounds)
    fixed = math.fsum(event.forward_fixed_s + event.backward_fixed_s for event in profile.events)
    return Schedule(
        spots=tuple(order[j] for j in used),
        bounds=(0, *(bounds[j + 1] for j in used)),
        microbatches=m,
        recompute=memory.recompute,
        forward_s=tuple(ahead[j] for j in used),
        backward_s=tuple(back[j] for j in used),
        memory_bytes=tuple(math.fsum(needs[bounds[j] : bounds[j + 1]]) for j in used),
        # One interpreter launches everything: what is fixed per micro-batch is done one after the other.
        predicted_s=max(step_s([ahead[j] for j in used], [back[j] for j in used], m), m * fixed),
    )
