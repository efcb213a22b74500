"""A run on the CPU asks nothing of its machine's GPUs: each worker would initialize the driver, or make a context."""

from __future__ import annotations

import contextlib
import time
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from parallelize import barrier, checkpoints, device, distributed, parallel_model, rank, save, shard_loader
from parallelize.run.context import current

pytestmark = pytest.mark.gpu


def record_questions(questions: list[str]) -> None:
    """Record who asks the driver for its devices; torch.cuda.is_available() initializes it so."""
    count_devices = torch._C._cuda_getDeviceCount

    def recording() -> int:
        callers = reversed(traceback.extract_stack()[:-1])
        questions.append(" < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in callers))
        return count_devices()

    torch._C._cuda_getDeviceCount = recording


@distributed(processes=2, seed=0)
def train(backend: str, folder: Path, *, in_background: bool) -> list[str]:
    questions: list[str] = []
    record_questions(questions)
    assert device() == torch.device("cpu")
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    data = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4, shuffle=True)
    with parallel_model(model, backend=backend):
        optimizer = torch.optim.SGD(
            model.parameters(), 0.1, momentum=0.9
        )  # Adam of torch 2.13 asks, to learn of captures
        loader = shard_loader(data)
        objects = {"model": model, "optimizer": optimizer, "loader": loader}
        with checkpoints(folder / "run", every=2, in_background=in_background, **objects) as saved:
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                saved.step()
        save(folder / "last", model=model)
    watch = current().watchdog._watch
    assert watch is not None
    while watch._facts is None:  # until hang detection has looked
        time.sleep(0.05)
    facts = watch._facts
    assert facts["memory_bytes"] > 0
    barrier()
    if backend == "fsdp":
        questions.clear()  # torch's own, of FakeTensorMode
    if torch.cuda.is_initialized():
        questions.append("CUDA is initialized")
    return questions


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_a_run_on_the_cpu_leaves_gpus_alone(backend: str, in_background: bool, tmp_path: Path) -> None:
    """Its checkpoints are in plain memory, hang detection and graph capture ask no driver."""
    assert train.all_ranks(backend, tmp_path, in_background=in_background) == [[], []]


def use_a_gpu() -> list[str]:
    questions: list[str] = []
    record_questions(questions)
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda") if rank() else torch.cuda.is_available()
    return questions + ["CUDA is initialized"] * torch.cuda.is_initialized()


def test_a_run_that_uses_gpus_is_seen() -> None:
    """Without this, the test above could not fail."""
    asked, initialized = distributed(processes=2)(use_a_gpu).all_ranks()
    assert any(callers.startswith("__init__.py") for callers in asked)
    assert "CUDA is initialized" in initialized
