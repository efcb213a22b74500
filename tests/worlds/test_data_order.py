"""The batches of each process in a real world, compared with torch's DistributedSampler."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from every_sample import KINDS, read
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from parallelize import (
    ConfigError,
    SyncError,
    device,
    distributed,
    parallel_model,
    rank,
    shard_loader,
    world_size,
)


def dataset(length):
    return TensorDataset(torch.arange(length), torch.arange(length) * 10)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_distributed_sampler(shuffle, workers):
    """Three epochs equal three of a DistributedSampler with set_epoch calls, also with worker processes."""

    @distributed(processes=2)
    def run():
        data = dataset(23)
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

    run()


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


def test_data_pipes_shard_themselves():
    """torch shards a data pipe with a sharding filter by the process group: it is not sharded again."""

    @distributed(processes=2)
    def run():
        pipe = IterableWrapper(range(10)).sharding_filter()
        return [value for batch in shard_loader(DataLoader(pipe, batch_size=2)) for value in batch.tolist()]

    assert sorted(value for values in run.all_ranks() for value in values) == list(range(10))


class ByProcess(IterableDataset):
    """Shards itself by torch.distributed's rank and world size."""

    def __iter__(self):
        return iter(range(dist.get_rank(), 8, dist.get_world_size()))


class ByTorch(IterableDataset):
    """Shards by a DistributedSampler, which queries the rank."""

    def __iter__(self):
        return iter(DistributedSampler(range(8), shuffle=False))


class WithCollective(IterableDataset):
    """Runs a collective, for which torch queries the rank."""

    def __iter__(self):
        dist.barrier()
        return iter(range(8))


@distributed(processes=2)
def iterate(dataset, divides=None):
    return [int(value) for batch in shard_loader(DataLoader(dataset, batch_size=2), divides=divides) for value in batch]


@pytest.mark.parametrize(
    ("dataset", "used"),
    [(ByProcess(), "get_rank and get_world_size"), (ByTorch(), "DistributedSampler")],
    ids=["own queries", "DistributedSampler"],
)
def test_a_dataset_that_queries_torch_for_its_rank_is_not_sharded_twice(dataset, used):
    """It is refused without divides='processes'."""
    with pytest.raises(ConfigError, match=f"its code uses {used}"):
        iterate(dataset)
    assert iterate.all_ranks(dataset, "processes") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_rank_queries_of_torchs_collectives_are_ignored():
    """A dataset that only runs a collective does not shard itself."""
    assert iterate.all_ranks(WithCollective()) == [[0, 2, 4, 6], [1, 3, 5, 7]]


class OwnOrder(IterableDataset):
    """Shuffles by a generator of its own, or shards itself in a way that cannot be seen."""

    def __init__(self, part=None):
        self.part = part

    def __iter__(self):
        order = list(range(16))
        random.Random(None if self.part is None else 0).shuffle(order)
        return iter(order if self.part is None else order[self.part :: 2])


@distributed(processes=2)
def train_on_a_stream(kind, workers=0, **options):
    """Train one epoch on a stream that differs between ranks, or does not."""
    data = OwnOrder({"own generator": None, "hidden part": rank()}.get(kind, 5))
    loader = data if kind == "generator" else DataLoader(data, batch_size=2, num_workers=workers)
    if kind == "generator":
        loader = (torch.tensor([number]) for number in random.Random().sample(range(2**20), 16))
    with parallel_model(torch.nn.Linear(1, 1)) as model:
        for batch in shard_loader(loader, **options):
            model(batch.float().unsqueeze(1)).sum().backward()
    return "trained"


@pytest.mark.parametrize(
    ("kind", "workers"), [("own generator", 0), ("own generator", 2), ("hidden part", 0), ("generator", 0)]
)
def test_streams_that_differ_between_ranks_are_named_at_the_first_step(kind, workers):
    """Their samples would overlap, or be lost: the first samples of the stream are compared, from workers, too."""
    message = r"rank \d iterates epoch 0, order \w{8}, where rank \d iterates epoch 0, order \w{8}"
    with pytest.raises(SyncError, match=message) as caught:
        train_on_a_stream(kind, workers)
    assert "divides='processes'" in str(caught.value)


def test_streams_that_are_equal_or_declared_are_trained():
    """Equal streams have equal hashes, and those of a dataset that shards itself are not compared."""
    assert train_on_a_stream("equal") == "trained"
    assert train_on_a_stream("equal", 2) == "trained"
    assert train_on_a_stream("hidden part", divides="processes") == "trained"


def test_the_bar_is_on_rank_0_and_counts_all_samples(capfd):
    """One bar, labelled, with the samples of both processes."""

    @distributed(processes=2, logs="all")
    def run():
        for _ in shard_loader(DataLoader(dataset(10), batch_size=2), progress="train"):
            pass

    run()
    err = capfd.readouterr().err
    assert "train: 100%" in err
    assert "10/10" in err
    assert err.count("100%") == 1
