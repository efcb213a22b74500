"""The partition of a chain is optimal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parallelize.backends.balanced.partition import (
    Chain,
    Slots,
    smallest_cap,
    split_one_phase,
    split_two_phase,
    stage_costs,
)

costs = st.integers(0, 20).map(float)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Chain, Slots]:
    """Generate chains of up to 8 calls on up to 4 devices, with caps that may be impossible."""
    n, k = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    each = st.lists(costs, min_size=n, max_size=n)
    chain = Chain(
        forward=draw(each),
        backward=draw(each),
        memory=draw(each),
        transfer=draw(st.lists(st.sampled_from([0.0, 0.0, 1.0, 7.0]), min_size=n, max_size=n)),
    )
    slots = Slots(
        caps=draw(st.lists(st.sampled_from([math.inf, 60.0, 25.0]), min_size=k, max_size=k)),
        speeds=draw(st.lists(st.sampled_from([1.0, 1.0, 0.5, 3.0]), min_size=k, max_size=k)),
    )
    return chain, slots


def on_two_devices(forward: list[float], backward: list[float], transfer: list[float]) -> tuple[Chain, Slots]:
    chain = Chain(forward=forward, backward=backward, memory=[0.0] * len(forward), transfer=transfer)
    return chain, Slots(caps=[math.inf] * 2, speeds=[1.0] * 2)


def every_partition(chain: Chain, slots: Slots) -> Iterator[tuple[int, ...]]:
    n = len(chain)
    for inner in itertools.combinations_with_replacement(range(n + 1), len(slots) - 1):
        split_points = (0, *inner, n)
        stages = zip(split_points, split_points[1:], slots.caps, strict=False)
        if all(sum(chain.memory[i:j]) <= cap for i, j, cap in stages):
            yield split_points


def both(chain: Chain, slots: Slots, split_points: Sequence[int]) -> float:
    return sum(max(stage_costs(phase, chain, slots, split_points)) for phase in (chain.forward, chain.backward))


@given(problems())
def test_one_phase_equals_enumeration(problem: tuple[Chain, Slots]) -> None:
    """No partition within the caps has a faster slowest stage; None means that no partition fits."""
    chain, slots = problem
    found = split_one_phase(chain.forward, chain, slots)
    values = [
        max(stage_costs(chain.forward, chain, slots, split_points)) for split_points in every_partition(chain, slots)
    ]
    if found is None:
        assert values == []
    else:
        assert max(stage_costs(chain.forward, chain, slots, found)) == pytest.approx(min(values))


@given(problems())
@example(on_two_devices([0.0, 0.0, 7.0], [7.0, 7.0, 0.0], [0.0, 3.0, 0.0]))  # the best forward includes a transfer
@example(on_two_devices([1.0, 0.0], [7.0, 1.0], [0.0, 3.0]))  # so does the limit on forward
@settings(max_examples=200)
def test_two_phases_equal_enumeration(problem: tuple[Chain, Slots]) -> None:
    """No partition within the caps has a smaller slowest forward plus slowest backward."""
    chain, slots = problem
    found = split_two_phase(chain, slots)
    values = [both(chain, slots, split_points) for split_points in every_partition(chain, slots)]
    if found is None:
        assert values == []
    else:
        assert found in set(every_partition(chain, slots))
        assert both(chain, slots, found) == pytest.approx(min(values))


@given(problems())
def test_a_longer_chain_is_split_by_the_sum_of_its_phases(problem: tuple[Chain, Slots]) -> None:
    """Above the exact size, the result is that of one phase with summed costs."""
    chain, slots = problem
    sums = [f + b for f, b in zip(chain.forward, chain.backward, strict=True)]
    assert split_two_phase(chain, slots, exact_up_to=0) == split_one_phase(sums, chain, slots)


@given(st.lists(costs, min_size=1, max_size=8), st.integers(1, 4))
def test_the_smallest_cap_is_sufficient_and_necessary(memory: list[float], devices: int) -> None:
    """A chain fits caps of that size, and no smaller ones."""
    n = len(memory)
    chain = Chain(forward=[1.0] * n, backward=[1.0] * n, memory=memory, transfer=[0.0] * n)
    cap = smallest_cap(memory, devices)
    for share, fits in ((1.0, True), (0.99, cap == 0.0)):
        slots = Slots(caps=[cap * share] * devices, speeds=[1.0] * devices)
        assert (split_two_phase(chain, slots) is not None) is fits


def test_equal_layers_are_distributed_evenly() -> None:
    """Fifteen equal layers on eight devices: at most two each, where a heuristic puts eight on the last one."""
    chain = Chain(forward=[1.0] * 15, backward=[2.0] * 15, memory=[0.0] * 15, transfer=[0.0] * 15)
    split_points = split_two_phase(chain, Slots(caps=[math.inf] * 8, speeds=[1.0] * 8))
    assert split_points is not None
    assert max(j - i for i, j in itertools.pairwise(split_points)) == 2


def test_an_expensive_transfer_is_avoided() -> None:
    """The chain is split where transfers are small, if that makes the slowest stage fastest."""
    chain = Chain(forward=[2.0] * 4, backward=[2.0] * 4, memory=[0.0] * 4, transfer=[0.0, 0.0, 9.0, 0.5])
    split_points = split_two_phase(chain, Slots(caps=[math.inf] * 2, speeds=[1.0] * 2))
    assert split_points in {(0, 1, 4), (0, 3, 4)}


@given(problems())
def test_the_smallest_cap_includes_copies(problem: tuple[Chain, Slots]) -> None:
    """A chain fits the smallest cap, and nothing less, if each stage holds copies at both of its ends."""
    chain, slots = replace(problem[0], copied=problem[0].transfer), problem[1]
    cap = smallest_cap(chain.memory, len(slots), copied=chain.copied)

    def fits(limit: float) -> bool:
        equal = Slots(caps=[limit] * len(slots), speeds=[1.0] * len(slots))
        return split_one_phase(chain.forward, chain, equal) is not None

    assert fits(cap)
    assert cap == 0.0 or not fits(cap - 0.5)
