"""Ranks that train on the same data are warned once; legal programs with equal inputs are not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset
from zoo import Mlp

from parallelize import all_gather, distributed, parallel_model, rank, shard_loader

STEPS = 6


def loader(*, shuffle: bool = False) -> DataLoader[Any]:
    data = torch.randn(8 * STEPS, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(data), batch_size=4, shuffle=shuffle)


def drawn() -> DataLoader[Any]:
    data = loader().dataset
    return DataLoader(data, batch_size=4, sampler=RandomSampler(data, replacement=True))


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


def policy_gradient(noise: torch.Generator | None) -> float:
    """Train a policy by REINFORCE: a state moves by the action, and the reward is its distance from 0."""
    torch.manual_seed(0)
    policy, state = Mlp(), torch.ones(4, 6)
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)
    with parallel_model(policy):
        for _ in range(STEPS):
            mean = policy(state)
            action = mean.detach() + torch.randn(mean.shape, generator=noise)
            state = state + action
            optimizer.zero_grad()
            ((action - mean).square() * -state.abs()).mean().backward()
            optimizer.step()
    return state.sum().item()


class Masked(nn.Module):
    """Sees a whole graph; each rank trains other nodes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, graph: torch.Tensor) -> torch.Tensor:
        return self.layer(graph)[rank() :: 2]


def gathered_criterion() -> None:
    encoder, criterion = Mlp(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*encoder.parameters(), *criterion.parameters()], 0.1)
    with parallel_model(encoder), parallel_model(criterion):
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


def shuffled() -> float:
    """Return a random number after the training."""
    torch.manual_seed(0)
    fit(dropout(), loader(shuffle=True), square)
    return torch.rand(()).item()


SAME = {
    "no shard_loader": lambda: fit(dropout(), loader(), square),
    "fsdp": lambda: fit(Mlp(), loader(), square, backend="fsdp"),
    "a constant input": lambda: fit(Mlp(), constant(), square),
    "a private generator": lambda: policy_gradient(torch.Generator().manual_seed(0)),
}
OTHER = {
    "shard_loader": lambda: fit(dropout(), shard_loader(loader()), square),
    "fsdp": lambda: fit(Mlp(), shard_loader(loader()), square, backend="fsdp"),
    "with replacement": lambda: fit(dropout(), drawn(), square),
    "divided by hand": lambda: fit(dropout(), divided(), square),
    "one graph": lambda: fit(Masked(), constant(), square),
    "zero gradients": lambda: fit(Mlp(), constant(), lambda output: 0 * square(output)),
    "gathered features": gathered_criterion,
    "global generators": lambda: policy_gradient(None),
    "too short to tell": lambda: fit(Mlp(), list(constant())[:4], square),
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
    """At the line that calls the model; a second block is not warned of again."""
    train({name: SAME[name], "again": SAME[name]})
    err = capsys.readouterr().err
    assert err.count("2 ranks read the same data: wrap the loader in shard_loader") == 1
    assert "test_same_data.py" in err.partition("UserWarning")[0]


def test_ranks_that_each_read_the_whole_dataset_are_warned_once(capsys: pytest.CaptureFixture[str]) -> None:
    """In another order on each rank: an epoch has twice the steps. Random numbers stay the same."""
    first, again = train(dict.fromkeys(("first", "again"), shuffled)).values()
    err = capsys.readouterr().err
    assert err.count("2 ranks each read all 48 samples of the dataset: wrap the loader in shard_loader") == 1
    assert first == again


def test_ranks_that_do_not_are_not_warned(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor are those whose inputs are equal, but not their gradients, or equal by a gather."""
    ranks = train.all_ranks(OTHER)
    assert capsys.readouterr().err.splitlines() == list(OTHER)
    assert ranks[0]["global generators"] != ranks[1]["global generators"]
