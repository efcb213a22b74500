"""Consistency checks across ranks: texts such as "iterates epoch 3" are compared at sync points that all ranks reach.

No rank blocks: the first rank at a sync point writes its text to the process group's store, and the other ranks
compare their texts with it.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

import torch.distributed as dist

from parallelize.errors import SyncError
from parallelize.runtime.process_group import default_store

__all__ = ["ConsistencyCheck", "SyncPoints", "register_check", "run_checks"]


@dataclass(frozen=True, eq=False)
class ConsistencyCheck:
    """A text that must be equal on all ranks; it is checked only while a reference to this object exists.

    Args:
        topic: a key that is the same on all ranks; texts with the same topic are compared.
        text: what this rank is doing, such as "iterates epoch 3".
        fix: the `fix` of the SyncError if texts differ.
    """

    topic: str
    text: str
    fix: str


_pending: weakref.WeakSet[ConsistencyCheck] = weakref.WeakSet()


def register_check(topic: str, text: str, *, fix: str) -> ConsistencyCheck:
    """Register a check for the next sync point; it is dropped when the returned object is deleted."""
    check = ConsistencyCheck(topic, text, fix)
    _pending.add(check)
    return check


def run_checks(sync_point: str) -> None:
    """Run the registered checks and unregister them.

    Args:
        sync_point: a name that every rank passes once, at the same place in the program.

    Raises:
        SyncError: the first rank at this sync point has a different text.
    """
    if not _pending:
        return
    checks = list(_pending)
    _pending.clear()
    store = default_store() if dist.is_initialized() else None
    if store is None:
        return
    rank = dist.get_rank()
    for check in checks:
        this_rank = f"rank {rank} {check.text}"
        first_rank = store.compare_set(f"parallelize/{sync_point}/{check.topic}", "", this_rank).decode()
        if first_rank.partition(" ")[2].partition(" ")[2] != check.text:
            raise SyncError(
                f"{this_rank}, where {first_rank}",
                why="ranks that differ here wait for each other forever, or train on the same data",
                fix=check.fix,
            )


class SyncPoints:
    """A series of sync points that all ranks reach in the same order, such as the forward passes of a parallel model.

    Every rank must create the same number of SyncPoints objects, in the same order.
    """

    def __init__(self) -> None:
        self._name = next(_series_ids)
        self._reached = itertools.count()

    def reach(self) -> None:
        """Run the registered checks; takes a fraction of a microsecond if none is registered."""
        number = next(self._reached)
        if _pending:
            run_checks(f"{self._name}/{number}")


_series_ids = itertools.count()
