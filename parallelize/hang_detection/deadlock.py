"""Deadlock detection and its messages: pure functions of the states of all ranks.

A rank in a collective waits for the ranks of the group that have not begun this collective. It waits forever in one of
these cases:

    mismatch    two ranks of a group began different collectives with the same sequence number
    returned    a rank that is waited for has returned
    cycle       ranks wait for each other in a cycle

Any other wait may still end: a rank that evaluates, compiles or writes a file may begin the collective later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from parallelize.errors import list_ranks
from parallelize.hang_detection.rank_state import Collective, RankState

__all__ = ["HangReport", "find_absent_rank", "find_deadlock", "timeout_report", "waiting_line"]

_WHY_MISMATCH = "all ranks of a group must make the same collective call, so none of these ever completes"
_FIX_MISMATCH = "make the same calls on every rank, with the same shapes and dtypes in the same order"
_FIX_RETURNED = "make the same number of steps and collectives on every rank: no `return`, `break`, extra step or \
extra backward on some ranks only"
_MAX_GROUPS = 4

_Call = tuple[tuple[str, str], int]  # counter and sequence number: one collective, on all ranks


@dataclass(frozen=True)
class HangReport:
    """Text of the error that reports a hang.

    Args:
        what: which ranks wait, where, and for which ranks.
        why: why the wait does not end.
        fix: what to change in the program.
        ranks: ranks whose states prove the hang.
    """

    what: str
    why: str
    fix: str
    ranks: tuple[int, ...] = ()

    def is_confirmed(self, states: Sequence[RankState], *, since: int) -> bool:
        """Whether every rank in `ranks` has returned, or its state answers a request later than `since`."""
        current = {state.rank for state in states if state.status == "returned" or state.request_id > since}
        return current.issuperset(self.ranks)


def find_deadlock(states: Sequence[RankState]) -> HangReport | None:
    """Return a report on ranks that provably wait forever, or None if all ranks may still continue."""
    if not any(state.status == "waiting" for state in states):
        return None
    waits = _Waits(states)
    return _find_mismatch(states) or _find_returned(states, waits) or _find_cycle(states, waits)


class _Waits:
    """The ranks that each rank certainly waits for; ranks with the same pending collectives share one set."""

    def __init__(self, states: Sequence[RankState]) -> None:
        self._states = states
        self._last: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)  # counter -> rank -> last sequence number
        self._members: dict[str, set[int]] = defaultdict(set)  # of a group, among the ranks with known states
        self._missing: dict[_Call, frozenset[int]] = {}
        self._awaited: dict[frozenset[_Call], frozenset[int]] = {}
        for state in states:
            for group in state.groups:
                self._members[group].add(state.rank)
            for call in state.collectives:
                last = self._last[call.counter]
                last[state.rank] = max(call.seq, last.get(state.rank, 0))

    def awaited(self, state: RankState) -> frozenset[int]:
        """Return the ranks that are missing in all pending collectives of a rank."""
        calls = frozenset((call.counter, call.seq) for call in state.pending() if state.status == "waiting")
        if calls not in self._awaited:
            missing = [self._missing_ranks(*call) for call in calls]
            self._awaited[calls] = frozenset.intersection(*missing) if missing else frozenset()
        return self._awaited[calls]

    def _missing_ranks(self, counter: tuple[str, str], seq: int) -> frozenset[int]:
        """Return the members of a group whose states show that they have not begun a collective."""
        if (counter, seq) not in self._missing:
            last = self._last[counter]
            self._missing[counter, seq] = frozenset(r for r in self._members[counter[0]] if last.get(r, 0) < seq)
        return self._missing[counter, seq]


def _find_mismatch(states: Sequence[RankState]) -> HangReport | None:
    waiting = [state for state in states if state.status == "waiting"]
    pending: dict[_Call, list[tuple[RankState, Collective]]] = {
        (call.counter, call.seq): [] for state in waiting for call in state.pending()
    }
    for state in states:
        for call in state.collectives:
            if (call.counter, call.seq) in pending:
                pending[call.counter, call.seq].append((state, call))
    for _, calls in sorted(pending.items(), key=lambda item: item[0][1]):
        ranks = tuple(state.rank for state, _ in calls)
        is_coalesced = len(set(ranks)) < len(ranks)  # several operations under one sequence number
        if not is_coalesced and _differ([call for _, call in calls]):
            text = _by_text([(state.rank, _call_text(state, call)) for state, call in calls])
            return HangReport(f"ranks are in different collectives: {text}", _WHY_MISMATCH, _FIX_MISMATCH, ranks)
    return None


def _differ(calls: Sequence[Collective]) -> bool:
    roots = {call.root for call in calls if call.root is not None}
    return len({call.signature for call in calls}) > 1 or len(roots) > 1


def _call_text(state: RankState, call: Collective) -> str:
    if call.is_completed:
        went_on = f"gone on{f' to {state.location}' if state.location else ''}"
        return f"was in {_name(call)}, and has {'returned' if state.status == 'returned' else went_on}"
    return f"waits at {state.location or 'an unknown line'} in {_operation(state.operation, call)}"


def _operation(operation: str, call: Collective) -> str:
    """Format the user's operation, followed by its collective if that has another name: "backward (all_reduce)"."""
    is_same = not operation or operation.strip("_") in call.signature
    return _name(call) if is_same else operation if "(" in operation else f"{operation} ({_name(call)})"


def _name(call: Collective) -> str:
    return call.signature if call.root is None else f"{call.signature} (root {call.root})"


def _find_returned(states: Sequence[RankState], waits: _Waits) -> HangReport | None:
    all_returned = {state.rank for state in states if state.status == "returned"}
    for state in states if all_returned else ():
        returned = sorted(all_returned & waits.awaited(state))
        if returned:
            return HangReport(
                f"rank {state.rank} {_waits(state)} for {list_ranks(returned)}, which {_has(returned)} returned",
                "a rank that has returned makes no further collective calls",
                _FIX_RETURNED,
                (state.rank, *returned),
            )
    return None


def _find_cycle(states: Sequence[RankState], waits: _Waits) -> HangReport | None:
    awaited = {s.rank: waits.awaited(s) for s in states if s.status == "waiting" and s.is_blocked}
    # Drop ranks that wait for no rank of the others, until none is left; the survivors wait for each other. Ranks that
    # wait for the same ranks are dropped together.
    left = awaited
    while True:
        alive = {targets for targets in set(left.values()) if not targets.isdisjoint(left.keys())}
        if len(kept := {rank: targets for rank, targets in left.items() if targets in alive}) == len(left):
            break
        left = kept
    if not left:
        return None
    edges = {targets: list_ranks(targets & left.keys()) for targets in alive}
    text = _by_text([(s.rank, f"{_waits(s)} for {edges[left[s.rank]]}") for s in states if s.rank in left])
    why = "each of them is in a collective that another of them has not begun"
    return HangReport(f"ranks wait for each other: {text}", why, _FIX_MISMATCH, tuple(sorted(left)))


def find_absent_rank(rank: int, needed: Sequence[int], states: Sequence[RankState]) -> HangReport | None:
    """Return a report on a rank that can never write its key, because it has returned or waits for `rank`; else None.

    `rank` waits in the store, which its state does not show, for keys of the `needed` ranks.
    """
    waits = _Waits(states)
    for state in states:
        is_deadlocked = state.is_blocked and rank in waits.awaited(state)
        if state.rank in needed and (state.status == "returned" or is_deadlocked):
            text = "has returned" if state.status == "returned" else f"{_waits(state)} for rank {rank}"
            return HangReport(f"rank {state.rank} {text}", "", "", (state.rank,))
    return None


def waiting_line(states: Sequence[RankState], *, world_size: int) -> str:
    """Describe which ranks wait, for which ranks, and where the awaited ranks are; "" if no rank waits."""
    waiting = [state for state in states if state.status == "waiting"]
    if not waiting:
        return ""
    first = max(waiting, key=lambda state: state.idle_s)
    same = {state.rank for state in waiting if (state.location, state.operation) == (first.location, first.operation)}
    others = {state.rank for state in states if state.status != "waiting"}
    awaited = {*_Waits(states).awaited(first), *first.peers} or others
    silent = sorted({*range(world_size)} - {state.rank for state in states})
    texts = [_by_text([(state.rank, _where(state)) for state in states if state.rank in awaited - same], ", which ")]
    texts.append(f"{list_ranks(silent)}, which {_has(silent)} not answered" if silent else "")
    for_ranks = "; ".join(filter(None, texts))
    return f"{list_ranks(sorted(same))} {_waits(first, len(same))}{for_ranks and f' for {for_ranks}'}"


def timeout_report(states: Sequence[RankState], timeout_s: float, *, world_size: int, reason: str) -> HangReport:
    """Build the report of a timeout without a proven deadlock from the known states and torch's `reason`."""
    return HangReport(
        waiting_line(states, world_size=world_size) or "a wait for other ranks took too long",
        f"{reason or 'nothing was received'}; timeout={timeout_s:g} s is over, and no deadlock could be proven",
        "increase timeout= if the awaited rank is only slow, else make that rank reach the same call",
    )


def _where(state: RankState) -> str:
    if state.status == "returned":
        return "has returned"
    stack = f" ({' > '.join(state.stack)})" if state.stack else ""
    if not state.location:
        return f"is outside of the user's program{stack}"
    verb = "waits" if state.status == "waiting" else "is"
    return f"{verb} at {state.location}{f' in {state.operation}' if state.operation else ''}{stack}"


def _waits(state: RankState, ranks: int = 1) -> str:
    pending = state.pending()
    operation = _operation(state.operation, pending[0]) if pending else state.operation
    location = state.location or "an unknown line"
    return f"wait{'s' * (ranks == 1)} at {location}{f' in {operation}' if operation else ''}"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _by_text(texts: Sequence[tuple[int, str]], join: str = " ") -> str:
    """Join texts, each with its ranks: "ranks 0-2 wait at ...; rank 3 ...", limited to `_MAX_GROUPS` texts."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, text in texts:
        groups[text].append(rank)
    phrases = [f"{list_ranks(ranks)}{join}{text}" for text, ranks in groups.items()]
    more = f"; and {len(phrases) - _MAX_GROUPS} more" if len(phrases) > _MAX_GROUPS else ""
    return "; ".join(phrases[:_MAX_GROUPS]) + more
