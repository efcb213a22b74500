"""The collectives that this process has begun last, from torch's flight recorder, which keeps the last 2000.

It runs in gloo and NCCL without being asked for; TORCH_FR_BUFFER_SIZE=0 turns it off, and then nothing can be proven.

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

from parallelize.hang_detection.rank_state import Call

__all__ = ["Recorder", "begun_since", "calls_of", "members"]

# Begun lately: what is not over after so long is waited for.
_SETTLED_NS = 500_000_000
_KEPT = 16
_AGAIN_S = 3.0

_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
# Where shapes and types have to be alike on all ranks; elsewhere only the operation has to. NCCL gathers what differs.
_ALIKE = {"all_reduce", "allreduce", "broadcast", "reduce"}
_ALIKE_IN_GLOO = {"all_gather", "allgather", "reduce_scatter"}
# A number so much lower than the one before is of another group of the same name, made after the first was destroyed.
_BACKWARDS = 8


class Recorder:
    """Reads the recorder of this process, seldom: one reading takes some 50 ms in which no Python runs.

    Args:
        since_ns: what was begun before this time (as time.time_ns) is not told of: another group of the same name.
    """

    def __init__(self, since_ns: int) -> None:
        self._since_ns = since_ns
        self._stands: object = None
        self._read_at = float("-inf")
        self._calls: tuple[Call, ...] = ()

    def has_pending(self) -> bool:
        """Whether some group has begun a collective that is not over, as far as a cheap look tells."""
        return any(begun > over for begun, over in self.progress())

    def progress(self) -> tuple[tuple[int, int], ...]:
        """How many collectives each group has begun, and which was the last to end; a cheap look."""
        status = _dump(entries=False).get("pg_status", {})
        return tuple(
            (each.get("last_enqueued_collective", 0), each.get("last_completed_collective", 0))
            for _, each in sorted(status.items())
        )

    def calls(self, stands: object, *, at_once: bool) -> tuple[Call, ...]:
        """The last collectives of every group, and all that are not over.

        Args:
            stands: where the main thread is: what was read there is still so.
            at_once: whether what was read elsewhere, not long ago, will not do.
        """
        age_s = time.monotonic() - self._read_at
        if age_s > _AGAIN_S or (at_once and stands != self._stands):
            self._stands, self._read_at = stands, time.monotonic()
            self._calls = calls_of(_dump(entries=True).get("entries", ()), since_ns=self._since_ns)
        return self._calls


def _dump(*, entries: bool) -> dict[str, Any]:
    dump: Any = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    if dump is None:
        return {}
    dumped = dump(includeCollectives=entries, includeStackTraces=False)
    read: dict[str, Any] = pickle.loads(dumped)  # made in this process, just now
    return read


def calls_of(entries: Sequence[Mapping[str, Any]], *, since_ns: int) -> tuple[Call, ...]:
    """The last collectives of every group, and all that are not over, from the recorder's entries; the oldest first."""
    now = time.time_ns()
    lately = [each for each in entries if each["time_created_ns"] >= since_ns and not each["is_p2p"]]
    found: list[Call] = []
    last: dict[str, int] = {}
    for call in (_call(each, now) for each in lately):
        if call.number == 1 or call.number < last.get(call.group, 0) - _BACKWARDS:
            found = [each for each in found if each.group != call.group]
        last[call.group] = call.number
        found.append(call)
    later: Counter[str] = Counter()  # of each group
    kept = []
    for call in reversed(found):
        later[call.group] += 1
        if later[call.group] <= _KEPT or not call.is_over:
            kept.append(call)
    return tuple(kept[::-1])


def _call(entry: Mapping[str, Any], now_ns: int) -> Call:
    engine, _, operation = entry["profiling_name"].partition(":")
    is_over = entry["retired"] or entry["state"] == "completed" or now_ns - entry["time_created_ns"] < _SETTLED_NS
    group, number = str(entry["process_group"][0]), entry["collective_seq_id"]
    return Call(group, number, _what(engine, operation, entry), is_over, engine=engine)


def _what(engine: str, operation: str, entry: Mapping[str, Any]) -> str:
    name = operation.strip("_").removesuffix("_base")
    if name not in _ALIKE and not (engine == "gloo" and name in _ALIKE_IN_GLOO):
        return name
    sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    return (
        f"{name} of {', '.join(f'{_DTYPES.get(kind, kind)}{size}' for kind, size in zip(dtypes, sizes, strict=False))}"
    )


def begun_since(since_ns: int, *, most: int = 200) -> dict[str, float]:
    """When this process began its last collectives, by names that are the same on all processes of their groups.

    Args:
        since_ns: what was begun before is left out (time.time_ns).
        most: so many at most.

    Returns:
        Name -> seconds since the epoch.
    """
    entries = _dump(entries=True).get("entries", ())
    found = [each for each in entries if each["time_created_ns"] >= since_ns and not each["is_p2p"]]
    return {
        f"{each['process_group'][0]}/{each['collective_seq_id']}": each["time_created_ns"] / 1e9
        for each in found[-most:]
    }


def members() -> dict[str, tuple[int, ...]]:
    """The global ranks of every process group of this process, by its name."""
    world: Any = dist.distributed_c10d._world
    ranks = dict(world.pg_group_ranks)
    return {str(name): tuple(sorted(ranks.get(group, ()))) for group, name in dict(world.pg_names).items()}
