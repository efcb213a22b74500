"""Checkpoints that are folders, with a file of every rank: whole or not at all, every damage told, nothing run."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import resource
import shutil
import signal
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from parallelize import (
    ConfigError,
    FSDPBackend,
    ParallelizeError,
    SyncError,
    WorkerError,
    barrier,
    checkpoints,
    distributed,
    is_main,
    load,
    parallel_model,
    rank,
    save,
)
from parallelize.checkpoint import file_format, rendezvous, saving
from parallelize.checkpoint.checksum import digest
from parallelize.checkpoint.file_format import MAIN, read


def net(seed: int = 0) -> nn.Module:
    """One whose dimensions no number of ranks divides, with tied weights."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 7), nn.Linear(7, 3))
    model[1].bias = model[0].bias
    return model


def write(path, backend="fsdp", times=1):
    """Save a model and an optimizer that has stepped; their weights, whole."""
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
    """A folder that three ranks have written, and the weights that they had."""
    path = tmp_path_factory.mktemp("saved") / "last"
    weights, _ = distributed(processes=3, backend="fsdp")(write)(path)
    return path, weights


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "last")


def parts_of(path):
    """The files of the ranks."""
    (folder,) = path.glob("parts-*")
    return sorted(folder.glob("*.distcp"))


def test_a_process_alone_loads_it(saved):
    """Every rank has written a file; whoever loads gets whole tensors, bitwise, moments included."""
    path, weights = saved
    assert len(parts_of(path)) == 3
    model = net(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    assert load(path, model=model, optimizer=optimizer) == {"number": 0}
    assert digest(list(model.parameters())) == digest(weights)
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (7, 3)


def test_torchs_own_tools_read_it(saved):
    """The folder of parts is a checkpoint of torch.distributed.checkpoint, for whoever trusts its writer."""
    path, weights = saved
    values = {"model['tensors']['0.weight']": torch.empty(7, 3)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(values, storage_reader=FileSystemReader(parts_of(path)[0].parent), no_dist=True)
    assert torch.equal(*values.values(), weights[0])


def test_copies_of_one_shard_are_written_once(tmp_path, saved):
    """Where groups of ranks hold the same parts one of them writes; saving again leaves only the new parts."""

    @distributed(processes=4, backend=FSDPBackend(shard_size=2))
    def run():
        return write(tmp_path / "last", FSDPBackend(shard_size=2), times=2)

    weights, listed = run()
    assert listed == [MAIN, "parts"]
    assert len(parts_of(tmp_path / "last")) == 2
    model = net(5)
    load(tmp_path / "last", model=model)
    assert digest(list(model.parameters())) == digest(weights)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    """One bit of the first value that is in a file."""
    pieces = read(path.parent.parent).pieces
    piece = next(each for of_key in pieces.of_key.values() for each in of_key if each.file == path.name)
    content = bytearray(path.read_bytes())
    values = torch.load(io.BytesIO(content[piece.start :][: piece.length]), weights_only=True)
    content[content.index(bytes(values.flatten().view(torch.uint8).tolist()), piece.start)] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "missing": (lambda file: file.unlink(), "is not there"),
    "cut": (cut, "bytes of"),
    "flipped": (flip, "does not hold"),
    "another rank's": (lambda file: shutil.copy(file.with_name("__0_0.distcp"), file), "does not hold|bytes of"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_parts_are_told(copied, how):
    """The error says which file of a rank is missing, short or damaged; nothing has changed."""
    damage, message = DAMAGES[how]
    damage(parts_of(copied)[1])
    model = net(5)
    before = digest(list(model.parameters()))
    with pytest.raises(ParallelizeError, match="is damaged") as caught:
        load(copied, model=model)
    assert "__1_0.distcp" in caught.value.faults[0].why
    assert re.search(message, caught.value.faults[0].why)
    assert digest(list(model.parameters())) == before


def test_ranks_that_could_read_theirs_do_not_go_on(saved, copied):
    """Where one rank's part is damaged no rank takes anything from the checkpoint, and all say whose it is."""
    flip(parts_of(copied)[2])

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
    assert others == [f"rank 2 could not read its parts of {copied}"] * 2
    assert own == f"{copied} is damaged"


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (os.fspath(self.path),)


@pytest.mark.parametrize("where", [".metadata", "part"])
def test_hostile_pickles_are_not_run(copied, tmp_path, where):
    """Neither torch's list of the parts nor a part is a way to run code; torch's own reader runs the former."""
    folder = parts_of(copied)[0].parent
    if where == ".metadata":
        (folder / where).write_bytes(pickle.dumps(Hostile(tmp_path / "run")))
        load(copied, model=net())
    else:
        size = parts_of(copied)[0].stat().st_size
        torch.save(Hostile(tmp_path / "run"), parts_of(copied)[0])
        with parts_of(copied)[0].open("ab") as file:
            file.truncate(max(size, file.tell()))
        with pytest.raises(ParallelizeError, match="is damaged"):
            load(copied, model=net())
    assert not (tmp_path / "run").exists()
    if where == ".metadata":
        with contextlib.suppress(AttributeError):  # of what it has got
            FileSystemReader(folder).read_metadata()
        assert (tmp_path / "run").exists()


@settings(max_examples=60)
@given(data=st.data())
def test_any_damage_is_told_or_harmless(saved, tmp_path_factory, data):
    """Bytes of any file changed, cut off or added: an error of this library, or the very weights that were saved."""
    path = shutil.copytree(saved[0], tmp_path_factory.mktemp("damaged") / "last")
    file = data.draw(st.sampled_from([path / MAIN, *parts_of(path)]))
    content = file.read_bytes()
    position, piece = data.draw(st.integers(0, len(content) - 1)), data.draw(st.binary(min_size=1, max_size=9))
    rest = content[position + len(piece) :]
    file.write_bytes(data.draw(st.sampled_from([content[:position], content[:position] + piece + rest, piece + rest])))
    model = net(5)
    before = digest(list(model.parameters()))
    try:
        load(path, model=model, rng=False)
    except ParallelizeError:
        assert digest(list(model.parameters())) == before
    else:
        assert digest(list(model.parameters())) == digest(saved[1])


def test_what_lies_at_the_path_is_respected(tmp_path, saved, copied):
    """A folder of something else, and a file where a folder was asked for, are refused; a checkpoint keeps its form."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=r"with notes\.txt in it"):
        save(tmp_path / "own", sharded=True, a=1)
    save(tmp_path / "file", a=1)
    with pytest.raises(ConfigError, match="a file is there"):
        save(tmp_path / "file", sharded=True, a=1)
    with pytest.raises(ConfigError, match="it is a folder"):
        save(copied, sharded=False, a=1)
    save(copied, a=1)
    assert load(copied) == {"a": 1}
    assert [each.name for each in copied.glob("*")] == [MAIN, *(each.name for each in copied.glob("parts-*"))]


@pytest.mark.parametrize(
    ("name", "message"), [(None, "there is no checkpoint.pt"), (".metadata", "torch.distributed.checkpoint has")]
)
def test_other_folders_are_told(tmp_path, name, message):
    """A folder that is no checkpoint, and one of torch's own, are said to be that."""
    if name is not None:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path)
    assert caught.value.faults[0].fix


def test_a_list_that_leads_elsewhere_is_refused(copied):
    """Parts are files of the checkpoint's own folder."""
    whole = torch.load(copied / MAIN, weights_only=True)
    whole["content"]["pieces"]["folder"] = "../../etc"
    whole["fingerprint"] = digest(whole["content"])
    torch.save(whole, copied / MAIN)
    with pytest.raises(ParallelizeError, match="is no name of a file beside it"):
        load(copied)


def test_folders_that_ranks_do_not_share_are_told(tmp_path):
    """A rank whose folder is another one than rank 0's is named with its host; the old checkpoint is still there."""
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
    assert "has no parts of rank 1" in main
    assert "sharded=False" in main
    assert "has no parts of rank 1" in other
    assert load(tmp_path / "0" / "last") == {"old": 1}


def test_a_rank_that_cannot_write_is_told(tmp_path):
    """Where another rank's disk is full every rank raises, rank 0 with that rank's reason, and no parts are left."""
    save(tmp_path / "last", sharded=True, old=1)

    @distributed(processes=2, backend="fsdp")
    def run():
        model = net()
        with parallel_model(model):
            if rank() == 1:  # in this process, which ends with the call
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
            with pytest.raises(ParallelizeError) as caught:
                save(tmp_path / "last", model=model)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return str(caught.value)

    main, other = run.all_ranks()
    assert "rank 1 on" in main
    assert "cannot write" in other
    assert load(tmp_path / "last") == {"old": 1}
    assert [each.name for each in (tmp_path / "last").iterdir() if each.name.startswith("parts")] == []


def test_an_end_after_the_last_moment_leaves_the_new_one(tmp_path):
    """Where rank 0 is stopped when the checkpoint is complete and the old parts are still there, it is not undone."""
    replace = file_format.replace_file

    def replace_and_be_stopped(path, write):
        replace(path, write)
        raise KeyboardInterrupt

    @distributed(processes=2, backend="fsdp")
    def run():
        model = net()
        with parallel_model(model):
            save(tmp_path / "last", model=model, number=1)
            file_format.replace_file = replace_and_be_stopped  # in this process, which ends with the call
            with pytest.raises(KeyboardInterrupt if is_main() else SyncError):
                save(tmp_path / "last", model=model, number=2)

    run.all_ranks()
    assert load(tmp_path / "last", model=net()) == {"number": 2}


def test_one_rank_alone_is_told(tmp_path):
    """Saving parts takes all ranks: one alone says so in time, and makes nothing."""

    @distributed(processes=2, backend="fsdp")
    def run():
        rendezvous.LATE_S, saving.ALONE_S = 0.5, 2.0  # in this process, which ends with the call
        model, started = net(), time.monotonic()
        with parallel_model(model):
            if is_main():
                with pytest.raises(SyncError, match="rank 1 did not come within"):
                    save(tmp_path / "last", model=model)
            barrier()
        return time.monotonic() - started

    assert run() < 5
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_last_checkpoint_is_passed_over(tmp_path, caplog):
    """Where a part of the newest is damaged all ranks go on from the one before; broken off ones are cleared."""

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
    flip(parts_of(tmp_path / "step-000000002")[1])
    (tmp_path / "step-000000009" / "parts-x").mkdir(parents=True)
    assert run.all_ranks(0) == [1, 1]
    assert not (tmp_path / "step-000000009").exists()


def save_for_ever(path):
    """Save other weights again and again, until one is killed."""
    model = net()
    with parallel_model(model):
        for number in range(1, 100_000):
            with torch.no_grad():
                for each in model.parameters():
                    each.to_local().fill_(number)
            save(path, model=model, number=number)
            if number == 1 and rank() == 0:
                path.with_suffix(".ready").touch()


def kill_while_saving(path, delays_s):
    """Kill one of two ranks, in turns, after each of the delays; what is loaded then."""
    found = []
    for attempt, delay_s in enumerate(delays_s):

        def run(path=path, victim=attempt % 2, delay_s=delay_s):
            if rank() == victim:  # beside the loop, at a time that has nothing to do with it
                signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                signal.setitimer(signal.ITIMER_REAL, 0.3 + delay_s)
            save_for_ever(path)

        with pytest.raises(WorkerError, match="SIGKILL"):
            distributed(processes=2, backend="fsdp")(run)()
        model = net()
        if path.is_dir() and (path / MAIN).exists():
            number = load(path, model=model)["number"]
            assert all(bool((each == number).all()) for each in model.parameters())
            found.append(number)
    return found


def test_a_kill_leaves_the_old_or_the_new_folder(tmp_path):
    """Whichever rank is killed while all save, what is loaded then is of one step, on every rank."""
    assert max(kill_while_saving(tmp_path / "last", [0.5, 0.8, 0.65])) > 1


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_many_kills_leave_the_old_or_the_new_folder(tmp_path):
    """The same, forty times."""
    delays = torch.rand(40, generator=torch.Generator().manual_seed(0)).tolist()
    assert len(kill_while_saving(tmp_path / "last", delays)) > 30
