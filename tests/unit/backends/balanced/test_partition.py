"""The partition of a chain is optimal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelize.backends.balanced.partition import Chain, Memory, smallest_cap, split

costs = st.integers(0, 20).map(float)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Chain, list[float], list[float]]:
    """Generate chains of up to 8 calls on up to 4 devices, with their caps, which may be impossible, and speeds."""
    n, k = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    each, moved = st.lists(costs, min_size=n, max_size=n), st.sampled_from([0.0, 0.0, 1.0, 7.0])
    chain = Chain(
        seconds=draw(each),
        memory=Memory(
            **{name: draw(each) for name in ("held", "backward", "working", "step")},
            **{name: draw(st.lists(moved, min_size=n, max_size=n)) for name in ("received", "returned")},
        ),
        transfer=draw(st.lists(moved, min_size=n, max_size=n)),
    )
    caps = st.lists(st.sampled_from([math.inf, 60.0, 25.0]), min_size=k, max_size=k)
    speeds = st.lists(st.sampled_from([1.0, 1.0, 0.5, 3.0]), min_size=k, max_size=k)
    return chain, draw(caps), draw(speeds)


def every_partition(chain: Chain, caps: list[float]) -> Iterator[tuple[int, ...]]:
    n, memory = len(chain.seconds), chain.memory

    def needed(i: int, j: int) -> float:
        copied = memory.received[i] + [*memory.returned, 0.0][j]
        phase = max(sum(memory.held[i:j]), sum(memory.backward[i:j]))
        return max(phase + max(memory.working[i:j]) + copied, sum(memory.step[i:j]))

    for inner in itertools.combinations_with_replacement(range(n + 1), len(caps) - 1):
        bounds = (0, *inner, n)
        if all(i == j or needed(i, j) <= cap for i, j, cap in zip(bounds, bounds[1:], caps, strict=False)):
            yield bounds


@given(problems())
def test_a_split_equals_enumeration(problem: tuple[Chain, list[float], list[float]]) -> None:
    """No partition within the caps has a faster slowest stage; None means that no partition fits."""
    chain, caps, speeds = problem
    found = split(chain, caps=caps, speeds=speeds)
    values = {bounds: max(chain.stages_s(bounds, speeds)) for bounds in every_partition(chain, caps)}
    if found is None:
        assert values == {}
    else:
        assert values[found] == pytest.approx(min(values.values()))


@given(problems())
def test_the_smallest_cap_is_sufficient_and_necessary(problem: tuple[Chain, list[float], list[float]]) -> None:
    """A chain fits the smallest cap, and nothing less, with the copies at both ends of each stage."""
    chain, caps, speeds = problem
    cap = smallest_cap(chain.memory, len(caps))
    assert split(chain, caps=[cap] * len(caps), speeds=speeds) is not None
    assert cap == 0.0 or split(chain, caps=[cap - 0.5] * len(caps), speeds=speeds) is None


def test_equal_layers_are_distributed_evenly() -> None:
    """Fifteen equal layers on eight devices: at most two each, where a heuristic puts eight on the last one."""
    bounds = split(Chain(seconds=[3.0] * 15, memory=Memory(held=[0.0] * 15)), caps=[math.inf] * 8, speeds=[1.0] * 8)
    assert bounds is not None
    assert max(j - i for i, j in itertools.pairwise(bounds)) == 2


def test_an_expensive_transfer_is_avoided() -> None:
    """The chain is split where transfers are small, if that makes the slowest stage fastest."""
    chain = Chain(seconds=[4.0] * 4, memory=Memory(held=[0.0] * 4), transfer=[0.0, 0.0, 9.0, 0.5])
    assert split(chain, caps=[math.inf] * 2, speeds=[1.0] * 2) in {(0, 1, 4), (0, 3, 4)}
