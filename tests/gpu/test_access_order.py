"""The pretended CUDA reports accesses that a real device would not order: prefetching without a wait is found."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_cuda.plugin import take_reports

from parallelize import distributed
from parallelize.data.device_prefetch import move_batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("FAKE_CUDA" not in os.environ, reason="needs the pretended CUDA of tests/fake_cuda"),
]

SIZE = 1000


class DeafStream(torch.Stream):
    """A stream that waits for nothing."""

    def wait_event(self, event: torch.Event) -> None:
        """Return without waiting."""

    def wait_stream(self, stream: torch.Stream) -> None:
        """Return without waiting."""


def prefetch() -> list[float]:
    """Read each batch, and overwrite it: its memory is used again for a later one."""
    batches = iter([torch.full((SIZE,), float(each)).pin_memory() for each in range(6)])
    means = []
    for batch in move_batches(batches, torch.device("cuda", 0), prefetch=2):
        means.append(batch.mean())
        batch.fill_(float("nan"))
        del batch
    return [each.item() for each in means]


def deaf_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let copies start before the memory is free."""
    monkeypatch.setattr(torch, "Stream", DeafStream)


def deaf_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps read batches before they are copied."""
    current = torch.accelerator.current_stream

    def current_stream(device: Any = None) -> torch.Stream:
        found = current(device)
        identity = {name: getattr(found, name) for name in ("stream_id", "device_index", "device_type")}
        return DeafStream(**identity)

    monkeypatch.setattr(torch.accelerator, "current_stream", current_stream)


def test_prefetching_is_ordered() -> None:
    """With both waits, nothing is reported, and the means are right."""
    assert prefetch() == [0, 1, 2, 3, 4, 5]
    assert take_reports() == []


@pytest.mark.parametrize(
    ("mutate", "access"), [(deaf_copies, "write by copy_ to the device"), (deaf_steps, "read by aten::mean")]
)
def test_a_missing_wait_is_reported(
    mutate: Callable[[pytest.MonkeyPatch], None], access: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait on either side of prefetching, the access that came too early is named."""
    mutate(monkeypatch)
    prefetch()
    monkeypatch.undo()
    assert any(access in each for each in take_reports())


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
