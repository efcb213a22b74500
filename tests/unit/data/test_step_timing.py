"""The line that tells how long each process's steps took, and which process held the others back."""

from __future__ import annotations

import re
import time

import pytest

from parallelize.data.step_timing import Pace, line, with_pace


def paces(*data_s: float, late_s: tuple[float, ...]) -> list[Pace]:
    """Processes that step together every 100 ms, each so much later than the step begins."""
    return [
        Pace(rank, 10, 0.1, wait, begun={f"0/{n}": n * 0.1 + late for n in range(10)})
        for rank, (wait, late) in enumerate(zip(data_s, late_s, strict=True))
    ]


def test_alike_processes_are_told_together() -> None:
    """Ranks with the same numbers share their words, and nobody is blamed."""
    said = line(paces(0.002, 0.002, 0.05, late_s=(0.0, 0.001, 0.002)), world_size=3, label="train.py:3 epoch 1")
    assert said == (
        "train.py:3 epoch 1: ranks 0, 1: 10 steps of 100 ms, 2% of it waiting for data; "
        "rank 2: 10 steps of 100 ms, 50% of it waiting for data"
    )


@pytest.mark.parametrize(("data_s", "reason"), [(0.04, "it waits for data"), (0.002, "it computes longer")])
def test_who_comes_last_is_named_with_the_reason(data_s: float, reason: str) -> None:
    """The one that begins its collectives late, step after step; for data if it waits for that meanwhile."""
    said = line(paces(0.002, data_s, 0.002, late_s=(0.0, 0.04, 0.001)), world_size=3, label="")
    assert f"rank 1 holds the others back: it comes to collectives 40 ms after the first; {reason}" in said


def test_turns_are_nobodys_fault() -> None:
    """Where now this one is last and now that one, none holds the others back."""
    both = [Pace(r, 10, 0.1, 0.0, begun={f"0/{n}": n + 0.05 * (n % 2 == r) for n in range(10)}) for r in range(2)]
    assert "holds" not in line(both, world_size=2, label="")


def test_few_common_collectives_tell_nothing() -> None:
    """Two of them are a coincidence."""
    both = [Pace(r, 10, 0.1, 0.0, begun={"0/1": 1.0 + r, "0/2": 2.0 + r, f"{r}/3": 1.0}) for r in range(2)]
    assert "holds" not in line(both, world_size=2, label="")


def test_who_is_not_through_is_named() -> None:
    """A process that is still in its epoch has no numbers yet."""
    assert line(paces(0.0, late_s=(0.0,)), world_size=3, label="").endswith("; ranks 1, 2: not through yet")


def test_of_many_processes_those_that_wait_longest_are_told() -> None:
    """The line does not grow with the world."""
    many = [Pace(rank, 10, 0.1, rank / 1000) for rank in range(64)]
    said = line(many, world_size=64, label="")
    assert "rank 63: 10 steps" in said
    assert "56 more wait less for data" in said
    assert len(said) < 600


def test_one_process_measures_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Time in the loader and time in the loop are told apart; an epoch that is left early says nothing."""

    def slow() -> object:
        for number in range(4):
            time.sleep(0.03)
            yield number

    for _ in with_pace(slow(), key="a", label="here"):
        time.sleep(0.01)
    said = capsys.readouterr().err
    found = re.fullmatch(r"here: rank 0: 4 steps of ([\d.]+) ms, (\d+)% of it waiting for data\n", said)
    assert found is not None, said
    assert float(found[1]) >= 40
    assert 50 <= int(found[2]) <= 95
    next(iter(with_pace(slow(), key="b", label="here")))
    assert capsys.readouterr().err == ""
