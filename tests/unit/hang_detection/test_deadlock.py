"""What is proof of a deadlock and what is not, whenever the states of the ranks were taken."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelize.hang_detection.deadlock import find_deadlock, waiting_line
from parallelize.hang_detection.rank_state import Collective, RankState, collectives_of
from parallelize.hang_detection.waiting import WaitKind

WORLD = range(3)
GROUPS = {"all": (0, 1, 2), "pair": (0, 1), "ends": (0, 2)}

# Program of one rank: (group, operation) of its collectives, each waited for.
Program = tuple[tuple[str, str], ...]
collectives = st.tuples(st.sampled_from(sorted(GROUPS)), st.sampled_from(["all_reduce", "barrier"]))


def groups_of(rank: int) -> tuple[str, ...]:
    return tuple(name for name, ranks in GROUPS.items() if rank in ranks)


class Machine:
    """Simulates ranks that each run a program of collectives until none can continue."""

    def __init__(self, programs: dict[int, Program]) -> None:
        self.programs = {rank: [call for call in each if rank in GROUPS[call[0]]] for rank, each in programs.items()}
        self.begun = dict.fromkeys(programs, 0)  # calls of its program; the rank may still wait in the last one

    def collectives(self, rank: int) -> list[Collective]:
        seqs = {group: itertools.count(1) for group in GROUPS}
        begun = self.programs[rank][: self.begun[rank]]
        return [Collective(f"{group}/gloo", next(seqs[group]), operation, True) for group, operation in begun]

    def waits_in(self, rank: int) -> Collective | None:
        own = self.collectives(rank)
        if not own:
            return None
        peers = [self.collectives(other) for other in GROUPS[own[-1].counter.partition("/")[0]]]
        matching = [[call.signature for call in calls if call[:2] == own[-1][:2]] for calls in peers]
        is_met = all(matching) and len({each for signatures in matching for each in signatures}) == 1
        return None if is_met else own[-1]._replace(is_completed=False)

    def can_step(self, rank: int) -> bool:
        return self.waits_in(rank) is None and self.begun[rank] < len(self.programs[rank])

    def state(self, rank: int) -> RankState:
        pending, calls = self.waits_in(rank), self.collectives(rank)
        if pending is not None:
            calls[-1] = pending
        has_returned = pending is None and self.begun[rank] == len(self.programs[rank])
        status = "waiting" if pending else "returned" if has_returned else "running"
        return RankState(rank, status, f"train.py:{self.begun[rank]}", "", calls, groups_of(rank), is_blocked=True)


@given(st.tuples(*[st.lists(collectives, max_size=4).map(tuple)] * 3))
def test_every_deadlock_is_found(programs: tuple[Program, ...]) -> None:
    """When no rank can step, there is a proof if and only if some rank waits."""
    machine = Machine(dict(enumerate(programs)))
    while steppable := [rank for rank in WORLD if machine.can_step(rank)]:
        machine.begun[steppable[0]] += 1
    states = {rank: machine.state(rank) for rank in WORLD}
    assert (find_deadlock(states) is not None) == any(machine.waits_in(rank) for rank in WORLD)


@given(
    st.lists(collectives, max_size=6).map(tuple),
    st.lists(st.tuples(st.sampled_from(WORLD), st.booleans()), max_size=24),
)
def test_states_of_different_times_prove_nothing_false(program: Program, order: list[tuple[int, bool]]) -> None:
    """However far each rank has come in the same program, and whenever it told so, no deadlock is found."""
    machine = Machine(dict.fromkeys(WORLD, program))
    states = {rank: machine.state(rank) for rank in WORLD}
    for rank, tells in order:
        if machine.can_step(rank):
            machine.begun[rank] += 1
        if tells:
            states[rank] = machine.state(rank)
        assert find_deadlock(states) is None


def waits(rank: int, *calls: Collective, **more: object) -> RankState:
    return RankState(rank, "waiting", "train.py:41", "", calls, groups_of(rank), **{"is_blocked": True, **more})


def begun(group: str, seq: int = 1, signature: str = "all_reduce of float32[4]", *, over: bool = False) -> Collective:
    return Collective(f"{group}/gloo", seq, signature, over)


def test_one_of_several_pending_calls_proves_nothing() -> None:
    """A rank with two pending collectives certainly waits only for ranks that both of them need."""
    other = waits(1, begun("all"))
    gone = RankState(2, "returned", groups=groups_of(2), since=1)
    assert find_deadlock({0: waits(0, begun("pair"), begun("ends")), 1: other, 2: gone}) is not None
    assert find_deadlock({0: waits(0, begun("pair"), begun("ends")), 2: gone}) is None
    assert find_deadlock({0: waits(0, begun("ends")), 2: gone}) is not None


def test_ranks_with_other_active_threads_may_still_be_freed() -> None:
    """A cycle needs ranks that nothing else in their process can free."""
    states = {0: waits(0, begun("pair")), 1: waits(1, begun("all"))}
    assert find_deadlock(states) is not None
    assert find_deadlock({**states, 1: waits(1, begun("all"), is_blocked=False)}) is None


def test_the_first_of_several_mismatches_is_reported() -> None:
    """Collectives after it differ because of it; a rank that has gone on is at another line."""
    first = waits(0, begun("all", 1, "barrier", over=True), begun("all", 2))
    second = RankState(1, "running", "eval.py:9", "test", [begun("all", 1, over=True)], groups_of(1))
    third = waits(2, begun("all", 1))
    verdict = find_deadlock({2: third, 0: first, 1: second})
    assert verdict is not None
    assert verdict["what"] == (
        "ranks are in different collectives: rank 0 was in barrier, and waits at train.py:41 in all_reduce of "
        "float32[4]; rank 1 was in all_reduce of float32[4], and is at eval.py:9 in test; "
        "rank 2 waits at train.py:41 in all_reduce of float32[4]"
    )


def test_a_line_says_where_the_awaited_ranks_are() -> None:
    """Ranks at one line are grouped, at most four groups are listed, and silent ranks are named."""
    running = {rank: RankState(rank, "running", f"eval.py:{rank}", groups=["0"]) for rank in range(2, 8)}
    waiting = {
        rank: RankState(rank, "waiting", "a.py:1", "evaluate", [begun("0", 1, "barrier")], ["0"]) for rank in (0, 1)
    }
    line = waiting_line({**running, **waiting}, world_size=8)
    assert line.startswith("ranks 0-1 wait at a.py:1 in evaluate (barrier) for rank 2, which is at eval.py:2; rank 3")
    assert line.endswith("rank 5, which is at eval.py:5; ...")
    alone = {0: waiting[0], 1: running[2]._replace(rank=1)}
    assert waiting_line(alone, world_size=4).endswith(
        "rank 1, which is at eval.py:2; ranks 2-3, which have not answered"
    )


def test_awaited_ranks_are_not_named_as_waiting() -> None:
    """Also where they are at the same line, as two ranks that wait for each other in `work.wait()`."""
    state = RankState(0, "waiting", "a.py:1", "train", [begun("0", 1, "barrier")], ["0"])
    other = RankState(1, "waiting", "a.py:1", "train", [begun("1", 1, "barrier")], ["0", "1"])
    line = "rank 0 waits at a.py:1 in train (barrier) for rank 1, which waits at a.py:1 in train (barrier)"
    assert waiting_line({0: state, 1: other}, world_size=2) == line


def entry(number: int, **changes: object) -> dict[str, object]:
    """Make an entry as in torch's flight recorders: of a collective that NCCL has completed.

    Source: getCollectiveTrace in torch/csrc/distributed/c10d/FlightRecorderDetail.hpp
    """
    return {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": number,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "state": "completed",
        "retired": True,
        "is_p2p": False,
        **changes,
    }


PENDING = {"state": "started", "retired": False}
GLOO = {"state": "scheduled"}  # it has no events


def test_recorded_collectives_are_completed_or_pending() -> None:
    """NCCL retires what has timed out, too; gloo marks in no other way. Pending ones are kept however old."""
    entries = [entry(1, **PENDING), *(entry(number) for number in range(2, 50)), entry(50, is_p2p=True)]
    assert [call.seq for call in collectives_of(entries)] == [1, *range(34, 50)]
    assert collectives_of(entries)[0] == Collective("0/nccl", 1, "all_reduce of float32[4]", False)
    calls = [entry(1, **{**PENDING, "retired": True}), entry(1, profiling_name="gloo:all_reduce", **GLOO)]
    assert [call.is_completed for call in collectives_of(calls)] == [False, True]


def test_only_the_number_of_elements_must_be_equal() -> None:
    """A scalar is reduced with a vector of one element, and a matrix with a vector."""
    sizes: list[list[int]] = [[], [1], [2, 3], [6]]
    calls = [collectives_of([entry(1, input_sizes=[size])])[0].signature for size in sizes]
    assert calls == ["all_reduce of float32[1]"] * 2 + ["all_reduce of float32[6]"] * 2


def test_the_parts_of_a_coalesced_operation_are_one_collective() -> None:
    """NCCL never marks the parts as completed, only the entry that ends them."""
    part = {"state": "scheduled", "retired": False}
    entries = [entry(1), entry(2, **part), entry(2, **part), entry(2, profiling_name="nccl:coalesced")]
    assert [(call.seq, call.is_completed) for call in collectives_of(entries)] == [(1, True), (2, True)]


@pytest.mark.parametrize("status", ["running", "returned"])
def test_gloo_and_nccl_count_their_collectives_apart(status: str) -> None:
    """In "cpu:gloo,cuda:nccl" rank 0 waits in NCCL's second collective, while rank 1 is behind three of gloo's."""
    of_gloo = [entry(number, profiling_name="gloo:barrier", **GLOO) for number in (1, 2, 3)]
    first = RankState(0, "waiting", "a.py:1", "", collectives_of([of_gloo[0], entry(1), entry(2, **PENDING)]), ["0"])
    other = RankState(1, status, "b.py:2", "", collectives_of([*of_gloo, entry(1)]), ["0"], since=1)
    assert (find_deadlock({0: first, 1: other}) is None) == (status == "running")


def test_a_rank_that_waits_for_a_message_waits_for_no_collective() -> None:
    """What it has begun with `async_op=True` is pending, and the message comes from a rank that is only slow."""
    states = {2: RankState(2, "running", "train.py:7", "evaluate", groups=["ab", "ba"])}
    for rank, group in enumerate(["ab", "ba"]):
        pending = [Collective(f"{group}/gloo", 1, "all_reduce of float32[2]", is_completed=False)]
        held = RankState(rank, "waiting", "train.py:9", "recv", pending, ["ab", "ba"], is_blocked=True)
        states[rank] = held._replace(wait_kind=WaitKind.MESSAGE)
    assert find_deadlock(states) is None
    place = "ranks 0-1 wait at train.py:9 in recv for rank 2, which is at train.py:7 in evaluate"
    assert waiting_line(states, 3) == place
    in_collectives = {rank: state._replace(wait_kind=WaitKind.OTHER) for rank, state in states.items()}
    assert find_deadlock(in_collectives) is not None
