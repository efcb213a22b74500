"""Results of all processes, back in the order of the dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from parallelize.collectives import all_gather
from parallelize.data.sampler_arithmetic import Split
from parallelize.errors import ConfigError
from parallelize.runtime.containers import map_leaves

__all__ = ["in_dataset_order", "indices_of", "rows_of"]


def in_dataset_order(results: Any, *, split: Split, order: Sequence[Any], rank: int, steps: int) -> Any:
    """Per-sample results of all processes, one row for each sample, by ascending index; a collective.

    Args:
        results: tensors, or containers of them, with a row for each sample that this process was given, in that order.
        split: how the epoch was divided.
        order: its units: indices, or batches of indices.
        rank: this process.
        steps: how many batches it was given.

    Raises:
        ConfigError: a tensor with another number of rows, or something that is no tensor.
    """
    # Every process knows what every other one was given in so many steps: beside these only results travel.
    taken = all_gather(steps)
    kept = [list(rows_of(split, order, each, taken[each])) for each in range(split.world_size)]
    total = sum(size for size, _ in _sizes(split, order, rank, steps))
    mine = torch.tensor([row for row, _ in kept[rank]], dtype=torch.int64)
    longest = max(map(len, kept))
    chosen: dict[Any, int] = {}
    for number, rows in enumerate(kept):
        for row, (_, index) in enumerate(rows):
            chosen.setdefault(index, number * longest + row)
    indices = sorted(chosen) if all(isinstance(index, int) for index in chosen) else list(chosen)
    places = torch.tensor([chosen[index] for index in indices], dtype=torch.int64)

    def checked(leaf: Any) -> Tensor:
        _check(leaf, total)
        own: Tensor = leaf[mine.to(leaf.device)]
        return torch.cat([own, own.new_zeros((longest - len(own), *own.shape[1:]))])

    gathered = all_gather(map_leaves(checked, results))  # (longest, *S) -> (W, longest, *S)
    return map_leaves(lambda leaf: leaf.flatten(0, 1)[places.to(leaf.device)], gathered)


def rows_of(split: Split, order: Sequence[Any], rank: int, steps: int) -> Iterator[tuple[int, Any]]:
    """Row in a process's results and index in the dataset, for each of its samples that is no repeat."""
    row = 0
    for step in range(steps):
        own = split.own(rank, step)
        for position in split.positions(rank, step):
            indices = indices_of(order[position % split.total])
            if position in own:
                yield from enumerate(indices, start=row)
            row += len(indices)


def _sizes(split: Split, order: Sequence[Any], rank: int, steps: int) -> Iterator[tuple[int, int]]:
    for step in range(steps):
        for position in split.positions(rank, step):
            yield len(indices_of(order[position % split.total])), position


def indices_of(unit: Any) -> Sequence[Any]:
    """The indices of a unit: of a batch all of them, else itself; tensors and NumPy's numbers as Python's."""
    unit = _plain(unit)
    if isinstance(unit, (Sequence, AbstractSet)) and not isinstance(unit, (str, bytes)):
        return [_plain(each) for each in unit]
    return (unit,)


def _plain(index: Any) -> Any:
    return index.tolist() if hasattr(index, "tolist") else index


def _check(leaf: Any, total: int) -> None:
    if not isinstance(leaf, Tensor):
        raise ConfigError(
            f"gather of a {type(leaf).__name__}",
            why="only tensors have a row for each sample",
            fix="use loader.gather(torch.cat(outputs)), or torch.tensor(values)",
        )
    if leaf.ndim == 0 or len(leaf) != total:
        raise ConfigError(
            f"gather of a tensor of shape {list(leaf.shape)}",
            why=f"this process was given {total} samples in this epoch, and each needs a row",
            fix="collect the output of every batch since iter(), and use loader.gather(torch.cat(outputs))",
        )
