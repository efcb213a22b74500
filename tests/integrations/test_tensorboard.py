"""Rank 0 writes values that are reduced over all ranks to TensorBoard."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from parallelize import all_reduce, distributed, is_main, parallel_model, rank

pytestmark = pytest.mark.slow

pytest.importorskip("tensorboard", reason="tensorboard is not installed")


@distributed(processes=2)
def train(folder: str) -> list[float]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder) if is_main() else None
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel_model(model):
        for step in range(3):
            loss = (model(torch.ones(1, 2)) - rank()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = all_reduce(loss.detach(), "mean")
            if writer is not None:
                writer.add_scalar("loss", mean, step)
    if writer is not None:
        writer.close()
    return [loss.item(), mean.item()]


def test_one_file_with_the_mean_of_all_ranks(tmp_path: Path) -> None:
    """The folder has one event file, with the mean loss of both processes."""
    (loss_0, mean), (loss_1, _) = train.all_ranks(str(tmp_path))
    (file,) = tmp_path.iterdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of protobuf and NumPy, in tensorboard's own files
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(file)).Reload().Scalars("loss")
    assert [event.step for event in events] == [0, 1, 2]
    assert events[-1].value == pytest.approx(mean)
    assert mean == pytest.approx((loss_0 + loss_1) / 2)
    assert loss_0 != pytest.approx(loss_1)
