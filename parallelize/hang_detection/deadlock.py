"""Deadlocks and their messages: pure functions of the states of all ranks.

A rank in a collective waits for the ranks of the group that have not begun it. It waits forever in one of these cases:

    mismatch    two ranks of a group began different collectives with the same sequence number
    returned    a rank that is waited for has returned
    cycle       blocked ranks wait for each other; one in `work.wait()` is not known to be blocked: no stack shows it

Any other wait may still end: a rank that evaluates, compiles or writes a file may begin the collective later.

The states need not be of the same moment. Of a cycle, suppose that some rank moves on after its state was taken, and
let A be the first. It waited for a rank B, which then began the collective before A moved: either before B's state was
taken, which would show it, or after it; but then B moved before A did.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

from parallelize.errors import list_ranks
from parallelize.hang_detection.rank_state import RankState

__all__ = ["Verdict", "awaited_ranks", "find_deadlock", "waiting_line"]

_FIX = "make the same calls on every rank, with the same shapes and dtypes in the same order"
_PLURAL = {"waits": "wait", "is": "are", "has": "have", "was": "were", "does": "do"}

_States = Mapping[int, RankState]
_Awaited = Mapping[int, frozenset[int]]
Verdict = dict[str, Any]
"""The error that reports a hang: what, why, fix."""


def find_deadlock(states: _States) -> Verdict | None:
    """Return the verdict on ranks that provably wait forever, or None if all ranks may still continue."""
    awaited = awaited_ranks(states)
    return _mismatch(states, awaited) or _returned(states, awaited) or _cycle(states, awaited)


def awaited_ranks(states: _States) -> _Awaited:
    """Return the ranks that each waiting rank certainly waits for: of its collectives, those missing in all of them."""
    last = {(rank, call.counter): call.seq for rank, state in states.items() for call in state.collectives}

    @functools.cache
    def missing(counter: str, seq: int) -> frozenset[int]:
        group = counter.partition("/")[0]
        return frozenset(r for r in states if group in states[r].groups and last.get((r, counter), 0) < seq)

    def of(state: RankState) -> frozenset[int]:
        each = [missing(*call[:2]) for call in state.pending()]
        return frozenset.intersection(*each) if each else frozenset()

    return {rank: of(state) for rank, state in states.items() if state.status == "waiting"}


def _mismatch(states: _States, awaited: _Awaited) -> Verdict | None:
    for key in sorted({call[:2] for rank in awaited for call in states[rank].pending()}):
        begun = {rank: call for rank, state in states.items() for call in state.collectives if call[:2] == key}
        longest = max((call.signature for call in begun.values()), key=len)  # one may lack the root
        if not all(longest.startswith(call.signature) for call in begun.values()):
            texts = {rank: _place(states[rank]) for rank in begun}
            texts |= {r: f"was in {call.signature}, and {texts[r]}" for r, call in begun.items() if call.is_completed}
            why = "all ranks of a group must make the same collective call, so none of these ever completes"
            return Verdict(what=f"ranks are in different collectives: {_phrases(texts)}", why=why, fix=_FIX)
    return None


def _returned(states: _States, awaited: _Awaited) -> Verdict | None:
    returned = {rank for rank, state in states.items() if state.status == "returned"}
    for rank, ranks in awaited.items():
        if ranks & returned:
            return Verdict(
                what=_line(states, rank, ranks & returned, silent={}),
                why="a rank that has returned makes no further collective calls",
                fix="make the same number of steps and collectives on every rank: no `return`, `break`, extra step or "
                "extra backward on some ranks only",
            )
    return None


def _cycle(states: _States, awaited: _Awaited) -> Verdict | None:
    left, size = {rank: ranks for rank, ranks in awaited.items() if states[rank].is_blocked}, -1
    # Drop ranks that wait for no rank of the others, until none is left; the survivors wait for each other.
    while len(left) != size:
        size = len(left)
        left = {rank: ranks for rank, ranks in left.items() if not ranks.isdisjoint(left)}
    if not left:
        return None
    texts = {rank: f"{_place(states[rank])} for {list_ranks(ranks & left.keys())}" for rank, ranks in left.items()}
    why = "each of them waits for what another of them has not begun"
    return Verdict(what=f"ranks wait for each other: {_phrases(texts)}", why=why, fix=_FIX)


def waiting_line(states: _States, world_size: int, silent: Mapping[int, str] | None = None) -> str:
    """Describe which ranks wait (at least one), for which ranks, and where the awaited ranks are.

    Args:
        states: states of the ranks that have answered.
        world_size: number of ranks.
        silent: phrases about ranks that have not answered: "is stopped, last seen at a.py:9".
    """
    awaited = awaited_ranks(states)
    first = min(awaited, key=lambda rank: states[rank].since)
    unanswered = range(world_size) - states.keys()
    others = (awaited[first] or states.keys() - awaited.keys()) | unanswered
    return _line(states, first, others, silent or {})


def _line(states: _States, rank: int, others: Collection[int], silent: Mapping[int, str]) -> str:
    """Say where a rank waits, and all ranks that wait at the same place, and where the others are."""
    texts = {each: _place(state) for each, state in states.items()}
    same = {each: text for each, text in texts.items() if text == texts[rank] and each not in others}
    places = {other: texts.get(other) or silent.get(other, "has not answered") for other in others}
    return _phrases(same) + (f" for {_phrases(places, ', which ')}" if places else "")


def _place(state: RankState) -> str:
    """Say where a rank is: "waits at train.py:4 in backward (all_reduce of float32[4])", "is at eval.py:9 in test"."""
    if state.status == "returned":
        return "has returned"
    operation, pending = state.operation, state.pending() if state.status == "waiting" else []
    if pending and "(" not in operation:
        name = pending[0].signature
        operation = name if operation.strip("_") in name else f"{operation} ({name})"
    verb = "waits" if state.status == "waiting" else "is"
    return f"{verb} at {state.location or 'an unknown line'}{operation and f' in {operation}'}"


def _phrases(texts: Mapping[int, str], join: str = " ") -> str:
    """Join the texts of ranks: "ranks 0-2 wait at ...; rank 3 ...", at most four."""
    phrases = []
    for text in dict.fromkeys(texts[rank] for rank in sorted(texts)):
        ranks, (verb, _, rest) = [rank for rank in texts if texts[rank] == text], text.partition(" ")
        phrases.append(f"{list_ranks(ranks)}{join}{_PLURAL[verb] if len(ranks) > 1 else verb} {rest}")
    return "; ".join(phrases[:4]) + "; ..." * (len(phrases) > 4)
