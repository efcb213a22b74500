"""checkpoints() in one process: runs that are interrupted and resumed."""

from __future__ import annotations

import contextlib
import enum
import gc
import os
import pathlib
import sys
import threading

import pytest
import torch
from checksum import checksum_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from parallelize import ConfigError, ParallelizeError, checkpoints, load, parallel_model, shard_loader


def assert_equal(a, b):
    """Compare nested values bitwise."""
    assert checksum_of(a) == checksum_of(b)


def dataset():
    return TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))


def train_for(steps, folder, *, model=None, **options):
    """Make checkpoints of a small model."""
    with checkpoints(folder, model=model or nn.Linear(1, 1), **options) as saved:
        for _ in range(steps):
            saved.step()


def names_in(folder):
    return sorted(each.name for each in folder.iterdir())


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


@settings(max_examples=10)
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
    """The newest `keep` files stay, and so do other files in the folder, and a damaged one, which does not count."""
    others = ["notes.txt", "step-000000100.pt", "step-1.pt"]
    for name in others:
        (tmp_path / name).write_text("mine")
    train_for(9, tmp_path, every=2, keep=2)
    assert names_in(tmp_path) == sorted([*others, "step-000000008.pt", "step-000000009.pt"])


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


def test_shards_have_paths_as_each_python_names_them(tmp_path, monkeypatch):
    """The index of shards holds the path of their folder, of a class that Python 3.13 keeps in another module."""
    monkeypatch.setitem(sys.modules, "pathlib._local", pathlib)
    monkeypatch.setattr(type(tmp_path), "__module__", "pathlib._local")
    train_for(1, tmp_path, every=1, sharded=True)
    with checkpoints(tmp_path, sharded=True, model=nn.Linear(1, 1)) as resumed:
        assert resumed.steps == 1


def test_damaged_files_are_skipped(tmp_path, caplog):
    """A run resumes from the newest undamaged file and logs the files that it skips."""
    last = run(tmp_path, every=10)
    newest, second = sorted(tmp_path.glob("step-*.pt"), reverse=True)[:2]
    newest.write_bytes(newest.read_bytes()[:1000])
    second.write_bytes(b"")
    again = run(tmp_path, every=10)
    assert_equal(again, last)
    assert caplog.text.count("skipped checkpoint") == 2


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({"keys": {enum.Enum: 1}}, "step-000000002"),
        ({"_parallelize": {"format": 7}}, "has format 7"),
        (nn.Linear(1, 1).state_dict(), "step-000000002"),
    ],
    ids=["a class", "another format", "other content"],
)
def test_a_newest_file_that_cannot_be_loaded_raises(tmp_path, content, what):
    """If it is not damaged, the run goes on neither from an older file nor from step 0."""
    train_for(1, tmp_path, every=1)
    path = tmp_path / "step-000000002.pt"
    torch.save(content, path)
    before = path.read_bytes()
    for _ in ("an older file", "a damaged older file"):
        with pytest.raises(ConfigError, match=what):
            train_for(0, tmp_path)
        assert path.read_bytes() == before
        (tmp_path / "step-000000001.pt").write_bytes(b"")


def test_a_file_that_cannot_be_read_raises(tmp_path):
    """A file without read permission, or on a failing disk, may be the newest state: the run does not start anew."""
    (tmp_path / "step-000000002.pt").symlink_to("/proc/self/mem")  # reading it fails, for root as well
    with pytest.raises(ConfigError, match=r"(?s)cannot read.*Input/output error.*let this user read it"):
        train_for(0, tmp_path)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="such a path is not there, and pathlib raises no error")
def test_a_folder_that_cannot_be_read_raises(tmp_path):
    """The error names the call, for example without permission, or as here because the name is too long."""
    with pytest.raises(ParallelizeError, match="File name too long"):
        train_for(0, tmp_path / ("x" * 300))


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
        saved.wait()
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


def test_the_background_writes_the_same_files(tmp_path):
    """A file that is written in the background has the bytes of one that is written at once."""
    model = nn.Linear(3, 3)
    for folder, in_background in (("a", True), ("b", False)):
        torch.manual_seed(0)
        with checkpoints(tmp_path / folder, every=1, in_background=in_background, model=model) as saved:
            saved.step(x=torch.arange(9.0).reshape(3, 3).T, empty=torch.empty(0, 2), none=None)
            saved.wait()
            written = (tmp_path / folder / "step-000000001.pt").read_bytes()
            (tmp_path / f"{folder}.pt").write_bytes(written)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_steps_do_not_wait_for_the_background(tmp_path, monkeypatch):
    """Only the next save waits for a file that is still being written."""
    disk = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: disk.wait(60.0))
    with checkpoints(tmp_path, every=2, in_background=True, model=nn.Linear(1, 1)) as saved:
        for _ in range(3):
            saved.step()
        assert not (tmp_path / "step-000000002.pt").exists()
        disk.set()
    assert names_in(tmp_path) == ["step-000000002.pt", "step-000000003.pt"]


def test_the_background_writes_a_snapshot(tmp_path):
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
    with pytest.raises(KilledError):
        run(tmp_path, dies_after=1, every=100)
    assert names_in(tmp_path) == []


class Extra(nn.Linear):
    """A model with extra state that cannot be saved."""

    def get_extra_state(self):
        return object()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"every": every}, "every=(?s:.*)10min") for every in ("10", "min", "-1s", "0s", 0, -5, 2.5, True, None)),
        ({"every": "10 years"}, "every=(?s:.*)10min"),
        ({"keep": 0}, "keep=0"),
        ({"model": Extra(1, 1)}, "_extra_state.* is of type"),
        ({"epoch": 3}, r"epoch=3.*\n.*\n.*step\(epoch="),
    ],
)
def test_invalid_options_are_rejected(tmp_path, options, message):
    """They raise on entry; the fix shows what a duration looks like."""
    with pytest.raises(ConfigError, match=message):
        train_for(0, tmp_path, **options)
    with pytest.raises(ConfigError, match="nothing to save"), checkpoints(tmp_path):
        pass


def test_values_are_refused_when_they_are_given(tmp_path):
    """A value that cannot be saved is refused by the step that gets it, and a NumPy number is converted."""
    numpy = pytest.importorskip("numpy")
    with checkpoints(tmp_path, every=1000, model=nn.Linear(1, 1)) as saved:
        saved.step(best=numpy.float32(0.5))
        assert type(saved.values["best"]) is float
        with pytest.raises(ConfigError, match="best is of type"):
            saved.step(best=object())


@settings(max_examples=200)
@given(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.integers().map("{}min".format)
    )
)
def test_any_save_schedule(tmp_path_factory, every):
    """Random values of `checkpoints(every=)` give a schedule or a ConfigError."""
    folder = tmp_path_factory.mktemp("runs")
    with contextlib.suppress(ConfigError), checkpoints(folder, every=every, model=nn.Linear(1, 1)) as saved:
        saved.step()


def test_the_copies_of_background_saves_end_with_the_block(tmp_path):
    """After the block, no copy of the weights is in memory, although the program still holds what it has yielded."""
    model = nn.Linear(123, 1, bias=False)
    with checkpoints(tmp_path, every=1, model=model) as saved:
        saved.step()
    gc.collect()
    storages = [each for each in gc.get_objects() if type(each) is torch.UntypedStorage and each.nbytes() == 4 * 123]
    assert saved.steps == 1
    assert {each.data_ptr() for each in storages} <= {model.weight.data_ptr()}
