"""Micro-batches go through stages one at a time, in order, and never block each other for good."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelize.backends.balanced.stage_lock import Aborted, Turnstile


def travel(
    microbatch: int, visits: list[int], gates: list[Turnstile], log: list[tuple[int, int]], busy: list[int]
) -> None:
    """A micro-batch's way, as a tape goes it: leave, wait for the next stage, work."""
    held = None
    for stage in visits:
        if held is not None:
            busy[held] -= 1
            gates[held].leave()
        gates[stage].enter(microbatch)
        held = stage
        busy[stage] += 1
        assert busy[stage] == 1
        log.append((stage, microbatch))
    if held is not None:
        busy[held] -= 1
        gates[held].leave()
    for gate in gates:
        gate.pass_by(microbatch)


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=5))
@settings(max_examples=50)
def test_every_order_of_visits_ends(ways: list[list[int]]) -> None:
    """Whatever stages micro-batches visit, skip and come back to: all arrive, one at a time, first visits in order."""
    gates, log, busy = [Turnstile() for _ in range(3)], [], [0, 0, 0]
    with ThreadPoolExecutor(len(ways)) as pool:
        running = [pool.submit(travel, i, way, gates, log, busy) for i, way in enumerate(ways)]
        for each in running:
            each.result(timeout=20)
    assert len(log) == sum(map(len, ways))
    for stage in range(3):
        visits = [microbatch for at, microbatch in log if at == stage]
        first = list(dict.fromkeys(visits))
        assert first == sorted(first)


def test_an_abort_ends_all_waits() -> None:
    """Who waits, and who comes later, is sent away."""
    gate = Turnstile()
    gate.enter(0)
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        gate.enter(1)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(wait)
        assert waiting.wait(10)
        gate.abort()
        with pytest.raises(Aborted):
            running.result(timeout=10)
    with pytest.raises(Aborted):
        gate.enter(2)


def test_one_that_has_ended_is_waited_for_no_more() -> None:
    """A micro-batch that ends without a visit lets the next one in."""
    gate = Turnstile()
    gate.pass_by(0)
    gate.enter(1)
    gate.leave()
    gate.enter(1)
