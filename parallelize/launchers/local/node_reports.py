"""How the ranks of a node have ended, as the other nodes hear it: texts and numbers, no pickles.

The node whose rank has failed raises the rank's own exception. The other nodes raise a WorkerError
in its place, which has the name, the text and the traceback of that exception.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from parallelize.call.outcome import Outcome
from parallelize.errors import ParallelizeError, WorkerError, add_note, error_text
from parallelize.launchers.failures import is_cause

_MOST_CHARACTERS = 30_000
"""Of a text: the store takes messages of at most 8 MB, with all ranks of a node."""


class RankEnd(NamedTuple):
    """How one rank has ended; each default is of the type that the field has.

    Args:
        rank: global rank.
        host: name of its host.
        pid: its process ID.
        evaluated: as in `Outcome`; "": None.
        has_exited: as in `Outcome`.
        error: the name of the exception's class; "": the rank has returned.
        fault: what is wrong.
        reason: why.
        fix: what to do about it.
        notes: the notes of the exception.
        traceback: the traceback as text.
        failed_at: time of the exception, in seconds since the epoch.
        exitcode: exit code of its process, or of a SystemExit; 0: neither.
        signal_name: the signal that ended its process; "": none.
        is_cause: whether the rank has failed by itself, and not because of another rank.
    """

    rank: int = 0
    host: str = ""
    pid: int = 0
    evaluated: str = ""
    has_exited: bool = False
    error: str = ""
    fault: str = ""
    reason: str = ""
    fix: str = ""
    notes: str = ""
    traceback: str = ""
    failed_at: float = 0.0
    exitcode: int = 0
    signal_name: str = ""
    is_cause: bool = False

    @classmethod
    def of(cls, outcome: Outcome) -> RankEnd:
        """Return how a rank of this node has ended."""
        end = cls(
            outcome.rank, outcome.host, outcome.pid, outcome.evaluated or "", outcome.has_exited
        )
        error = outcome.error
        if error is None:
            return end
        fault, reason, fix = _message_of(error, outcome)
        return end._replace(
            error=type(error).__name__,
            fault=fault[:_MOST_CHARACTERS],
            reason=reason[:_MOST_CHARACTERS],
            fix=fix[:_MOST_CHARACTERS],
            notes="\n".join(map(str, getattr(error, "__notes__", ())))[:_MOST_CHARACTERS],
            traceback=outcome.traceback[-_MOST_CHARACTERS:],
            failed_at=outcome.failed_at,
            exitcode=_exitcode_of(error),
            signal_name=getattr(error, "signal_name", None) or "",
            is_cause=is_cause(outcome),
        )

    def outcome(self) -> Outcome:
        """Return an outcome for this end, as of a rank of this node: its error is a WorkerError."""
        trace = self.traceback
        error: BaseException | None = None
        if self.error == SystemExit.__name__:
            # The rank has exited, or was stopped by SIGTERM, and is described as such.
            error = SystemExit(self.exitcode)
        elif self.error:
            error = self._worker_error()
            if self.is_cause:
                # It is a note: an outcome with the traceback of a lost connection is no cause.
                trace = ""
        return Outcome(
            self.rank,
            self.host,
            self.pid,
            error=error,
            traceback=trace,
            failed_at=self.failed_at,
            evaluated=self.evaluated or None,
            has_exited=self.has_exited,
        )

    def _worker_error(self) -> WorkerError:
        error = WorkerError(
            self.fault, why=self.reason, fix=self.fix, is_secondary=not self.is_cause
        )
        error.exitcode = self.exitcode or None
        error.signal_name = self.signal_name or None
        if self.notes:
            add_note(error, self.notes)
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
        # TypeError: there are too many fields.
        end = RankEnd(*fields)
        for value, default in zip(end, RankEnd(), strict=True):
            if type(value) is not type(default):
                raise ValueError(
                    f"a node says {value!r:.80} in place of a {type(default).__name__}"
                )
        outcomes.append(end.outcome())
    return outcomes


def json_of_ends(outcomes: Iterable[Outcome]) -> list[RankEnd]:
    """Return how the ranks of this node have ended, for `outcomes_of_json`."""
    return list(map(RankEnd.of, outcomes))


def _message_of(error: BaseException, outcome: Outcome) -> tuple[str, str, str]:
    """Return what is wrong, why, and the fix, as a WorkerError says it on another node."""
    name = type(error).__name__
    if not isinstance(error, ParallelizeError):
        return (
            f"{name}: {error_text(error)}",
            f"rank {outcome.rank} on {outcome.host} raised it, which is another node than this one",
            "see the traceback below; the call on that node raises the exception itself",
        )
    fault = error.faults[0]
    if isinstance(error, WorkerError):
        return fault.what, fault.why, fault.fix
    return f"{name}: {fault.what}", fault.why, fault.fix


def _exitcode_of(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, SystemExit):
        return 1
    return getattr(error, "exitcode", None) or 0
