"""Every exception this library raises on its own account.

    ParallelizeError
    ├── ConfigError(ValueError)               the request cannot work: every fault of it, at once
    ├── LaunchError(RuntimeError)             the processes could not be started, or never met
    ├── WorkerError(RuntimeError)             a worker ended without an exception of its own that can be raised here
    ├── SyncError(RuntimeError)               ranks disagree, or would silently train different models
    └── MissingDependencyError(ImportError)   an optional package is not there

Each message says what is wrong, why it cannot work, and how to fix it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ConfigError",
    "Fault",
    "LaunchError",
    "MissingDependencyError",
    "ParallelizeError",
    "SyncError",
    "WorkerError",
    "did_you_mean",
]


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: what it is (with its value), why it cannot work, how to fix it."""

    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}\n  why: {self.why}\n  fix: {self.fix}"


class ParallelizeError(Exception):
    """Base of every exception raised by this library.

    Args:
        what: what is wrong, with the value.
        why: the reason it cannot work.
        fix: what to write instead.
        is_echo: whether it only passes on what another rank raises: that one's exception is what the caller gets.
    """

    def __init__(self, what: str, *, why: str, fix: str, is_echo: bool = False) -> None:
        self.faults: tuple[Fault, ...] = (Fault(what, why, fix),)
        self.is_echo = is_echo
        super().__init__(str(self.faults[0]))

    def __reduce__(self) -> tuple[Any, ...]:
        # The default rebuilds from `args`, which knows nothing of keyword-only arguments.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[ParallelizeError], args: tuple[Any, ...], state: dict[str, Any]) -> ParallelizeError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(ParallelizeError, ValueError):
    """The request cannot work; `faults` holds every reason, not the first one found."""

    @classmethod
    def of(cls, faults: Sequence[Fault]) -> ConfigError:
        """One error for all `faults` of a request (at least one)."""
        first = faults[0]
        error = cls(first.what, why=first.why, fix=first.fix)
        error.faults = tuple(faults)
        if len(faults) > 1:
            listed = "\n".join(f"{number}. {fault}" for number, fault in enumerate(faults, start=1))
            error.args = (f"{len(faults)} faults in this request\n{listed}",)
        return error


class LaunchError(ParallelizeError, RuntimeError):
    """The processes could not be started, or did not find each other in time."""


class WorkerError(ParallelizeError, RuntimeError):
    """A worker ended and left no exception that could be raised in the caller.

    Attributes:
        rank: global rank of the worker that ended first, or None if it is not known.
        host: host name it ran on.
        exitcode: its exit code; negative is minus the signal's number; None if it raised.
        signal_name: such as "SIGKILL", or None.
    """

    rank: int | None = None
    host: str | None = None
    exitcode: int | None = None
    signal_name: str | None = None


class SyncError(ParallelizeError, RuntimeError):
    """Ranks disagree, or a step would have let them drift apart without a word."""


class MissingDependencyError(ParallelizeError, ImportError):
    """An optional package is needed and is not importable; `fix` holds the exact command."""


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """A sentence that lists the `known` names, after the one nearest to `name` if one is near; case does not count.

    Args:
        name: what was given.
        known: what could have been given.
        prefix: what each of them starts with and the sentence shows; it makes no two of them alike.
    """
    names = {each.casefold(): repr(prefix + each) for each in sorted(known)}
    near = difflib.get_close_matches(name.casefold(), names, n=1)
    hint = f"did you mean {names[near[0]]}? " if near else ""
    return f"{hint}known: {', '.join(names.values()) or 'none'}"
