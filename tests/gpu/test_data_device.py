"""Prefetching to a real device: copies overlap with its work, and no memory is read or reused too early."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset

from parallelize import device, distributed, shard_loader
from parallelize.data.prefetch import move_batches

pytestmark = pytest.mark.gpu

MEGABYTE = 2**20


class Numbered(Dataset):
    """Batches of a given size, each filled with its number."""

    def __init__(self, length, size_bytes):
        self.length, self.size = length, size_bytes // 4

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((self.size,), float(index))


def loader(length, size_bytes, workers=0):
    return DataLoader(Numbered(length, size_bytes), batch_size=None, num_workers=workers)


def busy(milliseconds):
    """Keep the current stream busy, without blocking the host."""
    torch.cuda._sleep(int(milliseconds * 1e6))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_on_the_device_in_order(workers):
    """While steps run, each batch has the dataset's values."""
    for number, batch in enumerate(shard_loader(loader(12, 8 * MEGABYTE, workers))):
        assert batch.device == device()
        busy(1)
        assert batch.min().item() == batch.max().item() == number


def test_containers_and_objects_arrive():
    """Nested containers, and objects with their own `to`."""
    batches = [{"x": (torch.ones(3), "text"), "packed": pack_sequence([torch.ones(2)])}]
    (batch,) = move_batches(iter(batches), torch.device("cuda", 0), prefetch=2)
    assert batch["x"][0].device.type == batch["packed"].data.device.type == "cuda"
    assert batch["x"][1] == "text"


def test_memory_is_not_reused_before_it_was_read():
    """Nor before its copy: each batch is filled with NaN after its use, which no other batch and no sum sees."""
    sums = []
    for batch in shard_loader(loader(20, 16 * MEGABYTE)):
        busy(2)
        sums.append(batch.sum())
        batch.fill_(float("nan"))
        del batch
    size = 16 * MEGABYTE // 4
    assert [each.item() / size for each in sums] == list(map(float, range(20)))


def test_a_broken_loop_leaves_its_memory_clean():
    """Unused prefetched copies do not overwrite tensors that reuse their memory."""
    for _ in range(5):
        batches = iter(shard_loader(loader(8, 64 * MEGABYTE)))
        next(batches)
        batches.close()
        other = torch.zeros(3 * 64 * MEGABYTE // 4, device=device())
        torch.cuda.synchronize()
        assert other.count_nonzero().item() == 0


def test_memory_stays_bounded():
    """While the host runs far ahead, the device holds only prefetched batches and those in use."""
    size = 32 * MEGABYTE
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    # Reserved memory: it also counts batches that were dropped, and cannot be used again yet.
    before = torch.cuda.memory_reserved()
    batches = iter([torch.ones(size // 4).pin_memory()] * 40)
    for batch in move_batches(batches, torch.device("cuda", 0), prefetch=2, are_fresh=True):
        busy(2)
        batch.sum()
    assert torch.cuda.max_memory_reserved() - before <= 5 * size


def test_another_stream_may_use_a_batch():
    """A loop on another CUDA stream sees the right values, too."""
    stream, sums = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        for batch in shard_loader(loader(10, 16 * MEGABYTE)):
            busy(1)
            sums.append(batch.sum())
    stream.synchronize()
    assert [each.item() / (4 * MEGABYTE) for each in sums] == list(map(float, range(10)))


def reused(buffer):
    """Yield six batches in the same memory."""
    for number in range(6):
        yield buffer.fill_(number)


BUFFERS = {
    "on the device": lambda: torch.empty(MEGABYTE, device="cuda"),
    "pinned": lambda: torch.empty(MEGABYTE, pin_memory=True),
    "pageable": lambda: torch.empty(MEGABYTE),
}


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_loader_that_reuses_its_buffer(kind, prefetch):
    """Each step reads its own batch, wherever the loader's buffer is and however busy the device."""
    sums = []
    for batch in shard_loader(reused(BUFFERS[kind]()), prefetch=prefetch):
        busy(2)
        sums.append(batch.sum())
    assert [each.item() / MEGABYTE for each in sums] == [0, 1, 2, 3, 4, 5]


def test_a_loader_that_reuses_a_numpy_array():
    """An array next to a tensor stays that of its step."""

    def batches():
        ids = np.empty(2)
        for number in range(6):
            ids.fill(number)
            yield torch.full((4,), float(number)), ids

    assert [(x.sum().item() / 4, ids[0]) for x, ids in shard_loader(batches())] == [(each, each) for each in range(6)]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_cannot_be_pinned_as_they_are(workers):
    """Expanded tensors are copied to pinned memory first, also those of DataLoader workers."""
    dataset = Expanded()
    found = list(shard_loader(DataLoader(dataset, batch_size=None, num_workers=workers)))
    assert all(torch.equal(batch.cpu(), dataset[number]) for number, batch in enumerate(found))
    assert len(found) == len(dataset)


class Expanded(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 3:
            raise IndexError
        return torch.full((1, 4), float(index)).expand(5, 4)


def test_a_dataset_on_the_device():
    """Samples that are on the device already are batched and returned there."""
    x = torch.arange(6.0, device="cuda")
    assert [batch.tolist() for batch in shard_loader(DataLoader(x, batch_size=2))] == [[0, 1], [2, 3], [4, 5]]


def test_the_first_batch_does_not_wait_for_the_second():
    """The step of the first batch begins before the loader makes another."""
    made = []

    def batches():
        for number in range(3):
            made.append(number)
            yield torch.ones(1)

    next(iter(shard_loader(batches())))
    assert made == [0]


def test_to_device_can_be_turned_off():
    """With to_device=False, batches stay on the CPU."""
    assert next(iter(shard_loader(loader(2, MEGABYTE), to_device=False))).device.type == "cpu"


def test_every_rank_gets_its_shard_on_its_device():
    """Two ranks on one GPU over gloo."""

    @distributed(gpus=[0, 0], process_group_backend="gloo")
    def train():
        return [(batch.device.type, batch[0].item()) for batch in shard_loader(loader(4, MEGABYTE))]

    with pytest.warns(UserWarning, match="names a GPU more than once"):
        assert train.all_ranks() == [[("cuda", 0.0), ("cuda", 2.0)], [("cuda", 1.0), ("cuda", 3.0)]]
