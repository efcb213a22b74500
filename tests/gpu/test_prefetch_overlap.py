"""Copies of batches run beside the loop's kernels, and neither overtakes the other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from parallelize import shard_loader
from parallelize.data.prefetch import move_batches, pins_memory

pytestmark = pytest.mark.gpu
on_simulated_clock = pytest.mark.skipif(
    "FAKE_CUDA" not in os.environ, reason="needs the pretended CUDA of tests/fake_cuda"
)

DEVICE = torch.device("cuda", 0)
SIZE = 1000
# Its copy takes a millisecond on the pretended device, at 25 GB/s.
BYTES_OF_A_MILLISECOND = 25_000_000


def pinned_batches(count: int) -> Iterator[Tensor]:
    """Yield batches like those of workers, each filled with its number."""
    for number in range(count):
        yield torch.full((SIZE,), float(number)).pin_memory()


def busy(milliseconds: float) -> None:
    torch.cuda._sleep(int(milliseconds * 1e6))


def step_milliseconds(batches: Iterable[Tensor], compute_milliseconds: float) -> list[float]:
    """Return the time from the end of each step to the end of the next."""
    ends = []
    for batch in batches:
        busy(compute_milliseconds)
        batch.sum()
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        ends.append(end)
    torch.cuda.synchronize()
    return [earlier.elapsed_time(later) for earlier, later in pairwise(ends)]


@on_simulated_clock
@pytest.mark.parametrize(
    ("prefetch", "compute_milliseconds", "expected"),
    [
        pytest.param(0, 5.0, 6.0, id="nothing is copied ahead"),
        pytest.param(1, 5.0, 5.0, id="one ahead"),
        pytest.param(2, 5.0, 5.0, id="two ahead"),
        pytest.param(1, 0.5, 1.0, id="copies take longer than steps"),
    ],
)
def test_a_copy_runs_while_the_device_computes(
    prefetch: int,
    compute_milliseconds: float,
    expected: float,
) -> None:
    """With a copy of 1 ms, a step takes the longer of both, and their sum without prefetching."""
    batch = torch.ones(BYTES_OF_A_MILLISECOND // 4).pin_memory()
    batches = move_batches(iter([batch] * 7), DEVICE, prefetch=prefetch, are_fresh=True)
    times = step_milliseconds(batches, compute_milliseconds)
    # The second batch is not copied before the first step is queued.
    assert times[1:] == pytest.approx([expected] * 5, abs=0.01)


class Numbered(Dataset[Tensor]):
    """Four samples are a batch whose copy takes a millisecond."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((BYTES_OF_A_MILLISECOND // 16,), float(index))


@on_simulated_clock
def test_batches_of_workers_are_copied_beside_the_steps() -> None:
    """The loop over a sharded DataLoader computes all the time, with default options."""
    loader = DataLoader(Numbered(), batch_size=4, num_workers=2)
    times = step_milliseconds(shard_loader(loader), 5.0)
    assert times[1:] == pytest.approx([5.0] * 4, abs=0.01)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_batch_that_is_dropped_unused_is_not_written_any_more(prefetch: int) -> None:
    """What the loop allocates in its memory has the loop's values."""
    zeros = []
    for batch in move_batches(pinned_batches(8), DEVICE, prefetch=prefetch, are_fresh=True):
        busy(1)
        del batch
        zeros.append(torch.zeros(SIZE, device=DEVICE))
    assert not torch.stack(zeros).any()


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_batch_that_is_kept_is_not_overwritten(prefetch: int) -> None:
    """A loop may keep its batches, or use and drop an old one in a later step."""
    kept: list[Tensor] = []
    means = []
    for batch in move_batches(pinned_batches(9), DEVICE, prefetch=prefetch, are_fresh=True):
        kept.append(batch)
        busy(1)
        if len(kept) > 3:
            oldest = kept.pop(0)
            means.append(oldest.mean())
            oldest.fill_(float("nan"))
            del oldest
    means += [batch.mean() for batch in kept]
    assert [mean.item() for mean in means] == list(range(9))


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_loop_may_change_its_stream(prefetch: int) -> None:
    """No batch is copied to memory that the other stream still reads."""
    other_stream, means = torch.cuda.Stream(), []
    batches = move_batches(pinned_batches(9), DEVICE, prefetch=prefetch, are_fresh=True)
    means.append(next(batches).mean())
    other_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other_stream):
        means.append(next(batches).mean())
        busy(5)
        means.append(next(batches).mean())
    means.extend(batch.mean() for batch in batches)
    torch.cuda.synchronize()
    assert [mean.item() for mean in means] == list(range(9))


def test_a_loop_that_is_left_gives_the_memory_of_its_batches_back() -> None:
    """Copies of batches that the loop has not taken write nothing of what comes after them."""
    batches = move_batches(pinned_batches(8), DEVICE, prefetch=3, are_fresh=True)
    next(batches)
    busy(1)
    next(batches)
    batches.close()
    zeros = torch.zeros(6, SIZE, device=DEVICE)
    rows = [torch.zeros(SIZE, device=DEVICE) for _ in range(6)]
    assert not zeros.any()
    assert not torch.stack(rows).any()


def test_what_a_loader_computes_on_the_device_is_moved_after_it() -> None:
    """A batch may hold tensors of the host, and others that the current stream still writes."""

    def batches() -> Iterator[dict[str, Tensor]]:
        for number in range(4):
            busy(1)
            on_device = torch.full((SIZE,), float(number), device=DEVICE)
            yield {"host": torch.full((SIZE,), float(number)), "device": on_device}

    for number, batch in enumerate(move_batches(batches(), DEVICE, prefetch=1)):
        assert batch["host"].device == batch["device"].device == DEVICE
        assert (batch["host"] + batch["device"]).mean().item() == 2 * number


def test_layouts_stay_and_gradients_reach_the_loader() -> None:
    """Strides of dense tensors are kept; a tensor that needs a gradient gets it."""
    image, weight = torch.ones(2, 3, 4, 4), torch.ones(3, requires_grad=True)
    image = image.to(memory_format=torch.channels_last)
    moved_image, moved_weight = next(move_batches(iter([(image, weight)]), DEVICE, prefetch=1))
    assert moved_image.is_contiguous(memory_format=torch.channels_last)
    moved_weight.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1, 1]


def test_batches_that_the_thread_of_a_loader_has_pinned() -> None:
    """They are copied as they are: every batch has the dataset's values."""
    dataset = torch.arange(24.0)
    loader = DataLoader(dataset, batch_size=4, num_workers=2)
    is_pinned = pins_memory(loader, DEVICE)
    assert is_pinned
    loader = DataLoader(dataset, batch_size=4, num_workers=2, pin_memory=is_pinned)
    host_batches = list(loader)
    assert all(batch.is_pinned() for batch in host_batches)
    batches = list(move_batches(iter(loader), DEVICE, prefetch=2, are_fresh=True))
    assert torch.equal(torch.cat(batches).cpu(), dataset)
