"""The batches of each process in a real world, compared with torch's DistributedSampler."""

from __future__ import annotations

import os
import random

import pytest
import torch
import torch.distributed as dist
from every_sample import KINDS, read
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from parallelize import (
    SyncError,
    barrier,
    device,
    distributed,
    parallel_model,
    rank,
    shard_loader,
    world_size,
)


def test_batches_are_those_of_the_distributed_sampler():
    """Three epochs equal three of a DistributedSampler with set_epoch calls, also with worker processes."""

    @distributed(processes=2, seed=0)
    def run(shuffle, workers):
        data = TensorDataset(torch.arange(23), torch.arange(23) * 10)
        loader = DataLoader(data, batch_size=4, shuffle=shuffle, num_workers=workers)
        sampler = DistributedSampler(data, world_size(), rank(), shuffle=shuffle)
        reference = DataLoader(data, batch_size=4, sampler=sampler)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            expected = [(x.tolist(), y.tolist()) for x, y in reference]
            batches = list(shard_loader(loader))
            assert len(shard_loader(loader)) == len(batches)
            assert all(x.device == y.device == device() for x, y in batches)
            assert [(x.tolist(), y.tolist()) for x, y in batches] == expected

    run(shuffle=False, workers=0)
    run(shuffle=True, workers=2)


@pytest.mark.parametrize("tail", ["pad", "exact"])
def test_real_ranks_read_what_simulated_ones_read(tail):
    """Every kind of loader with indices, although the global RNG of each rank is another one."""

    @distributed(processes=3)
    def run():
        torch.manual_seed(rank())
        random.seed(rank())
        read_by = {}
        for kind, make in KINDS.items():
            loader = shard_loader(make(0), tail=tail)
            loader.set_epoch(0)  # loaders of one kind that one line makes are epochs of one loader
            read_by[kind] = list(loader)
        return read_by

    for number, batches in enumerate(run.all_ranks()):
        for kind in KINDS:
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


class Divided(IterableDataset):
    """Takes its part by what a function tells."""

    def __init__(self, shard):
        self.shard = shard

    def __iter__(self):
        return iter(range(LENGTH)[slice(*self.shard())])


class ByTorch(IterableDataset):
    """Shards by a DistributedSampler."""

    def __iter__(self):
        return iter(DistributedSampler(range(LENGTH), shuffle=False))


class WithCollective(IterableDataset):
    """Runs a collective, for which torch queries the rank."""

    def __iter__(self):
        dist.barrier()
        return iter(range(LENGTH))


class Wrapped(IterableDataset):
    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)


class OwnSampler(Sampler):
    """Shards by itself, or draws an order of its own, and does not say so."""

    def __init__(self, kind):
        self.kind = kind

    def __iter__(self):
        order = random.Random().sample(range(LENGTH), LENGTH)
        return iter(order if self.kind == "shuffles" else range(rank(), LENGTH, world_size()))

    def __len__(self):
        return LENGTH if self.kind == "shuffles" else LENGTH // world_size()


class OwnOrder(IterableDataset):
    """Shuffles by a generator of its own, or takes a part in a way that cannot be seen."""

    def __init__(self, part=None):
        self.part = part

    def __iter__(self):
        order = random.Random(None if self.part is None else 0).sample(range(LENGTH), LENGTH)
        return iter(order if self.part is None else order[self.part :: 2])


def begun_by_zip():
    """Draws its order when its workers start, from this rank's random numbers."""
    torch.manual_seed(rank())
    return zip(DataLoader(range(LENGTH), 2, shuffle=True, num_workers=1), range(9))  # noqa: B905 - the shorter ends


def own_generator():
    yield from (torch.tensor([each]) for each in random.Random().sample(range(2**20), LENGTH))


def by_group():
    return dist.get_rank(), None, dist.get_world_size()


def by_variables():
    return int(os.environ["RANK"]), None, int(os.environ["WORLD_SIZE"])


SHARDED = {
    "by the group": lambda: DataLoader(Divided(by_group), batch_size=2),
    "by variables": lambda: DataLoader(Divided(by_variables), batch_size=2),
    "by variables, in workers": lambda: DataLoader(Divided(by_variables), batch_size=2, num_workers=2),
    "in halves": lambda: DataLoader(Divided(lambda: (rank() * 8, rank() * 8 + 8)), batch_size=2),
    "by a sampler": lambda: DataLoader(ByTorch(), batch_size=2),
    "wrapped": lambda: DataLoader(Wrapped(ByTorch()), batch_size=2),
    "a generator": lambda: (each for each in range(rank(), LENGTH, world_size())),
    "a sharded loader in it": lambda: zip(shard_loader(list(range(LENGTH))), range(LENGTH)),  # noqa: B905 - ends
    "a list": lambda: random.Random().sample(range(2**20), LENGTH),
    "a sampler of its own": lambda: DataLoader(range(LENGTH), 2, sampler=OwnSampler("shards")),
    "a sampler that shuffles by itself": lambda: DataLoader(range(LENGTH), 2, sampler=OwnSampler("shuffles")),
    "a generator that shuffles by itself": own_generator,
    "a dataset that shuffles by itself": lambda: DataLoader(OwnOrder(), batch_size=2),
    "a dataset that shuffles by itself, in workers": lambda: DataLoader(OwnOrder(), batch_size=2, num_workers=2),
    "a hidden part": lambda: DataLoader(OwnOrder(rank()), batch_size=2),
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


@distributed(processes=2)
def iterate(dataset, divides=None):
    return [int(value) for batch in shard_loader(DataLoader(dataset, batch_size=2), divides=divides) for value in batch]


def test_data_that_says_how_it_shards_itself_is_not_sharded_again():
    """With divides="processes"; a dataset that only runs a collective does not shard itself."""
    shares = [list(range(0, LENGTH, 2)), list(range(1, LENGTH, 2))]
    for dataset in (Divided(by_group), ByTorch()):
        assert iterate.all_ranks(dataset, "processes") == shares
    assert iterate.all_ranks(WithCollective()) == shares

    @distributed(processes=2)
    def by_sampler():
        loader = DataLoader(range(LENGTH), 2, sampler=OwnSampler("shards"))
        return [value for batch in shard_loader(loader, divides="processes") for value in batch.tolist()]

    assert by_sampler.all_ranks() == shares


def test_streams_that_are_equal_or_declared_are_trained():
    """Equal streams have equal hashes, and those of a dataset that shards itself are not compared."""

    @distributed(processes=2)
    def train():
        for part, workers, divides in ((5, 0, None), (5, 2, None), (rank(), 0, "processes")):
            loader = DataLoader(OwnOrder(part), batch_size=2, num_workers=workers)
            with parallel_model(torch.nn.Linear(1, 1)) as model:
                for batch in shard_loader(loader, divides=divides):
                    model(batch.float().unsqueeze(1)).sum().backward()

    train()
