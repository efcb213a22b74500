"""Of several failures the root cause is found and described briefly."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelize.call.outcome import Outcome
from parallelize.errors import SyncError, WorkerError
from parallelize.launchers.failures import End, caller_exception, end_of, is_cause, outcome_of_dead_worker
from parallelize.launchers.output import read_output

GLOO = "RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
NCCL = "torch.distributed.DistBackendError: NCCL error in: remote process exited"


def raised(rank: int, at: float, error: BaseException | None = None, traceback: str | None = None) -> Outcome:
    error = error or ValueError(f"of {rank}")
    traceback = f"Traceback ...\n{type(error).__name__}: {error}\n" if traceback is None else traceback
    return Outcome(rank, f"host{rank}", 100 + rank, error=error, traceback=traceback, failed_at=at)


def lost_connection(rank: int, at: float, line: str = GLOO) -> Outcome:
    return raised(rank, at, RuntimeError(line), f"Traceback (most recent call last):\n  ...\n{line}\n")


def stopped(rank: int, at: float) -> Outcome:
    return raised(rank, at, SystemExit(143))


def exited(rank: int, at: float, exitcode: int = -9, output: tuple[str, str] = ("", "")) -> Outcome:
    return outcome_of_dead_worker(rank, f"host{rank}", 100 + rank, exitcode, seen_at=at, output=output)


def error_of(*outcomes: Outcome, world_size: int = 4) -> BaseException:
    return caller_exception(outcomes, world_size=world_size)


@given(order=st.permutations(range(4)))
def test_the_earliest_exception_wins(order: list[int]) -> None:
    """It wins on every rank and in every order of the outcomes."""
    error = error_of(*(raised(rank, at=float(order.index(rank))) for rank in range(4)))
    assert str(error) == f"of {order[0]}"
    assert error.__notes__[0] == f"rank {order[0]} of 4 on host{order[0]} (pid {100 + order[0]}) raised it:"


def secondary(rank: int, at: float) -> Outcome:
    return raised(rank, at, SyncError("save failed on rank 0", why="it writes", fix="see it", is_secondary=True))


EXPLAINED = SyncError("rank 1 has left", why="b", fix="c")
# The table in the docstring of parallelize/launchers/failures.py.
ENDS = [
    (Outcome(0, "host0", 100, value=1), End.RETURNED, False),
    (stopped(0, 1.0), End.STOPPED, False),
    (lost_connection(0, 1.0, GLOO), End.LOST_CONNECTION, False),
    (lost_connection(0, 1.0, NCCL), End.LOST_CONNECTION, False),
    (
        raised(0, 1.0, ValueError("in hook"), f"Traceback ...\n{GLOO}\n\nValueError: in hook"),
        End.LOST_CONNECTION,
        False,
    ),
    (secondary(0, 1.0), End.REPEATED, False),
    (exited(0, 1.0), End.DIED, True),
    (exited(0, 1.0, exitcode=0), End.DIED, True),
    (exited(0, 1.0, exitcode=-signal.SIGTERM), End.DIED, True),
    (raised(0, 1.0, SystemExit(3)), End.RAISED, True),
    (raised(0, 1.0, KeyboardInterrupt()), End.RAISED, True),
    (raised(0, 1.0, EXPLAINED, f"Traceback ...\n{GLOO}\n\nTraceback ...\n"), End.RAISED, True),
]


@pytest.mark.parametrize(
    ("outcome", "end", "causes"), ENDS, ids=[f"{end.name}-{n}" for n, (_, end, _) in enumerate(ENDS)]
)
@pytest.mark.parametrize("is_earlier", [True, False])
def test_how_a_rank_has_ended_decides_whether_it_is_the_cause(
    outcome: Outcome, end: End, *, causes: bool, is_earlier: bool
) -> None:
    """Beside an exception of another rank, only what has failed by itself, and earlier, is raised in the caller."""
    assert (end_of(outcome), is_cause(outcome)) == (end, causes)
    exception = raised(1, 2.0 if is_earlier else 0.5)
    error = error_of(outcome, exception)
    assert (error is not exception.error) == (causes and is_earlier)


@pytest.mark.parametrize("line", [GLOO, NCCL])
def test_an_exception_wins_over_what_it_caused(line: str) -> None:
    """A connection error that comes before the exception, and a secondary error, are listed among the other ranks."""
    error = error_of(lost_connection(0, 1.0, line), raised(2, 2.0), lost_connection(3, 0.5, line))
    assert str(error) == "of 2"
    assert error.__notes__[-1] == "the others: ranks 0, 3: lost the connection; rank 1: stopped"
    error = error_of(secondary(1, 1.0), secondary(2, 1.0), raised(0, 2.0), world_size=3)
    assert str(error) == "of 0"
    assert error.__notes__[-1] == "the others: ranks 1-2: SyncError: save failed on rank 0"
    assert "failed on rank 0" in str(error_of(secondary(1, 1.0), stopped(0, 2.0)))


def test_a_lost_connection_is_the_cause_if_nothing_else_failed() -> None:
    """A network failure is reported by the first rank to notice it."""
    assert "gloo" in str(error_of(lost_connection(1, 2.0), lost_connection(0, 1.0), stopped(2, 3.0)))
    assert error_of(lost_connection(1, 2.0), lost_connection(0, 1.0)).__notes__[0].startswith("rank 0 ")


def test_an_exception_before_an_exit_wins_and_after_it_does_not() -> None:
    """Of several primary failures the earliest wins."""
    assert str(error_of(raised(0, 1.0), exited(1, 2.0))) == "of 0"
    assert error_of(raised(0, 3.0), exited(1, 2.0)).rank == 1
    assert str(error_of(raised(0, 2.0), exited(1, 2.0))) == "of 0"
    undated = dataclasses.replace(raised(0, 1.0), failed_at=float("inf"))
    assert str(error_of(undated, raised(1, 2.0))) == "of 1"
    assert error_of(undated, exited(1, 2.0)).rank == 1


def test_a_sync_error_that_explains_a_lost_connection_is_the_cause() -> None:
    """Its traceback contains the connection's error too."""
    error = SyncError("rank 1 has left", why="b", fix="c")
    explained = raised(0, 2.0, error, f"Traceback ...\n{GLOO}\n\nTraceback ...\n")
    assert error_of(explained, lost_connection(1, 1.0)) is error


def test_the_exit_of_all_ranks_is_that_of_the_program() -> None:
    """In any order; a rank that was stopped has not exited, and an error code is not lost."""
    exits = [raised(1, 1.0, SystemExit(3)), raised(0, 2.0, SystemExit("no data"))]
    assert error_of(*exits, world_size=2) is exits[1].error
    for first in (stopped(0, 2.0), Outcome(0, "host0", 100, has_exited=True), Outcome(0, "host0", 100, value=1)):
        error = error_of(exits[0], first, world_size=2)
        assert isinstance(error, WorkerError)
        assert (error.rank, error.exitcode) == (1, 3)


def test_other_exits_are_worker_errors() -> None:
    """SystemExit itself would end the caller without a message; a SIGTERM that the agent did not send is a cause."""
    error = error_of(raised(0, 1.0, SystemExit(3)), stopped(1, 2.0))
    assert isinstance(error, WorkerError)
    assert error.exitcode == 3
    assert error_of(raised(0, 1.0, SystemExit("bye"))).exitcode == 1
    assert not raised(0, 1.0, SystemExit(3)).was_stopped
    error = error_of(lost_connection(0, 2.0), stopped(1, 1.0), stopped(2, 2.5))
    assert (error.rank, error.signal_name) == (1, "SIGTERM")


@pytest.mark.parametrize(
    ("exitcode", "name", "text", "fix"),
    [
        (-40, "signal 40", "was ended by signal 40", ""),  # real-time signals have no name
        (-1, "SIGHUP", "was ended by SIGHUP", ""),
        (-signal.SIGKILL, "SIGKILL", "was ended by SIGKILL", "Out of memory"),
        (0, None, "ended with exit code 0", ""),
        (1, None, "ended with exit code 1", ""),
        (-signal.SIGABRT, "SIGABRT", "was ended by SIGABRT", "NCCL's watchdog"),
        (-signal.SIGABRT, "SIGABRT", "was ended by SIGABRT", "timeout="),
        (-signal.SIGBUS, "SIGBUS", "was ended by SIGBUS", "/dev/shm"),  # which is full
    ],
)
def test_an_exit_code_is_described(exitcode: int, name: str | None, text: str, fix: str) -> None:
    """A negative one is a signal; the fix names its usual reason. It wins over the connections that it has closed."""
    error = error_of(lost_connection(0, 0.5), exited(3, 1.0, exitcode=exitcode))
    assert isinstance(error, WorkerError)
    assert (error.rank, error.host, error.exitcode, error.signal_name) == (3, "host3", exitcode, name)
    assert str(error).startswith(f"rank 3 on host3 {text}\n")
    assert fix in error.faults[0].fix


def test_many_ranks_are_one_line() -> None:
    """A thousand stopped ranks are listed as ranges; those that differ have their own entry."""
    outcomes = [raised(5, 1.0), Outcome(7, "host7", 107, value=1), *(stopped(rank, 2.0) for rank in range(8, 500))]
    line = error_of(*outcomes, exited(3, 2.0, exitcode=7), world_size=1000).__notes__[-1]
    assert line == "the others: ranks 0-2, 4, 6, 8-999: stopped; rank 3: ended with exit code 7; rank 7: had returned"


def test_earlier_attempts_are_noted() -> None:
    """After restarts, the error of each attempt has one line."""
    error = caller_exception([raised(0, 1.0)], world_size=1, earlier=[KeyError("a"), OSError()])
    assert error.__notes__[-3:] == [
        "no other rank exists",
        "attempt 0 had failed with KeyError: 'a'",
        "attempt 1 had failed with OSError",
    ]


def test_the_last_lines_of_a_killed_rank_are_shown(tmp_path: Path) -> None:
    """The note contains the end of its stdout, then of its stderr."""
    (tmp_path / "rank1.out").write_text("".join(f"line {number}\n" for number in range(100)))
    (tmp_path / "rank1.err").write_text("Fatal Python error\n")
    (tmp_path / "rank11.out").write_text("another rank\n")
    error = error_of(exited(1, 1.0, output=read_output(tmp_path, 1)), world_size=2)
    lines = error.__notes__[0].splitlines()
    assert lines == ["last lines of rank 1:", *(f"line {number}" for number in range(80, 100)), "Fatal Python error"]


class NotelessError(Exception):
    def add_note(self, note: str) -> None:
        raise RuntimeError("no notes")


class OddNotesError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.__notes__ = 3


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    text: str


@pytest.mark.parametrize("kind", [NotelessError, OddNotesError, FrozenError])
def test_an_exception_whose_class_refuses_notes_has_them(kind: type[Exception]) -> None:
    """The caller's `except` finds it by its type."""
    own = kind("full")
    error = error_of(raised(2, 1.0, own))
    assert error is own
    assert error.__notes__[0] == "rank 2 of 4 on host2 (pid 102) raised it:"
    assert error.__notes__[-1].startswith("the others: ")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_errors_of_other_ranks_are_listed() -> None:
    """By the first line, to 120 characters: a longer text would hide the ranks after it; by the type without a text."""
    others = raised(1, 2.0, ValueError("x" * 121)), raised(2, 2.0, KeyError()), raised(3, 2.0, UnprintableError(), "")
    error = error_of(raised(0, 1.0), *others)
    assert str(error) == "of 0"
    assert error.__notes__[-1].startswith(
        f"the others: rank 1: ValueError: {'x' * 120}; rank 2: KeyError; "
        "rank 3: UnprintableError: (no text: its __str__ raised"
    )


def test_data_of_another_size_is_an_error_of_all_ranks() -> None:
    """gloo aborts the process that receives it: the lines of the ranks are those in their stacks."""
    mismatch = "op.preamble.length <= op.nbytes. 8 vs 4"
    err = (
        f"what(): gloo::EnforceNotMet [enforce fail at pair.cc:446] {mismatch}. Received data size does not match\n"
        'Fatal Python error: Aborted\n\nThread 0x2 (most recent call first):\n  File "/u/save.py", line 5 in save\n'
        '\nThread 0x1 (most recent call first):\n  File "/u/train.py", line 7 in train\n'
    )
    trace = f'Traceback (most recent call last):\n  File "/u/train.py", line 3, in train\n{GLOO}\n'
    error = error_of(raised(0, 2.0, RuntimeError(GLOO), trace), exited(1, 1.0, -6, ("", err)), world_size=2)
    assert isinstance(error, SyncError)
    what, why, _ = str(error).splitlines()
    assert what.endswith("rank 1 received data of another size than its collective expects, at train.py:7")
    assert why.endswith(f"({mismatch})")
    assert error.__notes__ == ["the others: rank 0: lost the connection at train.py:3"]
