"""Runs that are broken off and started again, in one process."""

from __future__ import annotations

import enum
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from parallelize import ConfigError, ParallelizeError, checkpoints, load, parallel_model, shard_loader
from parallelize.checkpoint.checksum import digest
from parallelize.checkpoint.save_schedule import ByClock, BySteps, timetable


def assert_equal(a, b):
    """Bitwise, whatever the containers hold."""
    assert digest(a) == digest(b)


def dataset():
    return TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))


class Phase(enum.Enum):
    """No plain value."""

    WARM = "warm"


class KilledError(Exception):
    """Stands for the end of a process."""


def run(folder, *, dies_after: int | None = None, every: int | str = 4, epochs: int = 3, in_background: bool = False):
    """A run in this process, as a user writes it; it may be broken off after a step."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = 0.0
    with parallel_model(model):
        loader = shard_loader(DataLoader(dataset(), batch_size=4, shuffle=True))
        things = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
        with checkpoints(folder, every=every, in_background=in_background, **things) as saved:
            losses = saved.values.get("losses", 0.0)
            for _ in range(loader.epoch, epochs):
                for (x,) in loader:
                    optimizer.zero_grad()
                    loss = model(x).square().mean()
                    loss.backward()
                    optimizer.step()
                    losses += loss.item()
                    saved.step(losses=losses)
                    if saved.steps == dies_after:
                        raise KilledError
                scheduler.step()
    return losses, saved.steps, [each.detach().clone() for each in model.parameters()], scheduler.get_last_lr()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return run(tmp_path_factory.mktemp("uninterrupted"))


@settings(max_examples=20)
@given(
    kills=st.lists(st.integers(1, 30), max_size=3, unique=True),
    every=st.sampled_from([1, 3, 4, 10, "0.004s"]),
    in_background=st.booleans(),
)
def test_a_broken_run_ends_as_an_unbroken_one(tmp_path_factory, uninterrupted, kills, every, in_background):
    """Broken off after any steps and started again, a run ends with bitwise the same weights, values and rates."""
    folder, options = tmp_path_factory.mktemp("broken"), {"every": every, "in_background": in_background}
    for kill in sorted(kills):
        with pytest.raises(KilledError):
            run(folder, dies_after=kill, **options)
    assert_equal(run(folder, **options), uninterrupted)
    assert_equal(run(folder, **options), uninterrupted)  # there is nothing left to do


def test_the_last_files_are_kept(tmp_path):
    """As many files as asked for, the newest; other files in the folder stay."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-1.pt").write_text("mine too")
    with checkpoints(tmp_path, every=2, keep=2, model=nn.Linear(1, 1)) as saved:
        for _ in range(9):
            saved.step()
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["notes.txt", "step-000000008.pt", "step-000000009.pt", "step-1.pt"]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch, in_background, sharded):
    """A program that goes to another directory in the block finds all of its files in one place."""
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    how = {"in_background": in_background, "sharded": sharded}
    with checkpoints("runs", every=1, keep=2, model=nn.Linear(1, 1), **how) as saved:
        for _ in range(4):
            saved.step()
            monkeypatch.chdir(tmp_path / "out")
    assert sorted(each.stem for each in (tmp_path / "runs").iterdir()) == ["step-000000003", "step-000000004"]
    assert list((tmp_path / "out").iterdir()) == []


def test_a_damaged_last_file_is_passed_over(tmp_path, caplog):
    """A run goes on from the newest file that is whole, and says which it has passed over."""
    last = run(tmp_path, every=10)
    newest, second = sorted(tmp_path.glob("step-*.pt"), reverse=True)[:2]
    newest.write_bytes(newest.read_bytes()[:1000])
    second.write_bytes(b"")
    again = run(tmp_path, every=10)
    assert_equal(again, last)
    assert caplog.text.count("passed over") == 2


@pytest.mark.parametrize("holds", ["a class", "another format", "other things"])
def test_files_that_are_not_damaged_are_not_begun_anew_on(tmp_path, holds):
    """Where there is nothing but files that are whole and of no use, a run is refused, not begun at step 0."""
    found = tmp_path / "step-000000002.pt"
    whole = {
        "a class": {"keys": {Phase.WARM: 1}},
        "another format": {"parallelize checkpoint": 7},
        "other things": nn.Linear(1, 1).state_dict(),
    }
    torch.save(whole[holds], found)
    (tmp_path / "step-000000001.pt").write_bytes(b"")
    before = found.read_bytes()
    with pytest.raises(ConfigError, match="checkpoints") as caught, checkpoints(tmp_path, model=nn.Linear(1, 1)):
        pass
    assert "step-000000002.pt" in caught.value.faults[0].what
    assert "name another folder" in caught.value.faults[0].fix
    assert found.read_bytes() == before


def test_a_file_of_another_format_is_passed_over_for_one_that_is_whole(tmp_path, caplog):
    """A run goes on from what it can read."""
    with checkpoints(tmp_path, every=1, model=nn.Linear(1, 1)) as saved:
        saved.step()
    torch.save({"parallelize checkpoint": 7}, tmp_path / "step-000000002.pt")
    with checkpoints(tmp_path, model=nn.Linear(1, 1)) as saved:
        assert saved.steps == 1
    assert "has format 7" in caplog.text


def test_a_file_that_was_passed_over_is_no_past(tmp_path):
    """A damaged file of a later step takes no place among those that are kept, and is left for its owner to see."""
    (tmp_path / "step-000000100.pt").write_bytes(b"")
    with checkpoints(tmp_path, every=2, keep=1, model=nn.Linear(1, 1)) as saved:
        for _ in range(4):
            saved.step()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000000004.pt", "step-000000100.pt"]


def test_what_changes_after_a_step_is_saved(tmp_path):
    """By save() and at the end of the block: weights and values that no step has seen are in the file."""
    model = nn.Linear(1, 1)

    def found():
        other = nn.Linear(1, 1)
        own = load(tmp_path / "step-000000001.pt", model=other)["_checkpoints"]
        return other.weight.item(), own["values"]

    with checkpoints(tmp_path, every=1, model=model) as saved:
        saved.step(best=1)
        model.weight.data.fill_(7.0)
        saved.values["best"] = 2
        saved.save()
        assert found() == (7.0, {"best": 2})
        model.weight.data.fill_(8.0)
        saved.values["best"] = 3
    assert found() == (8.0, {"best": 3})


def test_a_checkpoint_replaces_the_other_form(tmp_path):
    """A folder of as many steps, which another backend has written, is not found again beside the newer file."""
    model = nn.Linear(1, 1)
    for number, sharded in enumerate([True, False, True]):
        with checkpoints(tmp_path, sharded=sharded, model=model) as saved:
            assert saved.values.get("number", -1) == number - 1
            saved.values["number"] = number
    assert [each.name for each in tmp_path.iterdir()] == ["step-000000000"]


def test_a_failure_in_the_background_is_raised(tmp_path):
    """What could not be written in the background is an error in the loop, at the latest when the block ends."""
    (tmp_path / "file").write_text("")

    def broken():
        with checkpoints(tmp_path / "file" / "a", every=1, in_background=True, model=nn.Linear(1, 1)) as saved:
            saved.step()
            assert saved.steps == 1

    with pytest.raises(ParallelizeError, match="cannot write"):
        broken()


def test_the_background_writes_what_was(tmp_path):
    """A file holds the weights of the step after which it was saved, whatever has become of them since."""
    model, tied = nn.Linear(3, 3), nn.Linear(3, 3)
    tied.weight = model.weight
    with checkpoints(tmp_path, every=1, keep=9, in_background=True, model=model, tied=tied) as saved:
        for number in range(1, 7):
            model.weight.data.fill_(number)
            model.bias.data.fill_(-number)
            saved.step()
            model.weight.data.zero_()
    for number in range(1, 6):  # the sixth is written again at the end
        found = nn.Linear(3, 3)
        load(tmp_path / f"step-{number:09d}.pt", tied=found)
        assert bool((found.weight == number).all())
        load(tmp_path / f"step-{number:09d}.pt", model=found)
        assert bool((found.bias == -number).all())


def test_an_exception_saves_nothing(tmp_path):
    """A block that ends by an exception may be in the middle of a step: its state is not saved."""

    def broken():
        with checkpoints(tmp_path, every=100, model=nn.Linear(1, 1)) as saved:
            saved.step()
            raise KilledError

    with pytest.raises(KilledError):
        broken()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("every", ["10", "min", "-1s", "0s", 0, -5, 2.5, True, None, "10 years"])
def test_times_without_a_meaning_are_refused(every):
    """The error says what a time looks like."""
    with pytest.raises(ConfigError, match="every=") as caught:
        timetable(every, store=None, rank=0)
    assert "10min" in caught.value.faults[0].fix


@pytest.mark.parametrize(("every", "seconds"), [("10min", 600), ("30s", 30), ("1.5 h", 5400), ("1d", 86400)])
def test_times_are_read(every, seconds):
    """A number and a unit."""
    found = timetable(every, store=None, rank=0)
    assert isinstance(found, ByClock)
    assert found.every_s == seconds


def test_steps_are_counted():
    """Every so many steps, from the first on."""
    assert [each for each in range(1, 10) if BySteps(3).is_due(each)] == [3, 6, 9]


def test_a_clock_tells_all_ranks_one_step(monkeypatch):
    """Rank 0's clock decides, one step ahead; the others find it in the store."""
    store, now = torch.distributed.HashStore(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    ranks = [ByClock(5.0, store=store, rank=rank) for rank in range(2)]
    ranks[1]._key = ranks[0]._key
    due = []
    for step_number in range(1, 13):
        due.append([each.is_due(step_number) for each in ranks])
        now[0] += 1.5
    assert [number for number, each in enumerate(due, 1) if each == [True, True]] == [6, 11]
    assert all(each[0] == each[1] for each in due)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0, "model": nn.Linear(1, 1)}, "keep=0"),
        ({}, "nothing to save"),
        ({"model": nn.Linear(1, 1), "epoch": 3}, r"epoch=3.*\n.*\n.*step\(epoch="),
    ],
)
def test_requests_that_cannot_work_are_refused(tmp_path, options, message):
    """Before the first step, not when the run is to go on."""
    with pytest.raises(ConfigError, match=message), checkpoints(tmp_path, **options):
        pass
