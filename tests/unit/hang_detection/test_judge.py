"""The search for a deadlock by many ranks on one store: who is asked, who judges, and how many requests that takes."""

from __future__ import annotations

import cProfile
import logging
import math
import pstats
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from parallelize.hang_detection import deadlock
from parallelize.hang_detection.judge import Judge
from parallelize.hang_detection.rank_state import Collective, RankState, Status


class CountedStore:
    """A store that counts requests by name."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts

    def __getattr__(self, name: str) -> Any:
        self._counts[name] += 1
        return getattr(self._store, name)


class World:
    """Ranks of which each makes its checks when told to; all but the last are in a collective."""

    def __init__(self, size: int) -> None:
        store, self.counts = dist.HashStore(), Counter[str]()
        counted: Any = CountedStore(store, self.counts)
        self.judges = [Judge(counted, rank=rank, world_size=size, timeout_s=600.0) for rank in range(size)]
        self.status: list[Status] = ["waiting"] * (size - 1) + ["running"]

    def state(self, rank: int) -> RankState:
        is_waiting = self.status[rank] == "waiting"
        calls = (Collective("0", 1, "barrier", is_completed=False),) if is_waiting else ()
        answered = self.judges[rank].answered
        return RankState(rank, self.status[rank], "a.py:1", "", (), calls, ("0",), (), is_waiting, 3.0, answered)

    def check(self, *, rounds: int, idle_s: float = 3.0) -> list[deadlock.HangReport | None]:
        reports: list[deadlock.HangReport | None] = []
        for _ in range(rounds):
            reports = [self._check(rank, idle_s) for rank, status in enumerate(self.status) if status != "returned"]
        return reports

    def _check(self, rank: int, idle_s: float) -> deadlock.HangReport | None:
        waited_s = idle_s if self.status[rank] == "waiting" else None
        return self.judges[rank].check(waited_s, lambda: self.state(rank))

    def leave(self, rank: int) -> None:
        self.judges[rank].resign()
        self.status[rank] = "returned"
        self.judges[rank].publish_state(self.state(rank))


def test_ranks_that_wait_do_not_ask_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all have answered, each check of a rank is one request to the store; before, a few."""
    monkeypatch.setattr("parallelize.hang_detection.judge._MAX_PAUSE_S", 20.0)
    monkeypatch.setattr("parallelize.hang_detection.judge._FIRST_PAUSE_S", 20.0)
    world = World(32)
    assert world.check(rounds=4) == [None] * 32
    assert world.counts.total() < 20 * 32
    assert world.counts["multi_get"] <= 4  # the judge alone reads states
    world.counts.clear()
    world.check(rounds=5)
    assert world.counts == {"add": 5 * 32}


def test_all_waiting_ranks_get_the_report_of_one_judge() -> None:
    """A rank that returns makes the judge look again, and newer states confirm what it finds."""
    world = World(4)
    world.check(rounds=4)
    world.leave(3)
    reports = world.check(rounds=4)
    assert {report and report.what for report in reports} == {
        "rank 0 waits at a.py:1 in barrier for rank 3, which has returned"
    }


def test_a_judge_that_returns_is_replaced() -> None:
    """Another waiting rank then finds that it has returned."""
    world = World(4)
    world.check(rounds=4)
    world.leave(0)
    reports = world.check(rounds=5)[:2]
    assert [report and report.what for report in reports] == [
        "rank 1 waits at a.py:1 in barrier for rank 0, which has returned"
    ] * 2


def test_rank_0_logs_who_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    """One line for all ranks, whichever rank judges."""
    world = World(4)
    world.status = ["running", "waiting", "waiting", "waiting"]
    with caplog.at_level(logging.WARNING, logger="parallelize"):
        world.check(rounds=6, idle_s=31.0)
    assert caplog.messages == ["ranks 1-3 wait at a.py:1 in barrier for rank 0, which is at a.py:1"]


def test_errors_of_all_ranks_are_explained_by_one() -> None:
    """The first rank with an error reads the states; the others take its report."""
    world = World(3)
    world.leave(2)
    world.counts.clear()
    reports = [world.judges[rank].explain("closed", lambda rank=rank: world.state(rank)) for rank in (0, 1)]  # type: ignore[misc]  # mypy: no type of a lambda's default
    assert reports[0] == reports[1]
    assert world.counts["multi_get"] >= 1
    assert "which has returned" in reports[0].what


def test_states_are_read_though_some_are_missing() -> None:
    """By a number of requests that grows with the number of missing ranks only."""
    world = World(64)
    for rank in {*range(64)} - {17}:
        world.judges[rank].publish_state(world.state(rank))
    world.counts.clear()
    assert [state.rank for state in world.judges[0].states(range(64))] == [*range(17), *range(18, 64)]
    assert world.counts["check"] < 16


@pytest.mark.parametrize("status", ["running", "returned", "waiting"])
def test_a_proof_takes_time_in_proportion_to_the_ranks(status: Status) -> None:
    """Four times as many ranks, in pairs and in one group, take about four times as many function calls."""

    def calls(size: int) -> int:
        states = [
            RankState(
                rank,
                "waiting" if rank < size - 1 else status,
                collectives=(Collective("0", 1, "barrier", is_completed=False),) if rank < size - 1 else (),
                groups=("0", f"pair {rank // 2}"),
                is_blocked=True,
            )
            for rank in range(size)
        ]
        with cProfile.Profile() as profile:
            deadlock.find_deadlock(states)
            deadlock.waiting_line(states, world_size=size)
        return pstats.Stats(profile).total_calls  # type: ignore[attr-defined,no-any-return]  # not in the stub

    assert calls(256) < 6 * calls(64)


@pytest.mark.parametrize("idle_s", [598.0, 700.0])
def test_a_judge_goes_on_when_nothing_is_due(idle_s: float) -> None:
    """After the last line before the timeout, and after the timeout."""
    world = World(4)
    for judge in world.judges:
        judge._line_due_s = 480.0
    assert world.check(rounds=6, idle_s=idle_s) == [None] * 4
    assert world.judges[0]._ask_at < math.inf


def test_a_suspicion_ends_with_the_wait() -> None:
    """The same deadlock in the next wait is confirmed by newer states, too."""
    world = World(2)
    world.leave(1)
    judge = world.judges[0]
    while judge._suspected[0] is None:
        assert world.check(rounds=1) == [None]
    world.status[0] = "running"
    world.check(rounds=1)
    assert judge._suspected == (None, 0)


def test_requests_of_others_do_not_extend_the_time_to_answer() -> None:
    """A rank that never answers does not keep the judge from evaluating what the others have answered."""
    world = World(3)
    judge = world.judges[0]
    world._check(0, 3.0)
    asked_at = judge._asked_at
    assert asked_at is not None
    world.judges[1].request_states()
    world._check(0, 3.0)
    assert judge._asked_at == asked_at


def test_ranks_that_fail_together_are_all_in_the_report() -> None:
    """The first may count itself after others have published their states."""
    size = 8
    world, begun = World(size), threading.Barrier(size)
    reports: dict[int, deadlock.HangReport] = {}

    def explain(rank: int) -> None:
        def observe() -> RankState:
            time.sleep(0.01 * (rank + 1))  # reads the flight recorder
            return replace(world.state(rank), location=f"a.py:{1 if rank else 9}")

        world.status[rank] = "waiting"
        begun.wait()
        reports[rank] = world.judges[rank].explain("timed out", observe)

    threads = [threading.Thread(target=explain, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "have not answered" not in reports[0].what
    assert "has not answered" not in reports[0].what
    assert all(report == reports[0] for report in reports.values())
