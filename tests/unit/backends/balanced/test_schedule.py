"""The predicted time of a step, and the schedule chosen by it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelize.backends.balanced.hardware import DeviceSpec
from parallelize.backends.balanced.schedule import (
    Memory,
    Profile,
    UnitCall,
    best_schedule,
    candidates,
    ideal_speedup,
    needed_cap,
    step_s,
)

MIB = 2**20
MEMORY = Memory()


def call(
    name: str,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    fixed: float = 0.0,
    parameters: int = 0,
    saved: float = 0.0,
) -> UnitCall:
    return UnitCall(
        unit=name,
        forward_fixed_s=fixed,
        forward_per_sample_s=forward,
        backward_fixed_s=fixed,
        backward_per_sample_s=backward,
        parameter_bytes=parameters,
        saved_bytes=saved,
        input_bytes=saved / 10,
    )


def devices(count: int, *, cap: float = math.inf) -> list[DeviceSpec]:
    return [DeviceSpec(device=f"cuda:{index}", cap_bytes=cap) for index in range(count)]


def simulate(forward: list[float], backward: list[float], m: int) -> float:
    """Simulate a step: each stage runs one micro-batch at a time, in order."""
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
def test_the_formula_equals_a_simulation(forward: list[float], data: st.DataObject, m: int) -> None:
    """The closed form of a step equals a simulation of every micro-batch."""
    backward = data.draw(st.lists(st.floats(0.01, 9), min_size=len(forward), max_size=len(forward)))
    assert step_s(forward, backward, m) == pytest.approx(simulate(forward, backward, m))


def test_equal_stages_reach_the_ideal() -> None:
    """Four equal stages and 8 micro-batches are k m / (m + k - 1) times as fast as one device."""
    profile = Profile(calls=tuple(call(f"{i}") for i in range(4)), samples=8)
    found = best_schedule(profile, devices(4), microbatches=8, memory=MEMORY)
    assert found is not None
    assert 4 * 8 * 3.0 / found.predicted_s == pytest.approx(ideal_speedup(4, 8))


def test_fixed_costs_keep_the_number_of_micro_batches_small() -> None:
    """With costs per sample the most micro-batches win, with costs per call the fewest."""
    heavy = Profile(calls=tuple(call(f"{i}", fixed=0.001) for i in range(4)), samples=64)
    light = Profile(calls=tuple(call(f"{i}", forward=0.001, backward=0.001, fixed=1.0) for i in range(4)), samples=64)
    chosen = [best_schedule(each, devices(2), microbatches=None, memory=MEMORY) for each in (heavy, light)]
    assert [each.microbatches for each in chosen if each] == [64, 1]


def test_the_last_stage_is_on_the_first_device() -> None:
    """With devices that are alike, outputs are on the first device, where the loop has its targets."""
    found = best_schedule(Profile(calls=(call("a"), call("b")), samples=4), devices(2), microbatches=2, memory=MEMORY)
    assert found is not None
    assert [spec.device for spec in found.devices] == ["cuda:1", "cuda:0"]


def test_a_faster_device_gets_more() -> None:
    """A device three times as fast gets three times the work."""
    slow, fast = devices(2)
    unlike = [slow, replace(fast, speed=3.0)]
    profile = Profile(calls=tuple(call(f"{i}") for i in range(8)), samples=8)
    found = best_schedule(profile, unlike, microbatches=8, memory=MEMORY)
    assert found is not None
    counts = found.split_points[1], 8 - found.split_points[1]
    assert dict(zip([spec.device for spec in found.devices], counts, strict=True)) == {"cuda:0": 2, "cuda:1": 6}


def test_recomputing_fits_where_saving_does_not() -> None:
    """Caps that hold the activations need no recomputation; smaller caps do, down to `needed_cap`."""
    profile = Profile(calls=tuple(call(f"{i}", parameters=MIB, saved=MIB) for i in range(4)), samples=8)
    saving, recomputing = Memory(), Memory(recompute=True)

    def fits(cap_mib: float, memory: Memory) -> bool:
        return best_schedule(profile, devices(2, cap=cap_mib * MIB), microbatches=8, memory=memory) is not None

    needed = needed_cap(profile, devices(2), microbatches=8, memory=recomputing) / MIB
    assert fits(100, saving)
    assert not fits(needed, saving)
    assert fits(needed, recomputing)
    assert not fits(needed * 0.99, recomputing)


def test_memory_counts_parameters_and_activations() -> None:
    """Parameters count with gradients and optimizer state, activations for all micro-batches."""
    profile = Profile(calls=(call("a", parameters=MIB, saved=MIB),), samples=8, trained_share=0.5)
    (found,) = candidates(profile, devices(1), microbatches=4, memory=Memory(optimizer_state=2.0))
    assert found.memory_bytes == ((1 + 0.5 * 3) * MIB + 8 * MIB,)


def test_micro_batches_are_never_more_than_samples() -> None:
    """Eight micro-batches of three samples are reduced to three."""
    profile = Profile(calls=(call("a"), call("b")), samples=3)
    assert {each.microbatches for each in candidates(profile, devices(2), microbatches=8, memory=MEMORY)} == {3}
    assert {each.microbatches for each in candidates(profile, devices(2), microbatches=None, memory=MEMORY)} == {
        1,
        2,
    }


def test_a_chain_of_one_call_uses_one_device() -> None:
    """A chain that cannot be split leaves the other devices without a stage."""
    found = best_schedule(Profile(calls=(call("a"),), samples=8), devices(3), microbatches=4, memory=MEMORY)
    assert found is not None
    assert len(found.devices) == 1
