"""Ranks wait for each other after connecting, and briefly before closing their connections."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelize.cluster.devices import Hardware
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import compute_layout
from parallelize.run.process_group import bound_device
from parallelize.run.rendezvous import wait_before_closing, wait_for_all


@pytest.mark.parametrize("wait", [wait_for_all, wait_before_closing])
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
    wait_before_closing(dist.HashStore(), 2)


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"gpus": 2}, torch.device("cuda", 1)),
        ({"gpus": 2, "process_group_backend": "nccl"}, torch.device("cuda", 1)),
        ({"gpus": 2, "process_group_backend": "gloo"}, None),
        ({"gpus": 2, "process_group_backend": "cpu:gloo,cuda:gloo"}, None),
        ({"gpus": 0, "processes": 2}, None),
    ],
)
def test_nccl_is_bound_to_the_device_of_its_process(options: dict[str, Any], bound: torch.device | None) -> None:
    """Not gloo, whose groups neither connect to a device nor are split."""
    layout = compute_layout(Config.parse(**options), Hardware("cuda", 2))
    assert bound_device(World(rank=1, local_rank=1, world_size=2, local_world_size=2), layout) == bound


@pytest.mark.parametrize(("backend", "bound"), [(None, None), ("nccl", torch.device("cuda", 0)), ("gloo", None)])
def test_a_process_that_is_alone_connects_to_nobody(backend: str | None, bound: torch.device | None) -> None:
    """It has a communicator from its first collective on a GPU; without gloo, `barrier()` would warn if it had none."""
    layout = compute_layout(Config.parse(gpus=1, process_group_backend=backend), Hardware("cuda", 2))
    assert bound_device(World(), layout) == bound


def test_a_process_with_several_devices_is_bound_to_none() -> None:
    """Its tensors are on each of them."""
    layout = compute_layout(Config.parse(gpus=2, backend="dp"), Hardware("cuda", 2))
    assert len(layout.devices[0]) == 2
    assert bound_device(World(), layout) is None
