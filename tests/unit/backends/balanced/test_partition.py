"""The partition of a chain is the best there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelize.backends.balanced.partition import (
    Chain,
    Seats,
    smallest_cap,
    split_one_phase,
    split_two_phase,
    stage_costs,
)

costs = st.integers(0, 20).map(float)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Chain, Seats]:
    """Chains of up to 8 events on up to 4 devices, caps that may leave no way."""
    n, k = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    each = st.lists(costs, min_size=n, max_size=n)
    chain = Chain(
        forward=draw(each),
        backward=draw(each),
        memory=draw(each),
        cut=draw(st.lists(st.sampled_from([0.0, 0.0, 1.0, 7.0]), min_size=n, max_size=n)),
    )
    seats = Seats(
        caps=draw(st.lists(st.sampled_from([math.inf, 60.0, 25.0]), min_size=k, max_size=k)),
        speeds=draw(st.lists(st.sampled_from([1.0, 1.0, 0.5, 3.0]), min_size=k, max_size=k)),
    )
    return chain, seats


def every_partition(chain: Chain, seats: Seats) -> Iterator[tuple[int, ...]]:
    n = len(chain)
    for inner in itertools.combinations_with_replacement(range(n + 1), len(seats) - 1):
        bounds = (0, *inner, n)
        stages = zip(bounds, bounds[1:], seats.caps, strict=False)
        if all(sum(chain.memory[i:j]) <= cap for i, j, cap in stages):
            yield bounds


def both(chain: Chain, seats: Seats, bounds: Sequence[int]) -> float:
    return sum(max(stage_costs(phase, chain, seats, bounds)) for phase in (chain.forward, chain.backward))


@given(problems())
def test_one_phase_equals_enumeration(problem: tuple[Chain, Seats]) -> None:
    """No partition within the caps has a faster slowest stage, and None means there is no partition."""
    chain, seats = problem
    found = split_one_phase(chain.forward, chain, seats)
    values = [max(stage_costs(chain.forward, chain, seats, bounds)) for bounds in every_partition(chain, seats)]
    if found is None:
        assert values == []
    else:
        assert max(stage_costs(chain.forward, chain, seats, found)) == pytest.approx(min(values))


@given(problems())
@settings(max_examples=200)
def test_two_phases_equal_enumeration(problem: tuple[Chain, Seats]) -> None:
    """No partition within the caps has a smaller slowest forward plus slowest backward."""
    chain, seats = problem
    found = split_two_phase(chain, seats)
    values = [both(chain, seats, bounds) for bounds in every_partition(chain, seats)]
    if found is None:
        assert values == []
    else:
        assert found in set(every_partition(chain, seats))
        assert both(chain, seats, found) == pytest.approx(min(values))


@given(problems())
def test_a_longer_chain_is_cut_by_the_sum_of_its_phases(problem: tuple[Chain, Seats]) -> None:
    """Above the exact size the answer is that of one phase, and as feasible."""
    chain, seats = problem
    sums = [f + b for f, b in zip(chain.forward, chain.backward, strict=True)]
    assert split_two_phase(chain, seats, exact_up_to=0) == split_one_phase(sums, chain, seats)


@given(st.lists(costs, min_size=1, max_size=8), st.integers(1, 4))
def test_the_smallest_cap_is_enough_and_nothing_less_is(memory: list[float], devices: int) -> None:
    """A chain fits caps of that size, and not caps a little smaller."""
    n = len(memory)
    chain = Chain(forward=[1.0] * n, backward=[1.0] * n, memory=memory, cut=[0.0] * n)
    cap = smallest_cap(memory, devices)
    for share, fits in ((1.0, True), (0.99, cap == 0.0)):
        seats = Seats(caps=[cap * share] * devices, speeds=[1.0] * devices)
        assert (split_two_phase(chain, seats) is not None) is fits


def test_equal_layers_are_dealt_evenly() -> None:
    """Fifteen equal layers on eight devices: at most two each, where a heuristic puts eight on the last one."""
    chain = Chain(forward=[1.0] * 15, backward=[2.0] * 15, memory=[0.0] * 15, cut=[0.0] * 15)
    bounds = split_two_phase(chain, Seats(caps=[math.inf] * 8, speeds=[1.0] * 8))
    assert bounds is not None
    assert max(j - i for i, j in itertools.pairwise(bounds)) == 2


def test_a_dear_cut_is_avoided() -> None:
    """The chain is cut where little crosses, if that is what makes the slowest stage fastest."""
    chain = Chain(forward=[2.0] * 4, backward=[2.0] * 4, memory=[0.0] * 4, cut=[0.0, 0.0, 9.0, 0.5])
    bounds = split_two_phase(chain, Seats(caps=[math.inf] * 2, speeds=[1.0] * 2))
    assert bounds in {(0, 1, 4), (0, 3, 4)}
