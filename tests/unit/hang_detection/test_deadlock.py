"""Deadlock detection from the states of all ranks: what is proof, what is not, and the messages."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parallelize.hang_detection.deadlock import (
    HangReport,
    find_absent_rank,
    find_deadlock,
    timeout_report,
    waiting_line,
)
from parallelize.hang_detection.rank_state import Collective, RankState

WORLD = range(3)
GROUPS = {"all": (0, 1, 2), "pair": (0, 1), "ends": (0, 2)}


def groups_of(rank: int) -> tuple[str, ...]:
    return tuple(name for name, ranks in GROUPS.items() if rank in ranks)


# Program of one rank: (group, operation) of its collectives, each waited for.
Program = tuple[tuple[str, str], ...]
collectives = st.tuples(st.sampled_from(sorted(GROUPS)), st.sampled_from(["all_reduce", "barrier"]))


class Machine:
    """Simulates ranks that each run a program of collectives until none can continue."""

    def __init__(self, programs: dict[int, Program]) -> None:
        self.programs = {rank: [call for call in each if rank in GROUPS[call[0]]] for rank, each in programs.items()}
        self.begun = dict.fromkeys(
            programs, 0
        )  # number of calls of its program; the rank may still wait in the last one

    def collectives(self, rank: int) -> list[Collective]:
        seqs = {group: itertools.count(1) for group in GROUPS}
        begun = self.programs[rank][: self.begun[rank]]
        return [Collective(group, next(seqs[group]), operation, is_completed=True) for group, operation in begun]

    def waits_in(self, rank: int) -> Collective | None:
        own = self.collectives(rank)
        if not own:
            return None
        last = own[-1]
        matching = [
            [each for each in self.collectives(other) if (each.group, each.seq) == (last.group, last.seq)]
            for other in GROUPS[last.group]
        ]
        is_met = all(matching) and len({each.signature for calls in matching for each in calls}) == 1
        return None if is_met else replace(last, is_completed=False)

    def can_step(self, rank: int) -> bool:
        return self.waits_in(rank) is None and self.begun[rank] < len(self.programs[rank])

    def step(self, rank: int) -> None:
        self.begun[rank] += 1

    def state(self, rank: int) -> RankState:
        pending, calls = self.waits_in(rank), self.collectives(rank)
        if pending is not None:
            calls[-1] = pending
        has_returned = pending is None and self.begun[rank] == len(self.programs[rank])
        return RankState(
            rank,
            "waiting" if pending else "returned" if has_returned else "running",
            location=f"train.py:{self.begun[rank]}",
            collectives=tuple(calls),
            groups=groups_of(rank),
            is_blocked=True,
        )

    def states(self) -> list[RankState]:
        return [self.state(rank) for rank in self.programs]


def run(machine: Machine, order: list[int]) -> None:
    """Step the ranks, first in the given order, until none can step."""
    for rank in itertools.chain(order, itertools.cycle(WORLD)):
        if not any(map(machine.can_step, WORLD)):
            return
        if machine.can_step(rank):
            machine.step(rank)


@given(st.tuples(*[st.lists(collectives, max_size=4).map(tuple)] * 3))
@example(((("pair", "all_reduce"), ("ends", "all_reduce")), (), (("ends", "all_reduce"),)))
def test_every_deadlock_is_found(programs: tuple[Program, ...]) -> None:
    """When no rank can step, there is a proof if and only if some rank waits."""
    machine = Machine(dict(enumerate(programs)))
    run(machine, [])
    assert (find_deadlock(machine.states()) is not None) == any(machine.waits_in(rank) for rank in WORLD)


@given(st.lists(collectives, max_size=6).map(tuple), st.lists(st.sampled_from(WORLD), max_size=12))
def test_ranks_with_equal_programs_are_never_deadlocked(program: Program, order: list[int]) -> None:
    """However far each rank has come in the same program, no deadlock is found."""
    machine = Machine(dict.fromkeys(WORLD, program))
    for rank in order:
        if machine.can_step(rank):
            machine.step(rank)
        assert find_deadlock(machine.states()) is None


def waits(rank: int, *pending: Collective, location: str = "train.py:41", **more: object) -> RankState:
    more = {"is_blocked": True, **more}
    return RankState(rank, "waiting", location=location, collectives=pending, groups=groups_of(rank), **more)


def runs(rank: int, location: str = "eval.py:12", **more: object) -> RankState:
    return RankState(rank, "running", location=location, groups=groups_of(rank), **more)


def returned(rank: int, **more: object) -> RankState:
    return RankState(rank, "returned", groups=groups_of(rank), **more)


def reduce_in(group: str, seq: int = 1, *, over: bool = False, **more: object) -> Collective:
    return Collective(group, seq, "all_reduce of float32[4]", is_completed=over, **more)


def test_a_rank_that_is_busy_proves_nothing() -> None:
    """A running rank may still come, wherever it is."""
    assert find_deadlock([waits(0, reduce_in("all")), waits(1, reduce_in("all")), runs(2)]) is None


def test_a_slow_collective_proves_nothing() -> None:
    """All ranks are in the same collective, which one of them has completed: it may only be slow."""
    assert find_deadlock([waits(0, reduce_in("all")), waits(1, reduce_in("all")), runs(2)]) is None
    left = returned(1, collectives=(reduce_in("all", over=True),))
    assert find_deadlock([waits(0, reduce_in("all")), left]) is None


def test_another_active_thread_prevents_a_proof() -> None:
    """Ranks that wait for each other are not deadlocked if another thread of a rank may make the missing call."""
    stuck = [waits(0, reduce_in("pair")), waits(1, reduce_in("all"))]
    assert find_deadlock(stuck) is not None
    assert find_deadlock([stuck[0], replace(stuck[1], is_blocked=False)]) is None


def test_one_of_several_pending_calls_proves_nothing() -> None:
    """A rank with two pending collectives certainly waits only for ranks that both of them need."""
    both = waits(0, reduce_in("pair"), reduce_in("ends"))
    assert find_deadlock([both, returned(1), runs(2)]) is None
    assert find_deadlock([both, returned(1), returned(2)]) is None  # it waits for 1 or for 2


def test_another_root_is_another_collective() -> None:
    """Two ranks that each wait for a broadcast from the other are deadlocked."""
    other = waits(1, reduce_in("all", root=0), location="train.py:43")
    report = find_deadlock([waits(0, reduce_in("all", root=1)), other])
    assert report is not None
    assert "rank 0 waits at train.py:41 in all_reduce of float32[4] (root 1)" in report.what
    assert "rank 1 waits at train.py:43 in all_reduce of float32[4] (root 0)" in report.what


def test_a_report_says_who_waits_for_whom() -> None:
    """A cycle names its own ranks only; of ranks that have returned, all are named."""
    cycle = find_deadlock([waits(0, reduce_in("pair")), waits(1, reduce_in("all"), location="a.py:1"), runs(2)])
    assert cycle is not None
    assert cycle.ranks == (0, 1)
    assert cycle.what == (
        "ranks wait for each other: rank 0 waits at train.py:41 in all_reduce of float32[4] for rank 1; "
        "rank 1 waits at a.py:1 in all_reduce of float32[4] for rank 0"
    )
    report = find_deadlock([waits(0, reduce_in("all")), returned(1), returned(2)])
    assert report is not None
    assert report.ranks == (0, 1, 2)
    assert report.what.endswith(" for ranks 1-2, which have returned")


def test_the_first_of_several_mismatches_is_reported() -> None:
    """Collectives after it differ because of it."""
    first, later = reduce_in("ends"), Collective("all", 3, "barrier", is_completed=False)
    other = [Collective("all", 3, "broadcast", is_completed=False), Collective("ends", 1, "barrier", is_completed=True)]
    report = find_deadlock([waits(0, later, first), waits(2, *other)])
    assert report is not None
    assert "barrier, and has gone on" in report.what
    assert "broadcast" not in report.what


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        ("", "all_reduce of float32[4]"),
        ("all_reduce_", "all_reduce of float32[4]"),
        ("backward", "backward (all_reduce of float32[4])"),
        ("backward (all_reduce)", "backward (all_reduce)"),
    ],
)
def test_an_operation_is_named_with_its_collective(operation: str, text: str) -> None:
    """The collective is added if the user's operation has another name."""
    line = waiting_line([waits(0, reduce_in("pair"), operation=operation), runs(1, operation="f")], world_size=2)
    assert line == f"rank 0 waits at train.py:41 in {text} for rank 1, which is at eval.py:12 in f"


def test_where_a_rank_is() -> None:
    """A rank without a line of the user's program is outside of it; one without a collective has its operation."""

    def line(*others: RankState) -> str:
        first = waits(0, reduce_in("all"), operation="all_reduce", idle_s=9.0)
        return waiting_line([first, *others], world_size=3).partition(" for ")[2]

    assert line(returned(1), runs(2)) == "rank 1, which has returned; rank 2, which is at eval.py:12"
    assert line(runs(1, ""), runs(2, "", stack=("a", "b"))) == (
        "rank 1, which is outside of the user's program; rank 2, which is outside of the user's program (a > b)"
    )
    stuck = waits(1, location="a.py:1", operation="recv", idle_s=1.0)
    assert line(stuck) == "rank 1, which waits at a.py:1 in recv; rank 2, which has not answered"
    assert waiting_line([waits(0, location="")], world_size=1) == "rank 0 waits at an unknown line"
    several = waits(0, reduce_in("pair"), Collective("ends", 1, "barrier", is_completed=False), peers=(1,))
    assert waiting_line([several, runs(1)], world_size=2).startswith("rank 0 waits at train.py:41 in all_reduce of ")


@pytest.mark.parametrize(("ranks", "more"), [(4, ""), (5, "; and 1 more"), (7, "; and 3 more")])
def test_a_long_line_is_cut(ranks: int, more: str) -> None:
    """At most four groups of ranks are listed."""
    states = [replace(runs(0, f"a.py:{rank}"), rank=rank, groups=("all",)) for rank in range(1, ranks + 1)]
    line = waiting_line([waits(0, reduce_in("all")), *states], world_size=ranks + 1)
    assert line.endswith(f"rank 4, which is at a.py:4{more}")


def test_a_rank_that_completed_another_collective_is_named_with_its_line() -> None:
    """A rank that completed a different collective is at another line by now."""
    other = runs(1, collectives=(Collective("all", 1, "broadcast of float32[4]", is_completed=True),))
    report = find_deadlock([waits(0, reduce_in("all")), other])
    assert report is not None
    assert "rank 1 was in broadcast of float32[4], and has gone on to eval.py:12" in report.what
    for state, text in [(returned(1), "has returned"), (runs(1, ""), "has gone on")]:
        report = find_deadlock([waits(0, reduce_in("all"), location=""), replace(state, collectives=other.collectives)])
        assert report is not None
        assert "rank 0 waits at an unknown line in all_reduce of float32[4]" in report.what
        assert report.what.endswith(f"rank 1 was in broadcast of float32[4], and {text}")


def test_a_rank_that_waits_for_this_one_in_a_collective_is_absent() -> None:
    """So is one that has returned; one that runs, waits for another rank or has another thread may still come."""
    stuck, busy = waits(1, reduce_in("all")), runs(2)
    report = find_absent_rank(0, [1, 2], [runs(0), stuck, busy])
    assert report is not None
    assert report.what == "rank 1 waits at train.py:41 in all_reduce of float32[4] for rank 0"
    assert find_absent_rank(0, [2], [runs(0), stuck, busy]) is None
    assert find_absent_rank(0, [1], [runs(0), replace(stuck, is_blocked=False), busy]) is None
    assert find_absent_rank(0, [1], [runs(0), waits(1, reduce_in("pair", seq=0)), busy]) is None
    assert find_absent_rank(0, [1], [runs(0), returned(1), busy]) is not None


def test_a_report_is_confirmed_by_newer_states_of_its_ranks() -> None:
    """An older state does not confirm it; a rank that has returned need not answer again."""
    report = HangReport("what", "why", "fix", (0, 1))
    fresh, stale = waits(0, request_id=8), waits(1, request_id=7)
    assert not report.is_confirmed([fresh, stale], since=7)
    assert report.is_confirmed([fresh, replace(stale, request_id=8)], since=7)
    assert report.is_confirmed([fresh, returned(1)], since=7)


def test_the_line_names_waiting_and_awaited_ranks_with_their_lines() -> None:
    """Ranks that wait at one line are grouped; the awaited rank is shown with its stack."""
    busy = runs(0, operation="evaluate", stack=("train.py:30 in train", "eval.py:12 in evaluate"))
    waiting = [waits(rank, reduce_in("all"), operation="all_reduce", idle_s=31.0) for rank in (1, 2)]
    assert waiting_line([busy, *waiting], world_size=3) == (
        "ranks 1-2 wait at train.py:41 in all_reduce of float32[4] for rank 0, which is at eval.py:12 in evaluate "
        "(train.py:30 in train > eval.py:12 in evaluate)"
    )
    assert waiting_line([busy], world_size=1) == ""


def test_the_line_names_the_sender_of_a_message() -> None:
    """A receiving rank waits for one rank, whatever the others do."""
    line = waiting_line([waits(0, operation="recv", peers=(2,)), runs(1, "a.py:1"), runs(2, "b.py:2")], world_size=3)
    assert line == "rank 0 waits at train.py:41 in recv for rank 2, which is at b.py:2"


def test_a_rank_that_does_not_answer_is_named() -> None:
    """A stopped process has no state."""
    line = waiting_line([waits(0, reduce_in("all")), waits(2, reduce_in("all"))], world_size=4)
    assert line == "ranks 0, 2 wait at train.py:41 in all_reduce of float32[4] for ranks 1, 3, which have not answered"


def test_a_timeout_is_reported_with_the_known_states() -> None:
    """The report is the waiting line, with torch's message and the timeout."""
    states = [waits(0, reduce_in("pair"), operation="all_reduce"), runs(1)]
    report = timeout_report(states, 60, world_size=2, reason="Timed out waiting 60000ms")
    assert report.what == "rank 0 waits at train.py:41 in all_reduce of float32[4] for rank 1, which is at eval.py:12"
    assert report.why.startswith("Timed out waiting 60000ms; timeout=60 s is over")
    unknown = timeout_report([runs(0)], 60, world_size=1, reason="")
    assert unknown.what == "a wait for other ranks took too long"
    assert unknown.why.startswith("nothing was received; timeout=60 s is over")


def test_several_operations_under_one_sequence_number_are_no_mismatch() -> None:
    """NCCL counts coalesced operations as one."""
    second = Collective("all", 1, "all_reduce of float32[9]", is_completed=False)
    both = [waits(rank, reduce_in("all"), second) for rank in (0, 1)]
    assert find_deadlock([*both, waits(2, reduce_in("all"))]) is None
