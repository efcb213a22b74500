"""CUDA graphs are captured while the watch thread reads NCCL's recorder, which queries events."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from parallelize.hang_detection.rank_state import latest_collectives
from parallelize.hang_detection.watchdog import _allow_captures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("FAKE_CUDA" in os.environ, reason="the pretended CUDA captures no graphs"),
]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> object:
    """Initialize NCCL's group of one rank, whose recorder keeps what it does."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")  # its name in older releases
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


def _read_until(is_over: threading.Event, prepare: Callable[[], object], read: list[int]) -> None:
    prepare()
    with torch.cuda.device(0):
        while not is_over.is_set():
            read.append(len(latest_collectives(0)))


def test_a_capture_is_not_ended_by_the_watch_thread(group: object) -> None:
    """Events are pending, and queried all the time; the graph is captured, and computes what was captured."""
    total, x = torch.ones(1 << 20, device="cuda"), torch.ones(64, 64, device="cuda")
    is_over, read = threading.Event(), list[int]()
    thread = threading.Thread(target=_read_until, args=[is_over, _allow_captures, read])
    thread.start()
    try:
        for _ in range(20):
            dist.all_reduce(total)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = x @ x
            graph.replay()
            assert y.sum().item() == 64.0**3
    finally:
        is_over.set()
        thread.join()
    assert max(read) > 0
