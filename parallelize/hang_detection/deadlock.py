"""Deadlocks: pure functions of the states of all ranks. `advice.py` says how to mend them.

A rank in a collective waits for the ranks of the group that have not begun it. It waits forever in
one of these cases:

    mismatch    two ranks of a group began different collectives with the same sequence number
    returned    a rank that is waited for has returned
    cycle       blocked ranks wait for each other; one in `work.wait()` is not known to be blocked:
                no stack shows it; one that reads a number of a GPU is: see `main_thread`

Any other wait may still end: a rank that evaluates, compiles or writes a file may begin the
collective later.

The states need not be of the same moment. Of a cycle, suppose that some rank moves on after its
state was taken, and let A be the first. It waited for a rank B, which then began the collective
before A moved: either before B's state was taken, which would show it, or after it; but then B
moved before A did.

The words of this file:

    state       what a rank was doing when it was asked: see `RankState`
    pending     of a collective: begun by the rank, and not completed
    missing     of a rank: a member of the collective's group that has not begun it
    awaited     of a rank: missing in all pending collectives of the rank that waits
    silent      of a rank: it has not answered, so that nothing but its last line is known
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypedDict

from parallelize.errors import list_ranks
from parallelize.hang_detection.advice import advice_on, places_of
from parallelize.hang_detection.rank_state import Collective, RankState, RankStatus

_FIX = "make the same calls on every rank, with the same shapes and dtypes in the same order"
_PLURAL = {"waits": "wait", "is": "are", "has": "have", "was": "were", "does": "do"}
_MOST_PHRASES = 4

_States = Mapping[int, RankState]
_Awaited = Mapping[int, frozenset[int]]


class Verdict(TypedDict):
    """The parts of the error that reports a hang."""

    what: str
    why: str
    fix: str


def find_deadlock(states: _States) -> Verdict | None:
    """Return the verdict on ranks that provably wait forever.

    Returns:
        None: all ranks may still continue.
    """
    awaited = awaited_ranks(states)
    return _mismatch(states, awaited) or _returned(states, awaited) or _cycle(states, awaited)


def awaited_ranks(states: _States) -> _Awaited:
    """Return the ranks that each waiting rank certainly waits for.

    If a rank has several pending collectives, they are the ranks that are missing in all of them:
    the rank may wait for any of the collectives, and no state shows for which.
    """
    latest_number: dict[tuple[int, str], int] = {}
    for rank, state in states.items():
        for collective in state.collectives:
            latest_number[rank, collective.counter] = collective.seq
    # Many ranks wait in the same collective.
    missing_in: dict[tuple[str, int], frozenset[int]] = {}
    awaited: dict[int, frozenset[int]] = {}
    for rank, state in states.items():
        if state.status != RankStatus.WAITING:
            continue
        missing_of_rank = []
        for collective in state.awaited():
            key = collective.counter, collective.seq
            if key not in missing_in:
                missing_in[key] = _missing_ranks(states, latest_number, collective)
            missing_of_rank.append(missing_in[key])
        awaited[rank] = frozenset()
        if missing_of_rank:
            awaited[rank] = frozenset.intersection(*missing_of_rank)
    return awaited


def _missing_ranks(
    states: _States, latest_number: Mapping[tuple[int, str], int], collective: Collective
) -> frozenset[int]:
    """Return the ranks of a collective's group that have not begun it.

    Args:
        states: states of the ranks.
        latest_number: (rank, counter) -> number of the latest collective that the rank has begun.
        collective: the one that a rank waits in.
    """
    counter = collective.counter
    group, _, _library = counter.partition("/")
    missing = set()
    for rank, state in states.items():
        is_member = group in state.groups
        if is_member and latest_number.get((rank, counter), 0) < collective.seq:
            missing.add(rank)
    return frozenset(missing)


def _mismatch(states: _States, awaited: _Awaited) -> Verdict | None:
    """Return the verdict on the first collective that is not the same on all ranks of its group."""
    pending_keys: set[tuple[str, int]] = set()
    for rank in awaited:
        for collective in states[rank].pending():
            pending_keys.add((collective.counter, collective.seq))
    for key in sorted(pending_keys):
        begun = _begun_collectives(states, key)
        signatures = [collective.signature for collective in begun.values()]
        # A signature may lack the root.
        longest = max(signatures, key=len)
        if all(longest.startswith(signature) for signature in signatures):
            continue
        places = places_of(states)
        texts = {}
        for rank, collective in begun.items():
            texts[rank] = places[rank]
            if collective.is_completed:
                texts[rank] = f"was in {collective.signature}, and {places[rank]}"
        return _verdict(
            f"ranks are in different collectives: {_phrases(texts)}",
            states,
            begun.keys(),
            why="all ranks of a group must make the same collective call, so none of these ends",
            fix=_FIX,
        )
    return None


def _begun_collectives(states: _States, key: tuple[str, int]) -> dict[int, Collective]:
    """Return rank -> the collective that it has begun under a counter and sequence number."""
    begun: dict[int, Collective] = {}
    for rank, state in states.items():
        for collective in state.collectives:
            if (collective.counter, collective.seq) == key:
                begun[rank] = collective
    return begun


def _returned(states: _States, awaited: _Awaited) -> Verdict | None:
    """Return the verdict on the first rank that waits for one that has returned."""
    returned = {rank for rank, state in states.items() if state.status == RankStatus.RETURNED}
    for rank, awaited_by_rank in awaited.items():
        awaited_and_returned = awaited_by_rank & returned
        if awaited_and_returned:
            return _verdict(
                _describe_wait(states, rank, awaited_and_returned, silent={}),
                states,
                {rank, *awaited_and_returned},
                why="a rank that has returned makes no further collective calls",
                fix="make the same number of steps and collectives on every rank: no `return`, "
                "`break`, extra step or extra backward on some ranks only",
            )
    return None


def _cycle(states: _States, awaited: _Awaited) -> Verdict | None:
    """Return the verdict on blocked ranks that wait for each other."""
    blocked = {rank: awaited[rank] for rank in awaited if states[rank].is_blocked}
    # Drop ranks that wait for no blocked rank, until there is no such rank. The ranks that stay
    # wait for each other.
    has_dropped = True
    while has_dropped:
        has_dropped = False
        for rank, awaited_by_rank in list(blocked.items()):
            if awaited_by_rank.isdisjoint(blocked):
                del blocked[rank]
                has_dropped = True
    if not blocked:
        return None
    places = places_of(states)
    texts = {}
    for rank, awaited_by_rank in blocked.items():
        texts[rank] = places[rank]
        if places[rank].startswith("waits"):
            texts[rank] += f" for {list_ranks(awaited_by_rank & blocked.keys())}"
    return _verdict(
        f"ranks wait for each other: {_phrases(texts)}",
        states,
        blocked,
        why="each of them waits for what another of them has not begun",
        fix=_FIX,
    )


def _verdict(fault: str, states: _States, ranks: Collection[int], *, why: str, fix: str) -> Verdict:
    """Return a verdict with the advice on what these ranks do, or else with the general advice.

    Args:
        fault: what is wrong.
        states: states of all ranks.
        ranks: those that the verdict is about.
        why: why they wait forever.
        fix: the general advice.
    """
    advice = advice_on({rank: states[rank] for rank in ranks})
    if advice is None:
        return Verdict(what=fault, why=why, fix=fix)
    return Verdict(what=fault, why=advice.why or why, fix=advice.fix)


def timeout_verdict(fault: str, states: _States, *, reason: str) -> Verdict:
    """Return the verdict on ranks that have waited for too long, without a proof of a deadlock.

    Args:
        fault: which ranks wait for which, as of `waiting_line`.
        states: states of the ranks that have answered.
        reason: why they wait no longer.
    """
    fix = "make that rank reach the same call"
    advice = advice_on(states)
    if advice is not None:
        fix = advice.fix
    fix = f"increase timeout= if the awaited rank is only slow, else {fix}"
    return Verdict(what=fault, why=f"{reason}, and no deadlock could be proven", fix=fix)


def waiting_line(states: _States, world_size: int, silent: Mapping[int, str] | None = None) -> str:
    """Say which ranks wait (at least one), for which ranks, and where the awaited ranks are.

    Args:
        states: states of the ranks that have answered.
        world_size: number of ranks.
        silent: phrases about ranks that have not answered: "is stopped, last seen at a.py:9".
    """
    awaited = awaited_ranks(states)
    first = min(awaited, key=lambda rank: states[rank].since)
    awaited_by_first = set(awaited[first])
    if not awaited_by_first:
        # No collective shows for which ranks: it may be any rank that does not wait.
        awaited_by_first = states.keys() - awaited.keys()
    unanswered = range(world_size) - states.keys()
    return _describe_wait(states, first, awaited_by_first | unanswered, silent or {})


def _describe_wait(
    states: _States,
    rank: int,
    awaited: Collection[int],
    silent: Mapping[int, str],
) -> str:
    """Say where a rank waits, and all ranks that wait at the same place, and where the awaited are.

    "ranks 0 and 2 wait at train.py:9 in barrier for rank 1, which is at train.py:7 in evaluate"

    Args:
        states: states of the ranks that have answered.
        rank: a rank that waits.
        awaited: the ranks that it waits for.
        silent: as for `waiting_line`.
    """
    places = places_of(states)
    place = places[rank]
    waiting = {}
    for some_rank, place_of_rank in places.items():
        if place_of_rank == place and some_rank not in awaited:
            waiting[some_rank] = place
    if not awaited:
        return _phrases(waiting)
    awaited_places = {}
    for awaited_rank in awaited:
        silence = silent.get(awaited_rank, "has not answered")
        awaited_places[awaited_rank] = places.get(awaited_rank, silence)
    joined = " for "
    if not place.startswith("waits"):
        joined = ", waiting for "
    return f"{_phrases(waiting)}{joined}{_phrases(awaited_places, ', which ')}"


def _phrases(texts: Mapping[int, str], join: str = " ") -> str:
    """Join the texts of ranks: "ranks 0-2 wait at ...; rank 3 ...", at most four.

    Args:
        texts: rank -> a text that begins with a verb.
        join: what stands between a rank and its verb.
    """
    ranks_by_text: dict[str, list[int]] = {}
    for rank in sorted(texts):
        ranks_by_text.setdefault(texts[rank], []).append(rank)
    phrases = []
    for text, ranks in ranks_by_text.items():
        verb, _, rest = text.partition(" ")
        if len(ranks) > 1:
            verb = _PLURAL[verb]
            rest = rest.replace(" and is at ", " and are at ")
        phrases.append(f"{list_ranks(ranks)}{join}{verb} {rest}")
    if len(phrases) > _MOST_PHRASES:
        phrases[_MOST_PHRASES:] = ["..."]
    return "; ".join(phrases)
