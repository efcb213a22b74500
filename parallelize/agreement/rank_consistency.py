"""Consistency checks across ranks: texts such as "iterates epoch 3" are compared at sync points that all ranks reach.

No rank blocks: the first rank at a sync point writes its text to the process group's store, and the other ranks
compare their texts with it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch.distributed as dist

from parallelize.errors import SyncError
from parallelize.run.process_group import default_store

__all__ = ["ConsistencyCheck", "pending_checks", "run_checks"]


@dataclass(frozen=True, eq=False)
class ConsistencyCheck:
    """A text that must be equal on all ranks: it is checked at the next sync point, if this object still exists then.

    Args:
        topic: a key that is the same on all ranks; texts with the same topic are compared.
        text: what this rank is doing, such as "iterates epoch 3".
        fix: the `fix` of the SyncError if texts differ.
    """

    topic: str
    text: str
    fix: str

    def __post_init__(self) -> None:
        pending_checks.add(self)


pending_checks: weakref.WeakSet[ConsistencyCheck] = weakref.WeakSet()


def run_checks(sync_point: str) -> None:
    """Run the registered checks and unregister them.

    Args:
        sync_point: a name that every rank passes once, at the same place in the program.

    Raises:
        SyncError: the first rank at this sync point has a different text.
    """
    if not pending_checks:
        return
    checks = list(pending_checks)
    pending_checks.clear()
    if not dist.is_initialized():
        return
    store, rank = default_store(), dist.get_rank()
    for check in checks:
        this_rank = f"rank {rank} {check.text}"
        first_rank = store.compare_set(f"parallelize/{sync_point}/{check.topic}", "", this_rank).decode()
        if first_rank.partition(" ")[2].partition(" ")[2] != check.text:
            raise SyncError(
                f"{this_rank}, where {first_rank}",
                why="ranks that differ here wait for each other forever, or train on the same data",
                fix=check.fix,
            )
