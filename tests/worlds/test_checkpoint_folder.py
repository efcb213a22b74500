"""Sharded checkpoints, with a file of every rank: atomic, every damage detected, no code run."""

from __future__ import annotations

import enum
import io
import os
import pickle
import re
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checksum import checksum_of
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict

from parallelize import (
    ConfigError,
    FSDPBackend,
    ParallelizeError,
    barrier,
    checkpoints,
    distributed,
    load,
    parallel_model,
    rank,
    save,
)

pytestmark = pytest.mark.slow

MAIN_FILE = "checkpoint.pt"


def net(seed: int = 0) -> nn.Module:
    """Return a model with tied weights, with dimensions that no number of ranks divides evenly."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 7), nn.Linear(7, 3), nn.BatchNorm1d(3))
    model[1].bias = model[0].bias
    model[3].running_mean.fill_(1.0)
    model[3].eval()
    return model


def train_and_save(path, backend="fsdp", times=1):
    """Train one step and save; return the full weights and the kinds of files in the folder."""
    model = net()
    with parallel_model(model, backend=backend):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        for number in range(times):
            save(path, model=model, optimizer=optimizer, number=number)
        barrier()
        listed = sorted(each.relative_to(path).as_posix().partition("-")[0] for each in path.iterdir())
    return [each.detach().clone() for each in model.parameters()], listed


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a checkpoint that three ranks have written, and their full weights."""
    path = tmp_path_factory.mktemp("saved") / "last"
    weights, _ = distributed(processes=3, backend="fsdp")(train_and_save)(path)
    return path, weights


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "last")


def shard_files_of(path):
    """Return the shard files of a checkpoint, by rank."""
    (folder,) = path.glob("parts-*")
    return sorted(folder.glob("*.distcp"))


def test_torchs_own_tools_read_it(saved, tmp_path):
    """The shard folder is a checkpoint of torch.distributed.checkpoint, with qualified names and buffers."""
    path, weights = saved
    assert len(shard_files_of(path)) == 3
    folder = shard_files_of(path)[0].parent
    values = {
        "model": {"0.weight": torch.empty(7, 3)},
        "optimizer": {"state": {"0.weight": {"exp_avg": torch.empty(7, 3)}}},
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(values, storage_reader=FileSystemReader(folder), no_dist=True)
    assert torch.equal(values["model"]["0.weight"], weights[0])
    dcp_to_torch_save(folder, tmp_path / "full.pt")
    full = torch.load(tmp_path / "full.pt", weights_only=True)
    assert torch.equal(
        full["optimizer"]["state"]["0.weight"]["exp_avg"], values["optimizer"]["state"]["0.weight"]["exp_avg"]
    )
    assert full["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert full["number"] == 0
    model = net(5)
    model.load_state_dict(full["model"])
    assert checksum_of(list(model.parameters())) == checksum_of(weights)
    assert torch.equal(full["model"]["3.running_mean"], torch.ones(3))


def test_a_folder_of_torch_is_loaded(tmp_path):
    """load() reads what torch.distributed.checkpoint.save has written, optimizer state by name included."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({**states, "epoch": 3}, checkpoint_id=tmp_path, no_dist=True)
    other = net(5)
    restored = torch.optim.Adam(other.parameters())
    assert load(tmp_path, model=other, optimizer=restored) == {"epoch": 3}
    assert checksum_of(list(other.parameters())) == checksum_of(list(model.parameters()))
    assert checksum_of(restored.state_dict()["state"]) == checksum_of(optimizer.state_dict()["state"])
    assert restored.param_groups[0]["lr"] == 0.1


def test_tensors_in_any_container(tmp_path):
    """Tensors in tuples, lists and dictionaries are loaded from a folder as they were, and so are other values."""
    values = {"pair": (torch.ones(2), 3), "rows": [torch.zeros(1), {"x": torch.eye(2)}], "none": {}, "mixed": [1, "a"]}
    save(tmp_path / "last", sharded=True, **values)
    found = load(tmp_path / "last")
    assert checksum_of(found) == checksum_of(values)
    assert type(found["pair"]) is tuple


def test_copies_of_one_shard_are_written_once(tmp_path, saved):
    """Of replicated shards one rank writes, and saving again leaves only the new shards."""

    @distributed(processes=4, backend=FSDPBackend(shard_over=2))
    def run():
        return train_and_save(tmp_path / "last", FSDPBackend(shard_over=2), times=2)

    weights, listed = run()
    assert listed == [MAIN_FILE, "parts"]
    assert len([each for each in shard_files_of(tmp_path / "last") if each.stat().st_size]) == 2
    model = net(5)
    load(tmp_path / "last", model=model)
    assert checksum_of(list(model.parameters())) == checksum_of(weights)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    """Flip one bit of the first stored value in a file."""
    index = FileSystemReader(path.parent).read_metadata()
    shard = next(each for each in index.storage_data.values() if each.relative_path == path.name)
    content = bytearray(path.read_bytes())
    values = torch.load(io.BytesIO(content[shard.offset :][: shard.length]), weights_only=True)
    content[content.index(bytes(values.flatten().view(torch.uint8).tolist()), shard.offset)] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "missing": (lambda file: file.unlink(), "cannot read .*No such file"),
    "cut": (cut, "is damaged"),
    "flipped": (flip, "is damaged.*does not match its checksum"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_shards_are_detected(copied, how):
    """The error names the shard file that is missing, short or damaged; nothing has changed."""
    damage, message = DAMAGES[how]
    damage(shard_files_of(copied)[1])
    model = net(5)
    before = checksum_of(list(model.parameters()))
    with pytest.raises(ParallelizeError) as caught:
        load(copied, model=model, optimizer=torch.optim.Adam(model.parameters()))
    assert re.search(f"{message}", str(caught.value), re.DOTALL)
    assert "__1_0.distcp" in caught.value.faults[0].what
    assert checksum_of(list(model.parameters())) == before


def test_one_damaged_shard_stops_all_ranks(saved, copied):
    """If the shard of one rank is damaged, no rank loads anything, and all errors name that rank."""
    flip(shard_files_of(copied)[2])

    @distributed(processes=3, backend="fsdp")
    def run():
        model = net(5)
        with parallel_model(model):
            before = [each.to_local().clone() for each in model.parameters()]
            with pytest.raises(ParallelizeError) as caught:
                load(copied, model=model)
            assert all(map(torch.equal, before, [each.to_local() for each in model.parameters()]))
        return caught.value.faults[0].what

    *others, own = run.all_ranks()
    assert others[0] == others[1]
    assert "failed on rank 2" in others[0]
    assert "__2_0.distcp is damaged" in own


class PicklerOfPython311(pickle.Pickler):
    """Pickles the members of an enumeration as early releases of Python 3.11 do, such as 3.11.2."""

    def reducer_override(self, obj):
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def test_an_index_that_another_python_has_written(copied):
    """Some releases of Python pickle a member of an enumeration as a call of getattr, which reads nothing else here."""
    folder = shard_files_of(copied)[0].parent
    metadata, expected = FileSystemReader(folder).read_metadata(), load(copied)["model"]
    model = net(5)
    for value, is_safe in ((metadata, True), (Attribute(), False)):
        with (folder / ".metadata").open("wb") as file:
            PicklerOfPython311(file).dump(value)
        if is_safe:
            load(folder, model=model)
            assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())
        else:
            with pytest.raises(ParallelizeError, match="is damaged"):
                load(folder, model=model)


class Attribute:
    """Reads an attribute of a class when it is unpickled."""

    def __reduce__(self):
        return getattr, (torch.Size, "__subclasses__")


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (os.fspath(self.path),)


def test_a_hostile_shard_is_not_run(copied, tmp_path):
    """A shard file cannot run code; tests/unit/checkpoint/test_faults.py has other files, and the index."""
    file = shard_files_of(copied)[0]
    size = file.stat().st_size
    torch.save(Hostile(tmp_path / "run"), file)
    os.truncate(file, max(size, file.stat().st_size))
    with pytest.raises(ParallelizeError, match="is damaged"):
        load(copied, model=net())
    assert not (tmp_path / "run").exists()


def test_existing_paths_are_respected(tmp_path, saved, copied):
    """save() rejects a folder of other files and a file where it needs a folder; a checkpoint keeps its form."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=r"contains notes\.txt"):
        save(tmp_path / "own", sharded=True, a=1)
    save(tmp_path / "file", a=1)
    with pytest.raises(ConfigError, match="the path is that of a file"):
        save(tmp_path / "file", sharded=True, a=1)
    with pytest.raises(ConfigError, match="the path is that of a folder"):
        save(copied, sharded=False, a=1)
    save(copied, a=1)
    assert load(copied) == {"a": 1}
    assert sorted(each.name.partition("-")[0] for each in copied.iterdir()) == [MAIN_FILE, "parts"]


def test_an_index_with_a_path_is_rejected(copied):
    """Shards must be files in the folder of the checkpoint."""
    stored = torch.load(copied / MAIN_FILE, weights_only=True)
    stored["_parallelize"]["shards"]["folder"] = "../../etc"
    torch.save(stored, copied / MAIN_FILE)
    with pytest.raises(ParallelizeError, match="is not a plain file or folder name"):
        load(copied)


def test_folders_that_ranks_do_not_share_raise(tmp_path):
    """A rank that writes to another folder than rank 0 is named; the old checkpoint is still there."""
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    save(tmp_path / "0" / "last", sharded=True, old=1)

    @distributed(processes=2, backend="fsdp")
    def run():
        os.chdir(tmp_path / str(rank()))
        model = net()
        with parallel_model(model), pytest.raises(ParallelizeError) as caught:
            save("last", model=model)
        return str(caught.value)

    main, other = run.all_ranks()
    assert "sharded=False" in main
    for each in (main, other):
        assert "a rank has written __1_0.distcp elsewhere" in each
    assert load(tmp_path / "0" / "last") == {"old": 1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, or tests/fake_cuda")
@pytest.mark.filterwarnings("ignore:gpus=")
@pytest.mark.parametrize("sharded", [True, False])
def test_offloaded_state_stays_on_the_cpu(tmp_path, sharded):
    """After load(), AdamW steps with its state on the CPU, where the parameters and gradients are."""

    @distributed(gpus=[0, 0], process_group_backend="gloo", backend=FSDPBackend(cpu_offload=True))
    def run():
        model = nn.Linear(3, 7)
        with parallel_model(model):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for _ in range(2):
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                save(tmp_path / "last", sharded=sharded, model=model, optimizer=optimizer)
                load(tmp_path / "last", model=model, optimizer=optimizer)
            return {
                each.to_local().device.type
                for entries in optimizer.state.values()
                for each in entries.values()
                if each.dim()
            }

    assert run.all_ranks() == [{"cpu"}, {"cpu"}]


def test_a_damaged_checkpoint_is_skipped(tmp_path, caplog):
    """If a shard of the newest checkpoint is damaged, all ranks load the one before; incomplete ones are removed."""

    @distributed(processes=2, backend="fsdp")
    def run(count):
        model = net()
        with parallel_model(model), checkpoints(tmp_path, every=1, model=model) as kept:
            first = kept.steps
            for _ in range(count):
                kept.step()
            barrier()
        return first

    assert run.all_ranks(2) == [0, 0]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000000001", "step-000000002"]
    flip(shard_files_of(tmp_path / "step-000000002")[1])
    (tmp_path / "step-000000009" / "parts-x").mkdir(parents=True)
    assert run.all_ranks(0) == [1, 1]
    assert not (tmp_path / "step-000000009").exists()
