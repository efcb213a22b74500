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
from parallelize.backends.balanced.profiling import Chain, DeviceSpec, Profile
from parallelize.errors import ConfigError

MIB = 2**20


CPU = torch.device("cpu")


def profile(
    forward: list[float],
    backward: list[float] | None = None,
    *,
    microbatches: int = 8,
    parameters: list[float] | float = 0.0,
    saved: float = 0.0,
    moved: list[float] | float = 0.0,
    samples: int = 8,
    **of_chain: Any,
) -> Profile:
    """Return the costs of units, in seconds of a micro-batch, and in bytes of the batch.

    By default, backward takes twice as long as forward, and all is trained.
    """
    n = len(forward)

    def vector(value: Any) -> torch.Tensor:
        return torch.tensor(value if isinstance(value, list) else [value] * n, dtype=torch.float64)

    fields: dict[str, Any] = {
        "units": tuple(map(str, range(n))),
        "places": tuple(range(n)),
        "moved": vector(moved),
        "parameters": vector(parameters),
        "trained": vector(parameters),
    }
    return Profile(
        chain=Chain(**{**fields, **of_chain}),
        samples=samples,
        microbatches=microbatches,
        forward_s=vector(forward),
        backward_s=vector(backward or [2 * seconds for seconds in forward]),
        saved=vector(saved),
    )


def devices(count: int, *, cap: float = math.inf) -> list[DeviceSpec]:
    return [DeviceSpec(device=f"cuda:{index}", cap_bytes=cap) for index in range(count)]


def best(costs: Profile, specs: list[DeviceSpec], state: float = 2.0) -> Plan:
    options = BalancedBackend(optimizer_state=state)
    return Search(costs, specs, options, output_device=torch.device("cuda:0")).best()


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
    plan = best(profile([1.0] * 4), devices(4))
    assert 4 * 8 * 3.0 / (plan.predicted_s or 0.0) == pytest.approx(ideal_speedup(4, 8))
    # The loop's targets are on the first device.
    assert plan.devices == ("cuda:1", "cuda:2", "cuda:3", "cuda:0")


def test_the_step_on_one_device() -> None:
    """All units, for all micro-batches; the first device may be the slower one."""
    specs = [DeviceSpec(device="cuda:0", speed=0.5), DeviceSpec(device="cuda:1")]
    search = Search(profile([1.0] * 4), specs, BalancedBackend(), torch.device("cuda:0"))
    assert search.unsplit_s() == 4 * 8 * 3.0 / 0.5
    small = Search(profile([1.0], parameters=1.0), devices(2, cap=0.5), BalancedBackend(), CPU)
    assert small.unsplit_s() is None


def test_a_faster_device_gets_more() -> None:
    """A device three times as fast gets three times the work."""
    slow, fast = devices(1)[0], DeviceSpec(device="cuda:1", speed=3.0)
    plan = best(profile([1.0] * 8), [slow, fast])
    counts = plan.bounds[1], 8 - plan.bounds[1]
    assert dict(zip(plan.devices, counts, strict=True)) == {"cuda:0": 2, "cuda:1": 6}


def test_the_last_stage_or_the_first_one_is_on_the_first_device() -> None:
    """Of two orders the faster one is taken; if neither suits the limits, an error has the bytes."""
    chain = profile([1.0] * 3, parameters=[1.0 * MIB, 4.0 * MIB, 2.0 * MIB])

    def order(*sizes: int) -> list[str]:
        specs = [DeviceSpec(device=f"{size}", cap_bytes=3 * size * MIB) for size in sizes]
        return [*best(chain, specs, state=0.0).devices]

    assert order(2, 1, 4) == ["1", "4", "2"]
    assert order(1, 4, 2) == ["1", "4", "2"]
    with pytest.raises(ConfigError, match=r"needs at least 12\.0 MiB"):
        order(4, 2, 1)


def test_little_memory_on_the_first_device() -> None:
    """It takes the first stage, where units save little, rather than the last one."""
    chain = profile([1.0, 1.0, 1.0, 1.0], parameters=[1.0, 1.0, 9.0, 9.0])
    specs = [DeviceSpec(device="cuda:0", cap_bytes=12.0), DeviceSpec(device="cuda:1")]
    assert best(chain, specs).devices == ("cuda:0", "cuda:1")
    assert best(chain, specs).bounds == (0, 2, 4)


@pytest.mark.parametrize(("samples_are_large", "first"), [(True, "cuda:0"), (False, "cuda:1")])
def test_the_smaller_copy_decides_between_equal_orders(samples_are_large: bool, first: str) -> None:
    """Large inputs are not copied to another device than theirs, and neither are large outputs."""
    large, small = (1e9, 1e3) if samples_are_large else (1e3, 1e9)
    chain = profile([1.0] * 4, moved=[large, 1e6, 1e6, 1e6], output_bytes=small)
    assert best(chain, devices(2)).devices[0] == first


def test_no_stage_begins_where_much_is_moved() -> None:
    """What is moved to a stage takes time of this stage."""
    chain = profile([1.0] * 8, moved=[0.0, *[4e10] * 7])
    assert best(chain, devices(2)).bounds[1] in {4, 5}
    chain.chain.moved[4] *= 100.0
    assert best(chain, devices(2)).bounds[1] in {3, 5}


@pytest.mark.parametrize(("moved", "bound"), [([1e7, 1e7, 1e7, 2e7, 1e7], 2), ([1e7, 1e7, 2e7, 1e7, 1e7], 3)])
def test_a_stage_begins_where_less_is_moved(moved: list[float], bound: int) -> None:
    """Between equally good places, the one where less is moved is taken."""
    assert best(profile([1.0, 1.0, 1e-5, 1.0, 1.0], moved=moved), devices(2)).bounds == (0, bound, 5)


def test_no_stage_begins_where_arguments_are_changed() -> None:
    """The planner takes the next best place."""
    assert best(profile([1.0] * 4, places=(0, 1, 3)), devices(2)).bounds[1] in {1, 3}


def test_memory_of_a_stage() -> None:
    """Parameters, gradients and optimizer state; with activations and what is moved, or a step."""
    costs = profile(
        [1.0] * 2, parameters=1.0 * MIB, saved=70.0 * MIB, moved=7.0 * MIB, output_bytes=7 * MIB, loss_bytes=7 * MIB
    )
    # The first stage gets the inputs, the last one has the outputs.
    assert best(costs, devices(2)).memory_bytes == ((4 + 70 + 7) * MIB, (4 + 70 + 7 + 7) * MIB)
    for state, copies in ((2.0, 5.0), (1.0, 4.0), (0.0, 3.0)):
        heavy = best(profile([1.0], parameters=1.0 * MIB), devices(1), state=state)
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


@pytest.mark.parametrize(("frozen", "count", "most"), [(0, 4, 1.0), (6, 2, 1.06), (6, 4, 1.18)])
def test_a_model_with_frozen_parts_is_split_well(frozen: int, count: int, most: float) -> None:
    """Where the first units have no backward, a step is at most 18 % longer than the best one."""
    phases = [1.0] * 12, [0.0] * frozen + [2.0] * (12 - frozen)
    found = best(profile(*phases), devices(count))
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
    found = best(profile(costs, samples=64), specs)
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
    """No partition has a smaller largest cost; it is infinite if that of each one is."""
    n = len(devices[0])
    every = itertools.combinations_with_replacement(range(n + 1), len(devices) - 1)
    best = min(largest((0, *inner, n), devices) for inner in every)
    cost, bounds = split(devices)
    assert cost == best
    assert math.isinf(best) or largest(bounds, devices) == best
