"""Training functions in the shapes of published scripts, in a module that workers import by its name."""

from __future__ import annotations

import copy
from typing import Any

import torch
import worlds.legacy_state
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from worlds import legacy_state

from parallelize import distributed, parallel_model, shard_loader, world_size

X, Y = torch.linspace(-1, 1, 16).view(8, 2), torch.ones(8, 1)
run = distributed(processes=2)


def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Train, and return the first parameter."""
    with parallel_model(model):
        for x, y in shard_loader(DataLoader(TensorDataset(X, Y), batch_size=4 // world_size())):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    return next(model.parameters()).detach().clone()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


model = nn.Linear(2, 1)
parameters = list(model.parameters())


@run
def train_argument(net: nn.Module) -> torch.Tensor:
    return loop(net, sgd(net))


@run
def train_global() -> torch.Tensor:
    assert parameters[0] is model.weight
    return loop(model, sgd(model))


@run
def train_state() -> torch.Tensor:
    weight = loop(legacy_state.model, legacy_state.optimizer)
    legacy_state.history.append(0.5)
    return weight


@run
def train_by_package() -> torch.Tensor:
    return loop(worlds.legacy_state.model, worlds.legacy_state.optimizer)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x))).sum(1, keepdim=True)


class Trainer:
    """As published trainers are: everything is an attribute."""

    shared = nn.Linear(2, 1)

    def __init__(self) -> None:
        self.model = Tied()
        self.alias = [self.model]
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1)
        self.ema = copy.deepcopy(self.model).requires_grad_(False)
        self.history: list[float] = []
        self.epoch = 0

    def fit(self) -> torch.Tensor:
        weight = loop(self.alias[0], self.optimizer)
        for average, parameter in zip(self.ema.parameters(), self.model.parameters(), strict=True):
            average.data.mul_(0.5).add_(parameter.data, alpha=0.5)
        self.scheduler.step()
        self.model.eval()
        return weight

    @run
    def fit_ddp(self) -> torch.Tensor:
        return self.fit()

    @distributed(backend="fsdp", processes=2)
    def fit_fsdp(self) -> torch.Tensor:
        return self.fit()

    @run
    def count(self) -> None:
        self.history.append(0.5)
        self.epoch += 1

    @run
    def fit_shared(self) -> torch.Tensor:
        return loop(self.shared, sgd(self.shared))


class Rebuilt:
    """Its pickle has no model: the workers build another one."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 1)

    def __reduce__(self) -> Any:
        return Rebuilt, ()

    @run
    def fit(self) -> torch.Tensor:
        return loop(self.model, sgd(self.model))
