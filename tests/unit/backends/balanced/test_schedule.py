"""The predicted time of a step, and the schedule chosen by it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelize.backends.balanced.hardware import DeviceSpec
from parallelize.backends.balanced.plan import Plan, PlannerOptions, ideal_speedup
from parallelize.backends.balanced.schedule import (
    Line,
    Profile,
    UnitCall,
    best_plan,
    needed_cap,
    plans,
    step_s,
    unsplit_bytes,
)

MIB = 2**20


def options(microbatches: int | None, *, recompute: bool = False, **more: Any) -> PlannerOptions:
    return PlannerOptions(microbatches=microbatches, recompute=recompute, **more)


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
        forward=Line(fixed, forward),
        backward=Line(fixed, backward),
        parameter_bytes=parameters,
        saved=Line(0.0, saved),
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
    found = best_plan(profile, devices(4), options(8))
    assert found is not None
    assert 4 * 8 * 3.0 / found.predicted_s == pytest.approx(ideal_speedup(4, 8))


def test_fixed_costs_keep_the_number_of_micro_batches_small() -> None:
    """With costs per sample the most micro-batches win, with costs per call the fewest."""
    heavy = Profile(calls=tuple(call(f"{i}", fixed=0.001) for i in range(4)), samples=64)
    light = Profile(calls=tuple(call(f"{i}", forward=0.001, backward=0.001, fixed=1.0) for i in range(4)), samples=64)
    chosen = [best_plan(each, devices(2), options(None)) for each in (heavy, light)]
    assert [each.microbatches for each in chosen if each] == [64, 1]


def test_the_last_stage_is_on_the_first_device() -> None:
    """With devices that are alike, outputs are on the first device, where the loop has its targets."""
    found = best_plan(Profile(calls=(call("a"), call("b")), samples=4), devices(2), options(2))
    assert found is not None
    assert found.devices == ("cuda:1", "cuda:0")


def test_a_faster_device_gets_more() -> None:
    """A device three times as fast gets three times the work."""
    slow, fast = devices(2)
    unlike = [slow, replace(fast, speed=3.0)]
    profile = Profile(calls=tuple(call(f"{i}") for i in range(8)), samples=8)
    found = best_plan(profile, unlike, options(8))
    assert found is not None
    counts = found.bounds[1], 8 - found.bounds[1]
    assert dict(zip(found.devices, counts, strict=True)) == {"cuda:0": 2, "cuda:1": 6}


def test_recomputing_fits_where_saving_does_not() -> None:
    """Caps that hold the activations need no recomputation; smaller caps do, down to `needed_cap`."""
    profile = Profile(calls=tuple(call(f"{i}", parameters=MIB, saved=MIB) for i in range(4)), samples=8)
    saving, recomputing = options(8), options(8, recompute=True)

    def fits(cap_mib: float, given: PlannerOptions) -> bool:
        return best_plan(profile, devices(2, cap=cap_mib * MIB), given) is not None

    needed = needed_cap(profile, devices(2), recomputing) / MIB
    assert fits(100, saving)
    assert not fits(needed, saving)
    assert fits(needed, recomputing)
    assert not fits(needed * 0.99, recomputing)


def test_memory_counts_parameters_and_activations() -> None:
    """Parameters count with optimizer state; activations of all micro-batches, or of all but one and gradients."""
    profile = Profile(calls=(call("a", parameters=MIB, saved=MIB),), samples=8, trained_share=0.5)
    (found,) = plans(profile, devices(1), options(4))
    assert found.memory_bytes == ((1 + 0.5 * 2) * MIB + 8 * MIB,)
    heavy = replace(profile, calls=(call("a", parameters=16 * MIB, saved=MIB),))
    (found,) = plans(heavy, devices(1), options(4, optimizer_state=1.0))
    assert found.memory_bytes == ((1 + 0.5 * 2) * 16 * MIB + 6 * MIB,)


def test_memory_of_a_stage_counts_what_it_exchanges() -> None:
    """Inputs count on both sides of a split, outputs on the last stage; what is recomputed counts for one call."""
    calls = tuple(call(name, parameters=MIB, saved=10 * MIB) for name in "ab")
    profile = Profile(calls=calls, samples=7, output_bytes=MIB)
    weights, copied, saved, output = 3 * MIB, 7 * MIB, 70 * MIB, 7 * MIB
    (found,) = plans(profile, devices(2), options(2))
    assert found.bounds == (0, 1, 2)
    last = weights + saved + copied + output
    assert found.memory_bytes == (weights + saved + copied + copied, last)
    (found,) = plans(profile, devices(2), options(2, recompute=True))
    part = 10 * MIB * 4  # four of seven samples
    assert found.memory_bytes == (weights + copied + part + copied, weights + copied + part + output)
    assert unsplit_bytes(profile, options(2, recompute=True)) == 2 * (MIB + weights + saved) + output
    assert needed_cap(profile, devices(2), options(2, recompute=True)) == weights + copied + part + output
    assert needed_cap(profile, devices(2), options(2)) == last


def test_memory_of_what_does_not_shrink_with_micro_batches() -> None:
    """Weights that autocast has cast count once, masks for each micro-batch, working bytes for the largest call."""
    calls = [replace(call(name, parameters=4 * MIB), saved=Line(MIB, 0.0), working=Line(0.0, MIB)) for name in "ab"]
    calls[1] = replace(calls[1], saved_after=Line(0.0, MIB), shared_bytes=2 * MIB)

    def needed(trained_share: float, **more: Any) -> float:
        profile = Profile(calls=tuple(calls), samples=8, trained_share=trained_share)
        (found,) = plans(profile, devices(1), options(4, optimizer_state=0.0, **more))
        return found.memory_bytes[0] / MIB

    # Casts and their gradients in half precision are as large as the gradients that replace them.
    assert needed(1.0) == 2 * 4 * 2 + (2 * 4 + 8) * 3 / 4 + 2
    assert needed(0.0) == 2 * 4 + 2 + 2 * 4 + 8 + 2
    assert needed(0.0, recompute=True) == 2 * 4 + 2 + 8 + 3


def test_an_optimizer_step_counts() -> None:
    """Adam's step needs another copy of the parameters, which is more than small activations."""
    calls = tuple(call(name, parameters=MIB, saved=MIB / 64) for name in "ab")
    for state, copies in ((2.0, 5), (1.0, 3 + 1 / 16), (0.0, 2 + 1 / 16)):
        (found,) = plans(Profile(calls=calls, samples=8), devices(1), options(2, optimizer_state=state))
        assert found.memory_bytes == (2 * copies * MIB,)


def test_the_predicted_step_counts_transfers_and_recomputation() -> None:
    """The slowest link sets the rate; the fixed costs of all micro-batches are a lower limit."""
    specs = [replace(spec, bytes_per_s=rate) for spec, rate in zip(devices(2), (4.0, 2.0), strict=True)]
    calls = (call("a", saved=10.0), call("b", saved=10.0))
    profile = Profile(calls=calls, samples=8)
    found = best_plan(profile, specs, options(4))
    assert found is not None
    assert (found.forward_s, found.backward_s) == ((2.0, 3.0), (4.0, 5.0))
    assert found.predicted_s == 2 + 3 + 3 * 3 + 4 + 5 + 3 * 5
    found = best_plan(profile, specs, options(4, recompute=True))
    assert found is not None
    assert (found.forward_s, found.backward_s) == ((2.0, 3.0), (6.0, 7.0))
    fixed = Profile(
        calls=tuple(replace(each, forward=Line(100.0, 1.0), backward=Line(50.0, 2.0)) for each in calls), samples=8
    )
    found = best_plan(fixed, specs, options(4))
    assert found is not None
    assert found.predicted_s == 4 * 300


@pytest.mark.parametrize(
    ("samples", "least", "counts"),
    [(1, 1, [1]), (8, 1, [1, 2, 4, 8]), (8, 4, [1, 2]), (8, 16, [1]), (500, 1, [1, 2, 4, 8, 16, 32, 64])],
)
def test_powers_of_two_are_tried(samples: int, least: int, counts: list[int]) -> None:
    """Micro-batches are not smaller than those that were measured, and at most 64."""
    profile = Profile(calls=(call("a"),), samples=samples, least_samples=least)
    assert [each.microbatches for each in plans(profile, devices(1), options(None))] == counts


def test_equal_devices_are_tried_in_one_order() -> None:
    """Of devices that differ, each order is tried; with the first device last at first."""
    profile = Profile(calls=tuple(call(f"{i}") for i in range(3)), samples=4)

    def orders(*speeds: float) -> list[tuple[float, ...]]:
        pairs = enumerate(zip(devices(3), speeds, strict=True))
        specs = [
            replace(spec, speed=speed, bytes_per_s=1e10 + index, cap_bytes=80e9 + 1e8 * index)
            for index, (spec, speed) in pairs
        ]
        found = plans(profile, specs, options(2))
        speed_of = {spec.device: spec.speed for spec in specs}
        return [tuple(speed_of[name] for name in each.devices) for each in found]

    assert orders(1.0, 1.0, 1.0) == [(1.0, 1.0, 1.0)]  # although measured rates and free memory differ
    assert orders(1.5, 1.0, 1.0) == [(1.0, 1.0, 1.5), (1.0, 1.5, 1.0), (1.5, 1.0, 1.0)]


def test_all_orders_of_two_kinds_of_devices_are_tried() -> None:
    """Of eight devices, two of which are large, both get one of the large parts, wherever these are in the model."""
    sizes = [1, 4, 1, 1, 4, 1, 1, 1]
    calls = tuple(call(f"{index}", parameters=size * MIB) for index, size in enumerate(sizes))
    caps = [4, 4, *(1,) * 6]
    specs = [DeviceSpec(device=f"{index}", cap_bytes=2 * size * MIB) for index, size in enumerate(caps)]
    found = best_plan(Profile(calls=calls, samples=8), specs, options(4, optimizer_state=0.0))
    assert found is not None
    assert {found.devices[1], found.devices[4]} == {"0", "1"}


def test_a_model_that_fits_in_one_order_only_is_split() -> None:
    """Parts of 1, 4 and 2 MiB fit devices with limits of 4, 1 and 2 MiB in one of six orders, which is found."""
    calls = tuple(call(f"{size}", parameters=size * MIB) for size in (1, 4, 2))
    specs = [DeviceSpec(device=f"{size}", cap_bytes=2 * size * MIB) for size in (4, 1, 2)]
    found = best_plan(Profile(calls=calls, samples=8), specs, options(4, optimizer_state=0.0))
    assert found is not None
    assert found.devices == ("1", "4", "2")


@pytest.mark.parametrize(("frozen", "count", "most"), [(0, 4, 1.0), (6, 2, 1.0), (6, 4, 1.1)])
def test_a_model_with_frozen_parts_is_split_well(frozen: int, count: int, most: float) -> None:
    """Where the first calls have no backward, a step is about as short as that of the best of all splits."""
    phases = [1.0] * 12, [0.0] * frozen + [2.0] * (12 - frozen)
    calls = tuple(call("", forward=f, backward=b) for f, b in zip(*phases, strict=True))
    found = best_plan(Profile(calls=calls, samples=8), devices(count), options(8))
    assert found is not None
    steps = [
        step_s(*([sum(phase[i:j]) for i, j in itertools.pairwise((0, *inner, 12))] for phase in phases), 8)
        for inner in itertools.combinations_with_replacement(range(13), count - 1)
    ]
    assert min(steps) * 0.999 <= (found.predicted_s or 0.0) <= most * 1.001 * min(steps)


def test_micro_batches_are_never_more_than_samples() -> None:
    """Eight micro-batches of three samples are reduced to three."""
    profile = Profile(calls=(call("a"), call("b")), samples=3)
    assert {each.microbatches for each in plans(profile, devices(2), options(8))} == {3}
    assert {each.microbatches for each in plans(profile, devices(2), options(None))} == {
        1,
        2,
    }


def test_a_chain_of_one_call_uses_one_device() -> None:
    """A chain that cannot be split leaves the other devices without a stage."""
    found = best_plan(Profile(calls=(call("a"),), samples=8), devices(3), options(4))
    assert found is not None
    assert found.bounds == (0, 1)
    assert len(found.devices) == len(found.forward_s) == len(found.memory_bytes) == 1


def eight(*, rate: float = 1e9, **given: Any) -> Plan:
    """Return the best plan for eight devices of 40 MiB, two of which can hold the model of 16 calls."""
    calls = tuple(call(f"{i}", forward=0.01, backward=0.02, parameters=MIB, saved=MIB / 32) for i in range(16))
    specs = [replace(each, bytes_per_s=rate) for each in devices(8, cap=40 * MIB)]
    profile = Profile(calls=calls, samples=32)
    found = best_plan(profile, specs, options(None, **given))
    assert found is not None
    return found


def test_a_model_that_needs_two_of_eight_devices_runs_in_four_pipelines() -> None:
    """All devices are used, each under its limit; those with copies have no optimizer state."""
    found = eight()
    assert (found.pipelines, found.bounds, found.microbatches) == (4, (0, 8, 16), 32)
    assert found.devices[:2] == ("cuda:7", "cuda:0")
    assert len({*found.devices}) == 8
    edge, saved = MIB / 320 * 8, 8 * MIB / 32 * 8
    in_step, as_copies = 8 * 5 * MIB, 8 * 2 * MIB + saved * 7 / 8 + edge
    assert found.memory_bytes == pytest.approx((in_step,) * 2 + (as_copies + edge, as_copies) * 3)
    assert max(found.memory_bytes) <= 40 * MIB
    one = eight(max_pipelines=1)
    assert one.pipelines == 1
    assert one.predicted_s > 1.03 * found.predicted_s
    copies = 3 * 8 * MIB * 2 / 1e9
    assert found.predicted_s == pytest.approx(step_s(found.forward_s, found.backward_s, 8) + copies)


@pytest.mark.parametrize(
    "given",
    [{"rate": 1e6}, {"max_pipelines": 1}, {"recompute": True}, {"optimizer_state": -1.0}],
    ids=["slow links", "a limit", "recomputing", "fits on one device"],
)
def test_one_pipeline_where_more_are_not_faster(given: dict[str, Any]) -> None:
    """Copies over slow links take longer than they save; what backward recomputes, it recomputes in one pipeline."""
    assert eight(**given).pipelines == 1
