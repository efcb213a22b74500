"""Ranks whose inputs of the first step are bitwise equal are warned once, at that step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from zoo import Mlp

from parallelize import all_gather, distributed, parallel_model, rank, shard_loader

STEPS = 6


def loader() -> DataLoader[Any]:
    data = torch.randn(8 * STEPS, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(data), batch_size=4)


def divided() -> DataLoader[Any]:
    data = loader().dataset
    return DataLoader(Subset(data, range(rank(), len(data), 2)), batch_size=4, shuffle=True)


def fit(model: nn.Module, batches: Any, loss_of: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with parallel_model(model, optimizers=optimizer, **options):
        for (batch,) in batches:
            optimizer.zero_grad()
            loss_of(model(batch)).backward()
            optimizer.step()


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def gathered_criterion() -> None:
    encoder, criterion = Mlp(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*encoder.parameters(), *criterion.parameters()], 0.1)
    with parallel_model(encoder, criterion):
        for (batch,) in shard_loader(loader()):
            features = all_gather(encoder(batch)).reshape(-1, 2)
            optimizer.zero_grad()
            square(criterion(features)).backward()
            optimizer.step()


def dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 1))


def constant() -> Iterator[Any]:
    return iter([next(iter(loader()))] * STEPS)


SAME = {
    "no shard_loader": lambda: fit(dropout(), loader(), square),
    "fsdp": lambda: fit(Mlp(), loader(), square, backend="fsdp"),
    "a single step": lambda: fit(Mlp(), list(constant())[:1], square),
}
OTHER = {
    "shard_loader": lambda: fit(dropout(), shard_loader(loader()), square),
    "fsdp": lambda: fit(Mlp(), shard_loader(loader()), square, backend="fsdp"),
    "divided by hand": lambda: fit(dropout(), divided(), square),
    "gathered features": gathered_criterion,
    "drawn by each rank": lambda: fit(dropout(), ([torch.randn(4, 6)] for _ in range(STEPS)), square),
}


@distributed(processes=2)
def train(programs: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    results = {}
    for name, program in programs.items():
        print(name, file=sys.stderr)
        results[name] = program()
    return results


@pytest.mark.parametrize("name", SAME)
def test_ranks_that_read_the_same_data_are_warned_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At the line of the optimizer's step; a second block is not warned of again, nor the loop."""
    train({name: SAME[name], "again": SAME[name]})
    err = capsys.readouterr().err
    assert err.count("2 ranks read the same data: the inputs of ") == 1
    assert "reads all" not in err
    assert "Wrap the loader in shard_loader" in err
    assert "test_same_data.py" in err.partition("UserWarning")[0]


def test_ranks_that_do_not_are_not_warned(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor are those of which only some inputs are equal, as by a gather."""
    train(OTHER)
    assert capsys.readouterr().err.splitlines() == list(OTHER)
