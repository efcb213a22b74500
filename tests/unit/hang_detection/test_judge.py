"""Ranks on one store: which of them judges, what ends them, and how long the judgement takes."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelize.hang_detection import watchdog
from parallelize.hang_detection.rank_state import Collective, RankState
from parallelize.hang_detection.watchdog import Judge, Watchdog

LINE = "ranks 0-2 wait at a.py:1 in barrier for rank 3, which is at a.py:1"


class CountedStore:
    """A store that counts requests by name."""

    def __init__(self, store: Any) -> None:
        self._store, self.counts = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.counts[name] += 1
        return getattr(self._store, name)


class World:
    """Ranks of which each makes its checks when told to; all but the last are in a collective."""

    def __init__(self, size: int, *, timeout_s: float = 600.0) -> None:
        self.store: Any = CountedStore(dist.HashStore())
        self.judges = [
            Judge(self.store, rank, size, lambda _: timeout_s, lambda rank=rank: self.state(rank))  # type: ignore[misc]  # its default
            for rank in range(size)
        ]
        self.status = ["waiting"] * (size - 1) + ["running"]
        self.ended: dict[int, str] = {}

    def state(self, rank: int) -> RankState:
        status, judge = self.status[rank], self.judges[rank]
        done = [Collective("0/gloo", seq, "all_reduce of float32[6553600]", True) for seq in range(1, 16)]
        calls = [*done, Collective("0/gloo", 16, "barrier", False)] if status == "waiting" else done
        is_blocked = status == "waiting"
        return RankState(rank, status, "a.py:1", "", calls, ["0"], is_blocked, judge.since, judge.answered)

    def check(self, rounds: int) -> set[str | None]:
        """Return what ended the ranks, None for those that were not."""
        for _ in range(rounds):
            for rank, judge in enumerate(self.judges):
                if self.status[rank] != "returned" and rank not in self.ended:
                    verdict = judge.check(is_waiting=self.status[rank] == "waiting")
                    if verdict is not None:
                        self.ended[rank] = verdict["what"]
        return {self.ended.get(rank) for rank, status in enumerate(self.status) if status == "waiting"}

    def leave(self, rank: int) -> None:
        self.judges[rank].resign()
        self.status[rank] = "returned"
        self.judges[rank].since = 0
        self.judges[rank].check(is_waiting=True)


def test_ranks_that_wait_do_not_ask_each_other() -> None:
    """Once all have answered, each check of a rank is one request to the store; before, a few."""
    world = World(32)
    assert world.check(4) == {None}
    assert world.store.counts.total() < 20 * 32
    world.store.counts.clear()
    world.check(5)
    assert world.store.counts == {"add": 5 * 32}


@pytest.mark.parametrize("gone", [3, 0], ids=["awaited rank", "judge"])
def test_all_waiting_ranks_get_the_verdict_of_one_judge(gone: int) -> None:
    """A rank that returns makes the judge look again; if it was the judge, another waiting rank is."""
    world = World(4)
    world.check(4)
    world.leave(gone)
    ranks = "ranks 0-2" if gone else "ranks 1-2"
    assert world.check(5) == {f"{ranks} wait at a.py:1 in barrier for rank {gone}, which has returned"}


def test_rank_0_logs_who_is_missing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for all ranks, whichever rank judges."""
    monkeypatch.setattr(watchdog, "_FIRST_LINE_S", 3.0)  # as long as ranks that wait have waited
    world = World(4)
    with caplog.at_level(logging.WARNING, logger="parallelize"):
        world.check(6)
    assert caplog.messages == [LINE]


def test_a_wait_ends_before_torch_ends_it() -> None:
    """NCCL aborts the process at the timeout, so the verdict comes 2 s before it, and not earlier."""
    assert World(4, timeout_s=5.5).check(6) == {None}
    assert World(4, timeout_s=5.0).check(6) == {LINE}


def test_a_rank_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process does not keep the judge from telling what the others have answered."""
    world = World(4, timeout_s=5.0)
    world.status[3] = "returned"  # it makes no checks, and has published nothing
    world.check(3)
    monkeypatch.setattr(watchdog, "_ANSWER_S", 0.0)
    assert world.check(3) == {LINE.replace("which is at a.py:1", "which has not answered")}


@pytest.mark.parametrize(("size", "limit_s"), [(64, 0.05), (256, 0.2), (1024, 1.0)])
def test_a_judgement_is_fast(size: int, limit_s: float) -> None:
    """Of many ranks, from their answers to the verdict, in time of this thread."""

    def judgement_s() -> float:
        world = World(size)
        world.check(2)
        world.leave(size - 1)
        world.check(1)
        before = time.thread_time()
        world.judges[0].check(is_waiting=True)
        judged_s = time.thread_time() - before
        assert None not in world.check(2)
        return judged_s

    assert min(judgement_s() for _ in range(2)) < limit_s  # the machine may be busy


def test_a_look_keeps_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store is asked, which takes long on a busy machine, what a function has had is freed with it."""
    asked, answered = threading.Event(), threading.Event()

    def check(*_: object, is_waiting: bool) -> None:
        assert not is_waiting
        asked.set()
        answered.wait(20)

    def step() -> weakref.ref[torch.Tensor]:
        tensor = torch.ones(1)
        assert asked.wait(20)
        return weakref.ref(tensor)

    monkeypatch.setattr(Judge, "check", check)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with Watchdog().watch(store, timeout_s=lambda *_: 60.0, since_ns=None):
            tensor = step()
            assert tensor() is None
            answered.set()
    finally:
        dist.destroy_process_group()
