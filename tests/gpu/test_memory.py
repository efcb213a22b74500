"""fsdp of a model that does not fit on one device: a device holds its shards, and one block at a time.

The peaks are those of tensors. A limit of the memory would be one of the allocator's segments, too, of 2 or 20 MiB.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cublas import take_workspaces
from torch import nn

from parallelize import FSDPBackend, device, distributed, load, parallel_model, save

pytestmark = pytest.mark.gpu2

WIDTH, BLOCKS = 256, 24


def make() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)])


@distributed(gpus=2, seed=0)
def train(backend: FSDPBackend, path: Path) -> tuple[list[float], float]:
    """Return the losses, and the most that this device has held, in sizes of the model."""
    model = make()
    size = sum(parameter.nbytes for parameter in model.parameters())
    take_workspaces(device())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    losses = []
    with parallel_model(model, backend=backend):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            loss = model(torch.ones(2, WIDTH, device=device())).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        save(path, model=model, optimizer=optimizer)
        load(path, model=model, optimizer=optimizer)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    return losses, (torch.cuda.max_memory_allocated() - before) / size


@pytest.mark.parametrize(
    ("backend", "most"),
    [(FSDPBackend(cpu_offload=True), 1 / 3), (FSDPBackend(), 1.3)],
    ids=["offloaded", "half of the weights and gradients"],
)
def test_a_model_that_does_not_fit(backend: FSDPBackend, most: float, tmp_path: Path) -> None:
    """At the entry, in training, at save and load, and at the end of the block, which gives it back on the CPU."""
    for losses, held in train.all_ranks(backend, tmp_path / "last"):
        assert losses[0] > losses[1] > losses[2]
        assert held <= most
