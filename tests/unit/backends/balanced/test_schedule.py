"""What a step is predicted to take, and which schedule that leads to."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelize.backends.balanced.costs import Event, Profile, Spot
from parallelize.backends.balanced.schedule import Memory, best, candidates, ideal_speedup, needed_cap, step_s

MIB = 2**20


def event(
    name: str,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    fixed: float = 0.0,
    parameters: int = 0,
    saved: float = 0.0,
) -> Event:
    return Event(
        atom=name,
        forward_fixed_s=fixed,
        forward_per_sample_s=forward,
        backward_fixed_s=fixed,
        backward_per_sample_s=backward,
        parameter_bytes=parameters,
        saved_bytes=saved,
        input_bytes=saved / 10,
    )


def spots(count: int, *, cap: float = math.inf) -> list[Spot]:
    return [Spot(device=f"cuda:{index}", cap_bytes=cap) for index in range(count)]


def simulate(forward: list[float], backward: list[float], m: int) -> float:
    """A step, event by event: each stage does one micro-batch at a time, in order."""
    total = 0.0
    for phase in (forward, backward[::-1]):
        ends = [0.0] * len(phase)
        for _ in range(m):
            ready = 0.0
            for stage, cost in enumerate(phase):
                ready = ends[stage] = max(ready, ends[stage]) + cost
        total += ends[-1]
    return total


@given(st.lists(st.floats(0.01, 9), min_size=1, max_size=5), st.data(), st.integers(1, 9))
def test_the_formula_is_the_pipeline(forward: list[float], data: st.DataObject, m: int) -> None:
    """The closed form of a step equals playing it micro-batch by micro-batch."""
    backward = data.draw(st.lists(st.floats(0.01, 9), min_size=len(forward), max_size=len(forward)))
    assert step_s(forward, backward, m) == pytest.approx(simulate(forward, backward, m))


def test_equal_stages_reach_the_ideal() -> None:
    """Four equal stages and 8 micro-batches are k m / (m + k - 1) times as fast as one device."""
    profile = Profile(events=tuple(event(f"{i}") for i in range(4)), samples=8)
    found = best(profile, spots(4), microbatches=8, memory=Memory())
    assert found is not None
    assert 4 * 8 * 3.0 / found.predicted_s == pytest.approx(ideal_speedup(4, 8))


def test_costs_that_do_not_shrink_keep_micro_batches_few() -> None:
    """With much work per sample the most micro-batches win, with work per call only the fewest."""
    heavy = Profile(events=tuple(event(f"{i}", fixed=0.001) for i in range(4)), samples=64)
    light = Profile(events=tuple(event(f"{i}", forward=0.001, backward=0.001, fixed=1.0) for i in range(4)), samples=64)
    chosen = [best(each, spots(2), microbatches=None, memory=Memory()) for each in (heavy, light)]
    assert [each.microbatches for each in chosen if each] == [64, 1]


def test_the_last_stage_is_on_the_first_device() -> None:
    """Where devices are alike, outputs end on the device on which the loop has its targets."""
    found = best(Profile(events=(event("a"), event("b")), samples=4), spots(2), microbatches=2, memory=Memory())
    assert found is not None
    assert [spot.device for spot in found.spots] == ["cuda:1", "cuda:0"]


def test_a_faster_device_gets_more() -> None:
    """A device three times as fast gets three times the work, wherever in the order it is best."""
    unlike = [Spot(device="cuda:0", cap_bytes=math.inf), Spot(device="cuda:1", cap_bytes=math.inf, speed=3.0)]
    found = best(
        Profile(events=tuple(event(f"{i}") for i in range(8)), samples=8), unlike, microbatches=8, memory=Memory()
    )
    assert found is not None
    share = dict(zip([spot.device for spot in found.spots], (found.bounds[1], 8 - found.bounds[1]), strict=True))
    assert share == {"cuda:0": 2, "cuda:1": 6}


def test_recomputing_fits_where_keeping_does_not() -> None:
    """Caps that hold the activations need no recomputing; smaller ones do, down to the cap that is called needed."""
    profile = Profile(events=tuple(event(f"{i}", parameters=MIB, saved=MIB) for i in range(4)), samples=8)
    keeping, recomputing = Memory(), Memory(recompute=True)

    def fits(cap_mib: float, memory: Memory) -> bool:
        return best(profile, spots(2, cap=cap_mib * MIB), microbatches=8, memory=memory) is not None

    needed = needed_cap(profile, spots(2), microbatches=8, memory=recomputing) / MIB
    assert fits(100, keeping)
    assert not fits(needed, keeping)
    assert fits(needed, recomputing)
    assert not fits(needed * 0.99, recomputing)


def test_memory_is_as_told() -> None:
    """Parameters count with gradients and optimizer state, activations for all micro-batches."""
    profile = Profile(events=(event("a", parameters=MIB, saved=MIB),), samples=8, trained_share=0.5)
    (found,) = candidates(profile, spots(1), microbatches=4, memory=Memory(optimizer_state=2.0))
    assert found.memory_bytes == ((1 + 0.5 * 3) * MIB + 8 * MIB,)


def test_micro_batches_are_never_more_than_samples() -> None:
    """Eight micro-batches of three samples are three."""
    profile = Profile(events=(event("a"), event("b")), samples=3)
    assert {each.microbatches for each in candidates(profile, spots(2), microbatches=8, memory=Memory())} == {3}
    assert {each.microbatches for each in candidates(profile, spots(2), microbatches=None, memory=Memory())} == {1, 2}


def test_a_chain_of_one_event_uses_one_device() -> None:
    """What cannot be cut leaves the other devices without a stage."""
    found = best(Profile(events=(event("a"),), samples=8), spots(3), microbatches=4, memory=Memory())
    assert found is not None
    assert len(found.spots) == 1
