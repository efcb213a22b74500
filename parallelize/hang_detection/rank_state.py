"""What a rank is doing (its line, its latest collectives): plain data, which it publishes when a rank waits for long.

The collectives are read from torch's flight recorders: NCCL has one of its own, gloo uses the general one.
TORCH_FR_BUFFER_SIZE=0 turns them off; then no deadlock can be proven. torch's analyser
(torch.distributed.flight_recorder) needs all entries of all ranks, and does not know which ranks are blocked.

Source: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from parallelize.hang_detection.statements import Statement
from parallelize.hang_detection.waiting import WaitKind

__all__ = ["Collective", "RankState", "collectives_of", "latest_collectives", "progress"]


class Collective(NamedTuple):
    """A collective that a rank has begun.

    Args:
        counter: "0/gloo": name of the process group, the same on all its ranks, and library. A group may use several
            libraries, for tensors on different devices; each counts its own collectives.
        seq: sequence number in the counter, from 1.
        signature: operation, with dtypes and numbers of elements if all ranks must have the same ones, and with the
            source or destination if it is known: "broadcast of float32[4] (root 1)".
        is_completed: whether the collective has completed on this rank.
    """

    counter: str
    seq: int
    signature: str
    is_completed: bool


class RankState(NamedTuple):
    """What a rank is doing.

    Args:
        rank: global rank.
        status: "waiting": idle for seconds in a torch.distributed call, or elsewhere with a pending collective;
            "returned": the rank makes no further collectives; "stopped": its user has it in pdb; "running": any other
            state.
        location: innermost line of the user's program: "train.py:41".
        operation: call on that line: "all_reduce".
        collectives: most recent collectives of each group and all pending ones, oldest first.
        groups: names of all process groups of this rank; together, the states show the members of a group.
        is_blocked: whether the rank waits and no other thread of its process could make a missing collective call.
        since: number of the latest question when its wait, or its return, began; 0: it runs.
        answers: number of the question that this state answers.
        facts: what others have to say about this rank.
        wait_kind: what a report may say about its wait.
        block: of the kind END_OF_BLOCK, the line where the block begins: "train.py:11".
        statements: of the user's program, around the lines of its stack, outermost first.
    """

    rank: int
    status: str
    location: str = ""
    operation: str = ""
    collectives: Sequence[Collective] = ()
    groups: Sequence[str] = ()
    is_blocked: bool = False
    since: int = 0
    answers: int = 0
    facts: Any = None
    wait_kind: WaitKind = WaitKind.OTHER
    block: str = ""
    statements: Sequence[Statement] = ()

    @staticmethod
    def loads(text: bytes) -> RankState:
        """Return the state of another rank from its JSON."""
        state = RankState(*json.loads(text))
        return state._replace(
            collectives=[Collective(*fields) for fields in state.collectives],
            statements=[Statement(*fields) for fields in state.statements],
        )

    def pending(self) -> list[Collective]:
        """Return the collectives that have not completed."""
        return [call for call in self.collectives if not call.is_completed]


def progress() -> list[tuple[int, int]]:
    """Return the last begun and the last completed collective of each group and library; reads no entries."""
    return [
        (each["last_enqueued_collective"], each["last_completed_collective"])
        for trace in _dump(entries=False)
        for _, each in sorted(trace["pg_status"].items())
    ]


def latest_collectives(since_ns: int) -> list[Collective]:
    """Return the most recent collectives of every group, and all pending ones; holds the GIL for up to 50 ms.

    Args:
        since_ns: collectives before this time (time.time_ns) are ignored: an earlier group may have the same name.
    """
    return collectives_of(
        entry
        for trace in _dump(entries=True)
        for entry in trace.get("entries", ())
        if entry["time_created_ns"] >= since_ns
    )


def _dump(*, entries: bool) -> list[dict[str, Any]]:
    """Return the general recorder's trace, and NCCL's if this build of torch has NCCL."""
    dumps = (getattr(torch._C._distributed_c10d, name, None) for name in ("_dump_fr_trace", "_dump_nccl_trace"))
    # Trusted: torch has just pickled them in this process.
    return [pickle.loads(dump(includeCollectives=entries, includeStackTraces=False)) for dump in dumps if dump]


def collectives_of(entries: Iterable[Mapping[str, Any]]) -> list[Collective]:
    """Convert recorder entries to the most recent collectives of every group and all pending ones."""
    calls, last = dict[object, Collective](), dict[object, int]()
    for call in [_collective(entry) for entry in entries if not entry["is_p2p"]]:
        # Of a coalesced operation the last entry stays, the only one that is ever marked as completed.
        calls[call.counter, call.seq] = call
        last[call.counter] = call.seq
    return [each for each in calls.values() if not each.is_completed or each.seq > last[each.counter] - 16]


def _collective(entry: Mapping[str, Any]) -> Collective:
    library, _, operation = entry["profiling_name"].partition(":")
    name = operation.strip("_")  # "_all_gather_base"
    if name in {"all_reduce", "allreduce", "broadcast", "reduce"}:  # of as many elements on all ranks, in all libraries
        tensors = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
        name += " of " + ", ".join(f"{_dtype(kind)}[{math.prod(size)}]" for kind, size in tensors)
    # NCCL retires what has timed out, too; gloo has no other mark.
    is_completed = entry["state"] == "completed" or (entry["retired"] and library != "nccl")
    return Collective(f"{entry['process_group'][0]}/{library}", entry["collective_seq_id"], name, is_completed)


def _dtype(name: str) -> str:
    """Return "float32" for "Float", as a recorder calls it."""
    return str(getattr(getattr(torch, f"{name}Tensor", None), "dtype", name)).removeprefix("torch.")
