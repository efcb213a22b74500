"""Rank 0 logs to Weights & Biases, offline. Not in the extra `integrations`, because wandb is 100 MB."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from parallelize import all_reduce, distributed, is_main, parallel_model, rank

pytestmark = pytest.mark.slow

wandb = pytest.importorskip("wandb", reason="wandb is not installed")


@distributed(processes=2)
def train(folder: str) -> tuple[float, float | None]:
    run = wandb.init(mode="offline", dir=folder, project="digits", config={"lr": 0.1}) if is_main() else None
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel_model(model):
        for _ in range(3):
            loss = (model(torch.ones(1, 2)) - rank()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = all_reduce(loss.detach(), "mean").item()
            if run is not None:
                run.log({"loss": mean})
    if run is None:
        return mean, None
    logged = run.summary["loss"]
    run.finish()
    return mean, logged


def test_one_run_with_the_mean_of_all_ranks(tmp_path: Path) -> None:
    """One offline run ends with the mean loss; its service process ends with the workers."""
    (mean_0, logged_0), (mean_1, logged_1) = train.all_ranks(str(tmp_path))
    assert mean_0 == mean_1 == pytest.approx(logged_0)
    assert logged_1 is None
    runs = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 1
    assert [path.suffix for path in runs[0].glob("*.wandb")] == [".wandb"]
