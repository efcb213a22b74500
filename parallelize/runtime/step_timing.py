"""Report on rank 0's stderr after an epoch: step times of each process, and the process that the others waited for.

Processes that train together wait for each other in collectives, so their step times are equal. The slow process is
the one that starts collectives last by most seconds in all; torch's flight recorder has the start times.

No collective is run: each process writes its times to the store, and rank 0 waits for them for at most one second.
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

from parallelize.errors import list_ranks
from parallelize.hang_detection.flight_recorder import collective_start_times
from parallelize.runtime.process_group import default_store

__all__ = ["StepTiming", "report_line", "timed_steps"]

T = TypeVar("T")

_WAIT_S, _POLL_S = 1.0, 0.01
_MIN_LATE_S, _MIN_LATE_FRACTION, _MIN_COLLECTIVES = 0.001, 0.05, 3
_MAX_LISTED = 8
_epochs_begun = Counter[str]()  # by label, in all runs: those in a user's process group share its store


@dataclass(frozen=True)
class StepTiming:
    """Timing of one epoch on one process.

    Args:
        rank: rank of the process.
        steps: number of batches that the process took.
        step_s: mean seconds from one batch to the next, including the wait for the batch.
        data_s: mean seconds of that wait.
        collective_starts: name of a collective -> its start on this process, in seconds since 1970 by the local clock.
    """

    rank: int
    steps: int
    step_s: float
    data_s: float
    collective_starts: Mapping[str, float] = field(default_factory=dict)


def timed_steps(batches: Iterable[T], *, label: str) -> Iterator[T]:
    """Yield the batches; after the last one, rank 0 prints the report line.

    Args:
        batches: the batches of this process.
        label: the start of the line, the same on all processes.
    """
    _epochs_begun[label] += 1
    key = f"{label}/{_epochs_begun[label]}"
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
    with contextlib.suppress(dist.DistError, RuntimeError):  # a report that cannot be sent does not end the run
        _report(steps, took_s / steps, waited_s / steps, since_ns=since_ns, key=key, label=label)


def _report(steps: int, step_s: float, data_s: float, *, since_ns: int, key: str, label: str) -> None:
    is_connected = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not is_connected:
        _print(report_line([StepTiming(0, steps, step_s, data_s)], world_size=1, label=label))
        return
    timing = StepTiming(dist.get_rank(), steps, step_s, data_s, collective_starts=collective_start_times(since_ns))
    store = dist.PrefixStore(f"parallelize/step_timing/{key}", default_store())
    if timing.rank != 0:
        store.set(str(timing.rank), json.dumps(dataclasses.asdict(timing)))
        return
    others = _collect(store, dist.get_world_size())
    _print(report_line([timing, *others], world_size=dist.get_world_size(), label=label))


def _print(text: str) -> None:
    from tqdm.auto import tqdm  # imported late: in a notebook without ipywidgets the import warns

    tqdm.write(text, file=sys.stderr)


def _collect(store: dist.Store, world_size: int) -> list[StepTiming]:
    keys, deadline = [str(rank) for rank in range(1, world_size)], time.monotonic() + _WAIT_S
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    present = [key for key in keys if store.check([key])]
    timings = [StepTiming(**json.loads(store.get(key))) for key in present]
    for key in present:
        store.delete_key(key)
    return timings


def report_line(timings: Sequence[StepTiming], *, world_size: int, label: str) -> str:
    """Return the report line of an epoch, with the process that the others waited for, if any.

    Args:
        timings: timings of the processes that have finished the epoch.
        world_size: number of processes.
        label: the start of the line.
    """
    ranks_by_text: dict[str, list[int]] = defaultdict(list)
    is_long = len(timings) > _MAX_LISTED
    shown = sorted(timings, key=lambda timing: -timing.data_s)[:_MAX_LISTED] if is_long else timings
    for timing in shown:
        ranks_by_text[_timing_text(timing)].append(timing.rank)
    phrases = [f"{list_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
    if len(shown) < len(timings):
        phrases.append(f"{len(timings) - len(shown)} more ranks wait less for data")
    unfinished = sorted({*range(world_size)} - {timing.rank for timing in timings})
    if unfinished:
        phrases.append(f"{list_ranks(unfinished)}: not finished yet")
    return f"{label}: {'; '.join([*phrases, *_slowest_text(timings)])}"


def _timing_text(timing: StepTiming) -> str:
    fraction = timing.data_s / timing.step_s if timing.step_s else 0.0
    return f"{timing.steps} steps of {timing.step_s * 1000:.3g} ms, {fraction:.0%} of it waiting for data"


def _slowest_text(timings: Sequence[StepTiming]) -> Iterator[str]:
    """Yield a phrase about the rank that the others wait for most, if its delay is significant."""
    common = set.intersection(*(set(timing.collective_starts) for timing in timings)) if len(timings) > 1 else set()
    if len(common) < _MIN_COLLECTIVES:
        return
    # By last rank: in a short collective, chance decides which one that is.
    late_s: dict[int, float] = defaultdict(float)
    for name in common:
        by_rank = {timing.rank: timing.collective_starts[name] for timing in timings}
        last = max(by_rank, key=lambda rank: by_rank[rank])
        late_s[last] += by_rank[last] - min(by_rank.values())
    rank, total_s = max(late_s.items(), key=lambda item: item[1])
    slowest = next(timing for timing in timings if timing.rank == rank)
    mean_s = total_s / len(common)
    if 3 * total_s <= 2 * sum(late_s.values()) or mean_s < max(_MIN_LATE_S, _MIN_LATE_FRACTION * slowest.step_s):
        return
    extra_wait_s = slowest.data_s - min(timing.data_s for timing in timings)
    reason = "it waits for data" if 2 * extra_wait_s >= mean_s else "it computes longer, or its device is shared"
    delay = f"{mean_s * 1000:.3g} ms after the first rank"
    yield f"rank {rank} slows down the others: it starts collectives {delay}; {reason}"
