"""Orders of large data: compact, drawn once, and compared by a sample."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import as_rank, keep_sigchld_handler
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from parallelize import shard_loader
from parallelize.data.epoch_order import Permutation, draw_order, order_fingerprint
from parallelize.data.epoch_shard import indices_of, rows_in_dataset_order
from parallelize.data.rng import IsolatedRNG
from parallelize.data.sampler_arithmetic import TAILS, EpochSplit


@pytest.fixture(scope="module", autouse=True)
def workers_may_start() -> None:
    keep_sigchld_handler()


def test_a_permutation_takes_4_bytes_per_index_and_is_that_of_torch() -> None:
    """Indices of 32 bits have the values of those of 64."""
    order = Permutation(100_003, seed=5)
    assert order.indices.element_size() == 4
    assert order[:] == torch.randperm(100_003, generator=torch.Generator().manual_seed(5)).tolist()


def test_the_order_of_an_epoch_is_freed_before_the_next_is_drawn() -> None:
    """And drawn again if results of the former are gathered after all."""
    loader = shard_loader(DataLoader(range(100), batch_size=10, shuffle=True))
    rows = torch.cat(list(loader))
    order = loader._iterators.current.shard.order  # type: ignore[union-attr]  # a loop has ended
    assert order._drawn is not None
    next(iter(loader))
    assert order._drawn is None
    assert loader.gather(rows).tolist() == list(range(100))


class Yields(Sampler[Any]):
    def __init__(self, units: Sequence[Any]) -> None:
        self.units = units

    def __len__(self) -> int:
        return len(self.units)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.units)


@pytest.mark.parametrize(
    ("last", "kind"), [(1, array), (2**31 - 1, array), (2**31, list), (True, list), (np.int64(3), list), ([1], list)]
)
def test_long_orders_of_ints_take_4_bytes_per_index(last: Any, kind: type) -> None:
    """All others keep their units as the sampler yields them."""
    units = [*range(150_000), last]
    order = draw_order(Yields(units), seed=0, epoch=0)
    assert isinstance(order, kind)
    assert list(order) == units
    assert type(order[-1]) is type(last)
    assert not isinstance(order, array) or order.itemsize == 4


def test_orders_that_no_process_needs_to_list() -> None:
    """A sequential order is a range however long it is; another sampler's is listed up to a limit."""
    assert draw_order(SequentialSampler(range(10**9)), seed=0, epoch=0, max_listed=3) == range(10**9)
    assert list(draw_order(Yields(range(3)), seed=0, epoch=0, max_listed=3) or ()) == [0, 1, 2]
    assert draw_order(Yields(range(4)), seed=0, epoch=0, max_listed=3) is None


class Counting(Sequence[int]):
    """Counts the units that are read from it."""

    reads = 0

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, position: Any) -> Any:
        chosen = range(10**9)[position]
        self.reads += len(chosen) if isinstance(chosen, range) else 1
        return list(chosen) if isinstance(chosen, range) else chosen


def test_a_fingerprint_reads_a_sample_of_the_order() -> None:
    """Its beginning, and units of all parts."""
    order = Counting()
    order_fingerprint(order)
    assert 256 < order.reads < 1024
    units = list(range(10_000))
    changed = [order_fingerprint([*units[:at], *reversed(units[at:])]) for at in (0, 100, 5_000, 9_000)]
    assert len({order_fingerprint(units), *changed}) == 5
    assert len({order_fingerprint(units[:each]) for each in (1, 2, 9_999, 10_000)}) == 4


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(100), replacement=True, num_samples=10**10),
        WeightedRandomSampler([1.0] * 100, 2**24 + 1),
    ],
)
def test_draws_beyond_a_size_are_not_listed(sampler: Any) -> None:
    """minGPT draws 10**10 indices with replacement, of which a run reads few."""
    assert draw_order(sampler, seed=0, epoch=0) is None


def test_ranks_share_the_draws_of_a_long_sampler() -> None:
    """Their batches are those of one process, and a state resumes them."""
    make = lambda: DataLoader(  # noqa: E731 - a new one
        range(100), 2, sampler=RandomSampler(range(100), replacement=True, num_samples=10**10), collate_fn=list
    )

    def first(world_size: int, rank: int, steps: int, state: Any = None) -> tuple[list[list[int]], Any]:
        with as_rank(rank, world_size):
            loader = shard_loader(make())
            assert len(loader) == -(-(10**10) // (2 * world_size))
            if state is not None:
                loader.load_state_dict(state)
            batches = iter(loader)
            return [next(batches) for _ in range(steps)], loader.state_dict()

    single, _ = first(1, 0, 12)
    ranks = [first(2, rank, 3) for rank in range(2)]
    rest = [first(3, rank, 2, ranks[0][1])[0] for rank in range(3)]
    flat = [index for batch in single for index in batch]
    for start, world_size, batches in ((0, 2, [each for each, _ in ranks]), (12, 3, rest)):
        for rank in range(world_size):
            indices = [index for batch in batches[rank] for index in batch]
            assert indices == flat[start + rank :: world_size][: len(indices)]


@pytest.mark.parametrize("make", [torch.Generator, random.Random, np.random.default_rng, np.random.RandomState])
def test_every_kind_of_generator_is_isolated(make: Any) -> None:
    """A block draws from its own stream, which goes on in the next block, and the state outside stays."""
    own, state = make(), random.getstate()

    def draw(generator: Any) -> float:
        if isinstance(generator, torch.Generator):
            return torch.rand((), generator=generator).item()
        return generator.random()  # type: ignore[no-any-return]  # a float

    def drawn() -> list[float]:
        rng = IsolatedRNG(2**40 + 7, [own])

        def draw_all() -> list[float]:
            return [draw(own), random.random(), torch.rand(()).item(), np.random.random()]

        numbers = []
        for _ in range(3):
            with rng:
                numbers += draw_all()
            draw(own)
        first, again = rng.draw(iter(draw_all, []), seeds=[9, 9])
        assert first == again
        numbers += first
        return numbers

    before = torch.get_rng_state(), _numpy_keys()
    numbers = drawn()
    assert numbers == drawn()
    assert all(len(set(numbers[each::4])) == 4 for each in range(4))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), _numpy_keys()) == (state, before[1])


def test_the_module_random_is_isolated() -> None:
    """Its state, and the second Gaussian that it keeps, are as before; the stream keeps its own between blocks."""
    random.gauss(0, 1)
    before = random.getstate()
    expected = random.Random(5)
    rng = IsolatedRNG(5)
    for count in (1, 3, 700):
        with rng:
            assert [random.gauss(0, 1) for _ in range(count)] == [expected.gauss(0, 1) for _ in range(count)]
        assert random.getstate() == before
    with contextlib.suppress(KeyError), rng:
        random.shuffle([1, 2])
        raise KeyError
    assert random.getstate() == before


def _numpy_keys() -> list[int]:
    state: Any = np.random.get_state()
    return [*state[1].tolist(), state[2]]


class Noise(Dataset[list[float]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> list[float]:
        return [index, random.random(), torch.rand(()).item(), np.random.random()]


def test_augmentation_under_a_seed_is_the_same_after_resuming() -> None:
    """The random numbers of a batch follow from its position, however many were drawn ahead."""
    make = lambda: shard_loader(DataLoader(Noise(), 3, shuffle=True, collate_fn=list), seed=4)  # noqa: E731 - a new one
    with as_rank(1, 2):
        loader = make()
        epochs = [list(loader), list(loader)]
        assert len({number for epoch in epochs for batch in epoch for sample in batch for number in sample[1:]}) == 60
        loader.set_epoch(1)
        for step, _ in enumerate(loader):
            if step == 1:
                state = loader.state_dict()
                break
        other = make()
        other.load_state_dict(state)
        assert list(other) == epochs[1][2:]


class Draws(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return (random.randrange(6) for _ in range(4))


def drawing(samples: list[Any]) -> list[Any]:
    return [*samples, random.random()]


@pytest.mark.parametrize(
    ("data", "options", "is_saved"),
    [
        (TensorDataset(torch.arange(6)), {}, False),
        (Subset(Subset(TensorDataset(torch.arange(9)), range(8)), range(6)), {"shuffle": True}, False),
        (list(range(6)), {}, True),
        (list(range(6)), {"collate_fn": drawing}, True),
        (list(range(6)), {"sampler": Draws()}, True),
        (Noise(), {}, True),
    ],
)
def test_random_states_are_saved_where_code_may_draw(
    data: Any, options: Any, is_saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a seed, the state of `random` is read for each batch, unless the batch is made without the user's code."""
    counts, get_state = [0], random.getstate

    def counted() -> Any:
        counts[0] += 1
        return get_state()

    with as_rank(0, 2):
        monkeypatch.setattr(random, "getstate", counted)
        batches = iter(shard_loader(DataLoader(data, **options), seed=4))
        next(batches)
        first = counts[0]
        next(batches)
    assert (counts[0] > first) == is_saved


@given(
    st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=3), min_size=1, max_size=20),
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(TAILS),
    st.integers(0, 4),
    st.integers(0, 3),
)
def test_rows_of_all_ranks_are_sorted_by_index(
    units: list[list[int]], is_single: bool, world_size: int, batch: int, tail: Any, start: int, left: int
) -> None:
    """Each index that was read comes once, with a row of it, for indices and for batches of them, with text, too."""
    order: list[Any] = [unit[0] for unit in units] if is_single else units
    split = EpochSplit(total=len(order), world_size=world_size, group=world_size * batch, tail=tail, start=start)
    steps = [max(split.steps(rank) - left, 0) for rank in range(world_size)]
    read: list[list[int]] = []
    unique = set()
    for rank in range(world_size):
        taken = [each for step in range(steps[rank]) for each in split.positions(rank, step)]
        read.append([index for each in taken for index in indices_of(order[each % len(order)])])
        unique |= {index for each in taken if each < len(order) for index in indices_of(order[each])}
    counts, rows = rows_in_dataset_order(split, order, steps)
    flat = [
        index for each, count in zip(read, counts, strict=True) for index in (each[:count] + [-1] * 99)[: max(counts)]
    ]
    assert [flat[row] for row in rows.tolist()] == sorted(unique)
    names = [[f"sample {index}" for index in indices_of(unit)] for unit in order]
    _, rows = rows_in_dataset_order(split, names, steps)
    assert sorted(flat[row] for row in rows.tolist()) == sorted(unique)


def test_the_indices_of_a_subset_are_compared() -> None:
    """Two subsets of equal length have different fingerprints."""

    def fingerprint(indices: Any) -> str:
        with as_rank(0, 2):
            loader = shard_loader(DataLoader(Subset(Subset(range(50), indices), range(10)), batch_size=2))
            next(iter(loader))
            return loader._iterators.current.shard.fingerprint()  # type: ignore[union-attr]  # a batch was read

    assert fingerprint(list(range(20))) == fingerprint(list(range(20)))
    assert len({fingerprint(each) for each in (range(20), range(1, 21), torch.arange(20), np.arange(2, 22))}) == 4


class Files(Dataset[str]):
    def __init__(self, files: Sequence[Any], noise: int = 0) -> None:
        self.files, self.noise = files, [noise] * len(files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> str:
        return str(self.files[index])


def test_the_names_of_the_files_of_a_dataset_are_compared() -> None:
    """Files that the user has sharded by rank have different fingerprints; their folder and numbers may differ."""

    def fingerprint(dataset: Any) -> str:
        with as_rank(0, 2):
            loader = shard_loader(DataLoader(dataset, batch_size=2))
            next(iter(loader))
            return loader._iterators.current.shard.fingerprint()  # type: ignore[union-attr]  # a batch was read

    names = [f"{number}.jpg" for number in range(10_000)]
    for kind in (str, Path, lambda name: (name, 1)):
        whole = fingerprint(Files([kind(f"/a/{name}") for name in names]))
        assert whole == fingerprint(Files([kind(f"/local/b/{name}") for name in names], noise=1))
        ranks = [[kind(f"/a/{name}") for name in names[rank::2] * 2] for rank in range(2)]
        assert len({whole, *map(fingerprint, map(Files, ranks))}) == 3
        assert fingerprint(Files([kind(name) for name in [*names[:5_000], *names[6_000:], *names[:1_000]]])) != whole
    assert fingerprint(Files(range(9))) == fingerprint(Files([*range(9)]))


@pytest.mark.parametrize("contiguous", [True, False])
def test_the_first_rows_of_hugging_face_datasets_are_compared(contiguous: bool) -> None:
    """Datasets that the user has sharded by rank have different fingerprints."""
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": list(range(24))}).with_format("torch")

    def fingerprint(dataset: Any) -> str:
        with as_rank(0, 2):
            loader = shard_loader(DataLoader(dataset, batch_size=2))
            assert isinstance(next(iter(loader))["x"], torch.Tensor)  # the format is left as it is
            return loader._iterators.current.shard.fingerprint()  # type: ignore[union-attr]  # a batch was read

    assert fingerprint(data) == fingerprint(data.with_format("torch"))
    assert len({fingerprint(data.shard(2, rank, contiguous=contiguous)) for rank in range(2)}) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_is_shuffled_alike_on_all_ranks(workers: int) -> None:
    """torchdata's RandomSampler draws another seed on each process, and yet each sample is read once."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    epochs: list[list[int]] = [[], []]
    for rank in range(2):
        with as_rank(rank, 2), torch.random.fork_rng(devices=[]):
            torch.manual_seed(rank)
            loader = shard_loader(stateful(range(20), batch_size=3, shuffle=True, num_workers=workers, collate_fn=list))
            assert loader._source.batch_summary() == "3 x 2 processes = 6 global"
            for epoch in epochs:
                epoch += [index for batch in loader for index in batch]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(20))
    assert epochs[0] != epochs[1]


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(100))

    def __len__(self) -> int:
        return sys.maxsize


@pytest.mark.parametrize("limit", [0.5, 1.0])
def test_a_fraction_of_an_endless_sampler_is_endless(limit: float) -> None:
    """Its length is the largest integer."""
    with as_rank(0, 2):
        loader = DataLoader(TensorDataset(torch.arange(100)), batch_size=4, sampler=Endless())
        assert len(list(itertools.islice(shard_loader(loader, limit=limit), 10))) == 10
