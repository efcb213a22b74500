"""The pretended CUDA reports accesses that a real device would not order; prefetching has none."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_cuda.plugin import take_reports

from parallelize import device, distributed, parallel_model
from parallelize.data.prefetch import move_batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("FAKE_CUDA" not in os.environ, reason="needs the pretended CUDA of tests/fake_cuda"),
]

SIZE = 1000


def prefetch() -> list[float]:
    """Read each batch, and overwrite it: its memory is used again for a later one."""
    batches = iter([torch.full((SIZE,), float(each)).pin_memory() for each in range(6)])
    means = []
    for batch in move_batches(batches, torch.device("cuda", 0), prefetch=2):
        means.append(batch.mean())
        batch.fill_(float("nan"))
        del batch
    return [each.item() for each in means]


def test_prefetching_is_ordered() -> None:
    """Nothing is reported, and the means are right."""
    assert prefetch() == [0, 1, 2, 3, 4, 5]
    assert take_reports() == []


def race() -> None:
    x, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.add_(1)


def test_workers_report_too() -> None:
    """An unordered access in a worker is in the report of the process that started it."""
    distributed(gpus=2)(race).all_ranks()
    found = take_reports()
    assert len({each.split(":")[0] for each in found}) == 2
    assert all(" by aten::add" in each for each in found)


def reduce(*, waits: bool) -> float:
    x = torch.full((SIZE,), 1.0, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    if waits:
        work.wait()
    total = x.sum()
    work.wait()
    return total.item()


def test_a_collective_is_waited_for() -> None:
    """It runs on a stream of its own, as NCCL's: a tensor that is read without a wait is reported by every rank."""
    run = distributed(gpus=2)(reduce)
    assert (run(waits=True), take_reports()) == (2.0 * SIZE, [])
    run(waits=False)
    assert len([each for each in take_reports() if "is not ordered after write by a collective" in each]) == 2


class WaitsForNothing:
    """In place of the work of an all-reduce."""

    def wait(self) -> None: ...


def train_without_a_wait() -> None:
    model, all_reduce = torch.nn.Linear(4, 2), dist.all_reduce

    def unordered(*args: Any, **kwargs: Any) -> WaitsForNothing:
        all_reduce(*args, **kwargs)
        return WaitsForNothing()

    with parallel_model(model):
        loss = model(torch.ones(3, 4, device=device())).sum()
        dist.all_reduce = unordered
        loss.backward()
        dist.all_reduce = all_reduce


def test_the_reducer_waits_for_its_collectives() -> None:
    """Without its wait, the copy of the means to the gradients is not ordered after the collective."""
    distributed(gpus=2)(train_without_a_wait).all_ranks()
    assert any("is not ordered after write by a collective" in each for each in take_reports())


def test_an_unordered_access_fails_the_test(pytester: pytest.Pytester) -> None:
    """A test that passes otherwise is in error, with the access in its report."""
    pytester.makepyfile(
        """
        import torch

        def test_race():
            x, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
            with torch.cuda.stream(side):
                x.sum()
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*read by aten::sum on cuda:0, stream * is not ordered after write by aten::fill_*"])


def test_host_reads_before_a_copy_has_ended() -> None:
    """A copy to pinned memory has its values only after a wait, and one from it takes what is there when it runs."""
    device, host = torch.ones(3, device="cuda"), torch.zeros(3, pin_memory=True)
    host.copy_(device, non_blocking=True)
    assert host.isnan().all()
    torch.cuda.synchronize()
    assert host.tolist() == [1, 1, 1]
    device.copy_(host, non_blocking=True)
    host.fill_(5)
    assert device.tolist() == [5, 5, 5]


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_operators_refuse_tensors_of_two_devices(other: str) -> None:
    """As in CUDA, and new memory is NaN."""
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3, device="cuda:0") + torch.ones(3, device=other)
    assert torch.empty(3, device="cuda").isnan().all()
