"""The batches of each process in a real world, compared with torch's DistributedSampler."""

from __future__ import annotations

import os
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from every_sample import KINDS, read
from ranks import values
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler
from torch.utils.data.datapipes.iter import IterableWrapper

from parallelize import (
    ConfigError,
    SyncError,
    barrier,
    distributed,
    parallel_model,
    rank,
    shard_loader,
    world_size,
)


@pytest.mark.parametrize("tail", ["pad", "exact"])
def test_real_ranks_read_what_simulated_ones_read(tail):
    """Every kind of loader with indices, although the global RNG of each rank is another one."""

    @distributed(processes=3)
    def run():
        read_by = {}
        for kind, make in KINDS.items():
            torch.manual_seed(rank())
            random.seed(rank())
            np.random.seed(rank())
            loader = shard_loader(make(0), tail=tail)
            loader.set_epoch(1)
            read_by[kind] = list(loader)
        return read_by

    ranks = run.all_ranks()
    for kind in KINDS:
        for number, batches in enumerate(ranks):
            expected = read(kind, number, 3, tail).batches
            assert [each if isinstance(each, list) else [each] for each in batches[kind]] == expected, kind


def test_data_pipes_are_sharded_once():
    """By shard_loader, or with "processes" by the DataLoader, which tells their sharding filters the process group."""

    @distributed(processes=2)
    def run(divides=None):
        loader = DataLoader(IterableWrapper(range(10)).sharding_filter(), batch_size=2)
        return [value for batch in shard_loader(loader, divides=divides) for value in batch.tolist()]

    for divides in (None, "processes"):
        assert sorted(value for values in run.all_ranks(divides) for value in values) == list(range(10))


LENGTH = 16


class Stream(IterableDataset):
    """Yields what a function returns."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return iter(self.make())


def by_group():
    return range(dist.get_rank(), LENGTH, dist.get_world_size())


def by_variables():
    return range(int(os.environ["RANK"]), LENGTH, int(os.environ["WORLD_SIZE"]))


def by_torch():
    return DistributedSampler(range(LENGTH), shuffle=False)


def with_collective():
    """Run a collective, for which torch queries the rank."""
    dist.barrier()
    return range(LENGTH)


def own_order(part=None):
    """Shuffle by a generator of its own, or take a part in a way that cannot be seen."""
    order = random.Random(None if part is None else 0).sample(range(LENGTH), LENGTH)
    return order if part is None else order[part::2]


class OwnSampler(Sampler):
    """Shards by itself, or draws an order of its own, and does not say so."""

    def __init__(self, kind):
        self.kind = kind

    def __iter__(self):
        order = random.Random().sample(range(LENGTH), LENGTH)
        return iter(order if self.kind == "shuffles" else range(rank(), LENGTH, world_size()))

    def __len__(self):
        return LENGTH if self.kind == "shuffles" else LENGTH // world_size()


def begun_by_zip():
    """Draws its order when its workers start, from this rank's random numbers."""
    torch.manual_seed(rank())
    return zip(DataLoader(range(LENGTH), 2, shuffle=True, num_workers=1), range(9))  # noqa: B905 - the shorter ends


def own_generator():
    yield from (torch.tensor([each]) for each in random.Random().sample(range(2**20), LENGTH))


def streamed(make, workers=0):
    return lambda: DataLoader(Stream(make), batch_size=2, num_workers=workers)


SHARDED = {
    "by the group": streamed(by_group),
    "by variables, in workers": streamed(by_variables, workers=2),
    "wrapped": streamed(lambda: Stream(by_torch)),
    "a generator": lambda: (each for each in range(rank(), LENGTH, world_size())),
    "a sharded loader in it": lambda: zip(shard_loader(list(range(LENGTH))), range(LENGTH)),  # noqa: B905 - ends
    "a sampler of its own": lambda: DataLoader(range(LENGTH), 2, sampler=OwnSampler("shards")),
    "a sampler that shuffles by itself": lambda: DataLoader(range(LENGTH), 2, sampler=OwnSampler("shuffles")),
    "a generator that shuffles by itself": own_generator,
    "a dataset that shuffles by itself": streamed(own_order),
    "a hidden part": lambda: DataLoader(Stream(partial(own_order, rank())), batch_size=2),
    "a loader with started workers": begun_by_zip,
}


def test_what_differs_between_ranks_is_refused_before_its_first_batch():
    """Also where nothing is trained: each sample would come twice, or not at all."""

    @distributed(processes=2)
    def read():
        found = {}
        for kind, make in SHARDED.items():
            try:
                found[kind] = len(list(shard_loader(make())))
            except SyncError as error:
                found[kind] = str(error)
            barrier(kind)
        return found

    first, second = read.all_ranks()
    for kind in SHARDED:
        (message,) = [each[kind] for each in (first, second) if isinstance(each[kind], str)]
        assert "iterates epoch" in message, kind
        assert "divides='processes'" in message


def test_data_that_says_how_it_shards_itself_is_not_sharded_again():
    """With divides="processes"; a dataset that only runs a collective does not shard itself."""

    @distributed(processes=2)
    def read():
        loaders = [(streamed(make)(), "processes") for make in (by_group, by_torch)]
        loaders += [(streamed(with_collective)(), None)]
        loaders += [(DataLoader(range(LENGTH), 2, sampler=OwnSampler("shards")), "processes")]
        return [values(shard_loader(loader, divides=divides)) for loader, divides in loaders]

    assert read.all_ranks() == [[list(range(each, LENGTH, 2))] * 4 for each in range(2)]


def test_streams_that_are_equal_or_declared_are_trained():
    """Equal streams have equal hashes, and those of a dataset that shards itself are not compared."""

    @distributed(processes=2)
    def train():
        for part, workers, divides in ((5, 0, None), (5, 2, None), (rank(), 0, "processes")):
            loader = streamed(partial(own_order, part), workers)()
            with parallel_model(torch.nn.Linear(1, 1)) as model:
                for batch in shard_loader(loader, divides=divides):
                    model(batch.float().unsqueeze(1)).sum().backward()

    train()


@distributed(processes=2)
def one_epoch(loader):
    return [*values(shard_loader(loader)), *values(shard_loader(DataLoader(range(23), 4, shuffle=True)))]


def test_calls_of_one_epoch_read_another_order_each():
    """Also of a loader that the call makes anew, and not under a seed, which makes calls repeatable."""
    loader = DataLoader(range(23), 4, shuffle=True)
    assert len({tuple(one_epoch(loader)) for _ in range(3)}) == 3
    seeded = one_epoch.options(seed=0)
    assert len({tuple(seeded(loader)) for _ in range(2)}) == 1


def test_an_epoch_without_a_batch_is_refused():
    """One process would make a step."""

    @distributed(processes=2)
    def incomplete():
        list(shard_loader(DataLoader(range(23), 16, drop_last=True)))

    with pytest.raises(ConfigError, match="no process gets a batch: 23 samples, 32 in a step of all") as caught:
        incomplete()
    assert "batch size of at most 11" in caught.value.faults[0].fix
