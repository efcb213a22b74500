"""What the source around a rank's line shows, and what is said of ranks that wait for each other."""

from __future__ import annotations

import linecache
import sys
import textwrap
import threading
import traceback
from types import FrameType
from typing import Any

import pytest

from parallelize.hang_detection.advice import advice_on, places_of
from parallelize.hang_detection.rank_state import Collective, RankState
from parallelize.hang_detection.statements import Statement, StatementKind, rank_test_here, statements_around
from parallelize.hang_detection.waiting import Wait, WaitKind, wait_of_thread, waiting_for

PROGRAM = """
def train(is_main, rank, stack):
    try:
        with open("/dev/null"):
            while True:
                if rank == 0: pass
                else:
                    for x in [1]:
                        def save(): return stack()
                        return save()
    except KeyError: pass
    match rank:
        case 0:
            if not is_main(): pass
"""


def stack_of(rank: int) -> list[tuple[FrameType, int]]:
    """Return the stack in a function of the program, whose source is in no file."""
    lines = textwrap.dedent(PROGRAM).splitlines(keepends=True)
    linecache.cache["<cell>"] = len(PROGRAM), None, lines, "<cell>"
    namespace: dict[str, Any] = {}
    exec(compile("".join(lines), "<cell>", "exec"), namespace)
    found: list[tuple[FrameType, int]] = namespace["train"](
        bool, rank, lambda: [*traceback.walk_stack(sys._getframe(1))]
    )
    return found


def test_statements_around_a_line_are_found() -> None:
    """Outermost first, of each function of the stack; the branch of a test of the rank is named.

    Line 9 has the `return` of a function that is defined in the loops: it ends neither of them.
    """
    stack = [entry for entry in stack_of(1) if entry[0].f_code.co_filename == "<cell>"]
    assert statements_around(stack) == [
        Statement(StatementKind.BLOCK, "<cell>:4"),
        Statement(StatementKind.LOOP, "<cell>:5", exits=["while:5", "return:10", "except:11"]),
        Statement(StatementKind.RANK_TEST, "<cell>:6", "the `else` of `if rank == 0`"),
        Statement(StatementKind.LOOP, "<cell>:8", exits=["return:10", "except:11"]),
    ]


def test_the_test_of_the_rank_around_a_call() -> None:
    """The innermost one counts."""
    rank = 1
    assert rank_test_here() is None
    if rank > 0:
        found = rank_test_here()
    assert found is not None
    assert found.text == "`if rank > 0`"


def test_a_program_that_cannot_be_read_shows_nothing() -> None:
    """Its file may have changed meanwhile."""
    linecache.cache["<broken>"] = 9, None, ["def f(:\n"], "<broken>"
    namespace: dict[str, Any] = {"stack": lambda: [*traceback.walk_stack(sys._getframe(1))]}
    exec(compile("found = stack()", "<broken>", "exec"), namespace)
    assert statements_around(namespace["found"][:1]) == []


def test_of_calls_in_each_other_the_outer_one_counts() -> None:
    """`loader.mean` calls all_gather, and the user has not written that."""
    thread = threading.get_ident()
    with waiting_for("loader.mean", wait_kind=WaitKind.CALL):
        with waiting_for("all_gather", wait_kind=WaitKind.CALL):
            assert wait_of_thread(thread) == Wait("loader.mean", is_blocked=False, wait_kind=WaitKind.CALL)
        assert wait_of_thread(thread) == Wait("loader.mean", is_blocked=False, wait_kind=WaitKind.CALL)
    assert wait_of_thread(thread) is None


BLOCK = Statement(StatementKind.BLOCK, "a.py:1")
TEST = Statement(StatementKind.RANK_TEST, "a.py:4", "`if is_main()`")
PENDING = [Collective("0/gloo", 1, "all_gather", is_completed=False)]


def state(rank: int, operation: str, **fields: Any) -> RankState:
    return RankState(rank, "waiting", f"a.py:{rank}", operation, PENDING, **fields)


@pytest.mark.parametrize("names", [("save('a.pt')", "barrier"), ("barrier", "save('a.pt')")])
def test_a_call_that_is_under_no_test_of_the_rank(names: tuple[str, str]) -> None:
    """Only that every rank calls it is certain; a test that is around both lines is no reason."""
    states = {rank: state(rank, name, wait_kind=WaitKind.CALL, statements=[TEST]) for rank, name in enumerate(names)}
    advice = advice_on(states)
    assert advice is not None
    assert advice.fix.startswith(
        f"`{names[0].partition('(')[0]}` is called by every rank: decide whether to call it by"
    )


def test_a_read_of_a_gpu_is_no_call_of_every_rank() -> None:
    """A line such as `print(loss.item())` may be under a test of the rank."""
    states = {
        0: state(0, "backward"),
        1: state(1, "item", wait_kind=WaitKind.READ, statements=[TEST]),
    }
    assert advice_on(states) is None
    assert places_of(states)[1] == "waits at a.py:1 in item (all_gather)"


def test_ranks_that_differ_in_nothing_known_get_no_advice() -> None:
    """No cause is guessed."""
    assert advice_on({rank: state(rank, "all_reduce") for rank in (0, 1)}) is None


def test_the_place_at_the_end_of_a_block_without_a_loop() -> None:
    """A loop around the block was not left."""
    loop = Statement(StatementKind.LOOP, "a.py:0")
    ended = state(0, "the end of the block", wait_kind=WaitKind.END_OF_BLOCK, block="a.py:1", statements=[loop])
    inside = state(1, "backward", statements=[loop, BLOCK])
    assert places_of({0: ended, 1: inside}) == {
        0: "is at the end of the block of line 1 in a.py",
        1: "waits at a.py:1 in backward (all_gather)",
    }
