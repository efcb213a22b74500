"""The mean of a tensor over the ranks, which is computed while backward goes on.

A mean is computed in one of two ways:

    a collective          the sum, or the mean where the backend computes it
    two collectives       the mean, added by pairs of ranks: the same bits with any number of ranks
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn


class PendingMean(Protocol):
    """A mean that is under way: torch's Work, or an `OrderedMean`."""

    def is_completed(self) -> bool:
        """Whether `wait` would not wait; asks without waiting."""
        ...

    def wait(self) -> Any:
        """Let what comes after this call find the mean in the tensor.

        On a GPU, the current stream waits, and the host does not.
        """
        ...


class MeanOverRanks:
    """Starts means of tensors, all through one group.

    Args:
        group: a process group of all ranks.
        is_ordered: whether numbers are added by pairs of ranks, in one order for any number of
            ranks.
    """

    def __init__(self, group: Any, *, is_ordered: bool) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        # Two numbers have the same sum in each order.
        self._adds_by_pairs = is_ordered and self._size > 2
        # NCCL multiplies while it sends. gloo's AVG divides after the sum, which may overflow in
        # fp16.
        self._has_mean = dist.get_backend(group) == "nccl"

    def start(self, flat: torch.Tensor) -> PendingMean:
        """Replace the values of a tensor by their means; all ranks must call this in one order.

        Returns:
            what is under way: the tensor may be read after its `wait`.
        """
        if self._adds_by_pairs:
            return OrderedMean(flat, self._size, self._group)
        operation = dist.ReduceOp.AVG
        if not self._has_mean:
            flat.mul_(1.0 / self._size)
            operation = dist.ReduceOp.SUM
        work: PendingMean = dist.all_reduce(flat, op=operation, group=self._group, async_op=True)
        return work

    def sum_of_integers(self, table: torch.Tensor) -> list[list[int]]:
        """Return the sum of the ranks' tables of integers; waits for all ranks."""
        dist.all_reduce(table, group=self._group)
        rows: list[list[int]] = table.tolist()
        return rows


class OrderedMean:
    """A mean that is added by pairs of ranks: ((0 + 1) + (2 + 3)) + ...

    Each rank computes the mean of one piece of the tensor:

        flat, padded       [ piece of rank 0 | piece of rank 1 | ... ]
        first collective   each rank gets its piece of all ranks' tensors
        add                each rank adds these, by pairs, and divides by their number
        second collective  each rank gets the means of all pieces
    """

    def __init__(self, flat: torch.Tensor, size: int, group: Any) -> None:
        self._flat = flat
        self._size = size
        self._group = group
        self._padded = nn.functional.pad(flat, (0, -len(flat) % size))
        self._pieces = torch.empty_like(self._padded)
        self._work: Any = dist.all_to_all_single(
            self._pieces, self._padded, group=group, async_op=True
        )

    def is_completed(self) -> bool:
        """Return False: the second collective begins at the end of backward.

        It may begin nowhere else: all ranks begin their collectives in one order, and the first
        one does not end at the same time on all of them.
        """
        return False

    def add(self) -> None:
        """Add the pieces, and send the means; all ranks must call this in one order."""
        self._work.wait()
        rows = list(self._pieces.view(self._size, -1))
        while len(rows) > 1:
            rows = _sums_of_pairs(rows)
        mean = rows[0] / self._size
        parts = list(self._padded.chunk(self._size))
        self._work = dist.all_gather(parts, mean, group=self._group, async_op=True)

    def wait(self) -> None:
        """Wait for the means, and copy them to the tensor."""
        self._work.wait()
        self._flat.copy_(self._padded[: len(self._flat)])


def _sums_of_pairs(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sum of rows 0 and 1, of rows 2 and 3, ...; a last row without a partner stays."""
    pairs = zip(rows[0::2], rows[1::2], strict=False)
    sums = [first + second for first, second in pairs]
    if len(rows) % 2:
        sums.append(rows[-1])
    return sums
