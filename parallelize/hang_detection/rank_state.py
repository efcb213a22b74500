"""What a rank is doing (its line, its latest collectives): plain data, which it publishes if asked.

The collectives are read from torch's flight recorders: NCCL has one of its own, gloo uses the
general one. TORCH_FR_BUFFER_SIZE=0 turns them off; then no deadlock can be proven. torch's analyser
(torch.distributed.flight_recorder) needs all entries of all ranks, and does not know which ranks
are blocked.

Source: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html

The words of this file:

    counter     counts the collectives of a group in one library: "0/gloo"
    begun       of a collective: this rank has called it; others may not have
    signature   the operation with what has to be equal on all ranks: "broadcast of float32[4]"
    entry       what a recorder has noted about one collective
"""

from __future__ import annotations

import enum
import json
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from parallelize.hang_detection.statements import Statement
from parallelize.hang_detection.waiting import WaitKind

_RECORDER_BY_LIBRARY = {"": "_dump_fr_trace", "nccl": "_dump_nccl_trace"}
"""Names of the functions of torch that return what a recorder has noted; "": the general one."""

_MOST_COLLECTIVES = 16
"""Completed collectives of a counter that a state has; other ranks are hardly further behind."""

_SAME_SIZE = frozenset({"all_reduce", "allreduce", "broadcast", "reduce"})
"""Operations whose tensors have as many elements on all ranks, in all libraries."""


class RankStatus(enum.StrEnum):
    """What a rank does, as far as the others are concerned: see `main_thread`."""

    RUNNING = "running"
    """It computes, or has waited for a moment only."""

    WAITING = "waiting"
    """It has not moved for seconds, in a collective, or elsewhere with one that is pending."""

    STOPPED = "stopped"
    """Its user has it in pdb."""

    RETURNED = "returned"
    """It makes no further collectives."""


class Collective(NamedTuple):
    """A collective that a rank has begun.

    Args:
        counter: "0/gloo": name of the process group, the same on all its ranks, and library. A
            group may use several libraries, for tensors on different devices; each counts its own
            collectives.
        seq: sequence number in the counter, from 1.
        signature: operation, with dtypes and numbers of elements if all ranks must have the same
            ones, and with the source or destination if it is known: "broadcast of float32[4] (root
            1)".
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
        status: a RankStatus; as text, because it comes from another process.
        location: innermost line of the user's program: "train.py:41".
        operation: call on that line: "all_reduce".
        collectives: most recent collectives of each group and all pending ones, oldest first.
        groups: names of all process groups of this rank; together, the states show the members of
            a group.
        is_blocked: whether the rank waits, and no other thread of its process could make a missing
            collective call.
        since: number of the latest question when its wait, or its return, began; 0: it runs.
        answers: number of the question that this state answers.
        facts: for `parallelize top`: see `LiveFacts`.
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
        return pending_of(self.collectives)

    def awaited(self) -> list[Collective]:
        """Return the pending collectives, for one of which a rank that waits does so.

        A message is no collective: a rank in `dist.recv` goes on although a collective that it has
        begun with `async_op=True` is pending, so that the list is empty.
        """
        if self.wait_kind == WaitKind.MESSAGE:
            return []
        return self.pending()


def pending_of(collectives: Iterable[Collective]) -> list[Collective]:
    """Return those collectives that have not completed."""
    return [collective for collective in collectives if not collective.is_completed]


class Progress(NamedTuple):
    """How far the collectives of a group are in one library.

    Args:
        library: "nccl"; "": that of the general recorder, such as gloo.
        begun: sequence number of the last collective that this rank has begun.
        completed: that of the last one that has completed.
    """

    library: str
    begun: int
    completed: int


def progress() -> list[Progress]:
    """Return the progress of each group and library; reads no entries, which takes no time."""
    progress_of_groups = []
    for library, recorder in _RECORDER_BY_LIBRARY.items():
        status_by_group = _dump(recorder, has_entries=False).get("pg_status", {})
        for _group, status in sorted(status_by_group.items()):
            begun = status["last_enqueued_collective"]
            completed = status["last_completed_collective"]
            progress_of_groups.append(Progress(library, begun, completed))
    return progress_of_groups


def latest_collectives(since_ns: int) -> list[Collective]:
    """Return the most recent collectives of every group, and all pending ones.

    This holds the GIL for up to 50 ms.

    Args:
        since_ns: collectives before this time (time.time_ns) are ignored: an earlier group may
            have the same name.
    """
    entries: list[Mapping[str, Any]] = []
    for recorder in _RECORDER_BY_LIBRARY.values():
        entries += _dump(recorder, has_entries=True).get("entries", ())
    return collectives_of(entry for entry in entries if entry["time_created_ns"] >= since_ns)


def _dump(recorder: str, *, has_entries: bool) -> dict[str, Any]:
    """Return what a recorder has noted; nothing if this build of torch has no such recorder."""
    dump = getattr(torch._C._distributed_c10d, recorder, None)
    if dump is None:
        return {}
    text = dump(includeCollectives=has_entries, includeStackTraces=False)
    # torch has just pickled this in the same process, so that it may be trusted.
    noted: dict[str, Any] = pickle.loads(text)
    return noted


def collectives_of(entries: Iterable[Mapping[str, Any]]) -> list[Collective]:
    """Convert entries to the most recent collectives of every counter, and all pending ones."""
    collective_by_number: dict[tuple[str, int], Collective] = {}
    last_number: dict[str, int] = {}
    for entry in entries:
        if entry["is_p2p"]:
            continue
        collective = _collective(entry)
        # Of a coalesced operation, the last entry stays: no other is ever marked as completed.
        collective_by_number[collective.counter, collective.seq] = collective
        last_number[collective.counter] = collective.seq
    recent_or_pending = []
    for collective in collective_by_number.values():
        is_recent = collective.seq > last_number[collective.counter] - _MOST_COLLECTIVES
        if is_recent or not collective.is_completed:
            recent_or_pending.append(collective)
    return recent_or_pending


def _collective(entry: Mapping[str, Any]) -> Collective:
    """Convert one entry."""
    library, _, operation = entry["profiling_name"].partition(":")
    # Some names are internal: "_all_gather_base".
    signature = operation.strip("_")
    if signature in _SAME_SIZE:
        tensors = []
        for name, shape in zip(entry["input_dtypes"], entry["input_sizes"], strict=False):
            tensors.append(f"{_dtype(name)}[{math.prod(shape)}]")
        signature += f" of {', '.join(tensors)}"
    # gloo marks what has completed as retired alone. NCCL also retires what has timed out.
    is_completed = entry["state"] == "completed" or (entry["retired"] and library != "nccl")
    group = entry["process_group"][0]
    return Collective(f"{group}/{library}", entry["collective_seq_id"], signature, is_completed)


def _dtype(name: str) -> str:
    """Return "float32" for "Float", as a recorder calls it."""
    tensor_class = getattr(torch, f"{name}Tensor", None)
    return str(getattr(tensor_class, "dtype", name)).removeprefix("torch.")
