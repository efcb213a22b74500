"""fsdp of a model that does not fit on one device: a device holds its shards, and one block at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from parallelize import FSDPBackend, device, distributed, load, parallel_model, save

pytestmark = pytest.mark.gpu2

WIDTH, BLOCKS = 256, 24


def make() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)])


@distributed(gpus=2, seed=0)
def train(backend: FSDPBackend, share: float, path: Path) -> list[float]:
    model = make()
    own = sum(each.nbytes for each in model.parameters())
    total = torch.cuda.get_device_properties(device()).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + share * own) / total)
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
    assert {each.device.type for each in model.parameters()} == {"cpu"}
    return losses


@pytest.mark.parametrize(
    ("backend", "share"),
    [(FSDPBackend(cpu_offload=True), 1 / 3), (FSDPBackend(), 1.3)],
    ids=["offloaded", "half of the weights and gradients"],
)
def test_a_model_that_does_not_fit(backend: FSDPBackend, share: float, tmp_path: Path) -> None:
    """At the entry, in training, at save and load, and at the end of the block, which gives it back on the CPU."""
    losses = train(backend, share, tmp_path / "last")
    assert losses[0] > losses[1] > losses[2]
