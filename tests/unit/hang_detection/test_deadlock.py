"""What proves that ranks wait for ever, what proves nothing, and how it is said: by the places of all ranks alone."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from parallelize.hang_detection import stack_frames
from parallelize.hang_detection.deadlock import Finding, find, hopeless, line_due_s, overdue, waiting_line
from parallelize.hang_detection.flight_recorder import Recorder, calls_of
from parallelize.hang_detection.rank_state import Call, Place
from parallelize.hang_detection.thread_clock import ThreadClock

WORLD = range(3)
GROUPS = {"all": (0, 1, 2), "pair": (0, 1), "ends": (0, 2)}

# A program of one rank: which groups' collectives it begins, in order, each waited for.
Program = tuple[tuple[str, str], ...]
calls = st.tuples(st.sampled_from(sorted(GROUPS)), st.sampled_from(["all_reduce", "barrier"]))


class Machine:
    """Ranks that each run a program of collectives until nobody can go on."""

    def __init__(self, programs: dict[int, Program]) -> None:
        self.programs = {rank: [call for call in each if rank in GROUPS[call[0]]] for rank, each in programs.items()}
        self.begun = dict.fromkeys(programs, 0)  # by number in the rank's own program; the last one is waited in

    def calls(self, rank: int) -> list[Call]:
        numbers = {group: itertools.count(1) for group in GROUPS}
        begun = self.programs[rank][: self.begun[rank]]
        return [Call(group, next(numbers[group]), what, is_over=True) for group, what in begun]

    def waits_in(self, rank: int) -> Call | None:
        mine = self.calls(rank)
        if not mine:
            return None
        last = mine[-1]
        theirs = [
            [each for each in self.calls(other) if (each.group, each.number) == (last.group, last.number)]
            for other in GROUPS[last.group]
        ]
        is_met = all(theirs) and len({each.what for same in theirs for each in same}) == 1
        return None if is_met else replace(last, is_over=False)

    def can_step(self, rank: int) -> bool:
        return self.waits_in(rank) is None and self.begun[rank] < len(self.programs[rank])

    def step(self, rank: int) -> None:
        self.begun[rank] += 1

    def place(self, rank: int) -> Place:
        waited, done = self.waits_in(rank), self.calls(rank)
        if waited is not None:
            done[-1] = waited
        is_through = waited is None and self.begun[rank] == len(self.programs[rank])
        return Place(
            rank,
            "waits" if waited else "returned" if is_through else "runs",
            at=f"train.py:{self.begun[rank]}",
            calls=tuple(done),
            groups=tuple(GROUPS.items()),
            is_alone=True,
        )

    def places(self) -> list[Place]:
        return [self.place(rank) for rank in self.programs]


def run(machine: Machine, order: list[int]) -> None:
    """Let ranks step in some order, until none can."""
    for rank in itertools.chain(order, itertools.cycle(WORLD)):
        if not any(map(machine.can_step, WORLD)):
            return
        if machine.can_step(rank):
            machine.step(rank)


@given(st.tuples(*[st.lists(calls, max_size=4).map(tuple)] * 3))
@example(((("pair", "all_reduce"), ("ends", "all_reduce")), (), (("ends", "all_reduce"),)))
def test_what_stands_still_for_ever_is_found(programs: tuple[Program, ...]) -> None:
    """When nobody can go on, there is a proof if and only if somebody waits."""
    machine = Machine(dict(enumerate(programs)))
    run(machine, [])
    assert (find(machine.places()) is not None) == any(machine.waits_in(rank) for rank in WORLD)


@given(st.lists(calls, max_size=6).map(tuple), st.lists(st.sampled_from(WORLD), max_size=12))
def test_ranks_of_one_program_are_never_accused(program: Program, order: list[int]) -> None:
    """However far each rank has come in the same program, nothing proves that it waits for ever."""
    machine = Machine(dict.fromkeys(WORLD, program))
    for rank in order:
        if machine.can_step(rank):
            machine.step(rank)
        assert find(machine.places()) is None


def waits(rank: int, *pending: Call, at: str = "train.py:41", alone: bool = True, **more: object) -> Place:
    return Place(rank, "waits", at=at, calls=pending, groups=tuple(GROUPS.items()), is_alone=alone, **more)  # type: ignore[arg-type]  # fields of Place


def reduce_in(group: str, number: int = 1, *, over: bool = False, **more: object) -> Call:
    return Call(group, number, "all_reduce of float32[4]", is_over=over, **more)  # type: ignore[arg-type]  # fields of Call


def test_a_rank_that_is_busy_proves_nothing() -> None:
    """A rank that runs may still come, wherever it is."""
    assert find([waits(0, reduce_in("all")), waits(1, reduce_in("all")), Place(2, "runs", at="eval.py:12")]) is None


def test_a_slow_collective_proves_nothing() -> None:
    """All ranks in one and the same collective, one of them through with it: that takes its time."""
    assert find([waits(0, reduce_in("all")), waits(1, reduce_in("all")), Place(2, "runs", "a.py:1")]) is None
    assert find([waits(0, reduce_in("all")), Place(1, "returned", calls=(reduce_in("all", over=True),))]) is None


def test_a_thread_that_could_go_on_proves_nothing() -> None:
    """What looks like a circle is none if another thread of the process may make the missing call."""
    stuck = [waits(0, reduce_in("pair")), waits(1, reduce_in("all"))]
    assert find(stuck) is not None
    assert find([stuck[0], replace(stuck[1], is_alone=False)]) is None


def test_one_of_several_pending_calls_proves_nothing() -> None:
    """A rank that waits in one of two calls is not known to wait for those that only the other one needs."""
    both = waits(0, reduce_in("pair"), reduce_in("ends"))
    assert find([both, Place(1, "returned"), Place(2, "runs", at="a.py:1")]) is None
    assert find([both, Place(1, "returned"), Place(2, "returned")]) is None  # for 1 or for 2, but which?


def test_another_root_is_another_collective() -> None:
    """Two ranks that each expect a broadcast from the other."""
    finding = find([waits(0, reduce_in("all", root=1)), waits(1, reduce_in("all", root=0), at="train.py:43")])
    assert finding is not None
    assert "rank 0 waits at train.py:41 in all_reduce of float32[4] (root 1)" in finding.what
    assert "rank 1 waits at train.py:43 in all_reduce of float32[4] (root 0)" in finding.what


def test_one_that_has_gone_on_after_another_collective_is_named_with_its_place() -> None:
    """The rank that is through with what it began instead is somewhere else by now."""
    other = Place(1, "runs", at="eval.py:12", calls=(Call("all", 1, "broadcast of float32[4]", is_over=True),))
    finding = find([waits(0, reduce_in("all")), other])
    assert finding is not None
    assert "rank 1 was in broadcast of float32[4], and has gone on to eval.py:12" in finding.what


def test_who_waits_for_this_rank_elsewhere_cannot_come() -> None:
    """Nor can one that has returned; one that runs can, or that waits for another, or that has a thread for it."""
    stuck, runs = waits(1, reduce_in("all")), Place(2, "runs", "eval.py:12")
    finding = hopeless(0, [1, 2], [Place(0, "runs"), stuck, runs])
    assert finding is not None
    assert finding.what == "rank 1 waits at train.py:41 in all_reduce of float32[4] for rank 0"
    assert hopeless(0, [2], [Place(0, "runs"), stuck, runs]) is None
    assert hopeless(0, [1], [Place(0, "runs"), replace(stuck, is_alone=False), runs]) is None
    assert hopeless(0, [1], [Place(0, "runs"), waits(1, reduce_in("pair", number=0)), runs]) is None
    assert hopeless(0, [1], [Place(0, "runs"), Place(1, "returned"), runs]) is not None


def test_a_finding_holds_when_all_that_it_rests_on_have_told_again() -> None:
    """An answer from before the finding does not confirm it; who has returned need not answer."""
    finding = Finding("what", "why", "fix", (0, 1))
    fresh, stale = waits(0, answer=8), waits(1, answer=7)
    assert not finding.is_confirmed([fresh, stale], since=7)
    assert finding.is_confirmed([fresh, replace(stale, answer=8)], since=7)
    assert finding.is_confirmed([fresh, Place(1, "returned")], since=7)
    assert Finding.loads(finding.dumps()) == finding


def test_the_line_says_who_waits_for_whom_and_where_that_one_is() -> None:
    """The ranks that wait at one line together, and the stack of the one they wait for."""
    busy = Place(0, "runs", at="eval.py:12", doing="evaluate", stack=("train.py:30 in train", "eval.py:12 in evaluate"))
    waiting = [waits(rank, reduce_in("all"), doing="all_reduce", since_s=31.0) for rank in (1, 2)]
    assert waiting_line([busy, *waiting], world_size=3) == (
        "ranks 1-2 wait at train.py:41 in all_reduce of float32[4] for rank 0, which is at eval.py:12 in evaluate "
        "(train.py:30 in train > eval.py:12 in evaluate)"
    )
    assert waiting_line([busy], world_size=1) == ""


def test_the_line_names_the_sender_of_a_message() -> None:
    """Who receives waits for one rank, whatever the others do."""
    line = waiting_line(
        [waits(0, doing="recv", awaits=(2,)), Place(1, "runs", at="a.py:1"), Place(2, "runs", "b.py:2")],
        world_size=3,
    )
    assert line == "rank 0 waits at train.py:41 in recv for rank 2, which is at b.py:2"


def test_a_rank_that_does_not_answer_is_named() -> None:
    """One that is stopped, or whose machine is, cannot say where it is."""
    line = waiting_line([waits(0, reduce_in("all")), waits(2, reduce_in("all"))], world_size=4)
    assert line == "ranks 0, 2 wait at train.py:41 in all_reduce of float32[4] for ranks 1, 3, which have not answered"


def test_when_the_time_is_over_the_error_says_so() -> None:
    """The last line becomes the error, with torch's words and the timeout."""
    places = [waits(0, reduce_in("pair"), doing="all_reduce"), Place(1, "runs", at="eval.py:12")]
    finding = overdue(places, 60, world_size=2, said="Timed out waiting 60000ms")
    assert finding.what == "rank 0 waits at train.py:41 in all_reduce of float32[4] for rank 1, which is at eval.py:12"
    assert finding.why.startswith("Timed out waiting 60000ms; timeout=60 s is over")


def test_lines_grow_rare() -> None:
    """After 30 s, one minute, two, four."""
    assert [line_due_s(said) for said in range(4)] == [30, 60, 120, 240]


@given(st.builds(Place, st.integers(0, 9), st.sampled_from(["runs", "waits", "returned"]), stack=st.just(("a", "b"))))
def test_a_place_crosses_as_it_is(place: Place) -> None:
    """What is read is what was written, tuples and all."""
    full = replace(place, calls=(reduce_in("all", root=1),), groups=(("all", (0, 1)),), awaits=(2,))
    assert Place.loads(full.dumps()) == full


# What a process knows of itself


@pytest.fixture
def group() -> object:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_recorder_tells_what_was_begun(group: object) -> None:
    """Operation, shape and type, number in the group, and that it is over."""
    since_ns = time.time_ns()
    dist.all_reduce(torch.ones(2, 3))
    dist.broadcast(torch.ones(4, dtype=torch.int64), src=0)
    recorder = Recorder(since_ns)
    first, second = recorder.calls(None, at_once=True)
    assert (first.what, second.what) == ("all_reduce of float32[2, 3]", "broadcast of int64[4]")
    assert (first.is_over, second.is_over, second.number - first.number) == (True, True, 1)
    assert Recorder(time.time_ns()).calls(None, at_once=True) == ()


def entry(number: int, **changes: object) -> dict[str, object]:
    """As the recorder has it."""
    return {
        "time_created_ns": 1,
        "is_p2p": False,
        "profiling_name": "nccl:_all_gather_base",
        "retired": True,
        "state": "scheduled",
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        **changes,
    }


def test_what_is_not_over_is_told_however_long_ago_it_began() -> None:
    """Of what is over only the last few of a group; messages between two ranks have numbers of their own."""
    entries = [entry(1, retired=False), *(entry(number) for number in range(2, 50)), entry(50, is_p2p=True)]
    numbers = [call.number for call in calls_of(entries, since_ns=0)]
    assert numbers == [1, *range(34, 50)]
    assert calls_of(entries, since_ns=0)[0] == Call("0", 1, "all_gather", is_over=False, engine="nccl")


def test_a_group_that_was_made_again_begins_anew() -> None:
    """The first one's collectives have the same numbers, and are none of the second's."""
    entries = [
        *(entry(number, profiling_name="gloo:all_gather") for number in range(1, 6)),
        entry(7, process_group=("1", "undefined"), profiling_name="gloo:barrier"),
        *(entry(number, profiling_name="gloo:broadcast") for number in range(1, 4)),
    ]
    found = [(call.group, call.number, call.what) for call in calls_of(entries, since_ns=0)]
    assert found == [("1", 7, "barrier"), *(("0", number, "broadcast of float32[4]") for number in range(1, 4))]


def test_several_operations_under_one_number_are_no_mismatch() -> None:
    """NCCL counts what is coalesced as one."""
    both = [waits(rank, reduce_in("all"), Call("all", 1, "all_reduce of float32[9]", is_over=False)) for rank in (0, 1)]
    assert find([*both, waits(2, reduce_in("all"))]) is None


def inner() -> stack_frames.Stack:
    return stack_frames.stack_of(sys._getframe())


def test_a_stack_is_told_by_the_users_lines() -> None:
    """Lines of the program, outermost first, none of the library's or of Python's own."""
    stack = inner()
    said = stack_frames.lines(stack)
    assert said[-1].startswith("test_deadlock.py:")
    assert said[-1].endswith(" in inner")
    assert said[-2].endswith(" in test_a_stack_is_told_by_the_users_lines")
    assert stack_frames.site(stack) == said[-1].partition(" ")[0]
    assert not any("site-packages" in line or "threading" in line for line in said)


def test_an_errors_stack_ends_where_it_was_raised() -> None:
    """The line of the error, not the one where its function was left."""
    try:
        torch.ones(2) + torch.ones(3)
    except RuntimeError as error:
        stack = stack_frames.raised_in(error)
    assert stack_frames.lines(stack)[-1].endswith(" in test_an_errors_stack_ends_where_it_was_raised")


def test_a_printed_stack_is_read_either_way_round() -> None:
    """Python prints the innermost line last, its faulthandler first."""
    torch_line = f'File "{torch.__file__}", line 3, in all_reduce'
    printed = f'Traceback:\n  File "/home/a/train.py", line 4, in train\n  {torch_line}\nRuntimeError'
    dumped = "(most recent call first):\n  " + torch_line.replace(", in", " in") + '\n  File "/a/train.py", line 9 in f'
    found = [stack_frames.site_in(text) for text in (printed, dumped, "")]
    assert found == ["train.py:4", "train.py:9", ""]
    elsewhere = printed + '  File "/opt/other/parallelize/worker/main.py", line 7, in run\n'
    assert stack_frames.site_in(elsewhere) == "train.py:4"
    assert stack_frames.site_in(elsewhere.replace("worker/main.py", "worker/mine.py")) == "mine.py:7"


def _wait(ended: threading.Event) -> None:
    ended.wait()


def test_another_thread_of_the_user_is_seen() -> None:
    """It could make a call that the main thread does not."""
    ended = threading.Event()
    assert not stack_frames.has_others(threading.get_ident())
    thread = threading.Thread(target=_wait, args=(ended,))
    thread.start()
    try:
        assert stack_frames.has_others(threading.get_ident())
    finally:
        ended.set()
        thread.join()


def test_a_thread_that_computes_is_not_idle() -> None:
    """By its processor's time, which stands still while it sleeps."""
    clock = ThreadClock(threading.get_ident())
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        pass
    assert not clock.is_idle()
    time.sleep(0.05)
    assert clock.is_idle()
