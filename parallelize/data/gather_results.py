"""All-gather of per-sample results, in the order of the dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from parallelize.collectives import all_gather
from parallelize.data.sampler_arithmetic import EpochSplit
from parallelize.errors import ConfigError
from parallelize.runtime.containers import map_leaves

__all__ = ["gather_in_dataset_order", "indices_of"]


def gather_in_dataset_order(results: Any, *, split: EpochSplit, order: Sequence[Any], rank: int, steps: int) -> Any:
    """All-gather per-sample results: one row per sample, sorted by index, without repeats.

    Args:
        results: tensors, or containers of them, with one row per sample that this process was given, in the same order.
        split: how the epoch is sharded.
        order: the units of the epoch: indices, or batches of indices.
        rank: rank of this process.
        steps: number of batches that this process was given.

    Raises:
        ConfigError: a tensor has another number of rows, or a leaf is not a tensor.
    """
    # Every process computes which samples each process was given, so only step counts and results are sent.
    steps_by_rank = all_gather(steps)
    rows_by_rank = [list(_unique_rows(split, order, each, steps_by_rank[each])) for each in range(split.world_size)]
    total = sum(len(indices_of(unit)) for unit in _units(split, order, rank, steps))
    local_rows = torch.tensor([row for row, _ in rows_by_rank[rank]], dtype=torch.int64)
    longest = max(map(len, rows_by_rank))
    row_of_index: dict[Any, int] = {}
    for each, rows in enumerate(rows_by_rank):
        for row, (_, index) in enumerate(rows):
            row_of_index.setdefault(index, each * longest + row)
    indices = sorted(row_of_index) if all(isinstance(index, int) for index in row_of_index) else list(row_of_index)
    gathered_rows = torch.tensor([row_of_index[index] for index in indices], dtype=torch.int64)

    def padded(leaf: Any) -> Tensor:
        _check_rows(leaf, total)
        local: Tensor = leaf[local_rows.to(leaf.device)]
        return torch.cat([local, local.new_zeros((longest - len(local), *local.shape[1:]))])

    gathered = all_gather(map_leaves(padded, results))  # (longest, *S) -> (W, longest, *S)
    return map_leaves(lambda leaf: leaf.flatten(0, 1)[gathered_rows.to(leaf.device)], gathered)


def _unique_rows(split: EpochSplit, order: Sequence[Any], rank: int, steps: int) -> Iterator[tuple[int, Any]]:
    """Yield (row in a process's results, index in the dataset) for each of its samples, without repeats."""
    row = 0
    for step in range(steps):
        unique = split.unique_positions(rank, step)
        for position in split.positions(rank, step):
            indices = indices_of(order[position % split.total])
            if position in unique:
                yield from enumerate(indices, start=row)
            row += len(indices)


def _units(split: EpochSplit, order: Sequence[Any], rank: int, steps: int) -> Iterator[Any]:
    for step in range(steps):
        for position in split.positions(rank, step):
            yield order[position % split.total]


def indices_of(unit: Any) -> Sequence[Any]:
    """Return the indices in a unit, which is an index or a batch of them; converts tensors and NumPy numbers."""
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
