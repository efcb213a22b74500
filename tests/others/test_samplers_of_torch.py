"""Every sampler of torch.utils.data, and those of torchdata, reads through `shard_loader` in the order of one process.

The samples of two or three ranks are laid side by side as `shard_loader` deals them out, position by position; the
result is the loop of plain torch, also in the order within a batch, for two epochs, with and without a generator of
the sampler's own. The random numbers that the program draws afterwards are those of one process, too.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    sampler,
)

from parallelize import distributed, rank, shard_loader, world_size

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchdata calls a function that torch has deprecated
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader import sampler as torchdata_sampler

pytestmark = pytest.mark.slow

LENGTHS = (24, 25)
"""Whole batches, and a last batch of one sample."""
BATCH = 6
EPOCHS = 2

Make = Callable[[range], Sampler[Any]]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def weights(data: range) -> list[float]:
    return [1.0 + index for index in data]


SAMPLERS: dict[str, Make] = {
    "SequentialSampler": SequentialSampler,
    "RandomSampler": RandomSampler,
    "RandomSampler, generator": lambda data: RandomSampler(data, generator=seeded()),
    "RandomSampler, replacement": lambda data: RandomSampler(data, replacement=True),
    "RandomSampler, replacement, generator": lambda data: RandomSampler(data, replacement=True, generator=seeded()),
    "RandomSampler, fewer": lambda data: RandomSampler(data, num_samples=13),
    "RandomSampler, more": lambda data: RandomSampler(data, num_samples=40),
    "RandomSampler, replacement, more": lambda data: RandomSampler(data, replacement=True, num_samples=40),
    "SubsetRandomSampler": lambda data: SubsetRandomSampler(data[::2]),
    "SubsetRandomSampler, generator": lambda data: SubsetRandomSampler(data[1:], generator=seeded()),
    "WeightedRandomSampler": lambda data: WeightedRandomSampler(weights(data), 30),
    "WeightedRandomSampler, no replacement": lambda data: WeightedRandomSampler(weights(data), 12, replacement=False),
    "WeightedRandomSampler, generator": lambda data: WeightedRandomSampler(weights(data), 30, generator=seeded()),
    "torchdata.RandomSampler": torchdata_sampler.RandomSampler,
    "torchdata.RandomSampler, generator": lambda data: torchdata_sampler.RandomSampler(data, generator=seeded()),
    "torchdata.RandomSampler, replacement": lambda data: torchdata_sampler.RandomSampler(data, replacement=True),
    "torchdata.RandomSampler, more": lambda data: torchdata_sampler.RandomSampler(data, num_samples=40),
}
"""Name of a case, which begins with its class -> the sampler of a dataset."""

BATCH_SAMPLERS: dict[str, Make] = {
    "BatchSampler": lambda data: BatchSampler(RandomSampler(data), BATCH, drop_last=False),
    "BatchSampler, sequential": lambda data: BatchSampler(SequentialSampler(data), BATCH, drop_last=False),
    "BatchSampler, drop_last": lambda data: BatchSampler(RandomSampler(data), BATCH, drop_last=True),
    "BatchSampler, weighted": lambda data: BatchSampler(
        WeightedRandomSampler(weights(data), 30), BATCH, drop_last=False
    ),
    "torchdata.BatchSampler": lambda data: torchdata_sampler.BatchSampler(RandomSampler(data), BATCH, drop_last=False),
}
"""Name of a case, which begins with its class -> the sampler of batches of a dataset."""


def loaders() -> Iterator[tuple[str, Callable[[], DataLoader[Any]]]]:
    """Yield names and what makes a loader, of torch and of torchdata."""
    for kind, length in itertools.product((DataLoader, StatefulDataLoader), LENGTHS):
        data = range(length)
        for name, make in SAMPLERS.items():

            def with_sampler(kind: Any = kind, data: range = data, make: Make = make) -> DataLoader[Any]:
                return kind(data, BATCH, sampler=make(data))

            yield f"{kind.__name__} of {length}: {name}", with_sampler
        for name, make in BATCH_SAMPLERS.items():

            def with_batches(kind: Any = kind, data: range = data, make: Make = make) -> DataLoader[Any]:
                return kind(data, batch_sampler=make(data))

            yield f"{kind.__name__} of {length}: {name}", with_batches


def read(shards: Callable[[str, DataLoader[Any]], Any]) -> dict[str, Any]:
    """Return the batches of each epoch of each loader, and a number that the program draws afterwards."""
    results = {}
    for name, make in loaders():
        torch.manual_seed(5)
        loader = shards(name, make())
        epochs = [[batch.tolist() for batch in loader] for _ in range(EPOCHS)]
        results[name] = (epochs, torch.rand(()).item())
    return results


def read_on_rank() -> dict[str, Any]:
    def shards(name: str, loader: DataLoader[Any]) -> Any:
        if rank():
            # Other ranks have drawn other numbers, as for dropout.
            torch.manual_seed(1000 + rank())
        # A loader with drop_last=True has no incomplete batch to divide.
        tail = "drop" if "drop_last" in name else "exact"
        return shard_loader(loader, batch="global", tail=tail)

    return read(shards)


def side_by_side(parts: Sequence[list[int]]) -> list[int]:
    """Return the samples of a step in the order of one process: rank r of W has every W-th from position r on."""
    rows = itertools.zip_longest(*parts)
    return [sample for row in rows for sample in row if sample is not None]


@functools.cache
def in_one_process() -> dict[str, Any]:
    return read(lambda _name, loader: loader)


@pytest.mark.parametrize("processes", [2, 3])
def test_the_order_is_that_of_one_process(processes: int) -> None:
    """Each sample at its position, of samplers and of samplers of batches, in loaders of torch and of torchdata."""
    ranks = distributed(processes=processes)(read_on_rank).all_ranks()
    wrong = {}
    for name, (expected, drawn) in in_one_process().items():
        epochs = []
        for epoch in range(EPOCHS):
            steps = itertools.zip_longest(*[results[name][0][epoch] for results in ranks], fillvalue=[])
            epochs.append([side_by_side(parts) for parts in steps])
        if epochs != expected or ranks[0][name][1] != drawn:
            wrong[name] = epochs, expected
    assert wrong == {}


@pytest.mark.parametrize("processes", [2, 3])
def test_distributed_samplers_are_kept(processes: int) -> None:
    """A loader that torch has divided already reads what it reads without this package, in every epoch."""
    kinds = (DistributedSampler, torchdata_sampler.StatefulDistributedSampler)

    def read_divided(*, is_sharded: bool, place: int, places: int) -> list[Any]:
        results = []
        for kind, length, is_shuffled in itertools.product(kinds, LENGTHS, (True, False)):
            data = range(length)
            divided = kind(data, num_replicas=places, rank=place, shuffle=is_shuffled, seed=2)
            loader: Any = DataLoader(data, BATCH, sampler=divided)
            if is_sharded:
                loader = shard_loader(loader)
            for epoch in range(EPOCHS):
                divided.set_epoch(epoch)
                results.append([batch.tolist() for batch in loader])
        return results

    def on_rank() -> list[Any]:
        return read_divided(is_sharded=True, place=rank(), places=world_size())

    ranks = distributed(processes=processes)(on_rank).all_ranks()
    for place, results in enumerate(ranks):
        assert results == read_divided(is_sharded=False, place=place, places=processes)


def test_every_sampler_has_a_case() -> None:
    """A sampler that torch or torchdata adds is missed here."""
    cases = [*SAMPLERS, *BATCH_SAMPLERS]
    of_torch = {*sampler.__all__} - {"Sampler"}
    of_torchdata = {
        f"torchdata.{name}"
        for name, value in vars(torchdata_sampler).items()
        if isinstance(value, type) and issubclass(value, Sampler) and value.__module__ == torchdata_sampler.__name__
    }
    of_torchdata.remove("torchdata.StatefulDistributedSampler")
    for name in of_torch | of_torchdata:
        assert any(case.partition(",")[0] == name for case in cases), name
