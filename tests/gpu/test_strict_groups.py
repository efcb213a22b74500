"""Groups of the pretended CUDA are as strict as NCCL's, which compares nothing and does not hold the host."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_cuda.plugin import take_reports
from torch import Tensor

from parallelize import device, distributed, rank

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif("FAKE_CUDA" not in os.environ, reason="needs the pretended CUDA of tests/fake_cuda"),
]


def test_the_default_group_is_bound_to_the_device() -> None:
    """A group of gloo alone cannot be made for the CPU only, as with NCCL."""

    @distributed(gpus=2)
    def groups() -> tuple[str, torch.device, str]:
        dist.new_group(backend="gloo")
        with pytest.raises(RuntimeError, match="No backend type associated with device type cuda"):
            dist.new_group(backend="cpu:gloo")
        return dist.get_backend_config(), dist.group.WORLD.bound_device_id, dist.get_backend()

    for number, (config, bound, _) in enumerate(groups.all_ranks()):
        assert config == "cpu:gloo,cuda:nccl"
        assert bound == torch.device("cuda", number)


def refused(x: Tensor, *options: Any) -> str:
    try:
        dist.all_reduce(x, *options)
    except (TypeError, ValueError) as error:
        return str(error).splitlines()[0]
    return ""


def test_what_nccl_refuses() -> None:
    """Tensors with gaps or of another order, other dtypes, other reductions; channels_last is contiguous."""

    @distributed(gpus=2)
    def messages() -> list[str]:
        image = torch.ones(2, 3, 4, 4, device=device())
        return [
            refused(torch.ones(3, 4, device=device()).t()),
            refused(image.permute(3, 2, 1, 0)),
            refused(image[:, :2]),
            refused(torch.ones(2, dtype=torch.int16, device=device())),
            refused(torch.ones(2, dtype=torch.int32, device=device()), dist.ReduceOp.BOR),
            refused(image.to(memory_format=torch.channels_last)),
            refused(torch.ones(2, dtype=torch.bool, device=device()), dist.ReduceOp.MAX),
        ]

    contiguous = "Tensors must be contiguous"
    *strides, dtype, reduction, channels_last, boolean = messages()
    assert strides == [contiguous, contiguous, contiguous]
    assert "not supported for NCCL" in dtype
    assert "Cannot use ReduceOp" in reduction
    assert (channels_last, boolean) == ("", "")


@pytest.mark.parametrize("other", ["size", "dtype", "operation"])
def test_what_nccl_does_not_compare_is_an_error_here(other: str) -> None:
    """Real ranks would hang, or have garbage: each rank gets an error, and the test a report."""

    @distributed(gpus=2)
    def differ() -> str:
        is_other = rank() == 1
        x = torch.ones(3 if other == "size" and is_other else 2, device=device())
        if other == "dtype" and is_other:
            x = x.double()
        work = dist.broadcast(x, 0, async_op=True) if other == "operation" and is_other else None
        work = work or dist.all_reduce(x, async_op=True)
        with pytest.raises(RuntimeError, match="NCCL would hang, or compute garbage"):
            work.wait(timedelta(seconds=60))
        return "error"

    assert differ.all_ranks() == ["error", "error"]
    reports = take_reports()
    assert len(reports) == 2
    assert all("calls all_reduce" in each or "calls broadcast" in each for each in reports)


def test_a_collective_does_not_hold_the_host() -> None:
    """Kernels that need its result are queued behind it; what reads a number waits for the other rank."""

    @distributed(gpus=2)
    def run() -> tuple[list[bool], list[float]]:
        x, other = torch.ones(4, device=device()), torch.ones(4, device=device())
        dist.barrier()
        is_open = not rank()
        if rank() == 1:
            dist.all_reduce(x)
            y = x * 3
            y.add_(1)
            z = torch.cat([y, y]).view(2, 4) @ y
            event = torch.cuda.Event()
            event.record()
            was_open = event.query()
            other.mul_(2)
            dist.send(torch.zeros(1), 0)  # by gloo: rank 0 begins only now
        else:
            dist.recv(torch.zeros(1), 1)
            dist.all_reduce(x)
            y = x * 3
            y.add_(1)
            z = torch.cat([y, y]).view(2, 4) @ y
            was_open, event = is_open, torch.cuda.Event()
            event.record()
        values = [*z.tolist(), *other.tolist()]
        return [was_open, event.query()], values

    (_, values), (queried, others) = run.all_ranks()
    assert queried == [False, True]
    assert values == [196, 196, 1, 1, 1, 1]
    assert others == [196, 196, 2, 2, 2, 2]


def test_a_read_waits_for_a_collective_that_it_does_not_need() -> None:
    """As on a real device: the stream is behind it."""

    @distributed(gpus=2)
    def seconds() -> float:
        x, loss = torch.ones(4, device=device()), torch.full((), 2.0, device=device())
        dist.barrier()
        begin = time.monotonic()
        if rank() == 0:
            time.sleep(1)
        dist.all_reduce(x)
        assert loss.item() == 2
        return time.monotonic() - begin

    assert min(seconds.all_ranks()) > 0.9


def test_a_barrier_holds_the_host() -> None:
    """It is the one collective of NCCL that does."""

    @distributed(gpus=2)
    def seconds() -> float:
        dist.barrier()
        begin = time.monotonic()
        if rank() == 0:
            time.sleep(1)
        dist.barrier()
        return time.monotonic() - begin

    assert min(seconds.all_ranks()) > 0.9


def test_a_lost_rank_is_waited_for_until_an_abort() -> None:
    """As on GPUs of one node: the host goes on then, without values, and the group makes no more collectives."""

    @distributed(gpus=2, timeout="60s")
    def run() -> float | None:
        if rank() == 1:
            return None
        x = torch.ones(4, device=device())
        dist.all_reduce(x)
        threading.Timer(3.0, dist.group.WORLD._get_backend(device()).abort).start()
        begin = time.monotonic()
        x.sum().item()
        seconds = time.monotonic() - begin
        with pytest.raises(dist.DistBackendError, match="was aborted"):
            dist.all_reduce(x)
        return seconds

    seconds = run()
    assert seconds is not None
    assert seconds > 2.5


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_every_collective_over_nccl() -> None:
    """Values are those of gloo, in each form that torch has, also while earlier ones are pending."""

    @distributed(gpus=2)
    def run() -> list[list[float]]:
        mine, number = torch.arange(4.0, device=device()) + rank(), rank()
        doubled, gathered = mine * 2, [torch.empty(4, device=device()) for _ in range(2)]
        dist.all_reduce(doubled)
        dist.all_gather(gathered, doubled)
        together = torch.empty(8, device=device())
        dist.all_gather_into_tensor(together, mine)
        part, mean = torch.empty(2, device=device()), mine.clone()
        dist.reduce_scatter_tensor(part, mine.clone())
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        dist.reduce(reduced := mine.clone(), 0)
        dist.scatter(scattered := torch.empty(2, device=device()), [*mine.view(2, 2)] if number == 0 else None)
        exchanged, received = torch.empty(4, device=device()), torch.empty(4, device=device())
        dist.all_to_all_single(exchanged, mine)
        works = [dist.P2POp(dist.isend, mine, 1 - number), dist.P2POp(dist.irecv, received, 1 - number)]
        for work in dist.batch_isend_irecv(works):
            work.wait()
        collected = [torch.empty(4, device=device()) for _ in range(2)] if number == 0 else None
        dist.gather(mine, collected)
        complex_sum = torch.full((2,), 1j, device=device())
        dist.all_reduce(complex_sum)
        found = [*gathered, together, part, mean, reduced, scattered, exchanged, received, complex_sum.imag]
        return [each.tolist() for each in [*found, *(collected or [])]]

    first, second = run.all_ranks()
    both = [[2, 6, 10, 14]] * 2 + [[0, 1, 2, 3, 1, 2, 3, 4]]
    mean = [0.5, 1.5, 2.5, 3.5]
    end = [[2, 2]]
    sums = [1, 3, 5, 7]
    assert first == [*both, [1, 3], mean, sums, [0, 1], [0, 1, 1, 2], [1, 2, 3, 4], *end, [0, 1, 2, 3], [1, 2, 3, 4]]
    assert second == [*both, [5, 7], mean, [1, 2, 3, 4], [2, 3], [2, 3, 3, 4], [0, 1, 2, 3], *end]
