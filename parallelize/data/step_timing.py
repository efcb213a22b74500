"""How long each process's steps took in an epoch, and which process the others waited for: one line on rank 0.

Processes that train together end each step together, so their step times are alike. Who holds the rest back is seen
by when each begins its collectives, which torch's flight recorder notes: the one that comes last, step after step.

Nothing is collective: each process leaves its numbers in the store, and rank 0 waits a second for the others' at most.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch.distributed as dist

from parallelize.hang_detection.flight_recorder import begun_since

__all__ = ["Pace", "line", "with_pace"]

T = TypeVar("T")

_WAIT_S, _LOOK_EVERY_S = 1.0, 0.01
_LEAST_LATE_S, _LEAST_SHARE, _LEAST_MEETINGS = 0.001, 0.05, 3
_LISTED = 8


@dataclass(frozen=True)
class Pace:
    """One process's epoch.

    Args:
        rank: whose.
        steps: batches that it was given.
        step_s: mean time from one batch to the next, waiting for it included.
        data_s: of that, the mean time of waiting for the batch.
        begun: collective -> when this process began it, seconds since the epoch of its clock.
    """

    rank: int
    steps: int
    step_s: float
    data_s: float
    begun: Mapping[str, float] = field(default_factory=dict)

    def dumps(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self))


def with_pace(batches: Iterable[T], *, key: str, label: str) -> Iterator[T]:
    """The batches; when they are all given, a line on rank 0's standard error.

    Args:
        batches: of this process.
        key: of this epoch of this loader: the same on all processes, and of nothing else.
        label: what the line begins with.
    """
    since_ns, started = time.time_ns(), time.perf_counter()
    waited_s, steps, iterator = 0.0, 0, iter(batches)
    while True:
        before = time.perf_counter()
        try:
            batch = next(iterator)
        except StopIteration:
            break
        finally:
            waited_s += time.perf_counter() - before
        steps += 1
        yield batch
    took_s = time.perf_counter() - started
    if not steps:
        return
    with contextlib.suppress(dist.DistError, RuntimeError):  # a store that is gone ends the run, and not for this line
        _tell(steps, took_s / steps, waited_s / steps, since_ns=since_ns, key=key, label=label)


def _tell(steps: int, step_s: float, data_s: float, *, since_ns: int, key: str, label: str) -> None:
    is_connected = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not is_connected:
        _say(line([Pace(0, steps, step_s, data_s)], world_size=1, label=label))
        return
    pace = Pace(dist.get_rank(), steps, step_s, data_s, begun=begun_since(since_ns))
    store = dist.PrefixStore(f"parallelize/pace/{key}", dist.distributed_c10d._get_default_store())
    if pace.rank != 0:
        store.set(str(pace.rank), pace.dumps())
        return
    others = _gathered(store, dist.get_world_size())
    _say(line([pace, *others], world_size=dist.get_world_size(), label=label))


def _say(text: str) -> None:
    from tqdm.auto import tqdm  # here: in a notebook without ipywidgets it warns as soon as it is imported

    tqdm.write(text, file=sys.stderr)


def _gathered(store: dist.Store, world_size: int) -> list[Pace]:
    keys, end = [str(rank) for rank in range(1, world_size)], time.monotonic() + _WAIT_S
    while not store.check(keys) and time.monotonic() < end:
        time.sleep(_LOOK_EVERY_S)
    there = [key for key in keys if store.check([key])]
    paces = [Pace(**json.loads(store.get(key))) for key in there]
    for key in there:
        store.delete_key(key)
    return paces


def line(paces: Sequence[Pace], *, world_size: int, label: str) -> str:
    """The epoch in one line: each process's steps, and the one that the others waited for, if there is one.

    Args:
        paces: of the processes that are through.
        world_size: processes in all.
        label: what the line begins with.
    """
    by_words: dict[str, list[int]] = defaultdict(list)
    shown = sorted(paces, key=lambda pace: -pace.data_s)[:_LISTED] if len(paces) > _LISTED else paces
    for pace in shown:
        by_words[_words(pace)].append(pace.rank)
    parts = [f"{_named(ranks)}: {words}" for words, ranks in by_words.items()]
    if len(shown) < len(paces):
        parts.append(f"{len(paces) - len(shown)} more wait less for data")
    late = sorted({*range(world_size)} - {pace.rank for pace in paces})
    if late:
        parts.append(f"{_named(late)}: not through yet")
    return f"{label}: {'; '.join([*parts, *_held_back(paces)])}"


def _words(pace: Pace) -> str:
    share = pace.data_s / pace.step_s if pace.step_s else 0.0
    return f"{pace.steps} steps of {pace.step_s * 1000:.3g} ms, {share:.0%} of it waiting for data"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _held_back(paces: Sequence[Pace]) -> Iterator[str]:
    """Who comes last to most of the collectives that all have begun, and by how much that matters."""
    common = set.intersection(*(set(pace.begun) for pace in paces)) if len(paces) > 1 else set()
    if len(common) < _LEAST_MEETINGS:
        return
    times = [{pace.rank: pace.begun[name] for pace in paces} for name in common]
    last, often = Counter(max(each, key=lambda rank: each[rank]) for each in times).most_common(1)[0]
    late_s = sum(each[last] - min(each.values()) for each in times) / len(times)
    slow = next(pace for pace in paces if pace.rank == last)
    if 2 * often <= len(times) or late_s < max(_LEAST_LATE_S, _LEAST_SHARE * slow.step_s):
        return
    ahead_s = slow.data_s - min(pace.data_s for pace in paces)
    reason = (
        "it waits for data" if 2 * ahead_s >= late_s else "it computes longer, or something else does on its device"
    )
    yield f"rank {last} holds the others back: it comes to collectives {late_s * 1000:.3g} ms after the first; {reason}"
