"""Ranks begin together, and leave together if they are nearly done together."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from parallelize.runtime.process_group import _leave_together, _wait_for_all


@pytest.mark.parametrize("wait", [_wait_for_all, _leave_together])
def test_ranks_wait_for_the_last(wait: Callable[[dist.Store, int], None]) -> None:
    """The first two of three are held until the third has come, then all go on."""
    store, passed = dist.HashStore(), threading.Semaphore(0)

    def come() -> None:
        wait(store, 3)
        passed.release()

    threads = [threading.Thread(target=come) for _ in range(3)]
    for thread in threads[:2]:
        thread.start()
    assert not passed.acquire(timeout=0.2)
    threads[2].start()
    assert all(passed.acquire(timeout=20) for _ in range(3))
    for thread in threads:
        thread.join()


def test_a_rank_that_stays_is_left() -> None:
    """A rank waits for the others for a moment only: they may be waiting for it in a collective."""
    _leave_together(dist.HashStore(), 2)
