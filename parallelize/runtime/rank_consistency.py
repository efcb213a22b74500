"""What all processes should be doing alike, compared at a moment that they all reach.

Announcing and comparing never waits for anybody: the first process to come to the moment leaves its text in the store
of the process group, those that come later compare theirs with it.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

import torch.distributed as dist

from parallelize.errors import SyncError

__all__ = ["Announcement", "Moments", "announce", "compare"]


@dataclass(frozen=True, eq=False)
class Announcement:
    """What a process is doing, for as long as whoever does it keeps this.

    Args:
        topic: which announcements belong together: the same on all processes.
        text: what it does.
        fix: what to do where others do something else.
    """

    topic: str
    text: str
    fix: str


_open: weakref.WeakSet[Announcement] = weakref.WeakSet()


def announce(topic: str, text: str, *, fix: str) -> Announcement:
    """Have a text compared at the next moment that all processes reach, if what is returned is still kept then."""
    announcement = Announcement(topic, text, fix)
    _open.add(announcement)
    return announcement


def compare(moment: str) -> None:
    """Compare what is announced, each announcement once.

    Args:
        moment: a name that all processes use once, for the same moment.

    Raises:
        SyncError: an earlier process announced something else.
    """
    if not _open:
        return
    waiting = list(_open)
    _open.clear()
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    if store is None:
        return
    rank = dist.get_rank()
    for each in waiting:
        mine = f"rank {rank} {each.text}"
        first = store.compare_set(f"parallelize/{moment}/{each.topic}", "", mine).decode()
        if first.partition(" ")[2].partition(" ")[2] != each.text:
            raise SyncError(
                f"{mine}, where {first}",
                why="processes that do not step alike wait for each other forever, or train on the same data",
                fix=each.fix,
            )


class Moments:
    """Moments that all processes reach in the same order, as the forwards of a model that they train together.

    Every process has to make as many of these, in the same order.
    """

    def __init__(self) -> None:
        self._name = next(_ordinals)
        self._reached = itertools.count()

    def reach(self) -> None:
        """Compare what is announced; where nothing is, a fraction of a microsecond."""
        number = next(self._reached)
        if _open:
            compare(f"{self._name}/{number}")


_ordinals = itertools.count()
