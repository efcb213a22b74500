"""Where ranks that wait for each other are, and how to mend it: from their states alone.

Only what the states show is said. In the order in which they are looked for:

    state of the ranks                                      advice
    a call of a rank is under `if is_main():`               call it without that
    a rank is past a loop in which another rank still is    decide what ends it by an equal number
    a rank is in a call such as `save`, another is not      call it on every rank
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from parallelize.hang_detection.rank_state import RankState, RankStatus
from parallelize.hang_detection.statements import Statement, StatementKind
from parallelize.hang_detection.waiting import WaitKind

_EQUAL_NUMBER = "a number that is equal on all ranks: `all_reduce(value, 'mean')`"

_States = Mapping[int, RankState]


class Advice(NamedTuple):
    """How to mend a hang.

    Args:
        why: what the states show; "": nothing beside the hang itself.
        fix: what to change in the program.
    """

    why: str
    fix: str


def advice_on(states: _States) -> Advice | None:
    """Return the advice for ranks that wait for each other; None: the states show no reason.

    Args:
        states: states of these ranks alone.
    """
    return _on_rank_test(states) or _on_loop(states) or _on_call(states)


def _on_rank_test(states: _States) -> Advice | None:
    """Return the advice for a rank whose call only some ranks reach, as their `if` says."""
    for rank in sorted(states):
        state = states[rank]
        call = _call_of(state)
        test = _test_of_rank_alone(states, rank)
        if call and test is not None:
            _file, line_of_call = _file_and_line(state.location)
            _file, line_of_test = _file_and_line(test.line)
            return Advice(
                f"line {line_of_call} is under {test.text} of line {line_of_test}",
                f"`{call}` is called by every rank: call it without {test.text}",
            )
    return None


def _test_of_rank_alone(states: _States, rank: int) -> Statement | None:
    """Return the innermost test of the rank around the call of a rank that waits.

    A test that is around the line of each rank is no reason.
    """
    if states[rank].status != RankStatus.WAITING:
        return None
    for statement in reversed(states[rank].statements):
        is_around_all = True
        for state in states.values():
            is_around_all = is_around_all and statement in state.statements
        if statement.statement_kind == StatementKind.RANK_TEST and not is_around_all:
            return statement
    return None


def _on_loop(states: _States) -> Advice | None:
    """Return the advice for a rank that is in a loop which another rank has left."""
    for state in states.values():
        loop = None
        if state.status == RankStatus.RETURNED:
            loop = _loop_in(states)
        elif state.wait_kind == WaitKind.END_OF_BLOCK:
            loop = _loop_in(states, state.block)
        if loop is not None:
            return _advice_on_exits(loop)
    return None


def _advice_on_exits(loop: Statement) -> Advice:
    """Return the advice on what may end a loop, or one of its steps, on one rank alone."""
    why = "every rank makes the same steps in the same loops"
    lines_by_name: dict[str, list[str]] = {}
    for place in loop.exits:
        name, _, line = place.partition(":")
        lines_by_name.setdefault(f"`{name}`", []).append(line)
    if lines_by_name:
        _file, line_of_loop = _file_and_line(loop.line)
        texts = [f"{name} in line {', '.join(lines)}" for name, lines in lines_by_name.items()]
        why += f"; that of line {line_of_loop} has {' and '.join(texts)}"
    decided = [name for name in lines_by_name if name != "`except`"]
    fixes = []
    if decided:
        fixes.append(f"decide {' and '.join(decided)} by {_EQUAL_NUMBER}")
    if "`except`" in lines_by_name:
        fixes.append("let all ranks leave out a step if `except` leaves it out on one of them")
    if not fixes:
        fixes.append(f"decide the number of steps by {_EQUAL_NUMBER}")
    return Advice(why, "; ".join(fixes))


def _on_call(states: _States) -> Advice | None:
    """Return the advice for a rank in a call that every rank makes, while another is elsewhere."""
    calls = {rank: _call_of(states[rank]) for rank in sorted(states)}
    for rank, call in calls.items():
        is_call = states[rank].wait_kind == WaitKind.CALL
        if is_call and len(set(calls.values())) > 1:
            return Advice(
                "",
                f"`{call}` is called by every rank: decide whether to call it by {_EQUAL_NUMBER}",
            )
    return None


def _call_of(state: RankState) -> str:
    """Return the name of the call that a rank waits in, and every rank makes: "save"; "": none."""
    if state.status != RankStatus.WAITING:
        return ""
    if state.wait_kind in (WaitKind.END_OF_BLOCK, WaitKind.READ):
        return ""
    name, _, _arguments = state.operation.partition("(")
    return name.strip()


def _loop_in(states: _States, block: str = "") -> Statement | None:
    """Return the outermost loop in a block that any of the ranks is in.

    Args:
        states: states of the ranks.
        block: the line where the block begins; "": the loop may be anywhere.
    """
    for state in states.values():
        is_in_block = not block
        for statement in state.statements:
            if statement.statement_kind == StatementKind.LOOP and is_in_block:
                return statement
            if statement.statement_kind == StatementKind.BLOCK and statement.line == block:
                is_in_block = True
    return None


def places_of(states: _States) -> dict[int, str]:
    """Say of each rank where it is, in a phrase that begins with a verb.

    "waits at train.py:4 in backward (all_reduce of float32[4])", "is at eval.py:9 in test", "has
    left the loop of line 14 and is at the end of the block of line 11 in train.py".
    """
    places = {}
    for rank, state in states.items():
        places[rank] = _place_of(state)
        if state.status != RankStatus.RETURNED and state.wait_kind == WaitKind.END_OF_BLOCK:
            places[rank] = _place_at_end_of_block(states, state)
    return places


def _place_of(state: RankState) -> str:
    if state.status == RankStatus.RETURNED:
        return "has returned"
    verb = "is"
    call = state.operation
    if state.status == RankStatus.WAITING:
        verb = "waits"
        call = _call_with_collective(state)
    place = f"{verb} at {state.location or 'an unknown line'}"
    return f"{place} in {call}" if call else place


def _call_with_collective(state: RankState) -> str:
    """Return the call of a rank that waits, with the collective in it: "backward (all_reduce)"."""
    call = state.operation
    awaited = state.awaited()
    if not awaited or "(" in call or state.wait_kind == WaitKind.CALL:
        return call
    collective = awaited[0].signature
    if call.strip("_") in collective:
        return collective
    return f"{call} ({collective})"


def _place_at_end_of_block(states: _States, state: RankState) -> str:
    """Say that a rank is at the end of its block, and of which loop of another rank it is past."""
    file, line_of_block = _file_and_line(state.block)
    place = f"is at the end of the block of line {line_of_block} in {file}"
    loop = _loop_in(states, state.block)
    if loop is None:
        return place
    file_of_loop, line_of_loop = _file_and_line(loop.line)
    loop_text = f"line {line_of_loop}"
    if file_of_loop != file:
        loop_text += f" in {file_of_loop}"
    return f"has left the loop of {loop_text} and {place}"


def _file_and_line(location: str) -> tuple[str, str]:
    """Divide a line such as "train.py:11"."""
    file, _, line = location.rpartition(":")
    return file, line
