"""Exceptions of this library, and the faults that they list.

    ParallelizeError                      lists its `faults`
    ├── ConfigError(ValueError)           options are invalid; one error lists all faults
    ├── LaunchError(RuntimeError)         processes could not be started, or could not connect
    ├── WorkerError(RuntimeError)         a worker ended, and left no exception for the caller
    ├── SyncError(RuntimeError)           ranks disagree, or would train different models
    └── MissingDependencyError(ImportError)   an optional package is not installed

Each message has three parts: what is wrong, why it cannot work, and how to fix it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """One fault of a request: what is wrong (with the value), why it cannot work, how to fix it."""

    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}\n  why: {self.why}\n  fix: {self.fix}"


class ParallelizeError(Exception):
    """Base class of this library's exceptions.

    Args:
        what: what is wrong, with the value.
        why: reason why the request cannot work.
        fix: how to fix the request.
        is_secondary: whether another rank's exception caused this one; the caller then raises the
            cause instead.
    """

    def __init__(self, what: str, *, why: str, fix: str, is_secondary: bool = False) -> None:
        fault = Fault(what, why, fix)
        self.faults: tuple[Fault, ...] = (fault,)
        self.is_secondary = is_secondary
        super().__init__(str(fault))

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException.__reduce__ would call the class with `args` alone. That fails, because the
        # class also requires the keyword-only arguments `why` and `fix`.
        return _rebuild, (type(self), *self.args), vars(self)


def _rebuild(error_type: type[ParallelizeError], *args: str) -> ParallelizeError:
    return error_type.__new__(error_type, *args)


class ConfigError(ParallelizeError, ValueError):
    """Invalid options or environment variables; `faults` lists every fault."""

    @classmethod
    def of(cls, faults: Sequence[Fault]) -> ConfigError:
        """Build one error for all `faults` of a request (at least one)."""
        first = faults[0]
        error = cls(first.what, why=first.why, fix=first.fix)
        error.faults = tuple(faults)
        if len(faults) > 1:
            listed = "\n".join(f"{number}. {fault}" for number, fault in enumerate(faults, start=1))
            error.args = (f"{len(faults)} faults in this request\n{listed}",)
        return error


class LaunchError(ParallelizeError, RuntimeError):
    """The processes could not be started, or did not connect to each other in time."""


class WorkerError(ParallelizeError, RuntimeError):
    """A worker ended without an exception that can be raised in the caller.

    Attributes:
        rank: global rank of the worker that ended first; None if unknown.
        host: host name of that worker's machine.
        exitcode: exit code of that worker, -N for signal N; None if it raised an exception.
        signal_name: name of the signal that ended that worker, such as "SIGKILL"; None if no signal
            did.
    """

    rank: int | None = None
    host: str | None = None
    exitcode: int | None = None
    signal_name: str | None = None


class SyncError(ParallelizeError, RuntimeError):
    """Ranks disagree (as by different calls), or a step would make their models differ."""


class MissingDependencyError(ParallelizeError, ImportError):
    """An optional package cannot be imported; the message has the command that installs it."""


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an exception, also if its class refuses attributes, as a frozen dataclass."""
    notes = vars(error).get("__notes__")
    if not isinstance(notes, list):
        notes = []
    vars(error)["__notes__"] = [*notes, text]


def error_text(error: BaseException) -> str:
    """Return str(error), or a placeholder if its `__str__` raises."""
    try:
        return str(error)
    except Exception as exc:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"(no text: its __str__ raised {type(exc).__name__})"


def did_you_mean(name: str, valid_names: Iterable[str]) -> str:
    """Return a hint for an unknown name: the most similar valid name, if any, and all of them.

    Args:
        name: the unknown name; its case is ignored.
        valid_names: the names that exist.
    """
    shown_by_folded = {}
    for valid_name in sorted(valid_names):
        shown_by_folded[valid_name.casefold()] = repr(valid_name)

    hint = ""
    similar = difflib.get_close_matches(name.casefold(), shown_by_folded)
    if similar:
        # Of several names, that of the nearest length: "dpp" is a typo of "ddp", although "dp" is
        # more similar.
        closest = min(similar, key=lambda folded: abs(len(folded) - len(name)))
        hint = f"did you mean {shown_by_folded[closest]}? "
    return f"{hint}known: {', '.join(shown_by_folded.values()) or 'none'}"


def list_ranks(ranks: Collection[int]) -> str:
    """Return ranks as text for messages: "rank 1", "ranks 1-3, 7"."""
    numbers = set(ranks)
    starts = sorted(rank for rank in numbers if rank - 1 not in numbers)
    ends = sorted(rank for rank in numbers if rank + 1 not in numbers)
    intervals = []
    for start, end in zip(starts, ends, strict=True):
        intervals.append(str(start) if start == end else f"{start}-{end}")
    word = "rank" if len(numbers) == 1 else "ranks"
    return f"{word} {', '.join(intervals)}"
