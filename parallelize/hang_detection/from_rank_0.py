"""Values that rank 0 tells the other ranks through the store.

The search for deadlocks knows who waits for one. A value has a topic, such as the line of a loader,
and a number: the first value of a topic has the number 1.

    rank 0            tell("data at train.py:12", 1, b"...")        never waits
    another rank      wait("data at train.py:12", 1) -> b"..."      waits until rank 0 has told it

To that search (see `deadlock`), each topic is a counter of collectives whose group has one member,
rank 0. A rank that waits has begun a collective there, which rank 0 has not: so it waits for rank
0, and for nobody else.
"""

from __future__ import annotations

import json
import threading
import time
from typing import NamedTuple

import torch.distributed as dist

from parallelize.errors import SyncError
from parallelize.hang_detection.rank_state import Collective

RANK_0 = "rank 0"
"""Name of the group whose only member is rank 0."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.01


class FirstTold(NamedTuple):
    """What the first rank has told about a topic that all ranks tell.

    Args:
        rank: of that rank.
        text: its text.
    """

    rank: int
    text: str


class ValuesOfRank0:
    """The values that this process has told, or waits for.

    Args:
        store: has a prefix that no other block of the run uses.
        rank: rank of this process.
        world_size: number of ranks.
        timeout_s: longest time of a wait.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        # Of the values that this process has told, the number of the latest one of each topic.
        self._number_by_topic: dict[str, int] = {}
        self._awaited: Collective | None = None
        self._awaited_by = 0

    def tell(self, topic: str, number: int, value: bytes) -> None:
        """Tell the other ranks a value; for rank 0."""
        self._store.set(_key(topic, number), value)  # type: ignore[arg-type]  # the stub has no bytes
        self._number_by_topic[topic] = number

    def wait(self, topic: str, number: int) -> bytes:
        """Return the value that rank 0 tells; for the other ranks.

        Raises:
            SyncError: rank 0 has not told it within the timeout.
        """
        self._awaited = Collective(
            f"{RANK_0}/{topic}", number, f"iter() of the {topic}", is_completed=False
        )
        self._awaited_by = threading.get_ident()
        try:
            return self._received(topic, number)
        finally:
            self._awaited = None

    def _received(self, topic: str, number: int) -> bytes:
        """Return the value when rank 0 has told it; the last rank that reads it removes it."""
        key = _key(topic, number)
        end_s, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        # Store.get would block in compiled code: Ctrl-C would not end it, and another thread's
        # request would wait.
        while not self._store.check([key]):
            if time.monotonic() > end_s:
                raise SyncError(
                    f"rank {self._rank} waits for rank 0 to iterate the {topic}",
                    why="all ranks read in the order of rank 0, whose random numbers they need",
                    fix="iterate the same loaders equally often on every rank",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        value: bytes = self._store.get(key)
        readers = f"{key}/readers"
        if self._store.add(readers, 1) == self._world_size - 1:
            self._store.delete_key(key)
            self._store.delete_key(readers)
        return value

    def first_told(self, topic: str, text: str) -> FirstTold:
        """Return the text of the rank that comes first, which may be this one; never waits."""
        first: bytes = self._store.compare_set(f"first/{topic}", "", json.dumps([self._rank, text]))
        return FirstTold(*json.loads(first))

    def awaited_by(self, thread: int) -> Collective | None:
        """Return what a thread waits for; None: it does not wait."""
        return self._awaited if self._awaited_by == thread else None

    def collectives(self) -> list[Collective]:
        """Return what this process has told and waits for, as collectives.

        These are the latest value of each topic that it has told, and the one that it waits for.
        """
        collectives = []
        for topic, number in self._number_by_topic.items():
            collectives.append(Collective(f"{RANK_0}/{topic}", number, "", is_completed=True))
        # The main thread may set the attribute to None at any time.
        awaited = self._awaited
        if awaited is not None:
            collectives.append(awaited)
        return collectives


def _key(topic: str, number: int) -> str:
    return f"from rank 0/{topic}/{number}"
