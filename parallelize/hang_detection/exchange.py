"""What ranks that wait tell each other: a few keys in the store where they have met.

question        counts up while some rank waits; the others look at it once a second
place/<rank>    where a rank is, and which question that answers
judge           the one waiting rank that reads all places
verdict         proof that ranks wait for ever
news            a line for rank 0 to log
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from parallelize.hang_detection.deadlock import Finding
from parallelize.hang_detection.rank_state import Place

__all__ = ["Board"]


class Board:
    """The keys, as one rank uses them; from any thread, no call waits.

    Args:
        store: a connection of its own: another one may be waiting in it.
        rank: of this process.
        world_size: ranks in all.
    """

    def __init__(self, store: dist.Store, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = store
        self._store.set_timeout(timedelta(seconds=10))  # of an answer of a store that may be gone
        self._is_judge = False
        self._heard = ""

    def question(self) -> int:
        """The last question."""
        return self._store.add("question", 0)

    def ask(self) -> int:
        """Ask all ranks where they are; the number of the question."""
        return self._store.add("question", 1)

    def post(self, place: Place) -> None:
        """Say where this rank is."""
        self._store.set(f"place/{place.rank}", place.dumps())

    def places(self) -> list[Place]:
        """The last that every rank has said."""
        keys = [f"place/{rank}" for rank in range(self.world_size)]
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        return [Place.loads(each) for each in self._store.multi_get(keys)] if keys else []

    def becomes_judge(self) -> bool:
        """Whether this rank is the judge, which it becomes if there is none."""
        if not self._is_judge:
            self._is_judge = self._store.compare_set("judge", "", str(self.rank)).decode() == str(self.rank)
        return self._is_judge

    def leave(self) -> None:
        """Let another be the judge, if this rank is."""
        if self._is_judge:
            self._store.delete_key("judge")
            self._is_judge = False

    def decide(self, finding: Finding) -> None:
        """Write the verdict."""
        self._store.set("verdict", finding.dumps())

    def verdict(self) -> Finding | None:
        """The verdict, if there is one."""
        return Finding.loads(self._store.get("verdict")) if self._store.check(["verdict"]) else None

    def announce(self, line: str) -> None:
        """Have rank 0 log a line."""
        self._store.set("news", line)

    def news(self) -> str:
        """A line that was announced since the last look, or ""."""
        line = self._store.get("news").decode() if self._store.check(["news"]) else ""
        self._heard, is_new = line, line != self._heard
        return line if is_new else ""
