"""A loss that compares the samples of a batch is warned of once, where the ranks share the batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from parallelize import all_gather, all_reduce, distributed, parallel_model, shard_loader

WORLD = 2
TOLD = "the loss compares the samples of a batch with each other"

# Each takes the features of a batch and its targets.
Loss = Callable[[Tensor, Tensor], Tensor]


def vicreg(x: Tensor, _: Tensor) -> Tensor:
    x = x - x.mean(0)
    covariance = x.T @ x / (len(x) - 1)
    spread = F.relu(1 - torch.sqrt(x.var(0) + 1e-4)).mean()
    return spread + covariance.pow(2).sum() - covariance.diagonal().pow(2).sum()


def clip(x: Tensor, y: Tensor) -> Tensor:
    targets = torch.nn.functional.normalize(torch.stack([y, y**2, 1 - y], 1))
    return F.cross_entropy(F.normalize(x[:, :3]) @ F.normalize(targets * x[:, 3:]).T, torch.arange(len(x)))


def dice(x: Tensor, y: Tensor) -> Tensor:
    p = x.sigmoid()
    return 1 - (2 * (p.T * y).sum() + 1) / (p.sum() + y.sum() + 1)


def dice_of_gathered_sums(x: Tensor, y: Tensor) -> Tensor:
    """The sums of other ranks are constants, which bring no operation into the graph."""
    p = x.sigmoid()
    local = torch.stack([(p.T * y).sum(), p.sum() + y.sum()])
    common, total = local + (all_reduce(local.detach(), "sum") - local).detach()
    return 1 - (2 * common + 1) / (total + 1)


def gathered(loss: Loss) -> Loss:
    """Return the loss of the samples of all ranks, in the order in which one process has them."""

    def of_all(x: Tensor, y: Tensor) -> Tensor:
        return loss(all_gather(x).transpose(0, 1).flatten(0, 1), all_gather(y).T.flatten())

    return of_all


def cross_entropy(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, (y * 5.9).long(), label_smoothing=0.1)


def mean_square(x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(x.mean(1), y) + 0.1 * F.normalize(x, dim=1).sum(1).pow(2).mean()


def fit(loss_of: Loss, *, batch: str = "global", **options: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Train a model; return its weights, and the warnings of losses that compare samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 4, generator=generator).double(), torch.rand(24, generator=generator).double())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with parallel_model(model, **options):
            for x, y in shard_loader(DataLoader(data, batch_size=8), batch=batch):
                loss = loss_of(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    messages = [str(warning.message) for warning in caught]
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return weights, [message for message in messages if TOLD in message]


LOSSES = (vicreg, clip, dice)
ORDINARY = (cross_entropy, mean_square)


def outcomes(*, has_backends: bool) -> dict[str, tuple[dict[str, Tensor], list[str]]]:
    found = {}
    for loss in (*LOSSES, *ORDINARY):
        found[loss.__name__] = fit(loss)
    for loss in LOSSES:
        found[f"gathered {loss.__name__}"] = fit(gathered(loss))
    found["sums"] = fit(dice_of_gathered_sums)
    if has_backends:
        found["fsdp"] = fit(vicreg, backend="fsdp")
        found["fsdp ordinary"] = fit(cross_entropy, backend="fsdp")
        found["tokens"] = fit(dice, batch="per_process", average="sum")
        found["of each rank"] = fit(dice, batch="per_process")
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, tuple[dict[str, Tensor], list[str]]]]:
    """Return the outcomes of one process, and of each of two."""
    run = distributed(processes=WORLD)(outcomes)
    return [run.options(processes=1)(has_backends=False), *run.all_ranks(has_backends=True)]


@pytest.mark.parametrize("loss", [loss.__name__ for loss in LOSSES])
def test_a_loss_that_compares_samples_is_told_with_its_remedy(loss: str, found: list[Any]) -> None:
    """Rank 0 warns once; the weights are not those of one process, and after the remedy they are."""
    single, first, second = found
    (message,) = first[loss][1]
    assert "x = parallelize.all_gather(x).flatten(0, 1)" in message
    assert second[loss][1] == single[loss][1] == []
    with pytest.raises(AssertionError):
        torch.testing.assert_close(first[loss][0], single[loss][0], rtol=1e-6, atol=1e-6)
    weights, messages = first[f"gathered {loss}"]
    assert messages == []
    torch.testing.assert_close(weights, single[loss][0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", [loss.__name__ for loss in ORDINARY])
def test_a_mean_over_samples_is_not_told(loss: str, found: list[Any]) -> None:
    """Its weights are those of one process."""
    single, first, _ = found
    assert first[loss][1] == []
    torch.testing.assert_close(first[loss][0], single[loss][0], rtol=1e-6, atol=1e-6)


def test_it_is_told_under_fsdp_and_where_losses_add_up(found: list[Any]) -> None:
    """With other averages than that of ranks, the ranks' losses are parts of one loss."""
    _, first, _ = found
    assert len(first["fsdp"][1]) == len(first["tokens"][1]) == 1
    assert "use average='ranks'" in first["tokens"][1][0]
    assert first["fsdp ordinary"][1] == []


def test_it_is_not_told_where_the_ranks_have_batches_or_sums_in_common(found: list[Any]) -> None:
    """Each rank has a batch of its own, as under DDP; or a collective has brought the others' sums."""
    _, first, _ = found
    assert first["of each rank"][1] == []
    assert first["sums"][1] == []
