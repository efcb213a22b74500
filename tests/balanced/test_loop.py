"""A complete training loop: loader, checkpoint and backend="balanced" under a decorator."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from balanced.models import Gpt, seeded
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import distributed, load, parallel_model, save, shard_loader
from parallelize.backends.balanced.plugin import BalancedBackend

BACKEND = BalancedBackend(devices=("cpu", "cpu"), microbatches=4)
TOKENS = torch.randint(11, (22, 8), generator=torch.Generator().manual_seed(0))


def train(model: Any, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for (tokens,) in loader:
        logits = model(tokens)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()


def test_a_loop_with_loader_and_checkpoint(tmp_path: Path) -> None:
    """With shard_loader, save and load, a pipelined model ends with the plain loop's weights."""
    plain = seeded(Gpt)
    loader = DataLoader(TensorDataset(TOKENS), batch_size=8)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        train(plain, optimizer, loader)

    @distributed(backend=BACKEND, processes=1)
    def pipelined() -> dict[str, torch.Tensor]:
        model = seeded(Gpt)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        with parallel_model(model):
            train(model, optimizer, shard_loader(loader))
            save(tmp_path / "run.pt", model=model, optimizer=optimizer)
        model = seeded(lambda: Gpt(tied=True))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        with parallel_model(model):
            load(tmp_path / "run.pt", model=model, optimizer=optimizer)
            train(model, optimizer, shard_loader(loader))
        return copy.deepcopy(model.state_dict())

    for name, value in pipelined().items():
        torch.testing.assert_close(
            value, plain.state_dict()[name], rtol=1e-3, atol=1e-4, msg=lambda t, n=name: f"{n}: {t}"
        )
