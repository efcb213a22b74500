"""EpochShard: one process's shard of an epoch, of an order known in advance or of a stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from parallelize.collectives import all_gather
from parallelize.data.epoch_order import Permutation, order_fingerprint
from parallelize.data.rng import derive_seed
from parallelize.data.sample_fingerprint import sample_fingerprint
from parallelize.data.sampler_arithmetic import EpochSplit
from parallelize.errors import ConfigError, SyncError
from parallelize.runtime.containers import map_leaves

__all__ = ["EpochShard", "Position", "indices_of", "rows_in_dataset_order"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position in the data, at which an epoch shard starts.

    Args:
        epoch: its number, from 0.
        start: number of its units that are already consumed; each `Source` class defines its unit.
        facts: what is known of an interrupted epoch (see `EpochShard.facts`).
    """

    epoch: int = 0
    start: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(eq=False, kw_only=True)
class EpochShard(Generic[T]):
    """One process's shard of the rest of one epoch.

    Args:
        fetch: function that makes the batches of this shard, or of the units of each step; called only once.
        split: how the units are sharded; the number of a stream's units may be an estimate.
        order: all units of the epoch; None if they are not known in advance.
        stream: the units of an epoch without `order`, from its beginning.
        is_grouped: whether a step takes a list of units; if false, it takes a single unit.
        is_own: whether the stream is of this process only, so that processes do not compare it.
        data: text that identifies the data, for `fingerprint`.
        first: hash of the first units or samples of a stream, once they are drawn; "" if they are not compared.
        own_first: that of rank 0's first batch of a stream of its own, which only a resumed epoch is compared with.
        states: the latest states of the dataset, from which the epoch can go on (see `DatasetStates`).
    """

    position: Position
    fetch: Callable[[EpochShard[T]], Iterator[T]]
    split: EpochSplit
    rank: int = 0
    order: Sequence[Any] | None = None
    stream: Iterable[Any] = ()
    is_grouped: bool = False
    is_own: bool = False
    data: str = ""
    first: str = ""
    own_first: str = ""
    states: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_shuffled(self) -> bool:
        """Whether the order is known, and may be another one in each epoch."""
        return self.order is not None and not isinstance(self.order, range)

    def facts(self) -> dict[str, Any]:
        """Return what is saved of an interrupted epoch: its units' number and order, or a hash of a stream's start."""
        if self.order is not None:
            return {"units": len(self.order), "order": self.fingerprint()}
        # Hashes are comparable where all processes together take as many units in a step.
        first = self.first or self.own_first
        return {"first": [self.split.group, first]} if first else {}

    def __iter__(self) -> Iterator[Any]:
        """Yield the unit or the list of units of each step."""
        batches: Iterable[Sequence[Any]]
        if self.order is not None:
            batches = self.split.batches(self.order, self.rank)
        else:
            batches = self.split.batches_of_stream(self.stream if self.is_own else self._hashed_stream(), self.rank)
        return map(list, batches) if self.is_grouped else (batch[0] for batch in batches)

    def _hashed_stream(self) -> Iterator[Any]:
        stream = iter(self.stream)
        # As many units as rank 0 draws for its first batch, because it takes every W-th unit. Other ranks draw more.
        first = list(itertools.islice(stream, self.split.group - self.split.world_size + 1))
        self.first = sample_fingerprint(first) + self.data
        yield from first
        del first
        yield from stream

    def steps(self) -> int | None:
        """Count this process's batches; None if unknown."""
        return self.split.known_steps(self.rank)

    def start_after(self, steps: int) -> int:
        """Return the `Position.start` at which to resume after every process has taken `steps` batches."""
        if self.order is None:
            return self.split.start + steps * self.split.group
        return self.split.start_after(steps)

    def fingerprint(self) -> str:
        """Return a hash of the order, which processes compare; "" if the order is unknown."""
        return self.first if self.order is None else order_fingerprint(self.order) + self.data

    def samples(self, step: int | None = None) -> int | None:
        """Count the samples that all processes take in a step, or in all steps, without padding; None if unknown."""
        split = self.split
        if self.order is None:
            return None
        whole = range(split.start, min(split.start_after(split.steps(0)), split.total))
        return self._samples_at(whole if step is None else split.global_positions(step))

    def weight(self, step: int) -> float:
        """Return the weight of this process's gradients in a step, for which they average to the mean over samples.

        It is this process's fraction of the step's samples, times the world size: 1 if the shards are equal.
        """
        if self.order is None or self.split.tail != "weighted":
            return 1.0
        split = self.split
        local = self._samples_at(split.unique_positions(self.rank, step))
        return local * split.world_size / self._samples_at(split.global_positions(step))

    def _samples_at(self, positions: Sequence[int]) -> int:
        order: Any = self.order
        if self.is_grouped:
            return len(positions)
        return sum(len(indices_of(order[each % len(order)])) for each in positions)

    def gather(self, results: Any, *, steps: int) -> Any:
        """All-gather the results of the first `steps` steps: one row per sample, sorted by index, without repeats."""
        if self.order is None:
            raise ConfigError(
                "gather on a loader without indices",
                why="results are ordered by the indices that were iterated",
                fix="use parallelize.all_gather",
            )
        # Every process computes which samples each process was given, so only step counts and results are sent.
        order = derive_seed(self.split, self.position.epoch, self.fingerprint())
        steps_by_rank, orders = all_gather([steps, order])
        if others := [rank for rank, each in enumerate(orders) if each != orders[0]]:
            raise SyncError(
                f"gather on ranks that have iterated different epochs or orders: {others} and 0",
                why="each process computes from its own order which samples the others were given",
                fix="iterate the loader equally often on all processes, with the same data, seeds and set_epoch() "
                "calls; on one process alone, use a separate loader",
            )
        counts, gathered_rows = rows_in_dataset_order(self.split, self.order, steps_by_rank)
        count, longest = counts[self.rank], max(counts)
        total = sum(self._samples_at(self.split.positions(self.rank, step)) for step in range(steps))

        def padded(leaf: Any) -> Tensor:
            if not isinstance(leaf, Tensor):
                raise ConfigError(
                    f"gather of a {type(leaf).__name__}",
                    why="only tensors have one row per sample",
                    fix="use loader.gather(torch.cat(outputs)), or torch.tensor(values)",
                )
            if leaf.ndim == 0 or len(leaf) != total:
                raise ConfigError(
                    f"gather of a tensor of shape {list(leaf.shape)}",
                    why=f"this process was given {total} samples in this epoch, and each needs one row",
                    fix="collect the output of every batch since iter(), and use loader.gather(torch.cat(outputs))",
                )
            local: Tensor = leaf[:count]
            return torch.cat([local, local.new_zeros((longest - count, *local.shape[1:]))])

        gathered = all_gather(map_leaves(padded, results))  # (longest, *S) -> (W, longest, *S)
        return map_leaves(lambda leaf: leaf.flatten(0, 1)[gathered_rows.to(leaf.device)], gathered)


def rows_in_dataset_order(
    split: EpochSplit, order: Sequence[Any], steps_by_rank: Sequence[int]
) -> tuple[list[int], Tensor]:
    """Return the number of samples of each process, without repeats, and their rows, sorted by index.

    Row `k` of process `r` is counted as `r * longest + k`. Rows of repeated units, the last ones of a process, are left
    out, and of an index that several rows have, all but the first.
    """
    by_rank = [_indices(split, order, rank, steps) for rank, steps in enumerate(steps_by_rank)]
    counts = [len(each) for each in by_rank]
    if not all(isinstance(each, Tensor) for each in by_rank):  # keys in the order in which they come first
        numbers: dict[Any, int] = {}
        units = ([numbers.setdefault(key, len(numbers)) for key in _to_python(each)] for each in by_rank)
        by_rank = [torch.tensor(each, dtype=torch.int64) for each in units]
    rows = torch.cat([torch.arange(count) + rank * max(counts) for rank, count in enumerate(counts)])
    indices, positions = torch.sort(torch.cat(by_rank), stable=True)
    is_first = torch.ones_like(indices, dtype=torch.bool)
    is_first[1:] = indices[1:] != indices[:-1]
    return counts, rows[positions[is_first]]


def _indices(split: EpochSplit, order: Sequence[Any], rank: int, steps: int) -> Any:
    """Return the indices of a process's samples without those that repeat a unit: a tensor, or a list of any keys."""
    # A process takes every W-th position, over all of its steps.
    end = split.positions(rank, steps - 1).stop if steps else split.start
    taken = slice(split.start + rank, min(end, split.end, split.total), split.world_size)
    if taken.start >= taken.stop:
        return torch.empty(0, dtype=torch.int64)
    if isinstance(order, Permutation):
        return order.indices[taken].long()
    units: Sequence[Any] = order[taken]
    is_flat = set(map(type, units)) == {int}
    indices = units if is_flat else [index for unit in units for index in indices_of(unit)]
    return torch.tensor(indices, dtype=torch.int64) if is_flat or set(map(type, indices)) == {int} else indices


def indices_of(unit: Any) -> Sequence[Any]:
    """Return the indices in a unit, which is an index or a batch of them; converts tensors and NumPy numbers."""
    if type(unit) is int:
        return (unit,)
    unit = _to_python(unit)
    if isinstance(unit, (Sequence, AbstractSet)) and not isinstance(unit, (str, bytes)):
        return [_to_python(each) for each in unit]
    return (unit,)


def _to_python(index: Any) -> Any:
    return index.tolist() if hasattr(index, "tolist") else index
