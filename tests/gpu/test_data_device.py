"""Batches copied ahead on a real device: beside its work, never read too early, never overwritten too soon."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset

from parallelize import device, distributed, shard_loader
from parallelize.data.device_prefetch import on_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MEGABYTE = 2**20


class Numbered(Dataset):
    """Batches of a size, each full of its number."""

    def __init__(self, length, size_bytes):
        self.length, self.size = length, size_bytes // 4

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((self.size,), float(index))


def loader(length, size_bytes, workers=0):
    return DataLoader(Numbered(length, size_bytes), batch_size=None, num_workers=workers)


def busy(milliseconds):
    """Keep the current stream at work, without the host waiting."""
    torch.cuda._sleep(int(milliseconds * 1e6))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_on_the_device_in_order(workers):
    """Whatever a step does in the meantime, each batch holds what the dataset gave."""
    for number, batch in enumerate(shard_loader(loader(12, 8 * MEGABYTE, workers))):
        assert batch.device == device()
        busy(1)
        assert batch.min().item() == batch.max().item() == number


def test_containers_and_objects_arrive():
    """Nested ones, and those that move themselves."""
    batches = [{"x": (torch.ones(3), "text"), "packed": pack_sequence([torch.ones(2)])}]
    (batch,) = on_device(iter(batches), torch.device("cuda", 0), prefetch=2)
    assert batch["x"][0].device.type == batch["packed"].data.device.type == "cuda"
    assert batch["x"][1] == "text"


def test_a_step_reads_no_batch_before_its_copy():
    """The host runs ahead of a busy device: sums taken without waiting are those of the right batches."""
    sums = []
    for batch in shard_loader(loader(20, 16 * MEGABYTE)):
        busy(2)
        sums.append(batch.sum())
    size = 16 * MEGABYTE // 4
    assert [each.item() / size for each in sums] == list(map(float, range(20)))


def test_memory_is_not_reused_before_it_was_read():
    """Each batch is poisoned by the step after it was used: no later batch is touched, and no earlier read sees it."""
    sums = []
    for batch in shard_loader(loader(20, 16 * MEGABYTE)):
        busy(2)
        sums.append(batch.sum())
        batch.fill_(float("nan"))
        del batch
    size = 16 * MEGABYTE // 4
    assert [each.item() / size for each in sums] == list(map(float, range(20)))


def test_a_broken_loop_leaves_its_memory_clean():
    """What was copied ahead and never used does not overwrite what takes its memory."""
    for _ in range(5):
        batches = iter(shard_loader(loader(8, 64 * MEGABYTE)))
        next(batches)
        batches.close()
        other = torch.zeros(3 * 64 * MEGABYTE // 4, device=device())
        torch.cuda.synchronize()
        assert other.count_nonzero().item() == 0


def test_copies_run_beside_the_work():
    """By the device's own clock: steps that take as long as their copies take no longer together than alone."""
    size = 256 * MEGABYTE
    batches = [torch.ones(size // 4).pin_memory() for _ in range(2)] * 6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed(work):
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def serial():
        for batch in batches:
            batch.to("cuda", non_blocking=True)
            busy(copying)

    def overlapped():
        for _ in on_device(iter(batches), torch.device("cuda", 0), prefetch=2):
            busy(copying)

    copying = 0
    serial()
    copying = timed(serial) / len(batches)
    assert timed(overlapped) < 0.8 * timed(serial)


def test_memory_stays_bounded():
    """A host that runs far ahead of the device holds no more batches there than are ahead and in use."""
    size = 32 * MEGABYTE
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for batch in on_device(iter([torch.ones(size // 4).pin_memory()] * 40), torch.device("cuda", 0), prefetch=2):
        busy(2)
        batch.sum()
    assert torch.cuda.max_memory_allocated() - before <= 5 * size


def test_another_stream_may_use_a_batch():
    """A loop on a stream of the user's own sees the right values, too."""
    stream, sums = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        for batch in shard_loader(loader(10, 16 * MEGABYTE)):
            busy(1)
            sums.append(batch.sum())
    stream.synchronize()
    assert [each.item() / (4 * MEGABYTE) for each in sums] == list(map(float, range(10)))


def test_to_device_can_be_turned_off():
    """Then batches stay where the loader made them."""
    assert next(iter(shard_loader(loader(2, MEGABYTE), to_device=False))).device.type == "cpu"


def test_every_rank_gets_its_own_share_on_its_device():
    """Two ranks on one GPU over gloo."""

    @distributed(gpus=[0, 0], process_group_backend="gloo")
    def train():
        return [(batch.device.type, batch[0].item()) for batch in shard_loader(loader(4, MEGABYTE))]

    with pytest.warns(UserWarning, match="shares a GPU between ranks"):
        assert train.all_ranks() == [[("cuda", 0.0), ("cuda", 2.0)], [("cuda", 1.0), ("cuda", 3.0)]]
