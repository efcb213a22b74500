"""Collectives as read from torch's flight recorder."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from parallelize.hang_detection.deadlock import find_deadlock
from parallelize.hang_detection.flight_recorder import FlightRecorder, _dump, collectives_of
from parallelize.hang_detection.rank_state import Collective, RankState, Status


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
    """Make an entry as in torch's flight recorders: of a collective that NCCL has completed.

    Source: getCollectiveTrace in torch/csrc/distributed/c10d/FlightRecorderDetail.hpp
    """
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "thread_name": "pt_main_thread",
        "thread_id": "1",
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": "nccl:_all_gather_base",
        "time_created_ns": 1,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": 2,
        "time_discovered_completed_ns": 3,
        "retired": True,
        "timeout_ms": 600000,
        "is_p2p": False,
        **changes,
    }


PENDING = {"state": "started", "retired": False, "time_discovered_completed_ns": None}
GLOO = {"state": "scheduled", "time_discovered_started_ns": None, "time_discovered_completed_ns": None}  # has no events


def test_the_entries_are_those_of_torch(group: object) -> None:
    """The recorded fields of this file are the fields that torch writes; gloo's completed entries are only retired."""
    dist.all_reduce(torch.ones(4))
    while not (last := _dump(entries=True)[0]["entries"][-1])["retired"]:
        time.sleep(0.01)  # a thread of gloo does it after the call has returned
    assert last.keys() == entry(1).keys()
    assert {name: last[name] for name in GLOO} == GLOO


def test_pending_collectives_are_kept_however_old() -> None:
    """Of completed ones only the last few of a group are kept; point-to-point operations are left out."""
    entries = [entry(1, **PENDING), *(entry(number) for number in range(2, 50)), entry(50, is_p2p=True)]
    seqs = [call.seq for call in collectives_of(entries, since_ns=0)]
    assert seqs == [1, *range(34, 50)]
    assert collectives_of(entries, since_ns=0)[0] == Collective(
        "0", 1, "all_gather", is_completed=False, library="nccl"
    )


def test_nccl_retires_what_has_timed_out() -> None:
    """It is pending still; gloo marks what is completed in no other way."""
    timed_out = entry(1, **{**PENDING, "retired": True})
    of_gloo = entry(1, profiling_name="gloo:all_reduce", **GLOO)
    assert [call.is_completed for call in collectives_of([timed_out, of_gloo], since_ns=0)] == [False, True]


def test_the_parts_of_a_coalesced_operation_are_one_collective() -> None:
    """NCCL never marks the parts as completed, only the entry that ends them."""
    part = {"state": "scheduled", "retired": False}
    entries = [entry(1), entry(2, **part), entry(2, **part), entry(2, profiling_name="nccl:coalesced")]
    calls = collectives_of(entries, since_ns=0)
    assert [(call.seq, call.signature, call.is_completed) for call in calls] == [
        (1, "all_gather", True),
        (2, "coalesced", True),
    ]


def state(rank: int, *entries: dict[str, object], status: Status = "waiting") -> RankState:
    calls = collectives_of(entries, since_ns=0)
    return RankState(rank, status, collectives=calls, groups=("0",), is_blocked=status == "waiting")


def test_gloo_and_nccl_count_their_collectives_apart() -> None:
    """In "cpu:gloo,cuda:nccl" rank 0 waits in NCCL's second collective, while rank 1 is behind three of gloo's."""
    reduced = entry(1, profiling_name="nccl:all_reduce")
    waits = entry(2, profiling_name="nccl:all_reduce", **PENDING)
    of_gloo = [entry(number, profiling_name="gloo:barrier", **GLOO) for number in (1, 2, 3)]
    first = state(0, of_gloo[0], reduced, waits)
    busy = state(1, *of_gloo, reduced, status="running")
    assert find_deadlock([first, busy]) is None
    returned = find_deadlock([first, state(1, *of_gloo, reduced, status="returned")])
    assert returned is not None
    assert returned.what.endswith("for rank 1, which has returned")
    other = entry(2, profiling_name="nccl:broadcast")
    mismatch = find_deadlock([first, state(1, *of_gloo, reduced, other, status="running")])
    assert mismatch is not None
    assert mismatch.what.startswith("ranks are in different collectives")


def test_a_new_group_of_the_same_name_replaces_the_old_one() -> None:
    """Collectives of the destroyed group have the same sequence numbers, and are dropped."""
    entries = [
        *(entry(number, profiling_name="gloo:all_gather") for number in range(1, 6)),
        entry(7, process_group=("1", "undefined"), profiling_name="gloo:barrier"),
        *(entry(number, profiling_name="gloo:broadcast") for number in range(1, 4)),
    ]
    calls = [(call.group, call.seq, call.signature) for call in collectives_of(entries, since_ns=0)]
    assert calls == [("1", 7, "barrier"), *(("0", number, "broadcast of float32[4]") for number in range(1, 4))]
