"""checkpoints() in one process: runs that are interrupted and resumed."""

from __future__ import annotations

import concurrent.futures
import enum
import sys
import threading
import time
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from parallelize import ConfigError, ParallelizeError, checkpoints, load, parallel_model, shard_loader
from parallelize.checkpoint import background_save, save_schedule
from parallelize.checkpoint.checksum import checksum_of
from parallelize.checkpoint.save_schedule import SaveSchedule


def assert_equal(a, b):
    """Compare nested values bitwise."""
    assert checksum_of(a) == checksum_of(b)


def dataset():
    return TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))


class Phase(enum.Enum):
    """An enum, which is not a safe type."""

    WARM = "warm"


class KilledError(Exception):
    """Simulates the kill of a process."""


def run(folder, *, dies_after: int | None = None, every: int | str = 4, epochs: int = 3, in_background: bool = False):
    """Train as a user would, in this process; raise KilledError after step `dies_after`."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = 0.0
    with parallel_model(model):
        loader = shard_loader(DataLoader(dataset(), batch_size=4, shuffle=True))
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
        with checkpoints(folder, every=every, in_background=in_background, **objects) as saved:
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
def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path_factory, uninterrupted, kills, every, in_background):
    """Interrupted after any steps and resumed, a run ends with bitwise the same weights, values and learning rates."""
    folder, options = tmp_path_factory.mktemp("interrupted"), {"every": every, "in_background": in_background}
    for kill in sorted(kills):
        with pytest.raises(KilledError):
            run(folder, dies_after=kill, **options)
    assert_equal(run(folder, **options), uninterrupted)
    assert_equal(run(folder, **options), uninterrupted)  # the run is complete already


def test_the_last_files_are_kept(tmp_path):
    """The newest `keep` files stay, and so do other files in the folder."""
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
    """If the program changes its working directory in the block, all files are still in one folder."""
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    how = {"in_background": in_background, "sharded": sharded}
    with checkpoints("runs", every=1, keep=2, model=nn.Linear(1, 1), **how) as saved:
        for _ in range(4):
            saved.step()
            monkeypatch.chdir(tmp_path / "out")
    assert sorted(each.stem for each in (tmp_path / "runs").iterdir()) == ["step-000000003", "step-000000004"]
    assert list((tmp_path / "out").iterdir()) == []


def test_damaged_files_are_skipped(tmp_path, caplog):
    """A run resumes from the newest undamaged file and logs the files that it skips."""
    last = run(tmp_path, every=10)
    newest, second = sorted(tmp_path.glob("step-*.pt"), reverse=True)[:2]
    newest.write_bytes(newest.read_bytes()[:1000])
    second.write_bytes(b"")
    again = run(tmp_path, every=10)
    assert_equal(again, last)
    assert caplog.text.count("skipped checkpoint") == 2


@pytest.mark.parametrize("holds", ["a class", "another format", "other content"])
def test_undamaged_files_that_cannot_be_loaded_raise(tmp_path, holds):
    """If the folder has only undamaged files that cannot be loaded, the run raises and does not start at step 0."""
    path = tmp_path / "step-000000002.pt"
    contents = {
        "a class": {"keys": {Phase.WARM: 1}},
        "another format": {"parallelize checkpoint": 7},
        "other content": nn.Linear(1, 1).state_dict(),
    }
    torch.save(contents[holds], path)
    (tmp_path / "step-000000001.pt").write_bytes(b"")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="checkpoints") as caught, checkpoints(tmp_path, model=nn.Linear(1, 1)):
        pass
    assert "step-000000002.pt" in caught.value.faults[0].what
    assert "use another folder" in caught.value.faults[0].fix
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_read_raises(tmp_path):
    """A file without read permission, or on a failing disk, may be the newest state: the run does not start anew."""
    (tmp_path / "step-000000002.pt").symlink_to("/proc/self/mem")  # reading it fails, for root as well
    with pytest.raises(ConfigError, match="cannot read") as caught, checkpoints(tmp_path, model=nn.Linear(1, 1)):
        pass
    assert "Input/output error" in caught.value.faults[0].why
    assert "let this user read it" in caught.value.faults[0].fix


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="such a path is not there, and pathlib raises no error")
def test_a_folder_that_cannot_be_read_raises(tmp_path):
    """The error names the call, for example without permission, or as here because the name is too long."""
    folder = tmp_path / ("x" * 300)
    with pytest.raises(ConfigError, match="checkpoints") as caught, checkpoints(folder, model=nn.Linear(1, 1)):
        pass
    assert "File name too long" in caught.value.faults[0].why
    assert "let this user read" in caught.value.faults[0].fix


def test_a_file_of_another_format_is_skipped_for_one_that_can_be_loaded(tmp_path, caplog):
    """A run resumes from the newest file that it can load."""
    with checkpoints(tmp_path, every=1, model=nn.Linear(1, 1)) as saved:
        saved.step()
    torch.save({"parallelize checkpoint": 7}, tmp_path / "step-000000002.pt")
    with checkpoints(tmp_path, model=nn.Linear(1, 1)) as saved:
        assert saved.steps == 1
    assert "has format 7" in caplog.text


def test_a_skipped_file_does_not_count(tmp_path):
    """A damaged file of a later step does not count towards `keep` and is not removed."""
    (tmp_path / "step-000000100.pt").write_bytes(b"")
    with checkpoints(tmp_path, every=2, keep=1, model=nn.Linear(1, 1)) as saved:
        for _ in range(4):
            saved.step()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000000004.pt", "step-000000100.pt"]


def test_what_changes_after_a_step_is_saved(tmp_path):
    """save() and the end of the block save weights and values that have changed since the last step."""
    model = nn.Linear(1, 1)

    def loaded():
        other = nn.Linear(1, 1)
        progress = load(tmp_path / "step-000000001.pt", model=other)["_checkpoints"]
        return other.weight.item(), progress["values"]

    with checkpoints(tmp_path, every=1, model=model) as saved:
        saved.step(best=1)
        model.weight.data.fill_(7.0)
        saved.values["best"] = 2
        saved.save()
        assert loaded() == (7.0, {"best": 2})
        model.weight.data.fill_(8.0)
        saved.values["best"] = 3
    assert loaded() == (8.0, {"best": 3})


def test_a_checkpoint_replaces_the_other_form(tmp_path):
    """A checkpoint replaces one of the same step in the other form, file or folder."""
    model = nn.Linear(1, 1)
    for number, sharded in enumerate([True, False, True]):
        with checkpoints(tmp_path, sharded=sharded, model=model) as saved:
            assert saved.values.get("number", -1) == number - 1
            saved.values["number"] = number
    assert [each.name for each in tmp_path.iterdir()] == ["step-000000000"]


@pytest.fixture
def always_in_background(monkeypatch):
    """Use the writer process for states of any size."""
    monkeypatch.setattr(background_save, "MIN_BYTES", 0)


def test_a_failure_in_the_background_is_raised(tmp_path, always_in_background):
    """An error of a background save is raised by the next step after it has failed."""
    (tmp_path / "file").write_text("")

    def train():
        with checkpoints(tmp_path / "file" / "a", every=1, model=nn.Linear(1, 1)) as saved:
            saved.step()
            concurrent.futures.wait([saved._writer._job])
            saved.step()
            raise AssertionError

    with pytest.raises(ParallelizeError, match="cannot write"):
        train()


def test_a_killed_writer_is_named(tmp_path, always_in_background):
    """If the writer process is killed, the next save raises."""

    def train():
        with checkpoints(tmp_path, every=1, model=nn.Linear(1, 1)) as saved:
            saved.step()
            saved.wait()
            saved._writer._process.kill()
            saved._writer._process.wait()
            saved.step()
            saved.wait()

    with pytest.raises(ParallelizeError, match="the process that writes checkpoints has ended"):
        train()
    assert [each.name for each in tmp_path.iterdir()] == ["step-000000001.pt"]


def test_the_background_writes_the_same_files(tmp_path, always_in_background):
    """A file that the writer process has written has the bytes of one that is written at once."""
    model = nn.Linear(3, 3)
    for folder, in_background in (("a", True), ("b", False)):
        torch.manual_seed(0)
        with checkpoints(tmp_path / folder, every=1, in_background=in_background, model=model) as saved:
            saved.step(x=torch.arange(9.0).reshape(3, 3).T, empty=torch.empty(0, 2), none=None)
            saved.wait()
            written = (tmp_path / folder / "step-000000001.pt").read_bytes()
            (tmp_path / f"{folder}.pt").write_bytes(written)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_the_background_writes_a_snapshot(tmp_path, always_in_background):
    """A file holds the weights of its step, even if they change while it is written."""
    model, tied = nn.Linear(3, 3), nn.Linear(3, 3)
    tied.weight = model.weight
    with checkpoints(tmp_path, every=1, keep=9, in_background=True, model=model, tied=tied) as saved:
        for number in range(1, 7):
            model.weight.data.fill_(number)
            model.bias.data.fill_(-number)
            saved.step()
            model.weight.data.zero_()
    for number in range(1, 6):  # the sixth is saved again at the end of the block
        loaded = nn.Linear(3, 3)
        load(tmp_path / f"step-{number:09d}.pt", tied=loaded)
        assert bool((loaded.weight == number).all())
        load(tmp_path / f"step-{number:09d}.pt", model=loaded)
        assert bool((loaded.bias == -number).all())


def test_an_exception_saves_nothing(tmp_path):
    """A block that raises saves nothing: it may have stopped in the middle of a step."""

    def train():
        with checkpoints(tmp_path, every=100, model=nn.Linear(1, 1)) as saved:
            saved.step()
            raise KilledError

    with pytest.raises(KilledError):
        train()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("every", ["10", "min", "-1s", "0s", 0, -5, 2.5, True, None, "10 years"])
def test_invalid_every_is_rejected(every):
    """The fix shows what a duration looks like."""
    with pytest.raises(ConfigError, match="every=") as caught:
        SaveSchedule(every, store=None, rank=0)
    assert "10min" in caught.value.faults[0].fix


@pytest.mark.parametrize(("every", "seconds"), [("10min", 600), ("30s", 30), ("1.5 h", 5400), ("1d", 86400)])
def test_durations_are_parsed(every, seconds):
    """A duration is a number and a unit."""
    assert SaveSchedule(every, store=None, rank=0).every_s == seconds


@pytest.mark.parametrize(("every", "due"), [(1, [1, 2, 3, 4, 5, 6, 7, 8, 9]), (3, [3, 6, 9])])
def test_steps_are_counted(every, due):
    """With every=3 a save is due after steps 3, 6 and 9."""
    schedule = SaveSchedule(every, store=None, rank=0)
    assert [each for each in range(1, 10) if schedule.is_due(each)] == due


@pytest.fixture
def clock(monkeypatch):
    """Replace the schedule's clock by a list with one number of seconds."""
    seconds = [0.0]
    monkeypatch.setattr(save_schedule, "time", types.SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def test_one_process_saves_by_its_clock(clock):
    """A save is due as soon as the duration has passed since the last one."""
    schedule, due = SaveSchedule("10s", store=None, rank=0), []
    for step in range(1, 40):
        clock[0] += 2.5 if step < 20 else 4.0
        due += [step] * schedule.is_due(step)
    assert due == [4, 8, 12, 16, 20, 23, 26, 29, 32, 35, 38]


@pytest.mark.parametrize(
    ("step_s", "starts"),
    [
        ([0.0] * 40, [1, 2, 4, 8, 16, 32]),
        ([1.25] * 6, [1, 2, 4]),
        ([1.5] * 6, [1, 2, 3, 4, 5, 6]),
        ([0.0] * 4 + [0.75] * 40, [1, 2, 4, 8, 16, 20, 22, 23, 24, 26, 30, 34, 36, 37, 38, 40, 44]),
        ([4.0] * 3 + [0.0] * 10, [1, 2, 3, 4, 5, 7, 11]),
    ],
)
def test_a_window_takes_a_twentieth_of_the_period(clock, step_s, starts):
    """With every="60s" windows of calls get longer up to 1.5 s and shorter from 3 s on; each starts with a message."""
    store = CountingStore(torch.distributed.HashStore())
    schedule, found = SaveSchedule("60s", store=store, rank=0), []
    for step, seconds in enumerate(step_s, start=1):
        clock[0] += seconds
        before = store.num_sets
        schedule.is_due(step)
        found += [step] * (store.num_sets - before)
    assert found == starts


def test_the_window_after_the_period_ends_with_a_save(clock):
    """Rank 0 sees at the start of a window that the period is over; all ranks save at its end, and keys are deleted."""
    store, due = torch.distributed.HashStore(), []
    schedules = [SaveSchedule("10s", store=store, rank=rank) for rank in range(2)]
    schedules[1]._key = schedules[0]._key
    for step in range(1, 50):
        clock[0] += 2.5
        first, second = [each.is_due(step) for each in schedules]
        assert first is second
        due += [step] * first
    assert due == [5, 10, 15, 20, 25, 30, 35, 40, 45]
    assert store.num_keys() < 12


@pytest.mark.parametrize("behind", [0, 1])
def test_all_ranks_save_after_the_same_steps(behind, clock):
    """Ranks whose hosts run at different speeds save after the same steps, and rarely ask the store."""
    store = CountingStore(torch.distributed.HashStore())
    schedules = [SaveSchedule("0.2s", store=store, rank=rank) for rank in range(2)]
    schedules[1]._key = schedules[0]._key
    due: list[list[int]] = [[], []]
    saving = threading.Barrier(2)

    def take_steps(rank: int) -> None:
        for step in range(1, 700):
            if rank == 0:
                clock[0] += 0.001
            if rank == behind:
                time.sleep(0.0001)  # the slow host
            if schedules[rank].is_due(step):
                due[rank].append(step)
                saving.wait()

    threads = [threading.Thread(target=take_steps, args=[rank]) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert due[0] == due[1]
    assert len(due[0]) == 3
    assert store.num_sets < 200


class CountingStore:
    """A store that counts what is set."""

    def __init__(self, store) -> None:
        self._store, self.num_sets = store, 0

    def set(self, key, value):
        self.num_sets += 1
        self._store.set(key, value)

    def __getattr__(self, name):
        return getattr(self._store, name)


def test_values_are_refused_when_they_are_given(tmp_path):
    """A value that cannot be saved is refused by the step that gets it, and a NumPy number is converted."""
    numpy = pytest.importorskip("numpy")
    with checkpoints(tmp_path, every=1000, model=nn.Linear(1, 1)) as saved:
        saved.step(best=numpy.float32(0.5))
        assert type(saved.values["best"]) is float
        with pytest.raises(ConfigError, match="best is of type"):
            saved.step(best=object())


class Extra(nn.Linear):
    """A model with extra state that cannot be saved."""

    def get_extra_state(self):
        return object()


def test_extra_state_is_refused_at_the_start(tmp_path):
    """A model whose extra state cannot be saved is refused when the block is entered."""
    with pytest.raises(ConfigError, match=r"_extra_state.* is of type"), checkpoints(tmp_path, model=Extra(1, 1)):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0, "model": nn.Linear(1, 1)}, "keep=0"),
        ({}, "nothing to save"),
        ({"model": nn.Linear(1, 1), "epoch": 3}, r"epoch=3.*\n.*\n.*step\(epoch="),
    ],
)
def test_invalid_options_are_rejected(tmp_path, options, message):
    """Invalid options raise on entry."""
    with pytest.raises(ConfigError, match=message), checkpoints(tmp_path, **options):
        pass
