"""Whether ranks that wait can ever go on, and what to say of them: pure functions of where all of them are.

A rank waits for those of a group that have not begun the collective in which it stands. Three things prove that it
waits for ever:

    mismatch    under one number of one group, two ranks have begun different collectives
    gone        one that it waits for has returned
    circle      it waits for one that waits ... that waits for it

Everything else proves nothing: a rank that evaluates, compiles or writes may still come.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from parallelize.hang_detection.rank_state import Call, Place

__all__ = ["FIRST_LINE_S", "Finding", "awaited", "find", "hopeless", "line_due_s", "overdue", "waiting_line"]

FIRST_LINE_S = 30.0
"""After so many seconds in which nothing is proven, a line says who waits for whom; then at twice that, and so on."""

_WHY_MISMATCH = "a collective is one call that all ranks of a group make alike, so none of these ever ends"
_FIX_MISMATCH = "make the same calls on every rank, with the same shapes and types in the same order"
_FIX_GONE = "let every rank make as many steps and collectives as the others: no `return`, `break`, extra step or \
extra backward on some ranks only"
_MANY = 4


@dataclass(frozen=True)
class Finding:
    """That ranks wait for ever, as an error says it.

    Args:
        what: which ranks wait where for whom.
        why: it never ends.
        fix: what to write instead.
        ranks: those on whose places it rests.
    """

    what: str
    why: str
    fix: str
    ranks: tuple[int, ...] = ()

    def is_confirmed(self, places: Sequence[Place], *, since: int) -> bool:
        """Whether all that it rests on have told where they are after a question; a rank that has returned stays so."""
        told = {place.rank for place in places if place.state == "returned" or place.answer > since}
        return told.issuperset(self.ranks)

    def dumps(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str | bytes) -> Finding:
        """From text of `dumps`."""
        fields = json.loads(text)
        return cls(**{**fields, "ranks": tuple(fields["ranks"])})


def find(places: Sequence[Place]) -> Finding | None:
    """The proof that ranks wait for ever, or None: as far as is known they may all go on."""
    if not any(place.state == "waits" for place in places):
        return None
    return _mismatch(places) or _gone(places) or _circle(places)


def awaited(place: Place, places: Sequence[Place]) -> list[int]:
    """The ranks without which a rank surely cannot go on: of several collectives, those that all of them need."""
    if place.state != "waits":
        return []
    others = {other.rank: other for other in places if other.rank != place.rank}
    lacking = [_lacking(call, dict(place.groups).get(call.group, ()), others) for call in place.pending()]
    return sorted(set.intersection(*lacking)) if lacking else []


def _lacking(call: Call, members: Sequence[int], others: Mapping[int, Place]) -> set[int]:
    """The ranks of a group that have not begun a call, of those that have told where they are."""
    return {rank for rank in members if rank in others and (others[rank].last(call.group) or 0) < call.number}


def _mismatch(places: Sequence[Place]) -> Finding | None:
    begun: dict[tuple[str, int], list[tuple[Place, Call]]] = defaultdict(list)
    for place in places:
        for call in place.calls:
            begun[call.group, call.number].append((place, call))
    for key in sorted(begun, key=lambda key: key[1]):
        meeting = begun[key]
        ranks = tuple(place.rank for place, _ in meeting)
        is_coalesced = len(set(ranks)) < len(ranks)  # several operations under one number
        is_waited_in = any(place.state == "waits" and not call.is_over for place, call in meeting)
        if is_waited_in and not is_coalesced and _differ([call for _, call in meeting]):
            said = _listed([(place.rank, _in_call(place, call)) for place, call in meeting])
            return Finding(f"ranks are in different collectives: {said}", _WHY_MISMATCH, _FIX_MISMATCH, ranks)
    return None


def _differ(calls: Sequence[Call]) -> bool:
    roots = {call.root for call in calls if call.root is not None}
    return len({call.what for call in calls}) > 1 or len(roots) > 1


def _in_call(place: Place, call: Call) -> str:
    if call.is_over:
        went = "returned" if place.state == "returned" else f"gone on{f' to {place.at}' * bool(place.at)}"
        return f"was in {_named(call)}, and has {went}"
    return f"waits at {place.at or 'an unknown line'} in {_doing(place.doing, call)}"


def _doing(doing: str, call: Call) -> str:
    """What the user calls, and the collective behind it where that is another one."""
    is_the_same = not doing or doing.strip("_") in call.what
    return _named(call) if is_the_same else doing if "(" in doing else f"{doing} ({_named(call)})"


def _named(call: Call) -> str:
    return call.what if call.root is None else f"{call.what} (root {call.root})"


def _gone(places: Sequence[Place]) -> Finding | None:
    returned = {place.rank for place in places if place.state == "returned"}
    for place in places:
        gone = sorted(returned.intersection(awaited(place, places)))
        if gone:
            return Finding(
                f"rank {place.rank} {_waits(place)} for {_ranks(gone)}, which {_has(gone)} returned",
                "a rank that has returned takes part in no collective any more",
                _FIX_GONE,
                (place.rank, *gone),
            )
    return None


def _circle(places: Sequence[Place]) -> Finding | None:
    stuck = {place.rank: place for place in places if place.state == "waits" and place.is_alone}
    edges = {rank: [other for other in awaited(place, places) if other in stuck] for rank, place in stuck.items()}
    # What leads nowhere goes, again and again: what is left waits for others that are left.
    while True:
        ending = [rank for rank, targets in edges.items() if not targets]
        if not ending:
            break
        edges = {rank: [each for each in edges[rank] if each not in ending] for rank in edges if rank not in ending}
    if not edges:
        return None
    said = _listed([(rank, f"{_waits(stuck[rank])} for {_ranks(targets)}") for rank, targets in sorted(edges.items())])
    why = "each stands in a call that another has yet to make"
    return Finding(f"ranks wait for each other: {said}", why, _FIX_MISMATCH, tuple(edges))


def hopeless(rank: int, needed: Sequence[int], places: Sequence[Place]) -> Finding | None:
    """That one of the ranks that a rank needs elsewhere cannot come there: it has returned, or waits for that rank.

    Args:
        rank: it waits by other means than a collective, and does not say so in its place.
        needed: those that have not come.
        places: of all that have told.
    """
    for place in places:
        is_stuck = place.is_alone and rank in awaited(place, places)
        if place.rank in needed and (place.state == "returned" or is_stuck):
            where = "has returned" if place.state == "returned" else f"{_waits(place)} for rank {rank}"
            return Finding(f"rank {place.rank} {where}", "", "", (place.rank,))
    return None


def line_due_s(said: int) -> float:
    """How long a wait has lasted when the next line is due, if so many were said: 30 s, 1 min, 2 min, 4 min ..."""
    return FIRST_LINE_S * 2.0**said


def waiting_line(places: Sequence[Place], *, world_size: int) -> str:
    """Who waits for whom, and where those are: "" if nobody waits.

    Args:
        places: of the ranks that have answered.
        world_size: ranks in all.
    """
    waiting = [place for place in places if place.state == "waits"]
    if not waiting:
        return ""
    first = max(waiting, key=lambda place: place.since_s)
    alike = [place.rank for place in waiting if (place.at, place.doing) == (first.at, first.doing)]
    missing = {*awaited(first, places), *first.awaits} or {place.rank for place in places if place.state != "waits"}
    silent = sorted({*range(world_size)} - {place.rank for place in places})
    said = [_listed([(place.rank, _where(place)) for place in places if place.rank in missing - {*alike}], ", which ")]
    said.append(f"{_ranks(silent)}, which {_has(silent)} not answered" if silent else "")
    for_whom = "; ".join(filter(None, said))
    return f"{_ranks(alike)} {_waits(first, len(alike))}{for_whom and f' for {for_whom}'}"


def overdue(places: Sequence[Place], timeout_s: float, *, world_size: int, said: str) -> Finding:
    """That the time is over, with what is known of where all ranks are.

    Args:
        places: of the ranks that have answered.
        timeout_s: the run's.
        world_size: ranks in all.
        said: what torch said of it.
    """
    return Finding(
        waiting_line(places, world_size=world_size) or "a wait for other ranks took too long",
        f"{said or 'nothing came'}; timeout={timeout_s:g} s is over, and nobody could tell whether it would ever end",
        "give timeout= more time if that rank does what it should, else let it come to the same call",
    )


def _where(place: Place) -> str:
    if place.state == "returned":
        return "has returned"
    lines = f" ({' > '.join(place.stack)})" if place.stack else ""
    if not place.at:
        return f"is outside of the user's program{lines}"
    return (
        f"{'waits' if place.state == 'waits' else 'is'} at {place.at}{f' in {place.doing}' * bool(place.doing)}{lines}"
    )


def _waits(place: Place, ranks: int = 1) -> str:
    pending = place.pending()
    what = _doing(place.doing, pending[0]) if pending else place.doing
    return f"wait{'s' * (ranks == 1)} at {place.at or 'an unknown line'}{f' in {what}' * bool(what)}"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _listed(said: Sequence[tuple[int, str]], join: str = " ") -> str:
    """Ranks by what is said of them; the first few kinds."""
    by_words: dict[str, list[int]] = defaultdict(list)
    for rank, words in said:
        by_words[words].append(rank)
    kinds = [f"{_ranks(ranks)}{join}{words}" for words, ranks in by_words.items()]
    more = f"; and {len(kinds) - _MANY} more" if len(kinds) > _MANY else ""
    return "; ".join(kinds[:_MANY]) + more


def _ranks(ranks: Sequence[int]) -> str:
    """rank 1; ranks 1-3, 7."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(_runs(sorted(ranks)))}"


def _runs(ranks: Sequence[int]) -> Iterator[str]:
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    for start, end in zip(starts, ends, strict=True):
        yield str(start) if start == end else f"{start}-{end}"
