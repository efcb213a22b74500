"""What the pretended CUDA counts and takes as a real device does: waits, engines, contexts, workspaces."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from fake_cuda.plugin import take_reports

from parallelize import device, distributed

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif("FAKE_CUDA" not in os.environ, reason="needs the pretended CUDA of tests/fake_cuda"),
]


def test_what_waits_is_counted(host_waits: Callable[[], int]) -> None:
    """Each read of a number, synchronize, and copy to memory that is not pinned."""
    x = torch.ones(3, device="cuda")
    waits: list[Callable[[], object]] = [x[0].item, torch.cuda.synchronize, x.cpu, x.nonzero]
    for wait in waits:
        before = host_waits()
        wait()
        assert host_waits() == before + 1
    before = host_waits()
    x.to(torch.empty(3, pin_memory=True), non_blocking=True)
    x.add_(1)
    assert host_waits() == before


def test_copies_and_kernels_run_beside_each_other() -> None:
    """A device has an engine for kernels and one for each direction of copies; each does one thing at a time."""
    host = torch.empty(25_000_000 // 4, pin_memory=True)  # a millisecond at 25 GB/s
    streams = [torch.cuda.Stream() for _ in range(2)]
    millisecond = 1_000_000

    def measured(first: Callable[[], object], second: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        ends, begin = [], torch.cuda.Event(enable_timing=True)
        begin.record()
        for stream, work in zip(streams, (first, second), strict=True):
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                work()
                end = torch.cuda.Event(enable_timing=True)
                end.record()
                ends.append(end)
        torch.cuda.synchronize()
        return max(begin.elapsed_time(end) for end in ends)

    def copy() -> object:
        return host.to("cuda", non_blocking=True)

    def compute() -> None:
        torch.cuda._sleep(millisecond)

    assert measured(copy, compute) == pytest.approx(1.0, abs=0.01)
    assert measured(copy, copy) == pytest.approx(2.0, abs=0.01)
    assert measured(compute, compute) == pytest.approx(2.0, abs=0.01)


def _contexts(work: str) -> Iterator[str]:
    @distributed(gpus=2)
    def run() -> None:
        def touch() -> None:
            stream = torch.cuda.current_stream()
            if work == "an event":
                torch.cuda.Event().record(stream)
            else:
                stream.synchronize()

        thread = threading.Thread(target=touch)
        thread.start()
        thread.join()

    run.all_ranks()
    yield from (report.partition(": ")[2] for report in take_reports())


@pytest.mark.parametrize("work", ["a stream", "an event"])
def test_a_thread_without_a_device_makes_a_context(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on device 0: asking about its stream there takes memory of another rank's device."""
    monkeypatch.setenv("FAKE_CUDA_ONE_CONTEXT", "1")
    assert list(_contexts(work)) == ["a second context, on cuda:0"]


@pytest.mark.parametrize(("config", "mebibytes"), [(None, 32), (":16:8", 0.125), (":4096:8", 32)])
def test_the_first_product_takes_a_workspace(
    config: str | None, mebibytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As cuBLAS on a large GPU, for each stream, from the memory that torch counts."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)

    @distributed(gpus=2)
    def taken() -> list[float]:
        x, found = torch.ones(8, 8, device=device()), []
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            before = torch.cuda.memory_allocated()
            with torch.cuda.stream(stream):
                stream.wait_stream(torch.cuda.default_stream())
                y = x @ x
                y = y @ x
            del y
            torch.cuda.synchronize()
            found.append((torch.cuda.memory_allocated() - before) / 2**20)
        return found

    assert taken() == [mebibytes, mebibytes]
