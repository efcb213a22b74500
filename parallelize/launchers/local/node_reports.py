"""How the ranks of a node have ended, as the other nodes hear it: texts and numbers, no pickles.

The node whose rank has failed raises the rank's own exception. The other nodes raise a WorkerError
in its place, which has the name, the text and the traceback of that exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from parallelize.call.outcome import Outcome
from parallelize.errors import ParallelizeError, WorkerError, add_note, error_text
from parallelize.launchers.failures import is_cause

_MOST_CHARACTERS = 30_000
"""Of a text: the store takes messages of at most 8 MB, with all ranks of a node."""


@dataclass(frozen=True)
class RankEnd:
    """How one rank has ended; each default is of the type that the field has.

    Args:
        rank: global rank.
        host: name of its host.
        pid: its process ID.
        error: the name of the exception's class; "": the rank has returned.
        message: what is wrong, why, and the fix.
        notes: the notes of the exception.
        traceback: the traceback as text.
        failed_at: time of the exception, in seconds since the epoch.
        exitcode: exit code of its process, or of a SystemExit; 0: neither.
        signal_name: the signal that ended its process; "": none.
        is_cause: whether the rank has failed by itself, and not because of another rank.
        evaluated: as in `Outcome`; "": None.
        has_exited: as in `Outcome`.
    """

    rank: int = 0
    host: str = ""
    pid: int = 0
    error: str = ""
    message: Sequence[str] = ("", "", "")
    notes: Sequence[str] = ()
    traceback: str = ""
    failed_at: float = 0.0
    exitcode: int = 0
    signal_name: str = ""
    is_cause: bool = False
    evaluated: str = ""
    has_exited: bool = False

    @classmethod
    def of(cls, outcome: Outcome) -> RankEnd:
        """Return how a rank of this node has ended."""
        error = outcome.error
        if error is None:
            return cls(
                outcome.rank,
                outcome.host,
                outcome.pid,
                evaluated=outcome.evaluated or "",
                has_exited=outcome.has_exited,
            )
        return cls(
            rank=outcome.rank,
            host=outcome.host,
            pid=outcome.pid,
            error=type(error).__name__,
            message=_message_of(error, outcome),
            notes=[str(note)[:_MOST_CHARACTERS] for note in getattr(error, "__notes__", ())],
            traceback=outcome.traceback[-_MOST_CHARACTERS:],
            failed_at=outcome.failed_at,
            exitcode=_exitcode_of(error),
            signal_name=getattr(error, "signal_name", None) or "",
            is_cause=is_cause(outcome),
        )

    def outcome(self) -> Outcome:
        """Return an outcome for this end, as of a rank of this node: its error is a WorkerError."""
        if not self.error:
            return Outcome(
                self.rank,
                self.host,
                self.pid,
                evaluated=self.evaluated or None,
                has_exited=self.has_exited,
            )
        trace = self.traceback
        # A rank that was stopped is described as such, by the SystemExit that SIGTERM has raised.
        error: BaseException = self._worker_error()
        if self.error == SystemExit.__name__:
            error = SystemExit(self.exitcode)
        elif self.is_cause:
            # As a note: an outcome with the traceback of a lost connection would be no cause.
            trace = ""
        return Outcome(
            self.rank, self.host, self.pid, error=error, traceback=trace, failed_at=self.failed_at
        )

    def _worker_error(self) -> WorkerError:
        fault, reason, fix = self.message
        error = WorkerError(fault, why=reason, fix=fix, is_secondary=not self.is_cause)
        error.exitcode = self.exitcode or None
        error.signal_name = self.signal_name or None
        for note in self.notes:
            add_note(error, note)
        if self.is_cause and self.traceback:
            where = f"rank {self.rank} on {self.host} (pid {self.pid}) raised it:"
            add_note(error, f"{where}\n{self.traceback.rstrip()}")
        return error


def outcomes_of_json(values: Any) -> list[Outcome]:
    """Return outcomes of the ranks of another node, as it says that they have ended.

    Raises:
        ValueError: this is no list of such ends.
        TypeError: the same.
    """
    outcomes = []
    for fields in values:
        # TypeError: a field is unknown.
        end = RankEnd(**fields)
        for name, default in vars(RankEnd()).items():
            # JSON makes lists of tuples.
            type_ = type(default)
            if type_ is tuple:
                type_ = list
            _require_type(getattr(end, name), type_)
        for text in (*end.message, *end.notes):
            _require_type(text, str)
        outcomes.append(end.outcome())
    return outcomes


def json_of_ends(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Return how the ranks of this node have ended, for `outcomes_of_json`."""
    return [asdict(RankEnd.of(outcome)) for outcome in outcomes]


def _require_type(value: Any, type_: type) -> None:
    if type(value) is not type_:
        raise ValueError(f"a node says {value!r:.80} in place of a {type_.__name__}")


def _message_of(error: BaseException, outcome: Outcome) -> list[str]:
    """Return what is wrong, why, and the fix, as a WorkerError says it on another node."""
    name = type(error).__name__
    if isinstance(error, ParallelizeError):
        fault = error.faults[0]
        texts = [fault.what, fault.why, fault.fix]
        if not isinstance(error, WorkerError):
            texts[0] = f"{name}: {fault.what}"
    else:
        texts = [
            f"{name}: {error_text(error)}",
            f"rank {outcome.rank} on {outcome.host} raised it, which is another node than this one",
            "see the traceback below; the call on that node raises the exception itself",
        ]
    return [text[:_MOST_CHARACTERS] for text in texts]


def _exitcode_of(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, SystemExit):
        return 1
    return getattr(error, "exitcode", None) or 0
