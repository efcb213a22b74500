"""The report of each process's step times, and of the process that the others waited for."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
import torch.distributed as dist

from parallelize.runtime import step_timing
from parallelize.runtime.step_timing import StepTiming, report_line, timed_steps


def timings(*data_s: float, late_s: tuple[float, ...]) -> list[StepTiming]:
    """Build timings of processes that step together every 100 ms, each `late_s` after the start of the step."""
    return [
        StepTiming(rank, 10, 0.1, wait, collective_starts={f"0/{n}": n * 0.1 + late for n in range(10)})
        for rank, (wait, late) in enumerate(zip(data_s, late_s, strict=True))
    ]


def test_equal_timings_are_reported_together() -> None:
    """Ranks with the same numbers have one phrase, and small delays name no slow rank."""
    line = report_line(
        timings(0.002, 0.002, 0.05, late_s=(0.0, 0.001, 0.002)), world_size=3, label="train.py:3 epoch 1"
    )
    assert line == (
        "train.py:3 epoch 1: ranks 0-1: 10 steps of 100 ms, 2% of it waiting for data; "
        "rank 2: 10 steps of 100 ms, 50% of it waiting for data"
    )


@pytest.mark.parametrize(("data_s", "reason"), [(0.04, "it waits for data"), (0.002, "it computes longer")])
def test_the_slowest_rank_is_named_with_the_reason(data_s: float, reason: str) -> None:
    """It starts its collectives late, step after step: for data, if it waits longer for data meanwhile."""
    line = report_line(timings(0.002, data_s, 0.002, late_s=(0.0, 0.04, 0.001)), world_size=3, label="")
    assert f"rank 1 slows down the others: it starts collectives 40 ms after the first rank; {reason}" in line


def test_alternating_delays_name_no_slow_rank() -> None:
    """Each rank is last in half of the collectives."""
    both = [
        StepTiming(r, 10, 0.1, 0.0, collective_starts={f"0/{n}": n + 0.05 * (n % 2 == r) for n in range(10)})
        for r in range(2)
    ]
    assert "slows" not in report_line(both, world_size=2, label="")


def test_short_collectives_hide_no_slow_rank() -> None:
    """After each long wait come short collectives, in which the other rank is last by chance."""
    both = [
        StepTiming(
            rank,
            10,
            0.1,
            0.0,
            collective_starts={
                f"0/{n}": n + (0.03 if n % 3 == 0 else 0.001) * (rank == (n % 3 == 0)) for n in range(9)
            },
        )
        for rank in range(2)
    ]
    assert "rank 1 slows down the others: it starts collectives 10 ms" in report_line(both, world_size=2, label="")


def test_few_common_collectives_name_no_slow_rank() -> None:
    """Two late starts may be a coincidence."""
    both = [
        StepTiming(r, 10, 0.1, 0.0, collective_starts={"0/1": 1.0 + r, "0/2": 2.0 + r, f"{r}/3": 1.0}) for r in range(2)
    ]
    assert "slows" not in report_line(both, world_size=2, label="")


@pytest.mark.parametrize(
    ("delays_s", "step_s", "waits_s", "phrase"),
    [
        ((1.0,) * 3, 20.0, 2.5, "it waits for data"),
        ((1.0,) * 3, 20.0, 2.375, "it computes longer"),
        ((1.0,) * 3, 21.0, 2.0, ""),  # less than 5 % of a step
        ((1.0,) * 7 + (-1.0,) * 2, 1.0, 2.0, "it computes longer"),
        ((1.0,) * 6 + (-1.0,) * 3, 1.0, 2.0, ""),  # two thirds of all delays
        ((1.0,) * 5 + (-1.0,) * 4, 1.0, 2.0, ""),
        ((0.0005,) * 9, 0.001, 0.0, ""),  # less than a millisecond
    ],
)
def test_only_a_large_delay_is_named(delays_s: tuple[float, ...], step_s: float, waits_s: float, phrase: str) -> None:
    """One rank has more than two thirds of all delays, and 5 % of a step; it waits for data in half of the time."""
    both = [
        StepTiming(
            rank, 9, step_s, wait, collective_starts={f"0/{n}": n + late * rank for n, late in enumerate(delays_s)}
        )
        for rank, wait in enumerate((2.0, waits_s))
    ]
    line = report_line(both, world_size=2, label="")
    assert ("rank 1 slows down the others" in line) == bool(phrase)
    assert phrase in line


def test_a_step_that_takes_no_time_has_no_wait() -> None:
    """A clock may be too coarse for a short epoch."""
    assert report_line([StepTiming(0, 1, 0.0, 0.0)], world_size=1, label="here") == (
        "here: rank 0: 1 steps of 0 ms, 0% of it waiting for data"
    )


def test_unfinished_ranks_are_named() -> None:
    """A process that is still in its epoch has no timing yet."""
    assert report_line(timings(0.0, late_s=(0.0,)), world_size=3, label="").endswith("; ranks 1-2: not finished yet")


def test_timings_that_have_arrived_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits only for ranks whose timing is missing, and no longer than the limit."""
    sent = StepTiming(1, 10, 0.1, 0.0)
    store = dist.HashStore()
    store.set("1", json.dumps(dataclasses.asdict(sent)))
    monkeypatch.setattr(step_timing, "_WAIT_S", 3600.0)
    assert step_timing._collect(store, 2) == [sent]
    assert not store.check(["1"])
    monkeypatch.setattr(step_timing, "_WAIT_S", 0.0)
    assert step_timing._collect(store, 2) == []
    monkeypatch.setattr(step_timing, "_WAIT_S", 3600.0)
    monkeypatch.setattr(time, "sleep", lambda _: store.set("1", json.dumps(dataclasses.asdict(sent))))
    assert step_timing._collect(store, 2) == [sent]


def test_of_many_processes_those_that_wait_longest_are_reported() -> None:
    """The line does not grow with the world size."""
    many = [StepTiming(rank, 10, 0.1, rank / 1000) for rank in range(64)]
    line = report_line(many, world_size=64, label="")
    assert "rank 63: 10 steps" in line
    assert "56 more ranks wait less for data" in line
    assert len(line) < 600
    eight = report_line(many[:8], world_size=8, label="")
    assert eight.index("rank 0: ") < eight.index("rank 7: ")
    assert "more ranks" not in eight
    assert "1 more ranks" in report_line(many[:9], world_size=9, label="")


def test_one_process_measures_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in the loader is separated from time in the loop; an epoch that is left early is not reported."""
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def slow() -> object:
        nonlocal now
        for number in range(4):
            now += 0.03
            yield number

    for _ in timed_steps(slow(), label="here"):
        now += 0.01
    assert capsys.readouterr().err == "here: rank 0: 4 steps of 40 ms, 75% of it waiting for data\n"
    next(iter(timed_steps(slow(), label="here")))
    assert list(timed_steps([], label="here")) == []
    assert capsys.readouterr().err == ""
