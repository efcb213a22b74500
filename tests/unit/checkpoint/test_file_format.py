"""Checkpoint files: atomic writes, safe types only, every damage detected."""

from __future__ import annotations

import enum
import functools
import os
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from checksum import checksum_of
from torch import nn

from parallelize import ConfigError, ParallelizeError, load, save

VALUES = {
    "none": None,
    "number": 1 / 3,
    "large": 2**70,
    "text": "an é",
    "bytes": b"\0\xff",
    "nested": [(1, 2.5), {"a": {True, False}, 3: OrderedDict(x=torch.arange(3))}, Counter("aab")],
    "types": [torch.float16, torch.device("cpu"), torch.Size([1, 2])],
    "half": torch.arange(7).half(),
    "complex": torch.tensor([1 + 2j]),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5),
    "view": torch.arange(12.0).reshape(3, 4).T[1:],
    "flags": torch.tensor([True, False, True]),
}


def equal(a, b):
    """Return whether two nested values are equal, with equal types and bitwise equal tensors."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


class Phase(str, enum.Enum):  # noqa: UP042 - str() of a StrEnum's member returns its value
    """str() of a member returns its qualified name."""

    WARM = "warm"


Level = enum.IntEnum("Level", {"HIGH": 3})
Kind = enum.Enum("Kind", {"LAST": "last"})


class Point(NamedTuple):
    x: int
    y: int


# What is saved -> what is loaded
CONVERTED = {
    "array": (np.arange(3.0), torch.arange(3.0, dtype=torch.float64)),
    "single": (np.float32(0.5), 0.5),
    "double": (np.float64(0.1), 0.1),
    "flag": (np.bool_(True), True),
    "deep": ([{"a": np.float64(0.2)}], [{"a": 0.2}]),
    "path": (Path("runs", "a"), "runs/a"),
    "enum": (Kind.LAST, "last"),
    "default": (defaultdict(list, a=[1]), {"a": [1]}),
    "named": (Point(1, 2), (1, 2)),
    "frozen": (frozenset({1}), {1}),
}


def test_values_are_restored_or_converted(tmp_path):
    """Plain ones exactly, types and order included; NumPy's, paths, enums and special containers as plain ones."""
    save(tmp_path / "new" / "a.pt", **VALUES, **{name: given for name, (given, _) in CONVERTED.items()})
    found = load(tmp_path / "new" / "a.pt")
    expected = VALUES | {name: own for name, (_, own) in CONVERTED.items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert equal(found[name], value), name


@pytest.mark.parametrize(
    ("subclass", "own"),
    [
        (Phase.WARM, "warm"),
        (Level.HIGH, 3),
        (np.str_("a"), "a"),
        (np.float64(0.5), 0.5),
        (np.int64(7), 7),
        (np.bytes_(b"b"), b"b"),
    ],
)
def test_keys_and_elements_become_built_in_types(tmp_path, subclass, own):
    """Keys, set elements and values of subclasses are saved as the built-in values that they equal."""
    save(tmp_path / "a.pt", value=subclass, keys={subclass: {(subclass, 1): subclass}}, elements={subclass})
    expected = {"value": own, "keys": {own: {(own, 1): own}}, "elements": {own}}
    assert repr(load(tmp_path / "a.pt")) == repr(expected)


class Quantized(torch.Tensor):
    """A tensor subclass, as those of quantized optimizer state are."""


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "obj is of type builtins.object"),
        ({"a": [lambda: 0]}, r"obj\['a'\]\[0\] is of type builtins.function"),
        ({object(): 1}, "a key of obj is of type builtins.object"),
        (torch.eye(2).as_subclass(Quantized), "obj is of type .*Quantized"),
        (torch.eye(2).to_sparse(), "obj is not a dense tensor"),
        (torch.empty(1, device="meta"), "obj is not a dense tensor"),
        (torch.utils.data.DataLoader([1]), "obj is of type .*DataLoader"),
    ],
)
def test_unsafe_types_are_rejected_when_saved(tmp_path, value, named):
    """The error names the value and what to save instead; no file is made."""
    with pytest.raises(ConfigError, match=named) as caught:
        save(tmp_path / "a.pt", obj=value)
    assert caught.value.faults[0].fix
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_refused(tmp_path):
    """save() without objects, to an existing folder, and where nothing can be written."""
    (tmp_path / "file").write_text("")
    for path, objects, what in [
        (tmp_path / "a.pt", {}, "nothing to save"),
        (tmp_path, {"a": 1}, "the path is that of a folder"),
        (tmp_path / "file" / "a.pt", {"a": 1}, "cannot write(?s:.*)still there"),
    ]:
        with pytest.raises(ParallelizeError, match=what):
            save(path, **objects)


def test_other_files_are_rejected(tmp_path):
    """The error says why a file is not a checkpoint."""
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("hello", "world")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_bytes(b"hello")
    reasons = {"zip": "zip", "empty": "not a checkpoint", "text": "not a checkpoint", "no": "No such file"}
    for name, why in reasons.items():
        with pytest.raises(ParallelizeError, match=why):
            load(tmp_path / name)


def test_a_file_is_one_of_torch_save(tmp_path):
    """torch.load finds the state dicts under their names, with the names that the weights have in an eager model."""
    compiled = functools.partial(torch.compile, backend="eager")

    def plain(around=lambda module: module):
        return nn.Sequential(nn.Linear(2, 2), around(nn.BatchNorm1d(2)))

    model = compiled(plain(compiled))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    save(tmp_path / "a.pt", model=model, optimizer=optimizer, epoch=3)
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    eager, other = plain(), compiled(plain())
    eager.load_state_dict(found["model"])
    torch.optim.SGD(eager.parameters(), lr=1).load_state_dict(found["optimizer"])
    assert found["epoch"] == 3
    assert {"format", "torch", "world_size", "rng", "objects"} <= found["_parallelize"].keys()
    load(tmp_path / "a.pt", model=other)
    for each in (eager, other):
        assert equal(list(each.parameters()), list(model.parameters()))


def hand_written(model, optimizer):
    """Return files that others write, each with the names of the objects in load()."""
    state, moments = model.state_dict(), optimizer.state_dict()
    kinds = {"model": "model", "optimizer": "optimizer", "epoch": "value"}
    former = {
        "format": 2,
        "digest": "0123",
        "world_size": 1,
        "rng": [{"torch": torch.get_rng_state(), "data": {}}],
        "objects": {name: {"kind": kind} for name, kind in kinds.items()},
    }

    def prefixed(prefix):
        return {f"{prefix}.{name}": each for name, each in state.items()}

    return {
        "by hand": {"model": state, "optimizer": moments, "epoch": 3},
        "tutorial": {"model_state_dict": state, "optimizer_state_dict": moments, "epoch": 3},
        "lightning": {"state_dict": state, "optimizer": moments, "epoch": 3},
        "lightning in full": {"state_dict": prefixed("net"), "optimizer_states": [moments], "epoch": 3},
        "DDP": {"model": prefixed("module"), "optimizer": moments, "epoch": 3},
        "compiled": {"model": prefixed("_orig_mod"), "optimizer": moments},
        "bare": state,
        "former version": {"model": state, "optimizer": moments, "epoch": 3, "_parallelize": former},
    }


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("form", hand_written(nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)])))
def test_files_of_others_are_loaded(tmp_path, form, legacy):
    """load() takes files of torch.save: hand-written, of tutorials, of Lightning, of wrapped models, and bare ones."""

    def objects():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    first = objects()
    first["model"](torch.ones(2, 2)).sum().backward()
    first["optimizer"].step()
    content = hand_written(**first)[form]
    torch.save(content, tmp_path / "theirs.pt", _use_new_zipfile_serialization=not legacy)
    second = objects()
    if not {"optimizer", "optimizer_state_dict", "optimizer_states"} & content.keys():
        del second["optimizer"]
    assert load(tmp_path / "theirs.pt", **second) == ({"epoch": 3} if "epoch" in content else {})
    for name, each in second.items():
        assert checksum_of(each.state_dict()) == checksum_of(first[name].state_dict())
    assert load(tmp_path / "theirs.pt").keys() == content.keys() - {"_parallelize"}


@pytest.mark.parametrize(
    ("names", "states"), [(["net.weight", "bias"], 1), (["net.weight", "net.bias"], 2), (["a.net.weight", "a.bias"], 1)]
)
def test_names_that_only_resemble_lightnings_are_refused(tmp_path, names, states):
    """A prefix is ignored only if all names have it and the model's are left; so are states of other optimizers."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.clone()
    content = dict(zip(names, (torch.ones(2, 2), torch.ones(2)), strict=True))
    torch.save({"state_dict": content, "optimizer_states": [optimizer.state_dict()] * states}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=r"optimizer= is not in|Missing key"):
        load(tmp_path / "a.pt", model=model, optimizer=optimizer)
    assert torch.equal(model.weight, before)


def test_a_prefix_in_a_file_of_save_is_not_ignored(tmp_path):
    """A checkpoint of a model around this one is of another model."""
    save(tmp_path / "a.pt", model=nn.ModuleDict({"net": nn.Linear(2, 2)}))
    with pytest.raises(ConfigError, match="Missing key"):
        load(tmp_path / "a.pt", model=nn.Linear(2, 2))


def test_a_view_is_written_without_the_rest(tmp_path):
    """Ten elements of a large tensor are written as ten elements."""
    save(tmp_path / "a.pt", x=torch.arange(1_000_000.0)[:10])
    assert (tmp_path / "a.pt").stat().st_size < 50_000
    assert equal(load(tmp_path / "a.pt")["x"], torch.arange(10.0))


def test_equal_states_give_equal_files(tmp_path):
    """Two files of equal states, under other names, are equal bytes with right checksums, and name no host."""
    for name in ("a.pt", "b.pt"):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        save(tmp_path / name, model=model, optimizer=optimizer, text=str(Path("b")), again="b")
    content = (tmp_path / "a.pt").read_bytes()
    assert content == (tmp_path / "b.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None
        (pickled,) = (archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))
    host = os.uname().nodename.encode()
    assert b"X" + len(host).to_bytes(4, "little") + host not in pickled  # as a string; any file has two letters


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_followed(tmp_path, exists):
    """Saving to a symbolic link replaces its target, which may not exist yet, and leaves the link and no other file."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "last.pt").symlink_to(Path("scratch", "real.pt"))
    if exists:
        save(tmp_path / "scratch" / "real.pt", a=1)
    save(tmp_path / "last.pt", a=2)
    assert (tmp_path / "last.pt").is_symlink()
    assert load(tmp_path / "scratch" / "real.pt") == load(tmp_path / "last.pt") == {"a": 2}
    assert [each.name for each in (tmp_path / "scratch").iterdir()] == ["real.pt"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["last.pt", "scratch"]


SAVING = """
import sys, torch, parallelize
for number in range(100000):
    parallelize.save(sys.argv[1], number=number, x=torch.full((200_000,), number))
    if number == 1:
        print("ready", flush=True)
"""


@pytest.mark.parametrize(
    "kills", [2, pytest.param(300, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])], ids=["few", "many"]
)
def test_a_kill_leaves_the_old_or_the_new_file(tmp_path, kills):
    """After a kill during a save the file is a complete checkpoint, and no temporary files pile up."""
    path, found = tmp_path / "a.pt", []
    for delay_s in torch.linspace(0.05, 0.3, kills).tolist():
        with subprocess.Popen([sys.executable, "-c", SAVING, path], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            # The time of the kill is what is tested, so there is no event to wait for.
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(delay_s)
            process.kill()
        values = load(path)
        assert bool((values["x"] == values["number"]).all())
        found.append(values["number"])
    assert max(found) > 1
    save(path, a=1)
    assert [each.name for each in tmp_path.iterdir()] == ["a.pt"]
