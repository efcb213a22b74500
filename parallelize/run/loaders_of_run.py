"""What the loaders of a run share, and what other rooms read of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

__all__ = ["LoadersOfRun", "Parts"]


class Parts(NamedTuple):
    """The parts of a process's batch under `logical=`.

    Args:
        sizes: number of samples of each part.
        are_equal: whether all parts of all processes have as many.
    """

    sizes: list[int]
    are_equal: bool


@dataclass(eq=False)
class LoadersOfRun:
    """The loaders of one run in this process.

    Attributes:
        sharded: the user's DataLoader -> its sharded loaders, by their options. An entry is freed with the user's.
        made: line of code -> number of loaders that were made there.
        passes: number of passes that were begun: each may have drawn from the global generators.
        compared: number of orders that this process has compared with the other ranks' at once.
        compared_data: lines with types of datasets that were compared with those of the other ranks.
        has_evaluated: whether a loader was read without gradients.
        merged_ranks: number of ranks whose batches this one process reads in each step, for `compare`.
        parts_by_size: number of samples of a batch -> its parts, of the latest batch with as many.
        shared_samples: number of this process's samples in the latest batch, if all processes share it
            (batch="global"); 0: they do not, or the number is not known. Loaders set it, for the check of losses that
            compare the samples of a batch.
    """

    sharded: WeakKeyDictionary[Any, dict[Any, Any]] = field(default_factory=WeakKeyDictionary)
    made: Counter[str] = field(default_factory=Counter)
    passes: int = 0
    compared: int = 0
    compared_data: set[str] = field(default_factory=set)
    has_evaluated: bool = False
    merged_ranks: int = 1
    parts_by_size: dict[int, Parts] = field(default_factory=dict)
    shared_samples: int = 0
