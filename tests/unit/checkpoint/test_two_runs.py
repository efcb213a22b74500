"""Two runs that save to one path, and files that other users, or killed runs, have put there."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from parallelize import ConfigError, ParallelizeError, checkpoints, load, save

SAVING = """
import sys, torch
from parallelize import save

path, first, count, sharded = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "folder"
model = torch.nn.Linear(100, 100)
for number in range(first, first + count):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    save(path, sharded=sharded, model=model, number=number)
"""


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("form", ["file", "folder"])
def test_two_runs_on_one_path_lose_nothing(tmp_path: Path, form: str, count: int) -> None:
    """Each save of both succeeds, and each load finds the whole checkpoint of one of them."""
    path, model, loads = tmp_path / "last", nn.Linear(100, 100), Counter[str]()
    save(path, sharded=form == "folder", model=model, number=0)
    load(path)
    with torch.no_grad():
        model.weight.fill_(0)
        model.bias.fill_(0)
    save(path, sharded=form == "folder", model=model, number=0)
    command = [sys.executable, "-c", SAVING, str(path)]
    runs = [
        subprocess.Popen([*command, first, str(count), form], stderr=subprocess.PIPE, text=True)
        for first in ("1000", "5000")
    ]
    while any(run.poll() is None for run in runs):
        number = load(path, model=model, rng=False)["number"]
        values = {*model.weight.unique().tolist(), *model.bias.unique().tolist()}
        loads["whole" if values == {float(number)} else "mixed"] += 1
    errors = [run.communicate()[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors
    print(loads)
    assert set(loads) == {"whole"}
    assert load(path, model=model)["number"] in {999 + count, 4999 + count}
    left = sorted(entry.name.partition("-")[0] for entry in (path if path.is_dir() else tmp_path).iterdir())
    assert left == (["checkpoint.pt", "parts"] if form == "folder" else ["last"])


@pytest.mark.parametrize("name", ["last.pt", "last.safetensors"])
def test_a_planted_link_is_not_followed(tmp_path: Path, name: str) -> None:
    """Links at temporary names are neither written through nor removed."""
    victim = tmp_path / "victim"
    victim.write_text("important")
    for planted in (f".{name}.0.tmp", f".{name}.1.tmp"):
        (tmp_path / planted).symlink_to(victim)
    for _ in range(2):
        save(tmp_path / name, model=nn.Linear(2, 2))
    assert victim.read_text() == "important"
    assert not (tmp_path / name).is_symlink()
    assert (tmp_path / f".{name}.0.tmp").is_symlink()


@pytest.mark.parametrize("sharded", [False, True])
def test_permissions(tmp_path: Path, sharded: bool) -> None:
    """A new file gets those of the umask, and one that is replaced keeps its own."""
    before = os.umask(0o027)
    try:
        save(tmp_path / "last", sharded=sharded, a=1)
    finally:
        os.umask(before)
    path = tmp_path / "last" / "checkpoint.pt" if sharded else tmp_path / "last"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    for permissions in (0o600, 0o664, 0o444):
        path.chmod(permissions)
        save(tmp_path / "last", a=2)
        assert stat.S_IMODE(path.stat().st_mode) == permissions
    assert load(tmp_path / "last") == {"a": 2}


HELD = """
import os, signal, sys, torch
from pathlib import Path
from parallelize import save

def stop(*_):
    print("ready", flush=True)
    sys.stdin.read()
    return replace(*_)

replace, Path.replace = Path.replace, stop
save(sys.argv[1], sharded=sys.argv[2] == "folder", number=1)
"""


@pytest.mark.parametrize("form", ["file", "folder"])
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_save_removes_what_is_left_and_not_what_is_in_use(tmp_path: Path, form: str, is_killed: bool) -> None:
    """Temporary files and shards of a killed save go; those of one that is under way stay, and it succeeds."""
    path = tmp_path / "last"
    save(path, sharded=form == "folder", number=0)
    folder = path if form == "folder" else tmp_path
    with subprocess.Popen(
        [sys.executable, "-c", HELD, str(path), form], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        # torch itself renames the index of a folder before the main file is renamed.
        assert run.stdout.readline() == b"ready\n"
        if is_killed:
            run.kill()
            run.wait()
        during = {entry.name for entry in folder.iterdir()}
        save(path, number=2)
        after = {entry.name for entry in folder.iterdir()}
        assert load(path)["number"] == 2
        if not is_killed:
            assert {name for name in during if name.endswith(".tmp")} <= after
            run.communicate(b"")
            assert run.returncode == 0
            assert load(path)["number"] == 1
    save(path, number=3)
    assert len(list(folder.iterdir())) == (2 if form == "folder" else 1)
    assert load(path)["number"] == 3


def test_a_shard_of_another_save_is_refused(tmp_path: Path) -> None:
    """The main file has the checksum of each item; without, as older versions wrote it, items are not compared."""
    for number in (1, 2):
        model = nn.Linear(4, 4)
        save(tmp_path / str(number), sharded=True, model=model, number=number)
    mixed = shutil.copytree(tmp_path / "1", tmp_path / "mixed")
    (shard,), (other,) = ((tmp_path / name).glob("parts-*/*.distcp") for name in ("mixed", "2"))
    right = shard.read_bytes()
    shutil.copy(other, shard)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ParallelizeError, match=r"another save(.|\n)*checkpoint\.pt"):
        load(mixed, model=model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    shard.write_bytes(right)
    main_file = mixed / "checkpoint.pt"
    content = torch.load(main_file, weights_only=True)
    del content["_parallelize"]["shards"]["checksums"]
    torch.save(content, main_file)
    assert load(mixed, model=model) == {"number": 1}


@pytest.mark.parametrize("key", ["index", "folder", "checksums"])
@pytest.mark.parametrize("junk", [None, -1, b"junk", "../../x", "/etc", {"junk": 1}, ["junk"]])
def test_forged_shards_are_refused(tmp_path: Path, key: str, junk: object) -> None:
    """An index or a folder that is none is refused before a model is changed."""
    model = nn.Linear(4, 4)
    save(tmp_path / "last", sharded=True, model=nn.Linear(4, 4))
    main_file = tmp_path / "last" / "checkpoint.pt"
    content = torch.load(main_file, weights_only=True)
    content["_parallelize"]["shards"][key] = junk
    torch.save(content, main_file)
    before = model.weight.clone()
    with pytest.raises(ParallelizeError):
        load(tmp_path / "last", model=model)
    assert torch.equal(model.weight, before)


def test_a_forged_number_of_steps_changes_nothing(tmp_path: Path) -> None:
    """checkpoints() checks its own entry before it loads the model."""
    model = nn.Linear(2, 2)
    with checkpoints(tmp_path, every=1, model=model):
        pass
    (file,) = tmp_path.iterdir()
    content = torch.load(file, weights_only=True)
    other = nn.Linear(2, 2)
    before = other.weight.clone()
    for junk in ({"steps": -1, "values": {}}, {"steps": "1", "values": {}}, {"values": {}}, 3):
        content["_checkpoints"] = junk
        torch.save(content, file)
        with checkpoints(tmp_path, every=1, model=other) as saved:
            assert saved.steps == 0
            assert torch.equal(other.weight, before)
            saved._folder = tmp_path / "elsewhere"  # where the end of the block saves
    del content["_checkpoints"]
    torch.save(content, file)
    with pytest.raises(ConfigError, match="is not of checkpoints"), checkpoints(tmp_path, model=other):
        pass
    assert torch.equal(other.weight, before)
