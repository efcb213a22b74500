"""All-gather of per-sample results, in the order of the dataset."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from parallelize.collectives import all_gather
from parallelize.data.epoch_order import Permutation
from parallelize.data.sampler_arithmetic import EpochSplit
from parallelize.errors import ConfigError
from parallelize.runtime.containers import map_leaves

__all__ = ["gather_in_dataset_order", "indices_of", "rows_in_dataset_order"]


def gather_in_dataset_order(results: Any, *, split: EpochSplit, order: Sequence[Any], rank: int, steps: int) -> Any:
    """All-gather per-sample results: one row per sample, sorted by index, without repeats.

    Raises:
        ConfigError: a tensor has another number of rows, or a leaf is not a tensor.
    """
    # Every process computes which samples each process was given, so only step counts and results are sent.
    steps_by_rank = all_gather(steps)
    counts, gathered_rows = rows_in_dataset_order(split, order, steps_by_rank)
    count, longest = counts[rank], max(counts)
    total = count + sum(len(indices_of(order[each % split.total])) for each in _repeats(split, rank, steps))

    def padded(leaf: Any) -> Tensor:
        _check_rows(leaf, total)
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
    rows = torch.cat([torch.arange(count) + rank * max(counts) for rank, count in enumerate(counts)])
    if all(isinstance(each, Tensor) for each in by_rank):
        indices, positions = torch.sort(torch.cat(by_rank), stable=True)
        is_first = torch.ones_like(indices, dtype=torch.bool)
        is_first[1:] = indices[1:] != indices[:-1]
        return counts, rows[positions[is_first]]
    row_of_index: dict[Any, int] = {}
    for row, index in zip(rows.tolist(), (index for each in by_rank for index in each), strict=True):
        row_of_index.setdefault(index, row)
    return counts, torch.tensor(list(row_of_index.values()), dtype=torch.int64)


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


def _repeats(split: EpochSplit, rank: int, steps: int) -> range:
    """Return the positions of a process that repeat units; they are in its last step."""
    last = split.positions(rank, steps - 1) if steps else range(0)
    unique = split.unique_positions(rank, steps - 1) if steps else range(0)
    return last[len(unique) :]


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


def _check_rows(leaf: Any, total: int) -> None:
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
