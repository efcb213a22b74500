"""Which units of a pass each process takes, in which batches: pure functions.

    unit    what the user's sampler yields: an index, or a batch of indices
    pass    one iteration over a loader, from `iter()` to its end
    order   all units of a pass, in the order of one process
    step    what all processes together take at a time
    share   the units of one process in a step; under `logical=`, of one part
    tail    the units at the end that do not divide evenly
    weight  the factor of a process's gradients that makes their mean the mean over samples

Share `r` of `W` takes every W-th unit from position `r` on, as torch's DistributedSampler does. An
example with W=2, steps of 4 units, and 7 units (`.` is a unit, `:` is padding, a unit repeated from
the beginning):

    position     0 1 2 3 | 4 5 6 7
    step         0 . . . | 1 . . :
    share        0 1 0 1 | 0 1 0 1

    pad          r0: 0 2, 4 6    r1: 1 3, 5 0      equal lengths, some units are repeated
    drop         r0: 0 2, 4      r1: 1 3, 5        equal lengths, the last units are left out
    exact        r0: 0 2, 4 6    r1: 1 3, 5        each unit is taken once
    weighted     as exact, but a share that would be empty repeats units, with weight 0
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
from typing import Any, Literal, NamedTuple

from parallelize.run.containers import leaves

Tail = Literal["pad", "drop", "exact", "weighted"]

UNKNOWN = sys.maxsize
"""The number of units of a stream that does not tell it."""

_UNITS_AT_ONCE = 2**12
_MOST_COMPARED = 256
# Elements of an array that are hashed: enough to distinguish batches, which may take gigabytes.
_MOST_ELEMENTS = 1024


@dataclass(frozen=True, kw_only=True)
class EpochSplit:
    """The shares of one pass, or of the rest of it.

    Args:
        total: number of units of the whole pass; sys.maxsize: unknown.
        shares: number of shares.
        group: number of units that all processes together take in one step.
        drop_last: whether to leave out an incomplete last step, after units were repeated for
            "pad": as DataLoader(drop_last=True) does with a DistributedSampler.
        start: number of units of the pass that are already consumed.
        limit: the maximum number of units of the pass to consume.
        merged_shares: number of processes whose units one share has, for `compare`: those that they
            repeat at the end, too, and without those that they leave out.
    """

    total: int = UNKNOWN
    shares: int
    group: int
    tail: Tail = "pad"
    drop_last: bool = False
    start: int = 0
    limit: int = UNKNOWN
    merged_shares: int = 1

    def limited(self, limit: float | None) -> EpochSplit:
        """Return this split with a limit.

        Args:
            limit: a number of steps of the whole pass, also of one that is resumed; or a fraction
                of its steps, of which at least one is taken; None: no limit.
        """
        if limit is None:
            return self
        # A count of steps is used as it is: the length of the data may be an estimate.
        steps = limit
        if isinstance(limit, float):
            steps = int(limit * dataclasses.replace(self, start=0).steps(0)) or 1
        return dataclasses.replace(self, limit=min(int(steps) * self.group, UNKNOWN))

    @property
    def end(self) -> int:
        """End (exclusive) of the positions that are taken.

        With "pad" it may be beyond `total`: these positions repeat units from the beginning of the
        order. It is a multiple of the number of shares, and not of `group`: the last step may be
        short, but is equally short for all shares, which collectives of the ranks rely on.
        """
        rest = max(min(self.total, self.limit) - self.start, 0)
        shares = self.shares * self.merged_shares
        if self.tail == "pad":
            rest = -(-rest // shares) * shares
        elif self.tail == "drop":
            rest = rest // shares * shares
        return self.start + rest

    @property
    def has_repeats(self) -> bool:
        """Whether some units are taken twice, with their full weight."""
        return self.tail == "pad" and self.end > self.total

    def steps(self, share: int) -> int:
        """Count the batches of a share.

        They are equally many for all shares, unless the tail is "exact": there, share 0 may have
        one more than the last share.
        """
        rest = self.end - self.start
        if self.drop_last:
            return rest // self.group
        if self.tail == "exact":
            # Share s begins s positions later, so that it has s positions less before the end.
            rest -= share
        return max(-(-rest // self.group), 0)

    def positions(self, share: int, step: int) -> range:
        """Return the positions of a share in a step; those from `total` on repeat units.

        They are never empty with "weighted", whose ranks all have to make the step.
        """
        first = self.start + step * self.group
        positions = range(first + share, min(first + self.group, self.end), self.shares)
        if positions or self.tail != "weighted":
            return positions
        # Units of weight 0. As many as in a full batch, because batch norm refuses a single sample.
        # If a step has fewer units than there are shares, the range still reaches one position.
        return range(first + share, first + max(self.group, share + 1), self.shares)

    def positions_counted(self, share: int, step: int) -> range:
        """Return the positions of a share in a step, without repeats of units.

        They are the first ones of `positions`, of which some, or all, may be repeats.
        """
        taken = self.taken(step, step + 1)
        return taken[share :: self.shares]

    def taken(self, first_step: int, end_step: int) -> range:
        """Return the positions that all processes take in steps, without repeats of units.

        Args:
            first_step: the first of the steps.
            end_step: the one after the last.
        """
        first = self.start + first_step * self.group
        end = self.start + end_step * self.group
        return range(first, min(end, self.end, self.total))

    def start_after(self, steps: int) -> int:
        """Count the units of the pass that are consumed after `steps` steps of every process.

        A state at this position is resumed with another number of processes, too, because it counts
        the units of all.
        """
        end = self.start + steps * self.group
        if self.total == UNKNOWN:
            return end
        return min(end, max(self.end, self.start))

    def batches(self, order: Sequence[Any], share: int) -> Iterator[Sequence[Any]]:
        """Yield each batch of a share, as a sequence of units.

        Args:
            order: all units of the pass: a list, a range, or a tensor.
            share: number of the share.
        """
        # Full steps of equally many units for each share: one slice has those of many steps. The
        # rest, and steps whose shares differ by a unit, one by one.
        size, remainder = divmod(self.group, self.shares)
        full_steps = 0
        if not remainder:
            full_steps = max(min(self.end, self.total) - self.start, 0) // self.group
        # A slice of a tensor takes 2 us.
        stride = max(_UNITS_AT_ONCE // max(size, 1), 1)
        for step in range(0, full_steps, stride):
            first = self.start + step * self.group
            end = self.start + min(step + stride, full_steps) * self.group
            units = to_python(order[first + share : end : self.shares])
            for position in range(0, len(units), size):
                yield units[position : position + size]
        for step in range(full_steps, self.steps(share)):
            positions = self.positions(share, step)
            if positions.stop <= self.total:
                yield to_python(order[positions.start : positions.stop : positions.step])
            else:
                yield [to_python(order[position % self.total]) for position in positions]

    def batches_of_stream(self, stream: Iterable[Any], share: int) -> Iterator[list[Any]]:
        """Yield each batch of a share, from units whose number is unknown.

        Every share has as many units in a step, so that `group` is a multiple of `shares`.
        """
        units, size = self.units_of_stream(stream, share), self.group // self.shares
        while batch := list(itertools.islice(units, size)):
            if len(batch) == size or not self.drop_last:
                yield batch

    def units_of_stream(self, stream: Iterable[Any], share: int) -> Iterator[Any]:
        """Yield the units of a share, from a stream of those of the whole pass.

        All units of a round are drawn before this share's is yielded: if a loop is left, the
        streams of all shares go on at the same unit.

            units     a b c d | e f      share 1 of 4 yields b when a b c d are drawn, and f when
            share     0 1 2 3 | 0 1      the stream has ended; "pad" gives share 2 the unit a, and
                                         share 3 the unit b

        Args:
            stream: the units of the whole pass; those before `start` are drawn, and left out.
            share: number of the share.
        """
        units = itertools.islice(stream, self.limit)
        # The first units may pad the last round, also that of a pass that starts later.
        first_units = list(itertools.islice(units, self.shares))
        units = itertools.islice(itertools.chain(first_units, units), self.start, None)
        while units_of_round := list(itertools.islice(units, self.shares)):
            number = len(units_of_round)
            is_full = number == self.shares
            if share < number and (is_full or self.tail != "drop"):
                yield units_of_round[share]
            elif share >= number and self.tail == "pad":
                yield first_units[(share - number) % len(first_units)]


def share_of_batch(batch: Sequence[Any], share: int, shares: int) -> Sequence[Any]:
    """Return the share of a batch of indices.

    One that would be empty repeats an index, which counts with weight 0: each process has to make
    the step.
    """
    indices = batch[share::shares]
    if indices or not batch:
        return indices
    return [batch[share % len(batch)]]


def to_python(index: Any) -> Any:
    """Convert tensors, arrays and NumPy's numbers."""
    return index.tolist() if hasattr(index, "tolist") else index


def indices_of(unit: Any) -> Sequence[Any]:
    """Return the indices in a unit, which is an index or a batch of them.

    Tensors, arrays and NumPy's numbers are converted: two tensors of one value are different keys.
    """
    unit = to_python(unit)
    if isinstance(unit, (Sequence, AbstractSet)) and not isinstance(unit, (str, bytes)):
        return [to_python(index) for index in unit]
    return (unit,)


class RowsOfRanks(NamedTuple):
    """Where the results of samples lie that all ranks have gathered.

    Args:
        counts: number of samples of each rank, without repeats at the end.
        rows: row of each index, sorted by index; row k of rank r is the row r * max(counts) + k.
    """

    counts: list[int]
    rows: list[int]


def rows_in_dataset_order(indices_by_rank: Sequence[Sequence[Any]]) -> RowsOfRanks:
    """Return where the result of each index lies.

    Args:
        indices_by_rank: the indices that each rank has read, in its order, without repeats at the
            end. Samplers may yield an index several times: its first row is taken.
    """
    counts = [len(indices) for indices in indices_by_rank]
    longest, row_of_index = max(counts), dict[Any, int]()
    for rank, indices in enumerate(indices_by_rank):
        for position, index in enumerate(indices):
            row_of_index.setdefault(index, rank * longest + position)
    return RowsOfRanks(counts, [row_of_index[index] for index in sorted(row_of_index)])


def order_fingerprint(order: Any) -> str:
    """Return a hash of an order, by the first units and a sample of the others.

    It is compared between ranks, and with that of an interrupted pass. Some hundred units are
    enough to tell two orders apart; to hash 10^8 of them would take a minute.
    """
    stride = max(len(order) // _MOST_COMPARED, 1)
    return _hashed(
        repr([len(order), to_python(order[:_MOST_COMPARED]), to_python(order[::stride])])
    )


def sample_fingerprint(data: Iterable[Any], *, are_samples: bool = False) -> str:
    """Return a short hash of samples or batches; of objects of unknown types, only the type counts.

    It is "" if a container cannot be read. If the data contains integer arrays or text, only these
    are hashed: floats may differ by augmentation, and a single number beside a batch is often a
    counter. If the data `are_samples`, an integer counts as well, because it may be a label.
    """
    texts, identifying = list[str](), list[str]()
    try:
        for leaf in leaves(list(data)):
            text = _hashable_text(leaf)
            texts.append(text.text)
            is_number = text.first_type is int and (are_samples or text.is_array)
            if is_number or text.first_type in (str, bytes):
                identifying.append(text.text)
    except Exception:  # noqa: BLE001 - a container of the user raises an error, or contains itself
        return ""
    return _hashed("/".join(identifying or texts))


class _HashableText(NamedTuple):
    """The text of a leaf's values.

    Args:
        text: the values and the shape, or the type of an object that has no plain values.
        first_type: type of the first value: int, float, str or bytes; None: another one.
        is_array: whether the leaf is an array with at least one dimension.
    """

    text: str
    first_type: type | None
    is_array: bool


def _hashable_text(leaf: Any) -> _HashableText:
    """Return the text to hash for a leaf."""
    values: list[Any] = [leaf]
    shape: tuple[int, ...] = ()
    with contextlib.suppress(Exception):  # a class of the user, or a nested or sparse tensor
        if hasattr(leaf, "reshape"):
            values, shape = leaf.reshape(-1)[:_MOST_ELEMENTS].tolist(), tuple(leaf.shape)
    first = values[0] if values else 0.0
    for plain_type in (int, float, str, bytes):
        if isinstance(first, plain_type):
            return _HashableText(f"{shape}{values}", plain_type, bool(shape))
    return _HashableText(type(leaf).__qualname__, None, is_array=False)


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
