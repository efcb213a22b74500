"""What the guide `differences.md` says of two processes beside one, and how to get the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import all_reduce, broadcast, distributed, parallel_model, shard_loader

pytestmark = pytest.mark.slow

SAMPLES = 24
BATCH_SIZE = 4


def dataset() -> TensorDataset:
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


@distributed(processes=2)
def train(model: nn.Module, batch_size: int, batch: Any) -> dict[str, Any]:
    loader = shard_loader(DataLoader(dataset(), batch_size=batch_size, shuffle=True), batch=batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = []
    losses = []
    with parallel_model(model):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sizes.append(len(x))
            losses.append(loss.item())
        mean_of_last_step = all_reduce(loss.detach(), "mean").item()
    return {
        "steps": len(loader),
        "sizes": sizes,
        "last loss": losses[-1],
        "mean of last step": mean_of_last_step,
        "mean of epoch": loader.mean(losses),
    }


def run(*, processes: int, batch_size: int, batch: str) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Return the trained weights, and what each rank has returned."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    returned = train.options(processes=processes).all_ranks(model, batch_size, batch)
    return model.weight.detach(), returned


def test_a_batch_of_each_process_makes_larger_and_fewer_steps() -> None:
    """Two processes train what one process trains with twice the batch, at the same learning rate."""
    weights, returned = run(processes=2, batch_size=BATCH_SIZE, batch="per_process")
    of_one, returned_by_one = run(processes=1, batch_size=2 * BATCH_SIZE, batch="per_process")
    steps = SAMPLES // (2 * BATCH_SIZE)
    assert [values["steps"] for values in returned] == [steps, steps]
    assert [values["sizes"] for values in returned] == [[BATCH_SIZE] * steps] * 2
    assert returned_by_one[0]["sizes"] == [2 * BATCH_SIZE] * steps
    torch.testing.assert_close(weights, of_one)


def test_a_divided_batch_makes_the_steps_of_one_process() -> None:
    """Number of steps, weights and the means of losses are those of one process."""
    weights, returned = run(processes=2, batch_size=BATCH_SIZE, batch="global")
    of_one, (alone,) = run(processes=1, batch_size=BATCH_SIZE, batch="per_process")
    torch.testing.assert_close(weights, of_one)
    for values in returned:
        assert values["steps"] == alone["steps"]
        assert values["mean of last step"] == pytest.approx(alone["last loss"], rel=1e-5)
        assert values["mean of epoch"] == pytest.approx(alone["mean of epoch"], rel=1e-5)


def test_a_printed_loss_is_of_the_samples_of_its_rank() -> None:
    """The losses of the ranks differ, and their mean is that of the step."""
    _, (first, second) = run(processes=2, batch_size=BATCH_SIZE, batch="global")
    assert first["last loss"] != second["last loss"]
    mean = (first["last loss"] + second["last loss"]) / 2
    assert first["mean of last step"] == pytest.approx(mean, rel=1e-6)


@distributed(processes=2)
def draw() -> dict[str, float]:
    before = torch.rand(1).item()
    with parallel_model(nn.Linear(1, 1)):
        inside = torch.rand(1).item()
        shared = broadcast(torch.rand(1).item())
        torch.manual_seed(5)
        seeded = torch.rand(1).item()
    return {"before": before, "inside": inside, "shared": shared, "seeded": seeded, "after": torch.rand(1).item()}


def test_random_numbers_differ_inside_a_block_only() -> None:
    """Rank 0 draws the numbers of one process; the other rank has its own inside of the block."""
    torch.manual_seed(0)
    (alone,) = draw.options(processes=1).all_ranks()
    torch.manual_seed(0)
    first, second = draw.all_ranks()
    assert first == alone
    assert second["inside"] != first["inside"]
    del first["inside"], second["inside"]
    assert second == first
