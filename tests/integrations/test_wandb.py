"""Rank 0 makes one run of Weights & Biases, offline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallelize import all_reduce, distributed, is_main, rank

pytestmark = pytest.mark.slow

pytest.importorskip("wandb", reason="wandb is not installed")


@distributed(processes=2)
def train(folder: str) -> None:
    import wandb

    run = wandb.init(project="digits", dir=folder, mode="offline") if is_main() else None
    for step in range(3):
        mean = all_reduce(torch.tensor(step + rank() / 2), "mean").item()
        if run is not None:
            run.log({"loss": mean}, step=step)
    if run is not None:
        run.finish()


def test_one_run_with_the_mean_of_all_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The folder has one run, whose summary is the last mean."""
    train(str(tmp_path))
    assert len([*tmp_path.glob("wandb/offline-run-*")]) == 1
    assert "loss 2.25\n" in capfd.readouterr().err
