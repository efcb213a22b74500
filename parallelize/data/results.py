"""Results of samples, of all processes: their mean, and their rows in the order of the dataset.

An example of `gathered` with two ranks, five samples and batches of two; rank 1 repeats a sample:

    rank 0 has read      0 2 | 4          results of shape (3, *S)
    rank 1 has read      1 3 | 0          results of shape (3, *S), of which the last is a repeat
    sent                 0 2 4 / 1 3 -    (2, 3, *S): rows without repeats, filled with zeros
    rows of the indices  0 3 1 4 2        (5, *S): the rows of indices 0 1 2 3 4

Nothing is said between ranks about which samples they have: each computes the shares of all from
its own order, which is compared first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from parallelize.collectives import all_gather
from parallelize.data.source import Pass
from parallelize.data.units import rows_in_dataset_order
from parallelize.errors import ConfigError, SyncError
from parallelize.run.containers import map_leaves
from parallelize.run.generators import derive_seed


def mean_over_samples(iterated: Pass, value: Any) -> float:
    """Average over the samples of all processes; a collective (see `ShardedLoader.mean`).

    Args:
        iterated: the latest pass of this process's loader.
        value: the mean over its samples, or that of each of its batches, or a value for each
            sample.
    """
    _require_order(iterated, "mean")
    sizes = [iterated.count_once(step) for step in range(iterated.steps)]
    with_repeats = sum(iterated.count(step) for step in range(iterated.steps))
    values = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach().flatten()
    # One mean cannot leave out samples of weight 0, which are in whole batches of them.
    has_weightless = sum(sizes) not in (0, with_repeats)
    is_of_batches = len(values) == len(sizes)
    is_of_process = len(values) == 1 and not has_weightless
    is_of_samples = len(values) == with_repeats
    if not (is_of_batches or is_of_process or is_of_samples):
        raise ConfigError(
            f"mean of {len(values)} values",
            why=f"this process was given {len(sizes)} batches since iter()",
            fix="pass the mean over this process's samples, or that of each batch, or a value for "
            "each sample",
        )
    # In a process with one sample, a value may be any of the three. The others know which.
    are_means = is_of_batches or is_of_process
    may_be_of_samples, may_be_of_means = all_gather([is_of_samples, are_means])
    if all(may_be_of_samples) and not all(may_be_of_means):
        return _mean_of_rows(iterated, values)
    if iterated.split.has_repeats:
        raise _repeats_error(iterated)
    if not all(may_be_of_means):
        raise SyncError(
            "mean of a value for each sample on some processes, and of means on others",
            why="all processes average the same values",
            fix="pass the same kind of values on every process",
        )
    # No error of this rank alone comes from here on: the others would wait in a collective.
    _steps_of_ranks(iterated, "mean")
    weights = sizes if is_of_batches else [sum(sizes)]
    local = 0.0
    if sum(sizes):
        local = float(values @ values.new_tensor(weights))
    totals, counts = all_gather([local, sum(sizes)])
    if not sum(counts):
        raise ConfigError(
            "mean of no samples",
            why="no process was given a batch since iter()",
            fix="iterate the loader before",
        )
    return float(sum(totals) / sum(counts))


def _mean_of_rows(iterated: Pass, values: Tensor) -> float:
    """Return the mean of a value for each sample, without repeats.

    The sum is exact, so that the mean has the same bits at any number of processes.

    Args:
        iterated: the latest pass of this process's loader.
        values: of shape (N), for each sample that this process was given.
    """
    rows: list[float] = gathered(iterated, values).tolist()
    return math.fsum(rows) / len(rows)


def _repeats_error(iterated: Pass) -> ConfigError:
    why = "some samples have come twice, so that this process's values hold them twice"
    if iterated.has_gradients:
        return ConfigError(
            "mean over a loader in training, which repeats samples",
            why=why,
            fix='average each loss as it comes, all_reduce(loss.detach(), "mean"), or use '
            "shard_loader(loader, batch='global')",
        )
    return ConfigError(
        f"mean over a loader with tail={iterated.split.tail!r}",
        why=why,
        fix="evaluate under torch.no_grad() without tail=, or use loader.gather(values of "
        "samples).mean()",
    )


def gathered(iterated: Pass, results: Any) -> Any:
    """All-gather one row for each sample; a collective (see `ShardedLoader.gather`).

    Args:
        iterated: the latest pass of this process's loader.
        results: tensors with one row for each sample that the process was given.
    """
    _require_order(iterated, "gather")
    total = sum(iterated.count(step) for step in range(iterated.steps))
    kept = _rows_without_repeats(iterated)

    def rows_of(leaf: Any) -> Tensor:
        shape = list(getattr(leaf, "shape", [type(leaf).__name__]))
        if shape[:1] != [total]:
            raise ConfigError(
                f"gather of a value of shape {shape}",
                why=f"this process was given {total} samples since iter(), each needs a row",
                fix="collect the output of every batch, and use loader.gather(torch.cat(outputs))",
            )
        rows: Tensor = leaf
        if len(kept) < total:
            rows = leaf[kept]
        return rows

    # No error of this rank alone comes after this: the others would wait in a collective.
    local = map_leaves(rows_of, results)
    indices_by_rank = []
    steps_of_ranks = _steps_of_ranks(iterated, "gather")
    data_ranks = iterated.source.data_ranks
    # The ranks that hold one tensor parallel model have the same rows.
    for data_rank, rank in enumerate(data_ranks.ranks):
        indices_by_rank.append(_indices_of_rank(iterated, data_rank, steps_of_ranks[rank]))
    counts, order = rows_in_dataset_order(indices_by_rank)

    def padded(rows: Tensor) -> Tensor:
        missing = max(counts) - len(rows)
        return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])

    of_all = all_gather(map_leaves(padded, local))  # (longest, *S) -> (W, longest, *S)
    ranks = list(data_ranks.ranks)
    return map_leaves(lambda rows: rows[ranks].flatten(0, 1)[order], of_all)


def _indices_of_rank(iterated: Pass, rank: int, steps: int) -> list[Any]:
    """Return the indices that a data rank has read in its first steps, without those repeated."""
    parts = len(iterated.source.shares)
    indices: list[Any] = []
    for step in range(steps):
        for share in range(rank * parts, (rank + 1) * parts):
            indices += iterated.indices_of_share(share, step)
    return indices


def _rows_without_repeats(iterated: Pass) -> list[int]:
    """Return the rows of this process's results that are no repeats at the end of a share."""
    kept: list[int] = []
    first = 0
    for step in range(iterated.steps):
        for share in iterated.source.shares:
            kept += range(first, first + iterated.count_once_of_share(share, step))
            first += iterated.count_of_share(share, step)
    return kept


def _require_order(iterated: Pass, method: str) -> None:
    """Raise a ConfigError if the data of a pass has no indices."""
    if iterated.order is None:
        raise ConfigError(
            f"{method} on a loader without indices",
            why="samples are counted by the indices that were iterated",
            fix="use parallelize.all_gather, or all_reduce of sums and counts",
        )


def _steps_of_ranks(iterated: Pass, method: str) -> list[int]:
    """Gather each process's number of steps, and require that all have one order; a collective.

    Args:
        iterated: the latest pass of this process's loader.
        method: "mean" or "gather", for messages.
    """
    own_order = derive_seed(iterated.split, iterated.position.epoch, iterated.fingerprint())
    steps, orders = all_gather([iterated.steps, own_order])
    differing = [rank for rank, order in enumerate(orders) if order != orders[0]]
    if differing:
        raise SyncError(
            f"{method} on ranks that have iterated different epochs or orders: {differing} and 0",
            why="each process computes from its own order which samples the others were given",
            fix="iterate the loader equally often on all processes, with the same data; on one "
            "process alone, use a separate loader",
        )
    return [int(count) for count in steps]
