"""Damaged files, hostile files, and kills while files are written, by the thousand: figures of the guide."""

from __future__ import annotations

import builtins
import io
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from checksum import checksum_of
from torch import nn

from parallelize import ParallelizeError, load, save

SOAK = [pytest.mark.soak, pytest.mark.timeout(1800)]


def written(folder: Path) -> dict[str, Path]:
    """Write a checkpoint in each form, two of them by hand, and return their paths."""
    torch.manual_seed(0)
    model = nn.Linear(30, 20)
    paths = {form: folder / form for form in ("own", "hand-written", "bare", "shards")}
    save(paths["own"], model=model, number=1 / 3, text="a" * 50)
    save(paths["shards"], sharded=True, model=model, number=1 / 3)
    torch.save({"model": model.state_dict(), "number": 1 / 3}, paths["hand-written"])
    torch.save(model.state_dict(), paths["bare"])
    return paths


def damage(content: bytes, draw: random.Random) -> bytes:
    """Return the content with flipped bits, other bytes, a part missing, a part twice, cut, longer, or none of it."""
    at, length = draw.randrange(len(content)), draw.choice([1, 1, 8, 512])
    flipped = bytes([content[at] ^ 1 << draw.randrange(8)])
    return draw.choice(
        [
            content[:at] + flipped + content[at + 1 :],
            content[:at] + flipped + content[at + 1 :],
            content[:at] + draw.randbytes(length) + content[at + length :],
            content[:at] + bytes(length) + content[at + length :],
            content[:at] + content[at + length :],
            content[:at] + content[at : at + length] + content[at:],
            content[:at],
            content + draw.randbytes(length),
            b"PK\x03\x04" + draw.randbytes(length),
        ]
    )


def outcome(path: Path, form: str, expected: str) -> str:
    """Load a damaged checkpoint, and return what came of it."""
    model = nn.Linear(30, 20)
    before = checksum_of(model.state_dict())
    try:
        values = load(path, model=model, rng=False)
    except ParallelizeError:
        return "refused" if checksum_of(model.state_dict()) == before else "wrong: changed"
    # A foreign folder or file may have lost a name that nobody asked for; what it has is right.
    is_right = checksum_of(model.state_dict()) == expected and values.get("number", 1 / 3) == 1 / 3
    return "equal" if is_right and (form in {"bare", "hand-written"} or "number" in values) else "wrong"


@pytest.mark.parametrize("count", [120, pytest.param(3000, marks=SOAK)])
def test_damage_of_every_form_is_refused_or_harmless(tmp_path: Path, count: int) -> None:
    """A damaged checkpoint, hand-written or not, is refused and changes nothing, or it loads exactly what was saved."""
    paths, draw, found = written(tmp_path), random.Random(0), Counter[str]()
    torch.manual_seed(0)
    expected = checksum_of(nn.Linear(30, 20).state_dict())
    for form, number in zip(itertools.cycle(paths), range(count)):
        path = paths[form]
        parts = [path]
        if path.is_dir():
            parts = sorted(each for each in path.rglob("*") if each.is_file() and each.name != ".metadata")
        part = draw.choice(parts)
        content = part.read_bytes()
        part.write_bytes(damage(content, draw))
        result = outcome(path, form, expected)
        found[result] += 1
        assert not result.startswith("wrong"), (form, number, part.name)
        part.write_bytes(content)
    print(found)
    assert set(found) == {"refused", "equal"}


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.called = function, args

    def __reduce__(self) -> Any:
        return self.called


def hostile_objects(target: str) -> dict[str, Any]:
    """Return objects each of which makes the folder `target` when it is unpickled."""
    code = f"import os; os.mkdir({target!r})"
    return {
        "os.mkdir": Call(os.mkdir, target),
        "os.system": Call(os.system, f"mkdir {target}"),
        "builtins.exec": Call(builtins.exec, code),
        "subprocess.call": Call(subprocess.call, ["mkdir", target]),
        "getattr": Call(getattr, Call(__import__, "os"), "mkdir"),
        "torch.load": Call(torch.load, io.BytesIO(pickle.dumps(Call(os.mkdir, target)))),
    }


def hostile_files(folder: Path, target: str) -> list[Path]:
    """Write each object in four kinds of files: alone, by the old format, as a value of a checkpoint, as an index."""
    paths = []
    for number, each in enumerate(hostile_objects(target).values()):
        alone, old, value, index = (folder / f"{number}{kind}" for kind in ("a.pt", "b.pt", "c.pt", "d"))
        torch.save(each, alone)
        torch.save(each, old, _use_new_zipfile_serialization=False)
        torch.save({"model": nn.Linear(2, 2).state_dict(), "_parallelize": {"format": 2, "rng": each}}, value)
        index.mkdir()
        (index / ".metadata").write_bytes(pickle.dumps(each))
        paths += [alone, old, value, index]
    return paths


def test_hostile_files_run_nothing(tmp_path: Path) -> None:
    """None of 24 hostile files runs code: each raises. Those that torch.load reads would have run without its check."""
    target = tmp_path / "run"
    paths = hostile_files(tmp_path, str(target))
    assert len(paths) == 24
    for path in paths:
        with pytest.raises(ParallelizeError):
            load(path, model=nn.Linear(2, 2))
        assert not target.exists()
    with pytest.raises(ParallelizeError, match=r"posix\.mkdir") as caught:  # what it would call
        load(tmp_path / "0c.pt", model=nn.Linear(2, 2))
    assert caught.value.faults[0].fix
    for path in paths[:8]:
        if path.suffix == ".pt" and zipfile.is_zipfile(path):
            torch.load(path, weights_only=False)
            assert target.exists()
            target.rmdir()


KILLED = """
import contextlib, json, os, random, signal, sys, time
import torch
from torch import nn
from parallelize import checkpoints

folder, count, sharded = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "shards"
model, draw = nn.Linear(400, 400), random.Random(0)

def train(pipe):
    with checkpoints(folder, every=1, keep=2, sharded=sharded, model=model) as saved:
        while True:
            for each in model.parameters():
                each.data.fill_(saved.steps + 1)
            saved.step()
            os.write(pipe, saved.steps.to_bytes(8, "little"))

class Left(Exception):
    pass

with checkpoints(folder, every=1, sharded=sharded, model=model) as saved:
    saved.step()  # imports all that a save needs, once for all forks
    for each in model.parameters():
        each.data.fill_(1)

behind = []
for _ in range(count):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        train(writing)
    begun = int.from_bytes(os.read(reading, 8), "little")
    time.sleep(draw.random() * 0.06)  # the time of the kill is what is tested
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(writing)
    while step := os.read(reading, 8):
        begun = int.from_bytes(step, "little")
    os.close(reading)
    with contextlib.suppress(Left), checkpoints(folder, sharded=sharded, model=model) as saved:
        assert all(bool((each == saved.steps).all()) for each in model.parameters())
        behind.append(begun - saved.steps)
        raise Left  # so that the end of the block saves nothing
print(json.dumps(behind))
"""


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=SOAK)])
@pytest.mark.parametrize("form", ["file", "shards"])
def test_a_kill_during_a_save_leaves_the_newest_or_the_one_before(tmp_path: Path, form: str, count: int) -> None:
    """After a kill at any time, the checkpoint of the last step, or of the step before, loads."""
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(count), form]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    steps_behind = Counter(json.loads(output))
    print(steps_behind)
    assert set(steps_behind) <= {-1, 0, 1}
