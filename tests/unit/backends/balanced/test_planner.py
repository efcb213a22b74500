"""The predicted time and memory of a step, and the plan chosen by them."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from parallelize.backends.balanced.partition import split
from parallelize.backends.balanced.plan import Plan, ideal_speedup
from parallelize.backends.balanced.planner import Search, initial_devices, step_s
from parallelize.backends.balanced.plugin import BalancedBackend
from parallelize.backends.balanced.profiling import DeviceSpec, Line, Profile
from parallelize.errors import ConfigError

MIB = 2**20


def profile(
    forward: list[float],
    backward: list[float] | None = None,
    *,
    fixed: float = 0.0,
    parameters: list[float] | float = 0.0,
    saved: float = 0.0,
    moved: list[float] | float = 0.0,
    **more: Any,
) -> Profile:
    """Return the costs of units per sample; by default, backward takes twice as long as forward, and all is trained."""
    n = len(forward)

    def vector(value: Any) -> torch.Tensor:
        return torch.tensor(value if isinstance(value, list) else [value] * n, dtype=torch.float64)

    def line(value: Any, at_zero: float = 0.0) -> Line:
        return Line(vector(at_zero), vector(value))

    names = tuple(f"{index}" for index in range(n))
    values: dict[str, Any] = {
        "units": names,
        "places": tuple(range(n)),
        "moved": vector(moved),
        "parameters": vector(parameters),
        "trained": vector(parameters),
        "costs": {
            "forward": line(forward, fixed),
            "backward": line(backward or [2 * each for each in forward], fixed),
            "saved": line(saved),
        },
        "samples": 8,
    }
    return Profile(**{**values, **more})


def devices(count: int, *, cap: float = math.inf) -> list[DeviceSpec]:
    return [DeviceSpec(device=f"cuda:{index}", cap_bytes=cap) for index in range(count)]


def best(found: Profile, specs: list[DeviceSpec], microbatches: Any = "auto", state: float = 2.0) -> Plan:
    return Search(found, specs, BalancedBackend(microbatches=microbatches, optimizer_state=state)).best()


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
    found = best(profile([1.0] * 4), devices(4), 8)
    assert 4 * 8 * 3.0 / (found.predicted_s or 0.0) == pytest.approx(ideal_speedup(4, 8))
    assert found.devices == ("cuda:1", "cuda:2", "cuda:3", "cuda:0")  # the loop's targets are on the first device


@pytest.mark.parametrize(("per_sample", "fixed", "chosen"), [(1.0, 0.001, 16), (0.001, 1.0, 1)])
def test_fixed_costs_keep_the_number_of_micro_batches_small(per_sample: float, fixed: float, chosen: int) -> None:
    """With costs per sample the most micro-batches win, with costs per call the fewest."""
    found = profile([per_sample] * 4, fixed=fixed, samples=64)
    assert best(found, devices(2)).microbatches == chosen


def test_micro_batches_have_a_sample() -> None:
    """There are at most as many as samples."""
    assert best(profile([1.0] * 2, samples=3), devices(2), 8).microbatches == 3
    assert best(profile([1.0] * 2, samples=3), devices(2)).microbatches == 3


def test_a_faster_device_gets_more() -> None:
    """A device three times as fast gets three times the work."""
    slow, fast = devices(1)[0], DeviceSpec(device="cuda:1", speed=3.0)
    found = best(profile([1.0] * 8), [slow, fast], 8)
    counts = found.bounds[1], 8 - found.bounds[1]
    assert dict(zip(found.devices, counts, strict=True)) == {"cuda:0": 2, "cuda:1": 6}


def test_stages_are_in_the_order_of_the_devices() -> None:
    """The last stage is on the first device; devices whose limits do not suit this order are refused by their bytes."""
    chain = profile([1.0] * 3, parameters=[1.0 * MIB, 4.0 * MIB, 2.0 * MIB])
    specs = [DeviceSpec(device=f"{size}", cap_bytes=3 * size * MIB) for size in (2, 1, 4)]
    assert best(chain, specs, 4, state=0.0).devices == ("1", "4", "2")
    with pytest.raises(ConfigError, match="use more or larger devices"):
        best(chain, specs[1:] + specs[:1], 4, state=0.0)


def test_no_stage_begins_where_much_is_moved() -> None:
    """What is moved to a stage takes time of this stage."""
    chain = profile([1.0] * 8, moved=4e10)
    assert best(chain, devices(2), 8).predicted_s == pytest.approx((4 + 2 + 8 + 2) * 9)
    chain.moved[4] *= 100.0
    assert best(chain, devices(2), 8).bounds[1] in {3, 5}


@pytest.mark.parametrize(("moved", "bound"), [([1e7, 1e7, 1e7, 2e7, 1e7], 2), ([1e7, 1e7, 2e7, 1e7, 1e7], 3)])
def test_a_stage_begins_where_less_is_moved(moved: list[float], bound: int) -> None:
    """Between equally good places, the one where less is moved is taken."""
    assert best(profile([1.0, 1.0, 1e-5, 1.0, 1.0], moved=moved), devices(2), 8).bounds == (0, bound, 5)


def test_no_stage_begins_where_arguments_are_changed() -> None:
    """The planner takes the next best place."""
    assert best(profile([1.0] * 4, places=(0, 1, 3)), devices(2), 8).bounds[1] in {1, 3}


def test_memory_of_a_stage() -> None:
    """Parameters, gradients and optimizer state; with activations and what is moved, or with an optimizer step."""
    found = best(profile([1.0] * 2, parameters=1.0 * MIB, saved=10.0 * MIB, moved=1.0 * MIB, samples=7), devices(2), 2)
    assert found.memory_bytes == ((4 + 70 + 7) * MIB,) * 2
    for state, copies in ((2.0, 5.0), (1.0, 4.0), (0.0, 3.0)):
        heavy = best(profile([1.0], parameters=1.0 * MIB), devices(1), 2, state=state)
        assert heavy.memory_bytes == (copies * MIB,)


def test_a_model_that_is_too_large_for_a_profile() -> None:
    """Before it is profiled, a model is placed by the bytes of its parameters, with gradients and optimizer state."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    size = 5 * sum(each.nbytes for each in model.parameters())
    out, options = torch.device("cpu"), BalancedBackend()
    assert initial_devices(model, [DeviceSpec(device="cpu", cap_bytes=size)], options, output_device=out) == {}
    specs = [DeviceSpec(device=name, cap_bytes=size * 0.6) for name in ("cpu", "meta")]
    placed = initial_devices(model, specs, options, output_device=out)
    assert {name: each.type for name, each in placed.items()} == {"0": "meta", "1": "meta", "2": "cpu", "3": "cpu"}
    with pytest.raises(ConfigError, match="the best split needs at least"):
        initial_devices(model, specs[:1], options, output_device=out)


@pytest.mark.parametrize(("frozen", "count", "most"), [(0, 4, 1.0), (6, 2, 1.0), (6, 4, 1.1)])
def test_a_model_with_frozen_parts_is_split_well(frozen: int, count: int, most: float) -> None:
    """Where the first units have no backward, a step is about as short as that of the best of all splits."""
    phases = [1.0] * 12, [0.0] * frozen + [2.0] * (12 - frozen)
    found = best(profile(*phases), devices(count), 8)
    steps = [
        step_s(*([sum(phase[i:j]) for i, j in itertools.pairwise((0, *inner, 12))] for phase in phases), 8)
        for inner in itertools.combinations_with_replacement(range(13), count - 1)
    ]
    assert min(steps) * 0.999 <= (found.predicted_s or 0.0) <= most * 1.001 * min(steps)


@pytest.mark.parametrize("unequal", [False, True])
def test_planning_of_long_chains(unequal: bool) -> None:
    """Chains of some thousand units on eight devices are split nearly evenly, in less than the time of a step."""
    costs = [1.0 + (index % 7) for index in range(3000)]
    speeds = [1.0 + unequal * (index % 3) for index in range(8)]
    specs = [DeviceSpec(device=f"{index}", speed=each) for index, each in enumerate(speeds)]
    began = time.process_time()
    found = best(profile(costs, samples=64), specs, 8)
    assert time.process_time() - began < 60  # seconds of this process; about 2
    both = [f + b for f, b in zip(found.forward_s, found.backward_s, strict=True)]
    assert max(both) < 1.1 * 3 * 8 * sum(costs) / sum(speeds)


costs = st.sampled_from([0.0, 1.0, 2.0, 5.0, 20.0, math.inf])


@st.composite
def problems(draw: st.DrawFn) -> list[torch.Tensor]:
    """Generate the costs of all stages of up to 7 units, on each of up to 4 devices."""
    n, k = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    values = st.lists(costs, min_size=n * (n + 1), max_size=n * (n + 1))
    empty = torch.ones(n, n + 1, dtype=torch.bool).tril()
    found = (torch.tensor(draw(values), dtype=torch.float64).view(n, n + 1) for _ in range(k))
    return [each.masked_fill(empty, math.inf) for each in found]


def largest(bounds: tuple[int, ...], devices: list[torch.Tensor]) -> float:
    pairs = zip(devices, itertools.pairwise(bounds), strict=True)
    return max(float(each[i, j]) for each, (i, j) in pairs if i < j)


@given(problems())
def test_a_split_equals_enumeration(devices: list[torch.Tensor]) -> None:
    """No partition has a smaller largest cost; None means that each has an infinite one."""
    n = len(devices[0])
    every = itertools.combinations_with_replacement(range(n + 1), len(devices) - 1)
    best = min(largest((0, *inner, n), devices) for inner in every)
    found = split(devices)
    assert (found is None) == math.isinf(best)
    assert found is None or largest(found, devices) == best
