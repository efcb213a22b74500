"""What a run has been told about ranks that read the same data: the same fault is told once."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallelize.run.user_line import UserLine

__all__ = ["LoaderWarnings"]


@dataclass
class LoaderWarnings:
    """State of the two warnings about ranks that read the same data.

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
