"""Types of the public API, checked by mypy and pyright in their strict modes and never run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, assert_type

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import parallelize
from parallelize import (
    Amp,
    ConfigError,
    DDPBackend,
    Job,
    LocalLauncher,
    distributed,
    parallel_model,
    shard_loader,
)
from parallelize.block.context import ModelContext


class Net(nn.Module):
    """A model with its own method and attribute."""

    width: int = 8

    def loss(self, x: Tensor) -> Tensor:
        """A method that nn.Module does not have."""
        return x.sum() * self.width


class Critic(nn.Module):
    """Another model."""


# A decorated function keeps its parameters and its result.


@distributed(backend=DDPBackend(), gpus=[0, 1], amp=Amp(level="O2"))
def train(epochs: int, *, lr: float = 0.1) -> tuple[float, list[Tensor]]:
    """Anything."""
    return lr * epochs, []


assert_type(train(3), tuple[float, list[Tensor]])
assert_type(train(epochs=3, lr=0.2), tuple[float, list[Tensor]])
assert_type(train.all_ranks(3, lr=0.2), list[tuple[float, list[Tensor]]])
assert_type(train.options(gpus=4)(3), tuple[float, list[Tensor]])
assert_type(train.options(gpus=4).options(seed=1).all_ranks(3), list[tuple[float, list[Tensor]]])
assert_type(train.explain(), str)
assert_type(train.__wrapped__(3), tuple[float, list[Tensor]])
assert_type(copy.copy(train)(3), tuple[float, list[Tensor]])

train("3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # a wrong argument is an error
train()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]  # so is a missing one
train(3, 0.1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]  # and a positional one for a keyword
train.all_ranks()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]  # all_ranks takes the same arguments


job = train.submit(3)
assert_type(job, Job[tuple[float, list[Tensor]]])
assert_type(job.result(), tuple[float, list[Tensor]])
assert_type(train.submit_many([{"epochs": 3}], at_most=2), list[Job[tuple[float, list[Tensor]]]])
train.sbatch_script("job.sh", 3)
assert_type(train.compare(10, 3, lr=0.2).is_same, bool)
train.compare(10, "3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # so does a comparison
train.submit("3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # a job takes the same arguments


@distributed(launcher=LocalLauncher(start_method="spawn", heartbeat_timeout=120.0))
def quiet() -> None:
    """Returns nothing."""


assert_type(quiet.all_ranks(), list[None])
plain: Callable[[int], tuple[float, list[Tensor]]] = train


class Experiment:
    """Methods of all kinds."""

    @distributed(processes=2)
    def run(self, epochs: int) -> float:
        """An ordinary one."""
        return float(epochs)

    @staticmethod
    @distributed(processes=2)
    def measure(times: int) -> str:
        """One without self."""
        return str(times)


assert_type(Experiment().run(3), float)
assert_type(Experiment().run.all_ranks(3), list[float])
assert_type(Experiment().run.options(processes=4)(epochs=3), float)
assert_type(Experiment.measure(3), str)
Experiment().run("3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # self is not counted


# A model keeps its type in the block.

net, critic = Net(), Critic()

with parallel_model(net) as model:
    assert_type(model, Net)
    assert_type(model.width, int)
    assert_type(model.loss(torch.zeros(1)), Tensor)

with parallel_model(net, critic) as (generator, discriminator):
    assert_type(generator, Net)
    assert_type(discriminator, Critic)

with parallel_model(net, torch.zeros((), requires_grad=True)) as trained:
    assert_type(trained, tuple[nn.Module | Tensor, ...])

assert_type(parallel_model(net, backend="dp", gpus=[0, 1]), ModelContext[Net])
assert_type(parallel_model(net).start(), Net)


# A sharded loader yields items of the same type.


def epoch(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """A loader with typed items; torch gives no type for a DataLoader's items."""
    for pair in shard_loader(pairs):
        assert_type(pair, tuple[Tensor, Tensor])
    with shard_loader(pairs, tail="exact") as shard:
        for x, y in shard:
            assert_type(x, Tensor)
            assert_type(y, Tensor)


loader = DataLoader(TensorDataset(torch.zeros(2)))
epoch(loader)
shard_loader(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # no loader


# Checkpoints take any keyword arguments.

parallelize.save("last.pt", model=net, epoch=3)
assert_type(parallelize.load("last.pt", model=net), dict[str, Any])
parallelize.save(model=net)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]  # no path

with parallelize.checkpoints("runs/a", every="10min", keep=3, model=net) as saved:
    saved.step(best=0.1)
    assert_type(saved.steps, int)


# Helpers.

assert_type(parallelize.rank(), int)
assert_type(parallelize.world_size(), int)
assert_type(parallelize.local_rank(), int)
assert_type(parallelize.device(), torch.device)
assert_type(parallelize.is_main(), bool)

try:
    distributed(gpus=-2)
except ConfigError as error:
    assert_type([fault.fix for fault in error.faults], list[str])
