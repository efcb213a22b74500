"""The order of the units of an epoch, and which of them each process gets, in which batches.

A unit is one item of the user's sampler: an index, or a batch of indices. All processes have the
same order of units; process `r` of `W` takes every W-th unit from position `r` on, as torch's
DistributedSampler does. An example with W=2, batches of 2 units, and 7 units (`.` is a unit, `:` is
padding, a unit repeated from the beginning):

    position     0 1 2 3 | 4 5 6 7
    step         0 . . . | 1 . . :        a step takes group = W * batch size positions
    rank         0 1 0 1 | 0 1 0 1        so a rank's share of a step is a slice with stride W

    pad          r0: 0 2, 4 6    r1: 1 3, 5 0      equal lengths, some units are repeated
    drop         r0: 0 2, 4      r1: 1 3, 5        equal lengths, the last units are left out
    exact        r0: 0 2, 4 6    r1: 1 3, 5        each unit is taken once
    weighted     as exact, but a rank without a batch in the last step repeats units, with weight 0

Nothing here communicates: every process can compute the shares of all from a few numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from parallelize.data.rng import stream_rng
from parallelize.runtime.containers import leaves

__all__ = [
    "EpochSplit",
    "Tail",
    "draw_order",
    "indices_of",
    "is_exactly",
    "order_fingerprint",
    "rows_in_dataset_order",
    "sample_fingerprint",
    "to_python",
]

Tail = Literal["pad", "drop", "exact", "weighted"]

_MAX_LISTED = 2**24  # samplers with more units are drawn while they are iterated
_CHUNK = 2**12
_MAX_COMPARED = 256
# Elements of an array that are hashed: enough to distinguish batches, which may take gigabytes.
_MAX_ELEMENTS = 1024


@dataclass(frozen=True, kw_only=True)
class EpochSplit:
    """The shares of one epoch, or of the rest of it, on all processes.

    Args:
        total: number of units of the full epoch; sys.maxsize: unknown.
        group: number of units that all processes together take in one step.
        drop_last: whether to leave out an incomplete last step, as DataLoader(drop_last=True) does.
        start: number of units of the epoch that are already consumed.
        limit: the maximum number of units of the epoch to consume.
        parts: number of shares that one process reads (`logical=`); ranks are then those of shares.
    """

    total: int = sys.maxsize
    world_size: int
    group: int
    tail: Tail = "pad"
    drop_last: bool = False
    start: int = 0
    limit: int = sys.maxsize
    parts: int = 1

    def limited(self, limit: float | None) -> EpochSplit:
        """Return this split with a limit: steps of the full epoch, or a fraction, at least 1."""
        if limit is None:
            return self
        steps = dataclasses.replace(self, start=0).steps(0)
        # A length, and with it `steps`, may be wrong: an int is not cut to it.
        allowed = limit if isinstance(limit, int) else int(limit * steps) or 1
        return dataclasses.replace(self, limit=min(allowed * self.group, sys.maxsize))

    @property
    def end(self) -> int:
        """End (exclusive) of the positions that are taken; from `total` on they repeat units."""
        left = max(min(self.total, self.limit) - self.start, 0)
        if self.tail == "pad":
            left = -(-left // self.world_size) * self.world_size
        elif self.tail == "drop":
            left = left // self.world_size * self.world_size
        return self.start + left

    def steps(self, rank: int) -> int:
        """Count the batches of a process; equally many on all, unless the tail is "exact"."""
        left = self.end - self.start
        if self.drop_last:
            return left // self.group
        if self.tail == "exact":
            left -= rank
        return max(-(-left // self.group), 0)

    def positions(self, rank: int, step: int) -> range:
        """Return the positions that a process takes in a step; those from `total` on repeat units."""
        first = self.start + step * self.group
        positions = range(first + rank, min(first + self.group, self.end), self.world_size)
        if positions or self.tail != "weighted":
            return positions
        # Units of weight 0. They fill the batch, because batch norm refuses a single sample.
        return range(first + rank, first + self.group, self.world_size)

    def taken(self, steps: range) -> range:
        """Return the positions that all processes take in steps, without repeats of units."""
        first, end = (self.start + step * self.group for step in (steps.start, steps.stop))
        return range(first, min(end, self.end, self.total))

    def start_after(self, steps: int) -> int:
        """Count the units of the epoch that are consumed after `steps` steps of every process."""
        end = self.start + steps * self.group
        return end if self.total == sys.maxsize else min(end, max(self.end, self.start))

    def batches(self, order: Sequence[Any], rank: int) -> Iterator[Sequence[Any]]:
        """Yield each batch of a process, as a sequence of units."""
        size, is_uneven = divmod(self.group, self.world_size)
        full = 0 if is_uneven else max(min(self.end, self.total) - self.start, 0) // self.group
        stride = max(_CHUNK // size, 1)
        for step in range(0, full, stride):  # many steps at once: a slice of a tensor takes 2 us
            first = self.start + step * self.group
            end = self.start + min(step + stride, full) * self.group
            units = to_python(order[first + rank : end : self.world_size])
            for position in range(0, len(units), size):
                yield units[position : position + size]
        for step in range(full, self.steps(rank)):
            positions = self.positions(rank, step)
            yield [to_python(order[position % self.total]) for position in positions]

    def batches_of_stream(self, stream: Iterable[Any], rank: int) -> Iterator[list[Any]]:
        """Yield each batch of a process, from units whose number is unknown."""
        units, size = self.units_of_stream(stream, rank), self.group // self.world_size
        while batch := list(itertools.islice(units, size)):
            if len(batch) == size or not self.drop_last:
                yield batch

    def units_of_stream(self, stream: Iterable[Any], rank: int) -> Iterator[Any]:
        """Yield the units of a process, from those of an epoch, of unknown number, from its begin.

        Units of the other processes in a step are drawn first: a stream that is left goes on at the
        same unit on all of them.
        """
        counter, size = itertools.count(), self.world_size
        units = zip(itertools.islice(stream, self.limit), counter, strict=False)
        first = [unit for unit, _ in itertools.islice(units, rank)]  # may pad this rank's units
        others = size - 1 - rank
        for unit, _ in itertools.islice(units, self.start, None, rank + 1):
            drawn = sum(1 for _ in itertools.islice(units, others))
            if self.tail == "drop" and drawn < others:
                return
            yield unit
        total = next(counter)
        missing = (self.start - total) % size if total > self.start else 0
        if self.tail == "pad" and rank >= size - missing:
            yield first[(rank + missing - size) % len(first)]


def draw_order(sampler: Any, seed: int) -> Any:
    """Return all units that a sampler yields; None: they are too many to list, or endless.

    For torch's RandomSampler, the order is that of DistributedSampler. Before any other sampler is
    iterated, every generator that it may use is seeded, so that all processes get one order.
    """
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    is_random = is_exactly(sampler, RandomSampler) and not sampler.replacement
    length = len(sampler)
    if is_random and length == len(sampler.data_source):  # yields each index once
        # 4 bytes per index, converted to Python a slice at a time; the values are the same.
        dtype = torch.int32 if length < 2**31 else torch.int64
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(length, generator=generator, dtype=dtype)
    if length > _MAX_LISTED:
        return None
    # A length may be an estimate, and an endless sampler may have one.
    most = 2 * length + _CHUNK
    with stream_rng(sampler, seed):
        listed = list(itertools.islice(sampler, most))
    return listed if len(listed) < most else None


def is_exactly(sampler: object, kind: type) -> bool:
    """Whether a sampler is of a class of torch, or torchdata's of that name, and no subclass."""
    name = type(sampler).__module__, type(sampler).__name__
    return type(sampler) is kind or name == (
        "torchdata.stateful_dataloader.sampler",
        kind.__name__,
    )


def order_fingerprint(order: Any) -> str:
    """Return a hash of an order, by the first units and a sample of the others."""
    sample = order[:: max(len(order) // _MAX_COMPARED, 1)]
    return _hashed(repr([len(order), to_python(order[:_MAX_COMPARED]), to_python(sample)]))


def indices_of(unit: Any) -> Sequence[Any]:
    """Return the indices in a unit, an index or a batch; converts tensors and NumPy's numbers."""
    unit = to_python(unit)
    if isinstance(unit, (Sequence, AbstractSet)) and not isinstance(unit, (str, bytes)):
        return list(map(to_python, unit))
    return (unit,)


def rows_in_dataset_order(split: EpochSplit, order: Any, steps_by_rank: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return each process's number of samples, without repeats, and their rows, sorted by index.

    Row `k` of process `r` is counted as `r * longest + k`. Of an index that several rows have, all
    but the first are left out.
    """
    counts = [0] * (split.world_size // split.parts)
    found: dict[Any, tuple[int, int]] = {}
    whole = split.taken(range(max(steps_by_rank)))
    units = to_python(order[whole.start : whole.stop])
    places = [divmod(position - split.start, split.group) for position in whole]
    rows = [(step, place % split.world_size, unit) for (step, place), unit in zip(places, units, strict=True)]
    for step, share, unit in sorted(rows, key=itemgetter(0, 1)) if split.parts > 1 else rows:
        rank = share // split.parts
        for index in indices_of(unit) if step < steps_by_rank[rank] else ():
            found.setdefault(index, (rank, counts[rank]))
            counts[rank] += 1
    longest = max(counts)
    return counts, [rank * longest + row for _, (rank, row) in sorted(found.items())]


def to_python(index: Any) -> Any:
    """Convert tensors, arrays and NumPy's numbers."""
    return index.tolist() if hasattr(index, "tolist") else index


def sample_fingerprint(data: Iterable[Any], *, are_samples: bool = False) -> str:
    """Return a short hash of samples or batches; of objects of unknown types, only the type counts.

    It is "" if a container cannot be read. If the data contains integer arrays or text, only these
    are hashed: floats may differ by augmentation, and a single number beside a batch is often a
    counter. If the data `are_samples`, an integer counts as well, because it may be a label.
    """
    try:
        texts = [_hashable_text(leaf, are_samples) for leaf in leaves(list(data))]
    except Exception:  # noqa: BLE001 - a container of the user raises an error, or contains itself
        return ""
    identifying = [text for text, is_identifying in texts if is_identifying]
    return _hashed("/".join(identifying or [text for text, _ in texts]))


def _hashable_text(leaf: Any, has_labels: bool) -> tuple[str, bool]:  # noqa: FBT001 - one caller
    """Return the text to hash for a leaf, and whether it identifies the sample."""
    values, shape = [leaf], ()
    with contextlib.suppress(Exception):  # a class of the user, or a nested or sparse tensor
        if hasattr(leaf, "reshape"):
            values, shape = leaf.reshape(-1)[:_MAX_ELEMENTS].tolist(), tuple(leaf.shape)
    first = next(iter(values), 0.0)
    if not isinstance(first, (str, bytes, int, float)):
        return type(leaf).__qualname__, False
    identifying = (str, bytes, int) if has_labels or shape else (str, bytes)
    return f"{shape}{values}", isinstance(first, identifying)


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
