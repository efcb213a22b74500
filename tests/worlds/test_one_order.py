"""All processes together read, draw and train what one process would have, with the user's own samplers."""

from __future__ import annotations

import ast
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import TORCHRUN, keep_sigchld_handler
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from parallelize import ConfigError, SyncError, distributed, parallel_model, rank, shard_loader, world_size

LENGTH, BATCH, EPOCHS = 24, 8, 3
DATA = list(range(LENGTH))


@pytest.fixture(scope="module", autouse=True)
def workers_may_start() -> None:
    """Install torch's handler of SIGCHLD before the first test, whose guard would take it for a leak."""
    keep_sigchld_handler()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class ByRandom(Sampler[int]):
    """Draws all of its order at once, from Python's generator."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(DATA, LENGTH))


class ByNumpy(ByRandom):
    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(LENGTH).tolist())


class OneByOne(ByRandom):
    """Draws each index when it is asked for."""

    def __iter__(self) -> Iterator[int]:
        for _ in DATA:
            yield random.randrange(LENGTH)


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(LENGTH, ()))


class Tensors(ByRandom):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(LENGTH))


class Budget(Sampler[list[int]]):
    """Batches of different sizes, as of a budget of tokens."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(LENGTH).tolist()
        for first, end in ((0, 3), (3, 10), (10, 11), (11, 20), (20, LENGTH)):
            yield order[first:end]


class LiesAboutItsLength(ByRandom):
    def __len__(self) -> int:
        return 7


class NoLength(Sampler[int]):
    """Has an end, and does not tell it; draws each index when it is asked for."""

    def __iter__(self) -> Iterator[int]:
        for _ in DATA:
            yield int(np.random.randint(LENGTH))


class OwnGenerator(ByRandom):
    """Draws from a generator of its own, which is another one in each process."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        order = list(DATA)
        self.generator.shuffle(order)
        return iter(order)


KINDS: dict[str, Callable[[], DataLoader[Any]]] = {
    "sequential": lambda: DataLoader(DATA, BATCH),
    "shuffled": lambda: DataLoader(DATA, BATCH, shuffle=True),
    "generator": lambda: DataLoader(DATA, BATCH, shuffle=True, generator=seeded(3)),
    "uneven": lambda: DataLoader(DATA, 5, shuffle=True),
    "drop_last": lambda: DataLoader(DATA, 5, shuffle=True, drop_last=True),
    "workers": lambda: DataLoader(DATA, BATCH, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(DATA, BATCH, shuffle=True, num_workers=1, persistent_workers=True),
    "weighted": lambda: DataLoader(DATA, BATCH, sampler=WeightedRandomSampler([1.0] * LENGTH, LENGTH)),
    "weighted, generator": lambda: DataLoader(
        DATA, BATCH, sampler=WeightedRandomSampler([1.0] * LENGTH, LENGTH, generator=seeded(1))
    ),
    "subset": lambda: DataLoader(DATA, BATCH, sampler=SubsetRandomSampler(DATA[::2])),
    "replacement": lambda: DataLoader(DATA, BATCH, sampler=RandomSampler(DATA, replacement=True)),
    "more than all": lambda: DataLoader(DATA, BATCH, sampler=RandomSampler(DATA, num_samples=40)),
    "BatchSampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), BATCH, False)),
    "of batches": lambda: DataLoader(DATA, batch_sampler=Budget()),
    "of batches, workers": lambda: DataLoader(DATA, batch_sampler=Budget(), num_workers=1),
    "random": lambda: DataLoader(DATA, BATCH, sampler=ByRandom()),
    "numpy": lambda: DataLoader(DATA, BATCH, sampler=ByNumpy()),
    "one by one": lambda: DataLoader(DATA, BATCH, sampler=OneByOne()),
    "tensors": lambda: DataLoader(DATA, BATCH, sampler=Tensors()),
    "own Random": lambda: DataLoader(DATA, BATCH, sampler=OwnGenerator(random.Random(random.random()))),
    "own NumPy": lambda: DataLoader(DATA, BATCH, sampler=OwnGenerator(np.random.default_rng(np.random.randint(99)))),
    "own RandomState": lambda: DataLoader(
        DATA, BATCH, sampler=OwnGenerator(np.random.RandomState(np.random.randint(99)))
    ),
    "lying length": lambda: DataLoader(DATA, BATCH, sampler=LiesAboutItsLength()),
}


def read_all(shards: Callable[[DataLoader[Any]], Any]) -> Any:
    """Return the batches of three epochs of each kind, and what the program draws afterwards."""
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    epochs: dict[str, Any] = {}
    for kind, make in KINDS.items():
        nn.Linear(3, 3)  # a program draws between its loaders
        loader = shards(make())
        epochs[kind] = [[batch.tolist() for batch in loader] for _ in range(EPOCHS)]
    return epochs, (torch.rand(2).tolist(), random.random(), np.random.rand())


@distributed(processes=2)
def read_sharded() -> Any:
    def shards(loader: DataLoader[Any]) -> Any:
        if rank():  # other ranks draw numbers of their own, as for dropout
            torch.manual_seed(1000 + rank()), random.seed(rank()), np.random.seed(rank())
        return shard_loader(loader, batch="global")

    return read_all(shards)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_batches_are_those_of_one_process(processes: int) -> None:
    """In three epochs, for each kind of sampler; the program of rank 0 then goes on with the same numbers."""
    expected, drawn = read_all(lambda loader: loader)
    ranks = read_sharded.options(processes=processes).all_ranks()
    for kind in KINDS:
        for epoch in range(EPOCHS):
            steps = zip(*[epochs[kind][epoch] for epochs, _ in ranks], strict=True)
            for batch, parts in zip(expected[kind][epoch], steps, strict=True):
                read = [index for part in parts for index in part]
                # A part that would be empty repeats an index, with weight 0.
                assert sorted(read) == sorted(batch) or {*read} == {*batch}, kind
    assert ranks[0][1] == drawn


class Shuffled(IterableDataset[int]):
    """Shuffles all of its samples, or some ahead, while it is iterated."""

    def __init__(self, buffer: int) -> None:
        self.buffer = buffer

    def __iter__(self) -> Iterator[int]:
        held: list[int] = []
        for sample in DATA:
            held.append(sample)
            if len(held) == self.buffer:
                yield held.pop(random.randrange(len(held)))
        random.shuffle(held)
        yield from held


STREAMS: dict[str, Callable[[int], Any]] = {
    "shuffled": lambda size: DataLoader(Shuffled(LENGTH), size),
    "buffer": lambda size: DataLoader(Shuffled(5), size),
    "no length": lambda size: DataLoader(DATA, size, sampler=NoLength()),
}


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_streams_are_those_of_one_process(processes: int) -> None:
    """All ranks together read the stream of one process, whose program then goes on with the same numbers."""

    def read_streams(shards: Callable[[Any], Any], size: int) -> Any:
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        epochs: dict[str, Any] = {}
        for kind, make in STREAMS.items():
            loader = shards(make(size))
            epochs[kind] = [[int(sample) for batch in loader for sample in batch] for _ in range(EPOCHS)]
        return epochs, (random.random(), np.random.rand(), torch.rand(2).tolist())

    @distributed(processes=processes)
    def read() -> Any:
        return read_streams(shard_loader, 24 // processes)

    expected, drawn = read_streams(lambda loader: loader, 24)
    ranks = read.all_ranks()
    for kind in STREAMS:
        for epoch in range(EPOCHS):
            units = zip(*[epochs[kind][epoch] for epochs, _ in ranks], strict=True)
            assert [sample for unit in units for sample in unit] == expected[kind][epoch], kind
    assert ranks[0][1] == drawn


def test_an_endless_sampler_is_drawn_as_far_as_needed() -> None:
    """The ranks divide its order, which is that of one process."""

    def first(loader: Any, steps: int) -> list[int]:
        return [int(index) for _, batch in zip(range(steps), loader, strict=False) for index in batch]

    @distributed(processes=2)
    def read() -> list[int]:
        torch.manual_seed(5 + rank())
        return first(shard_loader(DataLoader(DATA, 4, sampler=Endless())), 3)

    torch.manual_seed(5)
    expected = first(DataLoader(DATA, 8, sampler=Endless()), 3)
    one, other = read.all_ranks()
    assert [index for pair in zip(one, other, strict=True) for index in pair] == expected


def test_calls_go_on_with_the_order() -> None:
    """The second call, and a loader that it makes anew, read what the second run of a plain function would."""

    def epoch(loader: Any) -> list[int]:
        return [int(index) for batch in loader for index in batch]

    @distributed(processes=2)
    def read(kept: DataLoader[Any]) -> tuple[list[int], list[int]]:
        made = DataLoader(DATA, BATCH, shuffle=True)
        return epoch(shard_loader(kept, batch="global")), epoch(shard_loader(made, batch="global"))

    kept = DataLoader(DATA, BATCH, shuffle=True, generator=seeded(3))
    torch.manual_seed(5)
    expected = [(epoch(kept), epoch(DataLoader(DATA, BATCH, shuffle=True))) for _ in range(3)]
    kept = DataLoader(DATA, BATCH, shuffle=True, generator=seeded(3))
    torch.manual_seed(5)
    for loaders in expected:
        one, other = read.all_ranks(kept)
        for position, order in enumerate(loaders):
            read_by_step = zip(one[position], other[position], strict=True)
            assert [index for pair in read_by_step for index in pair] == order


SIZES = [(length, size) for length in (43, 41, 40, 9) for size in (8, 5, 4)]


def samples(length: int) -> TensorDataset:
    inputs = torch.randn(length, 4, generator=seeded(1), dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def fit(shards: Callable[[DataLoader[Any]], Any], make: Callable[[], DataLoader[Any]], **options: Any) -> Any:
    """Train for two epochs; return the number of steps and the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0
    with parallel_model(model, **options):
        loader = shards(make())
        for _ in range(2):
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                steps += 1
            assert steps % len(loader) == 0
    return steps, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_a_global_batch_is_exact_for_any_size(backend: str) -> None:
    """As many steps, and the weights, of one process; also with drop_last and with batches of a sampler."""

    def loaders() -> list[Callable[[], DataLoader[Any]]]:
        makes = []
        for length, size in SIZES:
            makes.append(lambda length=length, size=size: DataLoader(samples(length), size, shuffle=True))
            makes.append(lambda length=length, size=size: DataLoader(samples(length), size, drop_last=True))
        makes.append(lambda: DataLoader(samples(LENGTH), batch_sampler=Budget()))
        return makes

    @distributed(processes=2, backend=backend)
    def train() -> list[Any]:
        return [fit(lambda loader: shard_loader(loader, batch="global"), make) for make in loaders()]

    trained = train()
    for make, (steps, weights) in zip(loaders(), trained, strict=True):
        expected_steps, expected = fit(lambda loader: loader, make)
        assert steps == expected_steps
        assert torch.allclose(weights, expected, rtol=0, atol=1e-12)


RESUMED = ["shuffled", "generator", "uneven", "weighted", "weighted, generator", "replacement", "random", "numpy"]
RESUMED += ["own Random", "own NumPy", "own RandomState", "of batches"]


def test_an_epoch_is_resumed_at_another_number_of_processes() -> None:
    """In its middle: the rest of the epoch, and the next one, are those of one process."""

    @distributed(processes=2)
    def begin(kind: str) -> dict[str, Any]:
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        sharded = shard_loader(KINDS[kind](), batch="global")
        next(iter(sharded))
        torch.rand(3), random.random(), np.random.rand()
        return sharded.state_dict()

    @distributed
    def go_on(kind: str, state: dict[str, Any]) -> list[list[int]]:
        torch.manual_seed(77), random.seed(77), np.random.seed(77)
        sharded = shard_loader(KINDS[kind](), batch="global")
        sharded.load_state_dict(state)
        return [batch.tolist() for batch in sharded]

    for kind in RESUMED:
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        _, *rest = [batch.tolist() for batch in KINDS[kind]()]
        state = begin(kind)
        for processes in (1, 2, 3):
            ranks = go_on.options(processes=processes).all_ranks(kind, state)
            for batch, parts in zip(rest, zip(*ranks, strict=True), strict=True):
                read = [index for part in parts for index in part]
                assert sorted(read) == sorted(batch) or {*read} == {*batch}, kind


class Files(Dataset[torch.Tensor]):
    """Rows of files, six of each."""

    def __init__(self, files: list[int]) -> None:
        self.rows = [float(file * 6 + row) for file in files for row in range(6)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.rows[index]])


def part_of_files(files: int) -> Dataset[Any]:
    return Files(list(range(files))[rank() :: world_size()])


DIVIDED: dict[str, Callable[[], Dataset[Any]]] = {
    "equal parts": lambda: part_of_files(4),
    "unequal parts": lambda: part_of_files(5),
    "concatenated": lambda: ConcatDataset([part_of_files(4), part_of_files(4)]),
}


@pytest.mark.parametrize("kind", DIVIDED)
@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_is_divided_already_is_refused(kind: str, workers: int) -> None:
    """Half of it would never be read; with divides="processes" each process reads its part."""

    @distributed(processes=2, timeout=60)
    def train(**options: Any) -> list[float]:
        model, read = nn.Linear(1, 1), list[float]()
        with parallel_model(model):
            loader = DataLoader(DIVIDED[kind](), 3, num_workers=workers)
            for batch in shard_loader(loader, limit=4, **options):
                model(batch).sum().backward()
                read += batch.flatten().tolist()
        return read

    with pytest.raises(SyncError, match="the ranks hold different data") as caught:
        train()
    assert "divides='processes'" in caught.value.faults[0].fix
    one, other = train.all_ranks(divides="processes")
    assert one
    assert {*one}.isdisjoint(other)


def test_different_loaders_are_named_with_both_lines() -> None:
    """Ranks that iterate different loaders wait for each other, and the error says where."""

    @distributed(processes=2, timeout=60)
    def train() -> None:
        first, second = (shard_loader(DataLoader(DATA, BATCH, shuffle=True)) for _ in range(2))
        model = nn.Linear(1, 1)
        with parallel_model(model):
            if rank() == 0:
                for batch in first:
                    model(batch[:, None].float()).sum().backward()
            else:
                for batch in second:
                    model(batch[:, None].float()).sum().backward()

    with pytest.raises(SyncError, match=r"rank 1 waits at .* in iter\(\) of the loader at test_one_order.py") as caught:
        train()
    assert len({*re.findall(r"waits at (\S+)", str(caught.value))}) == 2


def test_a_mean_in_training_says_what_to_write() -> None:
    """Where samples come twice, it names all_reduce; where none does, it works, also under fsdp."""

    @distributed(processes=2)
    def train(length: int, **options: Any) -> float:
        model, values = nn.Linear(4, 1).double(), []
        with parallel_model(model):
            loader = shard_loader(DataLoader(samples(length), 4, shuffle=True), **options)
            for inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                values.append(targets.mean())
            return loader.mean(values)

    for length, options in ((40, {}), (41, {"batch": "global"})):
        expected = float(samples(length).tensors[1].mean())
        for backend in ("ddp", "fsdp"):
            assert train.options(backend=backend)(length, **options) == pytest.approx(expected, abs=1e-12)
    with pytest.raises(ConfigError, match="mean over a loader in training") as caught:
        train(41)
    assert 'all_reduce(loss.detach(), "mean")' in caught.value.faults[0].fix


def test_an_evaluation_under_fsdp_counts_each_sample_once() -> None:
    """Although all ranks make each forward: what fills the last step has no weight."""

    @distributed(processes=3, backend="fsdp")
    def evaluate() -> tuple[float, list[float]]:
        model, rows, values = nn.Linear(4, 1).double(), [], []
        with parallel_model(model), torch.no_grad():
            loader = shard_loader(DataLoader(samples(43), 7))
            for inputs, targets in loader:
                model(inputs)
                rows.append(targets)
                values.append(targets.mean())
            return loader.mean(values), loader.gather(torch.cat(rows)).flatten().tolist()

    targets = samples(43).tensors[1]
    for mean, rows in evaluate.all_ranks():
        assert mean == pytest.approx(float(targets.mean()), abs=1e-12)
        assert rows == targets.flatten().tolist()


SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from parallelize import parallel_model, shard_loader

torch.manual_seed(5)
made_before = shard_loader(DataLoader(range(24), 8, shuffle=True), batch="global")
dist.init_process_group("gloo")
torch.manual_seed(5 + 1000 * dist.get_rank())
outside = [int(index) for batch in made_before for index in batch]
with parallel_model(nn.Linear(1, 1)):
    inside = [int(index) for batch in made_before for index in batch]
gathered = [None] * dist.get_world_size()
dist.all_gather_object(gathered, (outside, inside))
if dist.get_rank() == 0:
    print(gathered, flush=True)
dist.barrier()
os._exit(0)  # a thread of gloo may abort the interpreter at its end
"""


def test_a_script_may_make_its_loader_before_the_ranks_have_a_group(tmp_path: Path) -> None:
    """Under torchrun it is read outside of a block, by the group of the script, and inside of one."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, *TORCHRUN, str(tmp_path / "train.py")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    torch.manual_seed(5)
    loader = DataLoader(DATA, BATCH, shuffle=True)
    outside = [int(index) for batch in loader for index in batch]
    nn.Linear(1, 1)
    expected = outside, [int(index) for batch in loader for index in batch]
    one, other = ast.literal_eval(run.stdout.strip().splitlines()[-1])
    for order, halves in zip(expected, zip(one, other, strict=True), strict=True):
        assert [index for pair in zip(*halves, strict=True) for index in pair] == order


def test_a_stateful_loader_of_torchdata_is_divided() -> None:
    """Its sampler draws from a generator of its own, seeded when the loader is made: rank 0's is taken."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def epochs(shards: Callable[[Any], Any], seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        loader = shards(stateful(DATA, BATCH, shuffle=True))
        return [[int(index) for batch in loader for index in batch] for _ in range(2)]

    @distributed(processes=2)
    def read() -> list[list[int]]:
        return epochs(lambda loader: shard_loader(loader, batch="global"), 5 + rank())

    one, other = read.all_ranks()
    for order, halves in zip(epochs(lambda loader: loader, 5), zip(one, other, strict=True), strict=True):
        assert [index for pair in zip(*halves, strict=True) for index in pair] == order


def test_a_generator_that_loaders_share_moves_on_alike() -> None:
    """Two loaders that take turns read what they read in one process."""

    def turns(shards: Callable[[DataLoader[Any]], Any]) -> list[list[int]]:
        generator = seeded(4)
        loaders = [shards(DataLoader(DATA, BATCH, shuffle=True, generator=generator)) for _ in range(2)]
        return [[int(index) for batch in loader for index in batch] for _ in range(2) for loader in loaders]

    @distributed(processes=2)
    def read() -> list[list[int]]:
        return turns(lambda loader: shard_loader(loader, batch="global"))

    one, other = read.all_ranks()
    for order, halves in zip(turns(lambda loader: loader), zip(one, other, strict=True), strict=True):
        assert [index for pair in zip(*halves, strict=True) for index in pair] == order


def test_a_sharded_loader_says_what_it_is() -> None:
    """Its repr has the line, the rank and the batch sizes."""

    @distributed(processes=2)
    def show() -> str:
        return repr(shard_loader(DataLoader(DATA, BATCH)))

    pattern = r"<ShardedLoader of the DataLoader at test_one_order.py:\d+: rank 0 of 2, 8 x 2 processes = 16 global>"
    assert re.fullmatch(pattern, show())
