"""Ranks wait for each other after connecting, and briefly before closing their connections."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from parallelize.runtime.process_group import _wait_before_closing, _wait_for_all


@pytest.mark.parametrize("wait", [_wait_for_all, _wait_before_closing])
def test_ranks_wait_for_the_last(wait: Callable[[dist.Store, int], None]) -> None:
    """The first two of three block until the third one calls, then all continue."""
    store, passed = dist.HashStore(), threading.Semaphore(0)

    def call() -> None:
        wait(store, 3)
        passed.release()

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads[:2]:
        thread.start()
    assert not passed.acquire(timeout=0.2)
    threads[2].start()
    assert all(passed.acquire(timeout=20) for _ in range(3))
    for thread in threads:
        thread.join()


def test_a_busy_rank_is_not_waited_for() -> None:
    """The wait before closing has a short limit: the busy rank may be waiting for this one in a collective."""
    _wait_before_closing(dist.HashStore(), 2)
