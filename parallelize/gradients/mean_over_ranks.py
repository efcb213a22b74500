"""The mean of a tensor over the ranks, which is computed while backward goes on.

A mean is computed in one of two ways:

    an all_reduce    NCCL computes the mean. Other backends add values that are divided first.
    `OrderedMean`    Two collectives, for `logical=`. The mean is added by pairs of ranks, so that
                     its bits do not depend on the number of ranks.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn


class PendingMean(Protocol):
    """A mean that is being computed: the Work of an all_reduce, or an `OrderedMean`."""

    def is_completed(self) -> bool:
        """Whether `wait` would return at once. This call does not wait."""
        ...

    def wait(self) -> Any:
        """Make sure that operations after this call read the mean from the tensor.

        On a GPU, the current stream waits, and the host does not.
        """
        ...


class MeanOverRanks:
    """Starts means of tensors, all through one group.

    Args:
        group: a process group of the ranks that hold equal parameters.
        is_ordered: whether means are added by pairs of ranks, as `OrderedMean` does.

    Attributes:
        size: number of these ranks.
        is_first: whether this rank is the first of them.
    """

    def __init__(self, group: Any, *, is_ordered: bool) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.is_first = dist.get_rank(group) == 0
        # An all_reduce of two ranks has the same bits: a + b is b + a.
        self._adds_by_pairs = is_ordered and self.size > 2
        # NCCL multiplies while it sends. gloo's AVG divides after it has added, and the sum may
        # overflow in fp16.
        self._has_mean = dist.get_backend(group) == "nccl"

    def start(self, flat: torch.Tensor) -> PendingMean:
        """Begin to replace the values of a tensor by their means over the ranks.

        All ranks must call this for their tensors in the same order.

        Returns:
            The mean that is being computed. The tensor may be read after its `wait`.
        """
        if self._adds_by_pairs:
            return OrderedMean(flat, self.size, self._group)
        operation = dist.ReduceOp.AVG
        if not self._has_mean:
            flat.mul_(1.0 / self.size)
            operation = dist.ReduceOp.SUM
        work: PendingMean = dist.all_reduce(flat, op=operation, group=self._group, async_op=True)
        return work

    def sum_of_integers(self, table: torch.Tensor) -> list[list[int]]:
        """Return the element-wise sum of the ranks' tables; waits for all ranks."""
        dist.all_reduce(table, group=self._group)
        rows: list[list[int]] = table.tolist()
        return rows


class OrderedMean:
    """A mean that is added by pairs of ranks: ((0 + 1) + (2 + 3)) + ...

    Rank r computes the mean of piece r of the tensor:

        flat, padded       [ piece 0 | piece 1 | ... ], of equal lengths
        all_to_all         rank r receives piece r of the tensor of every rank, as rows
        add                rank r adds the rows by pairs, and divides by the number of ranks
        all_gather         every rank receives the means of all pieces

    Args:
        flat: the tensor, of one dimension. Its values become the means in `wait`.
        size: number of ranks.
        group: a process group of all ranks.
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
        """Return False, so that nobody asks for the mean before the end of backward.

        The all_gather begins at the end of backward, in `add`. All ranks must begin their
        collectives in one order. If the all_gather began as soon as the all_to_all has ended, ranks
        could begin it before or after the all_to_all of the next bucket.
        """
        return False

    def add(self) -> None:
        """Compute the mean of this rank's piece, and begin the all_gather.

        All ranks must call this for their means in the same order.
        """
        self._work.wait()
        rows = list(self._pieces.view(self._size, -1))
        while len(rows) > 1:
            rows = _sums_of_pairs(rows)
        mean = rows[0] / self._size
        # The chunks are views: the means of all pieces overwrite the padded tensor.
        parts = list(self._padded.chunk(self._size))
        self._work = dist.all_gather(parts, mean, group=self._group, async_op=True)

    def wait(self) -> None:
        """Wait for the means, and copy them to the tensor; call this after `add` only."""
        self._work.wait()
        self._flat.copy_(self._padded[: len(self._flat)])


def _sums_of_pairs(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sums of rows 0 and 1, of rows 2 and 3, ...; an odd last row is kept as it is."""
    pairs = zip(rows[0::2], rows[1::2], strict=False)
    sums = [first + second for first, second in pairs]
    if len(rows) % 2:
        sums.append(rows[-1])
    return sums
