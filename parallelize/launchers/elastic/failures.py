"""Which of several failures is the cause, and how the caller hears of it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence

from parallelize.call.task import Outcome, text_of
from parallelize.errors import ParallelizeError, SyncError, WorkerError
from parallelize.hang_detection.stack_frames import site_in
from parallelize.launchers.elastic.agent import Death

__all__ = ["is_echo", "verdict", "was_stopped"]

# What a rank says when a peer is gone, raised again or not: torch's own types, and gloo's plain RuntimeErrors.
_ECHO = re.compile(r"^(torch\.distributed\.Dist\w*Error: |RuntimeError: .*gloo/)", re.MULTILINE)
# What gloo says before it aborts, and the beginning of the last stack that Python's faulthandler then prints: main's.
_MISMATCH = re.compile(r"gloo::EnforceNotMet.*?(op\.preamble[^\n]*?)\. Received data size", re.DOTALL)
_STACK = "(most recent call first):"
_TAIL_LINES = 20
_FIXES = {
    "SIGKILL": "if you did not send it, the kernel did: look for 'Out of memory' in its log, and use less memory",
    "SIGSEGV": "a compiled extension failed: its stack is in the rank's output",
    "SIGTERM": "if you did not send it, the machine did: look into the log of its job scheduler",
}


def verdict(
    outcomes: Sequence[Outcome],
    deaths: Sequence[Death],
    *,
    world_size: int,
    output: Callable[[int], tuple[str, str]],
    earlier: Sequence[BaseException] = (),
) -> BaseException:
    """The exception to raise in the caller: the earliest cause, with rank, host and traceback as notes.

    Args:
        outcomes: of every rank that left one.
        deaths: workers that ended by themselves, as the agents noticed them.
        world_size: ranks in all.
        output: what a rank has printed to stdout and to stderr.
        earlier: what ended the attempts before this one.
    """
    told = {outcome.rank: outcome for outcome in outcomes}
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    silent = {death.rank: death for death in deaths if death.rank not in {outcome.rank for outcome in failed}}
    cause = _cause(failed, list(silent.values()))
    if isinstance(cause, Death):
        error, notes = _of_death(cause, output(cause.rank), outcomes)
    else:
        error, notes = _of_outcome(cause, world_size)
    said = {rank: _account(told.get(rank), silent.get(rank)) for rank in range(world_size) if rank != cause.rank}
    notes.append(f"the others: {_grouped(said)}" if said else "there is no other rank")
    notes += (f"attempt {attempt} had failed with {_line(before)}" for attempt, before in enumerate(earlier))
    noted = _noted(error, notes)
    if isinstance(noted, WorkerError):
        noted.rank, noted.host = cause.rank, cause.host
    return noted


def _cause(failed: Sequence[Outcome], silent: Sequence[Death]) -> Outcome | Death:
    """The first to fail by itself; a death is noticed late, an echo is early."""
    causes = [each for each in failed if not was_stopped(each) and not is_echo(each)]
    first_cause = min(causes, key=_when, default=None)
    first_death = min(silent, key=lambda death: death.seen_at, default=None)
    if first_cause is not None and (first_death is None or _when(first_cause) <= first_death.seen_at):
        return first_cause
    return first_death or min(failed, key=_when)


def _when(outcome: Outcome) -> float:
    return float("inf") if outcome.failed_at is None else outcome.failed_at


def was_stopped(outcome: Outcome) -> bool:
    """Whether a rank ended because it was asked to, and not of itself."""
    return isinstance(outcome.error, SystemExit) and outcome.error.code == 128 + signal.SIGTERM


def is_echo(outcome: Outcome) -> bool:
    """Whether a rank failed because another one had, as torch tells it or as it says itself."""
    return _lost_another(outcome) or (isinstance(outcome.error, ParallelizeError) and outcome.error.is_echo)


def _lost_another(outcome: Outcome) -> bool:
    # A SyncError may come of an echo, and says what that one does not.
    return bool(_ECHO.search(outcome.traceback)) and not isinstance(outcome.error, SyncError)


def _of_outcome(outcome: Outcome, world_size: int) -> tuple[BaseException, list[str]]:
    error = outcome.error
    assert error is not None
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        ended = -signal.SIGTERM if was_stopped(outcome) else code
        error = _worker_error(outcome.rank, outcome.host, ended, how=f"SystemExit({error.code!r})")
    where = f"rank {outcome.rank} of {world_size} on {outcome.host} (pid {outcome.pid}) raised this:"
    return error, [where, outcome.traceback.rstrip()]


def _of_death(death: Death, output: tuple[str, str], outcomes: Sequence[Outcome]) -> tuple[BaseException, list[str]]:
    _, err = output
    mismatch = _MISMATCH.search(err)
    if mismatch is not None:
        return _of_mismatch(death, mismatch[1], err, outcomes)
    error = _worker_error(death.rank, death.host, death.exitcode, how="it left no exception")
    # Of each a part, and the reason last: it is on stderr, and what was printed before must not crowd it out.
    tail = "\n".join(line for text in output for line in text.splitlines()[-_TAIL_LINES:])
    return error, [f"last lines of rank {death.rank}:\n{tail}"] if tail else []


def _of_mismatch(death: Death, said: str, err: str, outcomes: Sequence[Outcome]) -> tuple[SyncError, list[str]]:
    """Gloo ends a process without an exception when it gets more than it asked for."""
    stack = err[err.rindex(_STACK) if _STACK in err else 0 :]
    places = {death.rank: site_in(stack), **{each.rank: site_in(each.traceback) for each in outcomes}}
    told = "; ".join(f"rank {rank} was at {place}" for rank, place in sorted(places.items()) if place)
    error = SyncError(
        f"rank {death.rank} got data of another size than its collective is for{told and f': {told}'}",
        why=f"ranks are in different collectives, or give them tensors of different shapes or types ({said.strip()})",
        fix="make the same calls on every rank, with the same shapes and types in the same order",
    )
    return error, [f"rank {death.rank} on {death.host} (pid {death.pid}) was ended by gloo"]


def _worker_error(rank: int, host: str, exitcode: int, *, how: str) -> WorkerError:
    name = _signal_name(exitcode)
    fix = _FIXES.get(name or "", "raise an exception instead, so that its reason can be shown here")
    error = WorkerError(f"rank {rank} on {host} {_ended(exitcode)}", why=how, fix=fix)
    error.exitcode, error.signal_name = exitcode, name
    return error


def _signal_name(exitcode: int) -> str | None:
    known = {each.value: each.name for each in signal.Signals}
    return known.get(-exitcode, f"signal {-exitcode}") if exitcode < 0 else None


def _ended(exitcode: int) -> str:
    name = _signal_name(exitcode)
    return f"was ended by {name}" if name else f"ended with exit code {exitcode}"


def _account(outcome: Outcome | None, death: Death | None) -> str:
    """What became of a rank that is not the cause, in a few words."""
    if death is not None:
        return _ended(death.exitcode)
    if outcome is None or was_stopped(outcome):
        return "stopped"
    if outcome.error is None:
        return "had returned"
    return "lost the connection" if _lost_another(outcome) else _line(outcome.error)


def _line(error: BaseException) -> str:
    reason = text_of(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {reason[:120]}" if reason else type(error).__name__


def _grouped(said: dict[int, str]) -> str:
    """Ranks by what is said of them, on one line however many they are."""
    ranks: dict[str, list[int]] = {}
    for rank, words in said.items():
        ranks.setdefault(words, []).append(rank)
    return "; ".join(f"rank{'s' * (len(each) > 1)} {_ranges(each)}: {words}" for words, each in ranks.items())


def _ranges(ranks: Sequence[int]) -> str:
    """1, 2, 3, 7 as 1-3, 7."""
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _noted(error: BaseException, notes: Sequence[str]) -> BaseException:
    """The error with the notes; one that takes none, as its class has it, is stood in for."""
    try:
        for note in notes:
            _note(error, note)
    except Exception as exc:  # noqa: BLE001 - a user's class raises what it likes
        stand_in = WorkerError(
            f"{type(error).__name__}: {text_of(error)}",
            why=f"a worker raised it, and it takes no notes: {_line(exc)}",
            fix="see the worker's traceback; to catch it by its type, leave add_note and __notes__ as Python has them",
        )
        return _noted(stand_in, notes)
    return error


def _note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # Python 3.10 prints no notes, but whoever looks finds them where 3.11 keeps them
        error.__notes__ = [*getattr(error, "__notes__", []), text]  # type: ignore[attr-defined]  # not in 3.10's stub
