"""Recent collectives of this process, read from torch's flight recorders, which keep the latest 2000 each.

NCCL has a recorder of its own; gloo uses the general one. Both are on by default. TORCH_FR_BUFFER_SIZE=0 turns them
off; then no deadlock can be proven. torch's analyser (torch.distributed.flight_recorder) is not used here: it needs all
entries of all ranks, which are too many for the store, and does not know which ranks are blocked.

Source: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallelize.hang_detection.rank_state import Collective

__all__ = ["FlightRecorder", "collective_start_times", "collectives_of", "group_names"]

_PENDING_AFTER_NS = 500_000_000  # a younger collective counts as completed
_KEPT_PER_GROUP = 16
_CACHE_S = 3.0

_INTEGERS = {"Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Bool": "bool"}
_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", **_INTEGERS}
# Operations whose shapes and dtypes must be equal on all ranks. NCCL can also all-gather different shapes.
_SAME_SHAPES = {"all_reduce", "allreduce", "broadcast", "reduce"}
_SAME_SHAPES_IN_GLOO = {"all_gather", "allgather", "reduce_scatter"}
# A sequence number lower than its predecessor by more than this belongs to a new group of the same name.
_MAX_REORDERING = 8


class FlightRecorder:
    """Reader of this process's flight recorders. Reading all entries holds the GIL for about 50 ms, so they are cached.

    Args:
        since_ns: collectives before this time (time.time_ns) are ignored: an earlier group may have the same name.
    """

    def __init__(self, since_ns: int) -> None:
        self._since_ns = since_ns
        self._position: object = None
        self._read_at = float("-inf")
        self._collectives: tuple[Collective, ...] = ()

    def has_pending(self) -> bool:
        """Whether any group has a pending collective; fast, because it reads no entries."""
        # NCCL counts messages apart, so the last one to complete may have a higher number than the last one begun.
        return any(begun != completed for begun, completed in self.progress())

    def progress(self) -> tuple[tuple[int, int], ...]:
        """Return the last begun and last completed sequence number per group and library; reads no entries."""
        return tuple(
            (each.get("last_enqueued_collective", 0), each.get("last_completed_collective", 0))
            for trace in _dump(entries=False)
            for _, each in sorted(trace.get("pg_status", {}).items())
        )

    def collectives(self, position: object, *, fresh: bool) -> tuple[Collective, ...]:
        """Return the most recent collectives of every group, and all pending ones.

        Args:
            position: position of the main thread.
            fresh: whether to replace a recent cached result if the main thread was at another position.
        """
        age_s = time.monotonic() - self._read_at
        if age_s > _CACHE_S or (fresh and position != self._position):
            self._position, self._read_at = position, time.monotonic()
            self._collectives = collectives_of(_entries(), since_ns=self._since_ns)
        return self._collectives


def _dump(*, entries: bool) -> list[dict[str, Any]]:
    """Return the general recorder's trace, and NCCL's if this build of torch has NCCL."""
    dumps = (getattr(torch._C._distributed_c10d, name, None) for name in ("_dump_fr_trace", "_dump_nccl_trace"))
    # Trusted: torch has just pickled them in this process.
    return [pickle.loads(dump(includeCollectives=entries, includeStackTraces=False)) for dump in dumps if dump]


def _entries() -> list[Mapping[str, Any]]:
    found = [entry for trace in _dump(entries=True) for entry in trace.get("entries", ())]
    return sorted(found, key=lambda entry: entry["time_created_ns"])


def collectives_of(entries: Sequence[Mapping[str, Any]], *, since_ns: int) -> tuple[Collective, ...]:
    """Convert recorder entries to the most recent collectives of every group and all pending ones, oldest first."""
    now_ns = time.time_ns()
    calls: list[Collective] = []
    last: dict[tuple[str, str], Collective] = {}
    for call in (_collective(each, now_ns) for each in _since(entries, since_ns)):
        before = last.get(call.counter)
        if before is not None and before.seq == call.seq and call.library == "nccl":
            calls.remove(before)  # part of a coalesced operation, whose last entry alone is ever marked as completed
        elif call.seq == 1 or (before is not None and call.seq < before.seq - _MAX_REORDERING):
            calls = [each for each in calls if each.counter != call.counter]
        last[call.counter] = call
        calls.append(call)
    per_counter: Counter[tuple[str, str]] = Counter()
    kept = []
    for call in reversed(calls):
        per_counter[call.counter] += 1
        if per_counter[call.counter] <= _KEPT_PER_GROUP or not call.is_completed:
            kept.append(call)
    return tuple(kept[::-1])


def _since(entries: Sequence[Mapping[str, Any]], since_ns: int) -> list[Mapping[str, Any]]:
    return [each for each in entries if each["time_created_ns"] >= since_ns and not each["is_p2p"]]


def _collective(entry: Mapping[str, Any], now_ns: int) -> Collective:
    library, _, operation = entry["profiling_name"].partition(":")
    is_recent = now_ns - entry["time_created_ns"] < _PENDING_AFTER_NS
    # NCCL retires what has timed out, too; gloo has no other mark.
    is_over = entry["state"] == "completed" or (entry["retired"] and library != "nccl")
    group, seq = str(entry["process_group"][0]), entry["collective_seq_id"]
    return Collective(group, seq, _signature(library, operation, entry), is_over or is_recent, library=library)


def _signature(library: str, operation: str, entry: Mapping[str, Any]) -> str:
    name = operation.strip("_").removesuffix("base").removesuffix("_")
    if name not in _SAME_SHAPES and not (library == "gloo" and name in _SAME_SHAPES_IN_GLOO):
        return name
    tensors = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    return f"{name} of {', '.join(f'{_DTYPES.get(dtype, dtype)}{list(size)}' for dtype, size in tensors)}"


def collective_start_times(since_ns: int, *, most: int = 200) -> dict[str, float]:
    """Return the start times of this process's latest collectives, by names that are equal on all ranks of a group.

    Args:
        since_ns: collectives before this time (time.time_ns) are left out.
        most: maximum number of collectives.

    Returns:
        "<group>/<library>/<sequence number>" -> start time in seconds since the epoch.
    """
    starts = {}
    for each in _since(_entries(), since_ns)[-most:]:
        library = each["profiling_name"].partition(":")[0]
        starts[f"{each['process_group'][0]}/{library}/{each['collective_seq_id']}"] = each["time_created_ns"] / 1e9
    return starts


def group_names() -> tuple[str, ...]:
    """Return the names of all process groups of this process."""
    world: Any = dist.distributed_c10d._world
    return tuple(str(name) for name in dict(world.pg_names).values())
