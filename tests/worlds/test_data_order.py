"""What each process of a real world is given, against torch's DistributedSampler."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from parallelize import ConfigError, barrier, device, distributed, parallel_model, rank, shard_loader, world_size


def dataset(length):
    return TensorDataset(torch.arange(length), torch.arange(length) * 10)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_distributed_sampler(shuffle, workers):
    """Three epochs by themselves equal three with set_epoch by hand, also with worker processes."""

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


def test_data_pipes_divide_themselves():
    """torch shards a data pipe with a sharding filter by the process group: nothing is done to it twice."""

    @distributed(processes=2)
    def run():
        pipe = IterableWrapper(range(10)).sharding_filter()
        return [value for batch in shard_loader(DataLoader(pipe, batch_size=2)) for value in batch.tolist()]

    assert sorted(value for values in run.all_ranks() for value in values) == list(range(10))


class ByProcess(IterableDataset):
    """Divides itself as a program of torch.distributed does."""

    def __iter__(self):
        return iter(range(dist.get_rank(), 8, dist.get_world_size()))


class ByTorch(IterableDataset):
    """Has torch ask for it, and something else that waits for all."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        dist.barrier()
        return iter(range(8) if self.sampler is None else DistributedSampler(range(8), shuffle=False))


@distributed(processes=2)
def read_by_process(dataset, divides=None):
    return [int(value) for batch in shard_loader(DataLoader(dataset, batch_size=2), divides=divides) for value in batch]


@pytest.mark.parametrize("dataset", [ByProcess(), ByTorch(DistributedSampler)], ids=["itself", "by torch"])
def test_what_asks_torch_for_its_process_is_not_divided_twice(dataset):
    """Refused, until it is said that it divides itself."""
    with pytest.raises(ConfigError, match="it calls get_rank and get_world_size while it is read"):
        read_by_process(dataset)
    assert read_by_process.all_ranks(dataset, "processes") == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_what_torch_asks_for_itself_is_no_question():
    """A collective in a dataset knows the processes, and divides nothing."""
    assert read_by_process.all_ranks(ByTorch(None)) == [[0, 2, 4, 6], [1, 3, 5, 7]]


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


class SlowOnOne(TensorDataset):
    """Takes its time on rank 1."""

    def __getitem__(self, index):
        if rank() == 1:
            time.sleep(0.01)
        return super().__getitem__(index)


@distributed(processes=2)
def train_with_a_report():
    with parallel_model(torch.nn.Linear(1, 1)) as model:
        for (x,) in shard_loader(DataLoader(SlowOnOne(torch.ones(32, 1)), batch_size=2), report=True):
            model(x).sum().backward()
    if rank() == 0:  # nobody else reads this
        list(shard_loader(DataLoader(TensorDataset(torch.ones(8, 1))), report=True))
    barrier()


def test_the_report_names_the_rank_that_the_others_wait_for(capfd):
    """Slow data of one rank is seen by its share of waiting, and by who comes late; a rank that reads alone says so."""
    train_with_a_report()
    trained, alone = [line for line in capfd.readouterr().err.splitlines() if " steps of " in line]
    assert re.search(r"test_data_order.py:\d+ epoch 0: rank 0: 8 steps of [\d.]+ ms, \d+% of it waiting", trained)
    share_0, share_1 = (int(share) for share in re.findall(r"(\d+)% of it waiting for data", trained))
    assert share_0 < 30 < share_1
    assert re.search(r"rank 1 holds the others back: .* ms after the first; it waits for data$", trained)
    assert alone.endswith("rank 1: not through yet")
