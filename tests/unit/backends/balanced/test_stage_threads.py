"""A stage admits micro-batches one at a time, in order, without deadlock."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelize.backends.balanced.stage_threads import Aborted, StageLock


def visit_stages(
    microbatch: int, visits: list[int], locks: list[StageLock], log: list[tuple[int, int]], busy: list[int]
) -> None:
    """Acquire stages as a micro-batch does: release one, wait for the next."""
    held = None
    for stage in visits:
        if held is not None:
            busy[held] -= 1
            locks[held].release()
        locks[stage].acquire(microbatch)
        held = stage
        busy[stage] += 1
        assert busy[stage] == 1
        log.append((stage, microbatch))
    if held is not None:
        busy[held] -= 1
        locks[held].release()
    for lock in locks:
        lock.finish(microbatch)


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=5))
@settings(max_examples=50)
def test_every_order_of_visits_ends(visits_of_each: list[list[int]]) -> None:
    """For any visits, skips and returns, all micro-batches finish, one per stage at a time, first visits in order."""
    locks, log, busy = [StageLock() for _ in range(3)], [], [0, 0, 0]
    with ThreadPoolExecutor(len(visits_of_each)) as pool:
        running = [pool.submit(visit_stages, i, visits, locks, log, busy) for i, visits in enumerate(visits_of_each)]
        for each in running:
            each.result(timeout=20)
    assert len(log) == sum(map(len, visits_of_each))
    for stage in range(3):
        first = list(dict.fromkeys(microbatch for at, microbatch in log if at == stage))
        assert first == sorted(first)


def test_an_abort_ends_all_waits() -> None:
    """Waiting and later micro-batches get Aborted."""
    lock = StageLock()
    lock.acquire(0)
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        lock.acquire(1)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(wait)
        assert waiting.wait(10)
        lock.abort()
        with pytest.raises(Aborted):
            running.result(timeout=10)
    with pytest.raises(Aborted):
        lock.acquire(2)


def test_a_finished_micro_batch_is_not_waited_for() -> None:
    """A micro-batch that finishes without a visit lets the next one in."""
    lock = StageLock()
    lock.finish(0)
    lock.acquire(1)
    lock.release()
    lock.acquire(1)
