"""save, load and checkpoints in worlds of two and three real processes, under every backend."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import resource
import shutil
import signal
import time
import zipfile
from pathlib import Path

import pytest
import torch
from checksum import checksum_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import (
    ConfigError,
    ParallelizeError,
    SyncError,
    barrier,
    checkpoints,
    distributed,
    is_main,
    load,
    parallel_model,
    rank,
    save,
    shard_loader,
)

pytestmark = []  # shown by workers


def net() -> nn.Module:
    """Return a new model with the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(48, 4, generator=generator), torch.randn(48, 3, generator=generator))


def steps(model, optimizer, scheduler, loader, count: int) -> None:
    for _, (x, y) in zip(range(count), loader, strict=False):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()


def training_objects(model, batch_size=2):
    """Return the optimizer, scheduler and loader for a model in a block."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": shard_loader(DataLoader(samples(), batch_size=batch_size, shuffle=True)),
    }


def train_and_save(path, backend, sharded):
    """Train three steps and save; return the next random number of this rank."""
    model = net()
    with parallel_model(model, backend=backend):
        rest = training_objects(model)
        steps(model, *rest.values(), 3)
        save(path, sharded=sharded, model=model, **rest, note="here")
        return torch.rand(1).item()


def load_and_train(path, backend):
    """Load into new objects, draw a random number, train two steps; return what was loaded and the weights."""
    model = net()
    with parallel_model(model, backend=backend):
        rest = training_objects(model)
        note = load(path, model=model, **rest)["note"]
        drawn, position = torch.rand(1).item(), rest["loader"].state_dict()
        lr = rest["optimizer"].param_groups[0]["lr"]
        save(path.with_suffix(".again"), model=model, **rest)
        steps(model, *rest.values(), 2)
    return note, drawn, (position["epoch"], position["start"]), lr, [each.detach() for each in model.parameters()]


WORLDS = [("ddp", 2), ("fsdp", 2), ("ddp", 1), ("fsdp", 3), ("dp", 1), ("ddp2", 1)]
# backend, number of processes, sharded=
SOURCES = [("ddp", 2, None), ("fsdp", 2, False), ("fsdp", 2, None), ("ddp", 1, None)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return, for each source, the path of its checkpoint and the random number that each rank drew next."""
    folder = tmp_path_factory.mktemp("written")

    found = {}
    for backend, processes, sharded in SOURCES:
        path, run = folder / f"{backend}{processes}{sharded}", distributed(backend=backend, processes=processes)
        found[backend, processes, sharded] = path, run(train_and_save).all_ranks(path, backend, sharded)
    return found


def states(path):
    """Return the states in a checkpoint, file or folder, with full tensors and optimizer state by number."""
    found = load(path, rng=False)
    numbers = {name: number for number, name in enumerate(found["optimizer"]["param_groups"][0]["params"])}
    found["optimizer"]["state"] = {numbers[name]: each for name, each in found["optimizer"]["state"].items()}
    found["optimizer"]["param_groups"][0]["params"] = list(numbers.values())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source[0]}{source[1]}{source[2]}")
@pytest.mark.parametrize("target", WORLDS, ids=lambda world: f"{world[0]}{world[1]}")
def test_any_world_loads_what_any_other_has_saved(written, source, target):
    """Any backend and world size resumes from the same state, with equal weights on all ranks."""
    path, drawn = written[source]
    backend, processes = target
    results = distributed(backend=backend, processes=processes)(load_and_train).all_ranks(path, backend)
    for rank_, (note, number, position, lr, weights) in enumerate(results):
        assert (note, position) == ("here", (0, 6 * source[1]))
        assert lr == pytest.approx(0.1 * 0.9**3)
        assert (number == drawn[rank_]) if processes == source[1] else True
        assert checksum_of(weights) == checksum_of(results[0][4])
    first, again = states(path), states(path.with_suffix(".again"))
    for name in ("model", "optimizer", "scheduler"):
        assert checksum_of(first[name]) == checksum_of(again[name])
    (shutil.rmtree if path.with_suffix(".again").is_dir() else os.remove)(path.with_suffix(".again"))


def test_plain_values_are_saved_by_rank_0_alone(tmp_path):
    """`if is_main(): save(...)` of plain values is what torch.save is: no rank waits for another."""

    @distributed(processes=2)
    def run():
        model = net()
        with parallel_model(model):
            if is_main():
                save(tmp_path / "a.pt", model=model.state_dict(), number=2)
            save(tmp_path / f"rank{rank()}.pt", rank=rank())
            barrier()

    run()
    other = net()
    assert load(tmp_path / "a.pt", rng=False)["number"] == 2
    other.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True)["model"])
    assert [load(tmp_path / f"rank{number}.pt") for number in range(2)] == [{"rank": 0}, {"rank": 1}]


def test_the_cause_of_a_failed_save_reaches_the_caller(tmp_path):
    """The caller gets rank 0's exception, not the SyncError of the other rank, which reads no state."""

    class Broken:
        def state_dict(self):
            raise FileExistsError("mine")

        load_state_dict = None

    with pytest.raises(FileExistsError, match="mine"):
        distributed(processes=2)(save)(tmp_path / "a.pt", broken=Broken())


def train(folder, kills, backend, every, in_background=False):
    """Train as a user would; in attempt n, kill rank kills[n][1] after step kills[n][0]."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    with parallel_model(model, backend=backend):
        rest = training_objects(model, batch_size=4)
        optimizer, scheduler, loader = rest.values()
        with checkpoints(folder, every=every, in_background=in_background, model=model, **rest) as saved:
            first = saved.steps
            for _ in range(loader.epoch, 3):
                for x, y in loader:
                    optimizer.zero_grad()
                    F.mse_loss(model(x), y).backward()
                    optimizer.step()
                    saved.step()
                    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
                    if attempt < len(kills) and kills[attempt] == (saved.steps, rank()):
                        os.kill(os.getpid(), signal.SIGKILL)
                scheduler.step()
    return first, saved.steps, scheduler.get_last_lr(), [each.detach().clone() for each in model.parameters()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return the result of an uninterrupted run of two processes, by backend."""
    run = distributed(processes=2, seed=1)(train)
    return {each: run(tmp_path_factory.mktemp("uninterrupted"), [], each, 100) for each in ("ddp", "fsdp")}


# (step, rank) of each kill; a run has three epochs of six steps.
KILLS = st.lists(st.tuples(st.integers(1, 18), st.integers(0, 1)), min_size=1, max_size=2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=6)
@given(
    kills=KILLS,
    backend=st.sampled_from(["ddp", "fsdp"]),
    every=st.sampled_from([1, 4, 7, "0.02s"]),
    in_background=st.booleans(),
)
def test_a_killed_run_continues_where_it_was(tmp_path_factory, uninterrupted, kills, backend, every, in_background):
    """With max_restarts= a run whose ranks are killed at any step ends bitwise as an uninterrupted one."""
    run = distributed(processes=2, seed=1, max_restarts=2)(train)
    for _, *found in run.all_ranks(tmp_path_factory.mktemp("killed"), sorted(kills), backend, every, in_background):
        assert checksum_of(found) == checksum_of(list(uninterrupted[backend][1:]))


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_a_restart_begins_at_the_last_file(tmp_path, uninterrupted, caplog, backend):
    """A run that saves every 4 steps and loses a rank after step 11 resumes from step 8 and logs one restart."""
    run = distributed(processes=2, seed=1, max_restarts=1)(train)
    first, *found = run(tmp_path, [(11, 1)], backend, 4)
    assert first == 8
    assert checksum_of(found) == checksum_of(list(uninterrupted[backend][1:]))
    assert caplog.text.count("restart 1 of 1 after WorkerError: rank 1") == 1


def test_a_failed_write_in_the_background_raises_on_all_ranks(tmp_path):
    """The save after a failed one raises on every rank, on rank 0 with the reason."""
    (tmp_path / "file").write_text("")

    @distributed(processes=2)
    def run():
        folder = tmp_path / "file" / "a"
        with contextlib.suppress(LookupError), checkpoints(folder, every=1000, model=net()) as saved:
            saved.save()
            with pytest.raises(ParallelizeError if rank() == 0 else SyncError, match="cannot write"):
                saved.save()
            raise LookupError  # so that the end of the block saves nothing

    run()


@pytest.mark.parametrize("is_guarded", [False, True])
def test_torch_save_leaves_nothing_in_the_store(tmp_path, is_guarded):
    """Twenty calls, of one path and of others, on all ranks or on rank 0, add no key."""

    @distributed(processes=2)
    def run():
        store = torch.distributed.distributed_c10d._get_default_store()
        barrier()
        before = store.num_keys()
        barrier()
        for number in range(20):
            if rank() == 0 or not is_guarded:
                torch.save(number, tmp_path / f"{number % 3}.pt")
        barrier()
        after = store.num_keys()
        barrier()
        return before, after

    for before, after in run.all_ranks():
        assert after <= before + 1  # a rank that is still waiting may hold a key of its own
    assert [torch.load(tmp_path / f"{number}.pt") for number in range(3)] == [18, 19, 17]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_no_keys_pile_up_in_the_store(tmp_path, backend):
    """After more saves and loads the store holds no more keys."""

    @distributed(processes=2, backend=backend)
    def run():
        model, counts = net(), []
        store = torch.distributed.distributed_c10d._get_default_store()
        with parallel_model(model), checkpoints(tmp_path / "runs", every=1, keep=1, model=model) as saved:
            for _ in range(12):
                saved.step()
                save(tmp_path / "last", model=model)
                load(tmp_path / "last", model=model)
                barrier()
                counts.append(store.num_keys())
                barrier()
        return counts

    counts = run()
    assert counts[-1] < counts[1] + 5  # a rank that is still waiting may hold keys of its own; ten steps are between


def test_weights_of_a_sharded_run_as_safetensors(tmp_path):
    """Under fsdp, a name that ends in .safetensors gets one file, which a single process and a sharded run load."""
    safetensors = pytest.importorskip("safetensors.torch")

    @distributed(processes=2, backend="fsdp")
    def run():
        model = net()
        with parallel_model(model):
            rest = training_objects(model)
            steps(model, *rest.values(), 2)
            save(tmp_path / "last.safetensors", model=model)
            before = [each.to_local().clone() for each in model.parameters()]
            steps(model, *rest.values(), 1)
            load(tmp_path / "last.safetensors", model=model)
            assert all(map(torch.equal, before, [each.to_local() for each in model.parameters()]))
        return {name: each.detach().clone() for name, each in model.state_dict().items()}

    weights = run()
    assert [each.name for each in tmp_path.iterdir()] == ["last.safetensors"]
    model = net()
    model.load_state_dict(safetensors.load_file(tmp_path / "last.safetensors"))
    assert checksum_of(dict(model.state_dict())) == checksum_of(weights)
    assert load(tmp_path / "last.safetensors", model=net()) == {}


@pytest.mark.slow
def test_two_blocks_on_one_line_save_at_the_same_time(tmp_path):
    """A save in one block does not delete what the ranks post in the other one's, which is still in the background."""

    @distributed(processes=2, backend="fsdp", timeout=20)
    def run():
        model = net()
        with parallel_model(model), contextlib.ExitStack() as last, contextlib.ExitStack() as first:
            first.enter_context(checkpoints(tmp_path / "a", every=1, model=model))
            blocks = [last.enter_context(checkpoints(tmp_path / "b", every=1, model=model))]
            first.close()
            blocks.append(last.enter_context(checkpoints(tmp_path / "c", every=1, model=model)))
            for _ in range(3):
                for saved in blocks:
                    saved.step()

    run()
    assert [len(list((tmp_path / each).iterdir())) for each in "abc"] == [1, 3, 3]


def diverged(path, model):
    """Change a weight on one rank: no checkpoint holds diverged ranks."""
    model[0].weight.data.add_(rank())
    save(path, model=model)


def cyclic(path, model):
    """A container that contains itself."""
    values: dict[str, object] = {}
    values["self"] = values
    save(path, model=model, values=values)


def resumed(path, model):
    """A folder whose only file is undamaged, and cannot be loaded."""
    with checkpoints(path.with_name("unknown"), model=model):
        pass


REFUSED = {
    "diverged": ("ddp", diverged, SyncError, r"1 of 6 parameters differ between the ranks at save\("),
    "cyclic": ("ddp", cyclic, ConfigError, "nested too deeply"),
    "unsafe": ("ddp", lambda path, model: save(path, model=model, x=print), (ConfigError, SyncError), "x is of type"),
    "full disk": ("ddp", lambda path, model: save(path, model=model), ParallelizeError, "File too large"),
    "full disk of rank 1": (
        "fsdp",
        lambda path, model: save(path, model=model),
        ParallelizeError,
        r"cannot write(.|\n)*rank 1: \[Errno 27\] File too large",
    ),
    "device": ("ddp", lambda _, model: save("/dev/full", model=model), ParallelizeError, "it is not a file"),
    "no folder": ("ddp", lambda _, model: save("/proc/a.pt", model=model), ParallelizeError, "No such file"),
    "other model": ("fsdp", lambda path, _: load(path.with_name("b"), model=net()[0]), ConfigError, "Unexpected key"),
    "own names": (
        "ddp",
        lambda path, model: save(path.with_name(f"own{rank()}"), model=model),
        SyncError,
        "rank 1: .*own1.*; rank 0: .*own0",
    ),
    "own files": (
        "ddp",
        lambda path, model: load(path.with_name(f"of{rank()}"), model=model),
        SyncError,
        "rank 1: load of1 .*; rank 0: load of0",
    ),
    "format of tomorrow": ("ddp", resumed, ConfigError, "has format 7"),
}


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_what_cannot_be_done_is_said_on_all_ranks(tmp_path, backend):
    """All ranks raise, and go on; no file is left, and the next save succeeds."""
    for number, name in enumerate(("b", "of0", "of1")):
        save(tmp_path / name, model=net(), number=number)
    (tmp_path / "unknown").mkdir()
    torch.save({"_parallelize": {"format": 7}}, tmp_path / "unknown" / "step-000000001.pt")

    def files():
        return sorted(each.name for each in tmp_path.iterdir() if not each.is_dir() or any(each.iterdir()))

    @distributed(processes=2, backend=backend)
    def run():
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for case, (_, call, error, message) in ((name, row) for name, row in REFUSED.items() if row[0] == backend):
            model = net()
            with parallel_model(model):
                before = model[0].weight.detach().clone()
                if rank() == {"full disk": 0, "full disk of rank 1": 1}.get(case):
                    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
                with pytest.raises(error, match=message):
                    call(tmp_path / "a", model)
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
                model[0].weight.data.copy_(before)
                barrier()
                assert files() == ["b", "of0", "of1", "unknown"], case
                barrier()
        with parallel_model(net()) as model:
            save(tmp_path / "c", model=model)
            load(tmp_path / "c", model=model)

    run()


def test_unguarded_torch_save(tmp_path):
    """torch.save of one path on all ranks leaves whole files only, and rank 0's version; other paths are as before."""

    @distributed(processes=2)
    def run():
        replace = Path.replace

        def late(self, target):
            time.sleep(0.1)
            return replace(self, target)

        Path.replace = late
        for number in range(10):
            torch.save({"rank": rank(), "x": torch.full((50_000,), number)}, tmp_path / "a.pt")
            assert torch.load(tmp_path / "a.pt")["x"].unique() == number
            barrier()
            assert torch.load(tmp_path / "a.pt")["rank"] == 0
            barrier()
        torch.save(rank(), tmp_path / f"{rank()}.pt")
        torch.save(rank(), "/dev/null")
        torch.save(rank(), io.BytesIO())

    run()
    assert [torch.load(tmp_path / f"{number}.pt") for number in range(2)] == [0, 1]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_layers_in_another_order_train_alike(tmp_path, backend):
    """A run whose model declares its layers in another order goes on with the moments of each weight."""

    class Layers(nn.Module):
        def __init__(self, names) -> None:
            super().__init__()
            for name in names:
                setattr(self, name, nn.Linear(4, 4))

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    @distributed(processes=2, backend=backend)
    def run(names, is_first):
        torch.manual_seed(0)
        model = Layers("ab")
        if names != "ab":
            other = Layers(names)
            other.load_state_dict(model.state_dict())
            model = other
        with parallel_model(model):
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            if not is_first:
                load(tmp_path / "last", model=model, optimizer=optimizer)
            for number in range(2):
                optimizer.zero_grad()
                F.mse_loss(model(torch.full((2, 4), rank() + number + 1.0)), torch.ones(2, 4)).backward()
                optimizer.step()
            if is_first:
                save(tmp_path / "last", model=model, optimizer=optimizer)
        return {name: each.detach().clone() for name, each in sorted(model.state_dict().items())}

    run("ab", is_first=True)
    assert checksum_of(run("ba", is_first=False)) == checksum_of(run("ab", is_first=False))


def test_ranks_of_a_node_verify_one_file_together(tmp_path):
    """Two ranks read each byte of a file once between them; damage that only the other one finds raises on both."""
    path = tmp_path / "last.pt"
    layers = nn.Sequential(*(nn.Linear(500, 500, bias=False) for _ in range(8)))
    save(path, model=layers)
    size = path.stat().st_size

    @distributed(processes=2)
    def run():
        with parallel_model(layers):
            load(path, model=layers)  # imports what it needs
            before = bytes_read()
            load(path, model=layers)
            return bytes_read() - before

    amounts = run.all_ranks()
    assert size <= sum(amounts) < 1.5 * size
    assert max(amounts) < 0.8 * size
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        entries = [entry for entry in archive.infolist() if entry.file_size == 4 * 500**2]
    before = copy.deepcopy(layers.state_dict())
    for entry in entries[:2]:
        flipped = content.copy()
        flipped[entry.header_offset + 1000] ^= 1
        path.write_bytes(flipped)

        @distributed(processes=2)
        def fail():
            with parallel_model(layers), pytest.raises((ParallelizeError, SyncError), match="is damaged"):
                load(path, model=layers)
            return layers.state_dict()

        for state in fail.all_ranks():
            assert checksum_of(state) == checksum_of(before)


def bytes_read() -> int:
    """Return how many bytes this process has got by calls of `read`, which those of mapped memory are not."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).partition(":")[2])
