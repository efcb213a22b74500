"""What the loaders of a run share, and what other rooms read of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from parallelize.run.user_line import UserLine
from parallelize.torch_patches.loaders import Unwatched


class Parts(NamedTuple):
    """The parts of a process's batch under `logical=`.

    Args:
        sizes: number of samples of each part.
        are_equal: whether all parts of all processes have as many.
    """

    sizes: list[int]
    are_equal: bool


@dataclass(eq=False, frozen=True)
class ActiveLoader:
    """A loader that is being iterated.

    The startup summary names its batches while this object exists.

    Args:
        batch_sizes: local and global batch size, such as "32 x 4 processes = 128 global"; "": they
            are not known.
    """

    batch_sizes: str


@dataclass(eq=False)
class LoadersOfRun:
    """The loaders of one run in this process.

    Attributes:
        sharded: the user's DataLoader -> its sharded loaders, by their options. An entry is freed
            with the user's.
        made: line of code -> number of loaders that were made there.
        passes: number of passes that were begun: each may have drawn from the global generators.
        compared: number of orders that this process has compared with the other ranks' at once. It
            is the same on all ranks, which read in one order: the text that they compare has its
            number.
        compared_data: lines with types of datasets that were compared with those of the other
            ranks.
        has_evaluated: whether a loader was read without gradients.
        merged_ranks: number of ranks whose batches this one process reads in each step, for
            `compare`.
        parts_by_size: number of samples of a batch -> its parts, of the latest batch with as many.
        shared_samples: number of this process's samples in the latest batch, if all processes share
            it (batch="global"); 0: they do not, or the number is not known. Loaders set it, for the
            check of losses that compare the samples of a batch.
        active: the loaders that are being iterated.
        unwatched: the context in which this library reads loaders of the user.
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
    active: WeakSet[ActiveLoader] = field(default_factory=WeakSet)
    unwatched: Unwatched = field(default_factory=Unwatched)

    def begin(self, batch_sizes: str) -> ActiveLoader:
        """Note that a loader is being iterated, for as long as the returned object exists."""
        loader = ActiveLoader(batch_sizes)
        self.active.add(loader)
        return loader

    def active_batch_sizes(self) -> list[str]:
        """Return the batch sizes of the loaders that are being iterated, each once."""
        sizes = {loader.batch_sizes for loader in self.active}
        return sorted(sizes - {""})


@dataclass
class LoaderWarnings:
    """State of the two warnings about ranks that read the same data.

    Without it, the same fault would be told in each pass.

    Attributes:
        passes: number of backward passes in blocks of the run.
        judged_datasets: ids of the datasets that were compared with those of the other ranks, by
            the line of their loop. It is filled alike on all ranks.
        told_lines: lines with a loop over a DataLoader that were told.
        names_loader: whether a warning has named the line of a DataLoader, on the main rank.
        same_inputs_at: number of passes when equal inputs of the ranks were told; 0: they were not.
    """

    passes: int = 0
    judged_datasets: dict[UserLine, set[int]] = field(default_factory=dict)
    told_lines: set[UserLine] = field(default_factory=set)
    names_loader: bool = False
    same_inputs_at: int = 0
