"""Checkpoint files: atomic writes, safe types only, every damage detected."""

from __future__ import annotations

import enum
import functools
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from checksum import checksum_of
from hypothesis import given, settings
from hypothesis import strategies as st
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


def test_plain_values_are_restored(tmp_path):
    """Numbers, strings, tensors and their containers are restored exactly, types and order included."""
    save(tmp_path / "new" / "a.pt", **VALUES)
    found = load(tmp_path / "new" / "a.pt")
    assert found.keys() == VALUES.keys()
    for name, value in VALUES.items():
        assert equal(found[name], value), name


def test_subclasses_of_numbers_become_built_in_types(tmp_path):
    """A NumPy float is loaded as a Python float."""
    numpy = pytest.importorskip("numpy")
    save(tmp_path / "a.pt", best=numpy.float64(0.1), nested={"deep": [numpy.float64(0.2)]})
    found = load(tmp_path / "a.pt")
    assert (type(found["best"]), found) == (float, {"best": 0.1, "nested": {"deep": [0.2]}})


class Phase(str, enum.Enum):
    """An enum of strings: str() of a member returns its qualified name."""

    WARM = "warm"


class Level(enum.IntEnum):
    """An enum of integers."""

    HIGH = 3


class Kind(enum.Enum):
    """An enum of other values."""

    LAST = "last"


class Point(NamedTuple):
    """A named tuple."""

    x: int
    y: int


@pytest.mark.parametrize("numpy", ["str_", "float64", "int64", "bytes_", None])
def test_keys_and_elements_become_built_in_types(tmp_path, numpy):
    """Keys, set elements and values of subclasses are saved as the built-in values that they equal."""
    pairs = [(Phase.WARM, "warm"), (Level.HIGH, 3)]
    if numpy is not None:
        raw = {"str_": "a", "float64": 0.5, "int64": 7, "bytes_": b"b"}[numpy]
        pairs = [(getattr(pytest.importorskip("numpy"), numpy)(raw), raw)]
    for subclass, own in pairs:
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


def test_nothing_to_save_and_folders_are_rejected(tmp_path):
    """save() without objects, and to an existing folder, raises."""
    with pytest.raises(ConfigError, match="nothing to save"):
        save(tmp_path / "a.pt")
    with pytest.raises(ConfigError, match="the path is that of a folder"):
        save(tmp_path, a=1)


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("how", ["torch.save", "in a checkpoint", "pickle", "legacy"])
def test_a_hostile_file_is_not_run(tmp_path, how):
    """No code in a file is run; for a file in our format the error names the function that it would have called."""
    hostile, path = Hostile(f"touch {tmp_path / 'run'}"), tmp_path / "a.pt"
    if how == "torch.save":
        torch.save(hostile, path)
    elif how == "legacy":
        torch.save(hostile, path, _use_new_zipfile_serialization=False)
    elif how == "pickle":
        path.write_bytes(pickle.dumps(hostile))
    else:
        save(path, a=1)
        stored = torch.load(path, weights_only=True)
        stored["a"] = hostile
        torch.save(stored, path)
    with pytest.raises(ParallelizeError, match=r"posix.system|not a checkpoint") as caught:
        load(path)
    assert caught.value.faults[0].fix
    assert not (tmp_path / "run").exists()


def test_the_hostile_file_would_have_run(tmp_path):
    """Meta-test: torch.load with weights_only=False runs the command."""
    torch.save(Hostile(f"touch {tmp_path / 'run'}"), tmp_path / "a.pt")
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not a checkpoint"),
        (b"hello", "not a checkpoint"),
        (None, "No such file"),
    ],
)
def test_other_files_are_rejected(tmp_path, content, why):
    """The error says why a file is not a checkpoint."""
    if content is not None:
        (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(ParallelizeError, match=why):
        load(tmp_path / "a.pt")


def test_a_file_is_one_of_torch_save(tmp_path):
    """torch.load finds the state dicts under their names, with the names that the weights have in an eager model."""
    compiled = functools.partial(torch.compile, backend="eager")
    model = compiled(nn.Sequential(nn.Linear(2, 2), compiled(nn.BatchNorm1d(2))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    save(tmp_path / "a.pt", model=model, optimizer=optimizer, epoch=3)
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    plain.load_state_dict(found["model"])
    torch.optim.SGD(plain.parameters(), lr=1).load_state_dict(found["optimizer"])
    assert found["epoch"] == 3
    assert {"format", "torch", "world_size", "rng", "objects"} <= found["_parallelize"].keys()
    assert equal(list(plain.parameters()), list(model.parameters()))
    other = compiled(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    load(tmp_path / "a.pt", model=other)
    assert equal(list(other.parameters()), list(plain.parameters()))


KINDS = {"model": "model", "optimizer": "optimizer", "epoch": "value"}


def hand_written(model, optimizer):
    """Return files that others write, each with the names of the objects in load()."""
    state, moments = model.state_dict(), optimizer.state_dict()
    return {
        "by hand": {"model": state, "optimizer": moments, "epoch": 3},
        "tutorial": {"model_state_dict": state, "optimizer_state_dict": moments, "epoch": 3},
        "lightning": {"state_dict": state, "optimizer": moments, "epoch": 3},
        "lightning in full": {
            "state_dict": {f"net.{name}": each for name, each in state.items()},
            "optimizer_states": [moments],
            "epoch": 3,
        },
        "DDP": {"model": {f"module.{name}": each for name, each in state.items()}, "optimizer": moments, "epoch": 3},
        "compiled": {"model": {f"_orig_mod.{name}": each for name, each in state.items()}, "optimizer": moments},
        "bare": state,
        "former version": {
            "model": state,
            "optimizer": moments,
            "epoch": 3,
            "_parallelize": {
                "format": 2,
                "digest": "0123",
                "world_size": 1,
                "rng": [{"torch": torch.get_rng_state(), "data": {}}],
                "objects": {name: {"kind": kind} for name, kind in KINDS.items()},
            },
        },
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


def test_values_are_converted(tmp_path):
    """Arrays, paths, enums and special containers become tensors, strings, values and plain containers."""
    numpy = pytest.importorskip("numpy")
    values = {
        "array": (numpy.arange(3.0), torch.arange(3.0, dtype=torch.float64)),
        "single": (numpy.float32(0.5), 0.5),
        "flag": (numpy.bool_(True), True),
        "path": (Path("runs", "a"), "runs/a"),
        "enum": (Kind.LAST, "last"),
        "default": (defaultdict(list, a=[1]), {"a": [1]}),
        "named": (Point(1, 2), (1, 2)),
        "frozen": (frozenset({1}), {1}),
    }
    save(tmp_path / "a.pt", **{name: given for name, (given, _) in values.items()})
    found = load(tmp_path / "a.pt")
    for name, (_, expected) in values.items():
        assert equal(found[name], expected), name


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


def test_zip_archives_are_rejected(tmp_path):
    """A zip archive of something else raises an error of this library."""
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("hello", "world")
    with pytest.raises(ParallelizeError, match=r"a\.pt"):
        load(tmp_path / "a.pt")


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """Return the bytes of a checkpoint file."""
    path = tmp_path_factory.mktemp("intact") / "a.pt"
    save(path, model=nn.Linear(40, 30), text="a" * 50, number=1 / 3)
    return path.read_bytes()


@settings(max_examples=300)
@given(data=st.data())
def test_damage_is_detected_or_harmless(tmp_path_factory, intact, data):
    """A file with changed, removed or added bytes raises an error of this library or loads exactly what was saved."""
    position = data.draw(st.integers(0, len(intact) - 1))
    inserted = data.draw(st.binary(min_size=1, max_size=20))
    damaged = data.draw(
        st.sampled_from(
            [
                intact[:position],
                intact[:position] + inserted + intact[position + len(inserted) :],
                intact[:position] + intact[position + len(inserted) :],
                intact + inserted,
                inserted,
                b"PK\x03\x04" + inserted,
            ]
        )
    )
    path = tmp_path_factory.mktemp("damaged") / "a.pt"
    path.write_bytes(damaged)
    model = nn.Linear(40, 30)
    before = model.weight.clone()
    try:
        found = load(path, model=model, rng=False)
    except ParallelizeError:
        assert torch.equal(model.weight, before)
    else:  # padding between records and time stamps in the zip directory are not content
        assert found == {"text": "a" * 50, "number": 1 / 3}
        path.with_name("intact.pt").write_bytes(intact)
        assert checksum_of(load(path, rng=False)) == checksum_of(load(path.with_name("intact.pt"), rng=False))


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


def test_an_unwritable_path_raises(tmp_path):
    """The error for a path that cannot be written has the reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ParallelizeError, match="cannot write") as caught:
        save(tmp_path / "file" / "a.pt", a=1)
    assert "still there" in caught.value.faults[0].fix


SAVING = """
import sys, torch, parallelize
for number in range(100000):
    parallelize.save(sys.argv[1], number=number, x=torch.full((200_000,), number))
    if number == 1:
        print("ready", flush=True)
"""


def kill_while_saving(path: Path, delays_s: list[float]) -> list[int]:
    """Kill a process that saves in a loop, after each of the delays; return the numbers loaded after each kill."""
    found = []
    for delay_s in delays_s:
        with subprocess.Popen([sys.executable, "-c", SAVING, path], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            # The time of the kill is what is tested, so there is no event to wait for.
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(delay_s)
            process.send_signal(signal.SIGKILL)
        if path.exists():
            values = load(path)
            assert bool((values["x"] == values["number"]).all())
            found.append(values["number"])
    return found


def test_a_kill_leaves_the_old_or_the_new_file(tmp_path):
    """After a kill during a save the file is a complete checkpoint, and no temporary files pile up."""
    found = kill_while_saving(tmp_path / "a.pt", [0.05, 0.11, 0.17, 0.23])
    assert max(found) > 1
    save(tmp_path / "a.pt", a=1)
    assert [each.name for each in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_hundreds_of_kills_leave_the_old_or_the_new_file(tmp_path):
    """The same with 300 kills."""
    delays = torch.rand(300, generator=torch.Generator().manual_seed(0)).mul(0.3).tolist()
    assert len(kill_while_saving(tmp_path / "a.pt", delays)) > 250
