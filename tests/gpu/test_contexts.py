"""Each rank has a CUDA context on its own device alone: another takes half a gigabyte of another rank's device."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from fake_cuda.plugin import take_reports
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from parallelize import (
    DDPBackend,
    FSDPBackend,
    all_reduce,
    barrier,
    checkpoints,
    device,
    distributed,
    load,
    parallel_model,
    rank,
    save,
    shard_loader,
)
from parallelize.hang_detection import watchdog
from parallelize.hang_detection.watchdog import Watchdog
from parallelize.run.context import current
from parallelize.run.watching import watching

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif("FAKE_CUDA" not in os.environ, reason="needs the pretended CUDA of tests/fake_cuda"),
]


@distributed(gpus=2, seed=0)
def train(backend: object, amp: object, folder: Path) -> float:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    data = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4, shuffle=True, num_workers=1)
    with parallel_model(model, backend=backend, amp=amp):
        optimizer = torch.optim.AdamW(model.parameters())
        loader = shard_loader(data)
        with checkpoints(folder / "run", every=2, model=model, optimizer=optimizer, loader=loader) as saved:
            for (x,) in loader:
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                saved.step()
        save(folder / "last", model=model, optimizer=optimizer)
        load(folder / "last", model=model, optimizer=optimizer)
        barrier()
        time.sleep(1.5 * rank())  # a wait that hang detection looks at
        return all_reduce(loss.item(), "mean")


@pytest.mark.parametrize("amp", [None, "fp16", "O2"])
@pytest.mark.parametrize("backend", [DDPBackend(), FSDPBackend()], ids=["ddp", "fsdp"])
def test_a_rank_has_one_context(backend: object, amp: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the start of the process to its end."""
    monkeypatch.setenv("FAKE_CUDA_ONE_CONTEXT", "1")
    train(backend, amp, tmp_path)
    assert take_reports() == []


def touch_another_device() -> None:
    for each in (rank(), 1 - rank()):
        torch.ones(1, device=f"cuda:{each}")


def test_a_second_context_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that touches another's device is seen."""
    monkeypatch.setenv("FAKE_CUDA_ONE_CONTEXT", "1")
    distributed(gpus=2)(touch_another_device).all_ranks()
    assert sorted(each.partition(": ")[2] for each in take_reports()) == [
        "a second context, on cuda:0",
        "a second context, on cuda:1",
    ]


@distributed(gpus=2)
def device_of_watch_thread() -> int:
    own, seen = current().watchdog, []
    before = own.on_look
    own.on_look = lambda stack, **facts: (before(stack, **facts), seen.append(torch.cuda.current_device()))
    while not seen:
        time.sleep(0.05)
    return seen[0]


def test_the_watch_thread_is_on_the_device_of_its_rank() -> None:
    """NCCL's recorder, which it reads, queries events on the thread's device."""
    assert device_of_watch_thread.all_ranks() == [0, 1]


@distributed(gpus=2)
def device_where_captures_are_allowed() -> int:
    seen = list[int]()
    watchdog._allow_captures = lambda: seen.append(torch.cuda.current_device())
    with watching(Watchdog(), device(), timedelta(minutes=1), since_ns=None):
        while not seen:
            time.sleep(0.05)
    return seen[0]


def test_the_watch_thread_begins_on_the_device_of_its_rank() -> None:
    """Its first call to CUDA's runtime, before it looks at anything, may make a context."""
    assert device_where_captures_are_allowed.all_ranks() == [0, 1]


@distributed(gpus=2)
def device_of_writer(folder: Path) -> int:
    model = nn.Linear(2, 2)
    with parallel_model(model), checkpoints(folder, model=model) as saved:
        return saved._thread._executor.submit(torch.cuda.current_device).result()


def test_the_thread_that_writes_checkpoints_is_on_the_device_of_its_rank(tmp_path: Path) -> None:
    """torch's writer takes the current stream of its thread, and waits for it."""
    assert device_of_writer.all_ranks(tmp_path) == [0, 1]
