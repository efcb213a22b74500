"""Collectives as read from torch's flight recorder."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from parallelize.hang_detection.flight_recorder import FlightRecorder, collectives_of
from parallelize.hang_detection.rank_state import Collective


@pytest.fixture
def group() -> object:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_recorder_lists_collectives(group: object) -> None:
    """With operation, shape, dtype, sequence number, and whether they have completed."""
    since_ns = time.time_ns()
    dist.all_reduce(torch.ones(2, 3))
    dist.broadcast(torch.ones(4, dtype=torch.int64), src=0)
    recorder = FlightRecorder(since_ns)
    first, second = recorder.collectives(None, fresh=True)
    assert (first.signature, second.signature) == ("all_reduce of float32[2, 3]", "broadcast of int64[4]")
    assert (first.is_completed, second.is_completed, second.seq - first.seq) == (True, True, 1)
    assert FlightRecorder(time.time_ns()).collectives(None, fresh=True) == ()


def entry(number: int, **changes: object) -> dict[str, object]:
    """Make an entry as in torch's flight recorder."""
    return {
        "time_created_ns": 1,
        "is_p2p": False,
        "profiling_name": "nccl:_all_gather_base",
        "retired": True,
        "state": "scheduled",
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        **changes,
    }


def test_pending_collectives_are_kept_however_old() -> None:
    """Of completed ones only the last few of a group are kept; point-to-point operations are left out."""
    entries = [entry(1, retired=False), *(entry(number) for number in range(2, 50)), entry(50, is_p2p=True)]
    seqs = [call.seq for call in collectives_of(entries, since_ns=0)]
    assert seqs == [1, *range(34, 50)]
    assert collectives_of(entries, since_ns=0)[0] == Collective(
        "0", 1, "all_gather", is_completed=False, library="nccl"
    )


def test_a_new_group_of_the_same_name_replaces_the_old_one() -> None:
    """Collectives of the destroyed group have the same sequence numbers, and are dropped."""
    entries = [
        *(entry(number, profiling_name="gloo:all_gather") for number in range(1, 6)),
        entry(7, process_group=("1", "undefined"), profiling_name="gloo:barrier"),
        *(entry(number, profiling_name="gloo:broadcast") for number in range(1, 4)),
    ]
    calls = [(call.group, call.seq, call.signature) for call in collectives_of(entries, since_ns=0)]
    assert calls == [("1", 7, "barrier"), *(("0", number, "broadcast of float32[4]") for number in range(1, 4))]
