"""Of several failures the cause is found, and told in few words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelize.call.task import Outcome
from parallelize.errors import SyncError, WorkerError
from parallelize.launchers.elastic.agent import Death
from parallelize.launchers.elastic.failures import verdict, was_stopped
from parallelize.launchers.elastic.worker_output import RankFiles

GLOO = "RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
NCCL = "torch.distributed.DistBackendError: NCCL error in: remote process exited"


def raised(rank: int, at: float, error: BaseException | None = None, traceback: str | None = None) -> Outcome:
    error = error or ValueError(f"of {rank}")
    traceback = f"Traceback ...\n{type(error).__name__}: {error}\n" if traceback is None else traceback
    return Outcome(rank, f"host{rank}", 100 + rank, error=error, traceback=traceback, failed_at=at)


def echo(rank: int, at: float, line: str = GLOO) -> Outcome:
    return raised(rank, at, RuntimeError(line), f"Traceback (most recent call last):\n  ...\n{line}\n")


def stopped(rank: int, at: float) -> Outcome:
    return raised(rank, at, SystemExit(143))


def died(rank: int, at: float, exitcode: int = -9) -> Death:
    return Death(rank, f"host{rank}", 100 + rank, exitcode, at)


def silent(rank: int) -> tuple[str, str]:
    return "", ""


def judged(outcomes: list[Outcome], deaths: list[Death], world_size: int = 4) -> BaseException:
    return verdict(outcomes, deaths, world_size=world_size, output=silent)


@given(order=st.permutations(range(4)))
def test_the_earliest_exception_wins(order: list[int]) -> None:
    """Whichever rank it is, and in whatever order outcomes are read."""
    error = judged([raised(rank, at=float(order.index(rank))) for rank in range(4)], [])
    assert str(error) == f"of {order[0]}"
    assert error.__notes__[0] == f"rank {order[0]} of 4 on host{order[0]} (pid {100 + order[0]}) raised this:"


@pytest.mark.parametrize("line", [GLOO, NCCL])
def test_an_echo_is_no_cause_however_early(line: str) -> None:
    """A lost connection before the exception that made it so is set aside."""
    error = judged([echo(0, 1.0, line), raised(2, 2.0), echo(3, 0.5, line)], [])
    assert str(error) == "of 2"
    assert error.__notes__[-1] == "the others: ranks 0, 3: lost the connection; rank 1: stopped"


def passed_on(rank: int, at: float) -> Outcome:
    return raised(rank, at, SyncError("save failed on rank 0", why="it writes", fix="see it", is_echo=True))


def test_what_passes_on_a_failure_is_no_cause_however_early() -> None:
    """An error of this library that says so is set aside, and told of the others with its own words."""
    error = judged([passed_on(1, 1.0), passed_on(2, 1.0), raised(0, 2.0)], [], world_size=3)
    assert str(error) == "of 0"
    assert error.__notes__[-1] == "the others: ranks 1-2: SyncError: save failed on rank 0"
    assert "failed on rank 0" in str(judged([passed_on(1, 1.0), stopped(0, 2.0)], []))


def test_an_echo_is_the_cause_when_there_is_no_other() -> None:
    """A network that fails is reported, by the first to notice."""
    assert "gloo" in str(judged([echo(1, 2.0), echo(0, 1.0), stopped(2, 3.0)], []))
    assert judged([echo(1, 2.0), echo(0, 1.0)], []).__notes__[0].startswith("rank 0 ")


def test_a_silent_death_wins_over_its_echoes() -> None:
    """The rank that was killed is named, with the signal, and attributes for programs."""
    error = judged([echo(0, 1.0), echo(1, 1.1)], [died(3, 1.5)])
    assert isinstance(error, WorkerError)
    assert (error.rank, error.host, error.exitcode, error.signal_name) == (3, "host3", -9, "SIGKILL")
    assert str(error).startswith("rank 3 on host3 was ended by SIGKILL\n")
    assert "Out of memory" in str(error)


def test_an_exception_before_a_death_wins_and_after_it_does_not() -> None:
    """Between causes, time decides."""
    assert str(judged([raised(0, 1.0)], [died(1, 2.0)])) == "of 0"
    assert judged([raised(0, 3.0)], [died(1, 2.0)]).rank == 1


def test_the_agent_sees_raising_ranks_die_too() -> None:
    """A death of a rank that has said why is not another failure."""
    error = judged([raised(0, 1.0)], [died(0, 0.5, exitcode=1)])
    assert str(error) == "of 0"


def test_a_rank_stopped_from_outside_is_the_cause() -> None:
    """SIGTERM that nobody here sent came before the others were stopped or lost it."""
    error = judged([echo(0, 2.0), stopped(1, 1.0), stopped(2, 2.5)], [])
    assert (error.rank, error.signal_name) == (1, "SIGTERM")


def test_sys_exit_is_a_worker_error_with_its_code() -> None:
    """SystemExit itself would end the caller without a word."""
    error = judged([raised(0, 1.0, SystemExit(3)), stopped(1, 2.0)], [])
    assert isinstance(error, WorkerError)
    assert error.exitcode == 3
    assert judged([raised(0, 1.0, SystemExit("bye"))], []).exitcode == 1
    assert not was_stopped(raised(0, 1.0, SystemExit(3)))


def test_an_unknown_signal_has_its_number() -> None:
    """Real-time signals have no name."""
    assert judged([], [died(0, 1.0, exitcode=-40)]).signal_name == "signal 40"


def test_many_ranks_are_one_line() -> None:
    """A thousand stopped ranks are one range; those that differ are said apart."""
    outcomes = [raised(5, 1.0), Outcome(7, "host7", 107, value=1), *(stopped(rank, 2.0) for rank in range(8, 500))]
    line = judged(outcomes, [died(3, 2.0, exitcode=7)], world_size=1000).__notes__[-1]
    assert line == "the others: ranks 0-2, 4, 6, 8-999: stopped; rank 3: ended with exit code 7; rank 7: had returned"


def test_earlier_attempts_are_noted() -> None:
    """After restarts, what ended each attempt is told in a line."""
    error = verdict([raised(0, 1.0)], [], world_size=1, output=silent, earlier=[KeyError("a"), OSError()])
    assert error.__notes__[-3:] == [
        "there is no other rank",
        "attempt 0 had failed with KeyError: 'a'",
        "attempt 1 had failed with OSError",
    ]


def test_the_last_lines_of_a_silent_rank_are_shown(tmp_path: Path) -> None:
    """Its output of that attempt is all it left: the end of each stream, and the reason last."""
    files = RankFiles(tmp_path)
    (tmp_path / "rank1.out").write_text("".join(f"earlier {number}\n" for number in range(100)))
    (tmp_path / "rank1.1.out").write_text("".join(f"line {number}\n" for number in range(100)))
    (tmp_path / "rank1.1.err").write_text("Fatal Python error\n")
    (tmp_path / "rank11.1.out").write_text("another rank\n")
    error = verdict([], [died(1, 1.0)], world_size=2, output=lambda rank: files.texts(rank, 1))
    lines = error.__notes__[0].splitlines()
    assert lines == ["last lines of rank 1:", *(f"line {number}" for number in range(80, 100)), "Fatal Python error"]


class NotelessError(Exception):
    def add_note(self, note: str) -> None:
        raise RuntimeError("no notes")


class OddNotesError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.__notes__ = 3


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 knows no add_note")
def test_an_exception_with_an_add_note_of_its_own_is_stood_in_for() -> None:
    """What it raises then is not the cause."""
    error = judged([raised(2, 1.0, NotelessError("full"))], [])
    assert str(error).startswith("NotelessError: full\n")
    assert "it takes no notes: RuntimeError: no notes" in str(error)


def test_an_exception_that_takes_no_notes_is_stood_in_for() -> None:
    """Text, place and notes are those of the rank that raised it."""
    error = judged([raised(2, 1.0, OddNotesError("full"))], [])
    assert isinstance(error, WorkerError)
    assert (error.rank, error.host) == (2, "host2")
    assert str(error).startswith("OddNotesError: full\n")
    assert error.__notes__[0] == "rank 2 of 4 on host2 (pid 102) raised this:"


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise ValueError("nothing to say")


def test_another_ranks_exception_without_a_text_does_no_harm() -> None:
    """It is told of in the words that there are."""
    error = judged([raised(0, 1.0), raised(1, 2.0, SpeechlessError(), "")], [], world_size=2)
    assert str(error) == "of 0"
    assert error.__notes__[-1].startswith("the others: rank 1: SpeechlessError: (its text cannot be had")
