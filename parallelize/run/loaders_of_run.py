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
        first_size: number of samples of the first part of all processes.
        are_equal: whether all parts of all processes have equally many samples.
    """

    sizes: list[int]
    first_size: int
    are_equal: bool


@dataclass(eq=False, frozen=True)
class ActiveLoader:
    """A loader that is being iterated: its pass keeps this object.

    The startup summary names the batches of the loader while this object exists.

    Args:
        batch_sizes: local and global batch size, such as "32 x 4 processes = 128 global"; "": the
            sizes are not known.
    """

    batch_sizes: str


@dataclass(eq=False)
class LoadersOfRun:
    """The loaders of one run in this process.

    Attributes:
        sharded: the user's DataLoader -> options -> the sharded loader, which a later call of
            `shard_loader` returns again. An entry is freed with the DataLoader.
        made: line of code -> number of loaders that were made there. It makes their names differ.
        passes: number of passes over loaders that were begun. Each may have drawn from the global
            generators, which `logical=` must not take for a draw of the user's code.
        compared: number of orders of data that were compared with the other ranks when the pass
            began. The name of a comparison has this number, which must be the same on all ranks.
        compared_data: a line with a type of dataset, such as "train.py:41 Images", for each that
            was compared with the other ranks.
        has_evaluated: whether a loader was read without gradients on several processes, so that
            ranks have computed values of different samples.
        merged_ranks: number of ranks whose batches this one process reads in each step, for
            `compare`.
        parts_by_loader: name of a loader -> the parts of its latest batch, under `logical=`, that
            of the latest loader last. A forward has the parts of the batch that has as many
            samples.
        shared_samples: number of this process's samples in the latest batch, if all processes share
            the batch (batch="global"); 0: they do not share it, or the number is not known. Loaders
            set it, for the check of losses that compare the samples of a batch.
        active: the loaders that are being iterated.
        unwatched: the context in which this library reads loaders of the user itself, without the
            warning that they are not sharded.
    """

    sharded: WeakKeyDictionary[Any, dict[Any, Any]] = field(default_factory=WeakKeyDictionary)
    made: Counter[str] = field(default_factory=Counter)
    passes: int = 0
    compared: int = 0
    compared_data: set[str] = field(default_factory=set)
    has_evaluated: bool = False
    merged_ranks: int = 1
    parts_by_loader: dict[str, Parts] = field(default_factory=dict)
    shared_samples: int = 0
    active: WeakSet[ActiveLoader] = field(default_factory=WeakSet)
    unwatched: Unwatched = field(default_factory=Unwatched)

    def begin(self, batch_sizes: str) -> ActiveLoader:
        """Note that a loader is being iterated, for as long as the returned object exists."""
        loader = ActiveLoader(batch_sizes)
        self.active.add(loader)
        return loader

    def note_parts(self, loader: str, parts: Parts) -> None:
        """Note the parts of the batch that a loader, given by its name, is about to yield."""
        self.parts_by_loader.pop(loader, None)
        self.parts_by_loader[loader] = parts

    def active_batch_sizes(self) -> list[str]:
        """Return the batch sizes of the loaders that are being iterated, equal sizes once."""
        sizes = {loader.batch_sizes for loader in self.active}
        return sorted(sizes - {""})


@dataclass
class LoaderWarnings:
    """State of the two warnings about ranks that read the same data.

    `data/forgotten.py` warns of a DataLoader that is not sharded, and `agreement/first_step.py` of
    equal inputs of the models. Without this state, both would warn of the same fault, and in each
    epoch again.

    Attributes:
        passes: number of backward passes in blocks of the run.
        judged_datasets: line of a loop over a DataLoader -> ids of the datasets that need no more
            comparison with the other ranks. It is filled alike on all ranks.
        told_lines: lines of loops of which the user was warned, by one of the two warnings.
        names_loader: whether a warning has named the line of a DataLoader, on the main rank.
        same_inputs_at: value of `passes` when the inputs were found equal on all ranks; 0: they
            were not.
    """

    passes: int = 0
    judged_datasets: dict[UserLine, set[int]] = field(default_factory=dict)
    told_lines: set[UserLine] = field(default_factory=set)
    names_loader: bool = False
    same_inputs_at: int = 0
