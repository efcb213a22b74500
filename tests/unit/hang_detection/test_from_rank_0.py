"""Values that rank 0 tells the other ranks, and the deadlocks of ranks that wait for one."""

from __future__ import annotations

import threading

import pytest
from ranks import wait_for
from torch.distributed import HashStore

from parallelize import SyncError
from parallelize.hang_detection.deadlock import find_deadlock
from parallelize.hang_detection.from_rank_0 import RANK_0, ValuesOfRank0
from parallelize.hang_detection.rank_state import Collective, RankState


def values_of(rank: int, store: HashStore, world_size: int = 2, timeout_s: float = 10.0) -> ValuesOfRank0:
    return ValuesOfRank0(store, rank, world_size, timeout_s)


def test_a_value_is_received_by_every_other_rank_and_then_removed() -> None:
    """In any order, and each number of a topic is a value of its own."""
    store = HashStore()
    ranks = [values_of(rank, store, world_size=3) for rank in range(3)]
    for number in (1, 2):
        ranks[0].tell("loader at a.py:1", number, b"\0\xff" * number)
    for number in (2, 1):
        assert [rank.wait("loader at a.py:1", number) for rank in ranks[1:]] == [b"\0\xff" * number] * 2
    assert not store.check(["from rank 0/loader at a.py:1/1"])


def test_a_value_that_is_told_later_ends_the_wait() -> None:
    """The waiting thread, and no other, is known to wait for it meanwhile."""
    store, received = HashStore(), list[bytes]()
    first, second = (values_of(rank, store) for rank in range(2))
    thread = threading.Thread(target=lambda: received.append(second.wait("data", 1)))
    thread.start()
    wait_for(lambda: second.awaited_by(thread.ident or 0) is not None)
    assert second.awaited_by(threading.get_ident()) is None
    assert second.collectives() == [Collective(f"{RANK_0}/data", 1, "iter() of the data", is_completed=False)]
    first.tell("data", 1, b"a")
    thread.join(10)
    assert received == [b"a"]
    assert second.collectives() == []
    assert first.collectives() == [Collective(f"{RANK_0}/data", 1, "", is_completed=True)]


def test_a_wait_has_the_timeout_of_the_run() -> None:
    """The error names the rank and the loader."""
    with pytest.raises(SyncError, match=r"rank 1 waits for rank 0 to iterate the loader at a\.py:1"):
        values_of(1, HashStore(), timeout_s=0.05).wait("loader at a.py:1", 1)


def state(rank: int, *calls: Collective, status: str = "waiting") -> RankState:
    groups = ["0", RANK_0] if rank == 0 else ["0"]
    return RankState(rank, status, "a.py:1", "step", calls, groups, status == "waiting")


AWAITED = Collective(f"{RANK_0}/loader at a.py:1", 2, "iter() of the loader at a.py:1", is_completed=False)
BARRIER = Collective("0/gloo", 1, "barrier", is_completed=False)


def told(number: int) -> Collective:
    return Collective(f"{RANK_0}/loader at a.py:1", number, "", is_completed=True)


def test_a_rank_that_waits_for_rank_0_waits_for_nobody_else() -> None:
    """Rank 0 in a collective with it, or at its end, is a deadlock; before it has looked for the value, it is none."""
    assert find_deadlock({0: state(0, told(1), BARRIER), 1: state(1, AWAITED)})
    assert find_deadlock({0: state(0, told(1), status="returned"), 1: state(1, AWAITED)})
    # It has told the value in the meantime, or may tell it later.
    assert find_deadlock({0: state(0, told(2), BARRIER), 1: state(1, AWAITED)}) is None
    assert find_deadlock({0: state(0, told(1), status="running"), 1: state(1, AWAITED)}) is None
    # Rank 2 has not told it either, but nobody waits for that.
    ranks = {0: state(0, told(1), status="running"), 1: state(1, AWAITED), 2: state(2, BARRIER)}
    assert find_deadlock(ranks) is None
