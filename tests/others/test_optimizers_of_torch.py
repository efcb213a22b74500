"""Every optimizer of torch's own database trains under each back end what it trains in one process.

The database, `torch.testing._internal.common_optimizers`, has the options that torch tests. Each combination takes
three steps, with and without a closure, beside a loop of plain torch that adds up the gradients of the ranks' batches:

    ddp, logical=, amp level O2     parameters have the same bits
    fsdp                            parameters differ by less than 1e-12 in float64: kernels read shards, whose
                                    elements they may add in another order
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from others.torch_databases import Refusal, imported, largest_difference, outcome_of, unexplained
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import Amp, all_gather, distributed, parallel_model, shard_loader

pytestmark = pytest.mark.slow

RANKS, STEPS, BATCH = 2, 3, 8


@dataclass(frozen=True)
class World:
    """How a run is started, and what it may differ by from plain torch."""

    options: dict[str, Any]
    dtype: torch.dtype = torch.float64
    tolerance: float = 0.0
    parts: int = 1


WORLDS = {
    "ddp": World({}),
    "fsdp": World({"backend": "fsdp"}, tolerance=1e-12),
    "O2": World({"amp": Amp(level="O2", dtype=torch.bfloat16)}, dtype=torch.float32),
    "logical": World({"logical": 4}, parts=2),
}

REFUSALS: dict[str, dict[str, Refusal]] = {
    "ddp": {},
    "fsdp": {"SparseAdam": Refusal("rows has sparse=True under fsdp", "the engine cuts dense gradients only")},
    "O2": {},
    "logical": {"SparseAdam": Refusal("an embedding of sparse gradients", "their sums depend on the division")},
}


class Dense(nn.Module):
    """Matrices and vectors of sizes that two ranks do not divide, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 3)
        self.down = nn.Linear(3, 5, bias=False)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:  # B 4 -> B 5
        return self.down(torch.tanh(self.up(x))) * self.gain


class Matrices(nn.Module):
    """Matrices only, which is what Muon takes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 3, bias=False)
        self.down = nn.Linear(3, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # B 4 -> B 5
        return self.down(torch.tanh(self.up(x)))


class Sparse(nn.Module):
    """A table of rows with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(7, 5, sparse=True)

    def forward(self, x: Tensor) -> Tensor:  # B 4 -> B 5
        return self.rows((x[:, 0].abs() * 10).long() % 7)


@dataclass(frozen=True)
class Case:
    """One combination of the options of an optimizer."""

    name: str
    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any]
    model: type[nn.Module]
    has_closure: bool


def cases() -> Iterator[Case]:
    """Yield the combinations in the database; `fused` and `foreach` where the CPU has them."""
    for entry in imported("torch.testing._internal.common_optimizers").optim_db:
        implementations: list[dict[str, bool]] = [{}]
        if "foreach" in entry.supported_impls:
            implementations.append({"foreach": True})
        if "fused" in entry.supported_impls and "cpu" in entry.supports_fused_on:
            implementations.append({"fused": True})
        model: type[nn.Module] = Dense
        if entry.only_supports_sparse_grads:
            model = Sparse
        elif entry.optim_cls is torch.optim.Muon:
            model = Matrices
        for inputs in entry.optim_inputs_func(device="cpu"):
            for implementation in implementations:
                for has_closure in (False, True):
                    if entry.step_requires_closure and not has_closure:
                        continue
                    words = [entry.optim_cls.__name__, inputs.desc, *implementation]
                    if has_closure:
                        words.append("closure")
                    options = {**inputs.kwargs, **implementation}
                    yield Case(", ".join(words), entry.optim_cls, options, model, has_closure)


def train(case: Case, optimizer: torch.optim.Optimizer, backward: Any) -> None:
    """Take one step; `backward` computes the gradients and returns the loss."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward()

    if case.has_closure:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets)


def by_hand(case: Case, model: nn.Module, batches: Sequence[Sequence[Any]], world: World) -> None:
    """Train a model by plain torch: the mean of the gradients of the ranks' batches, in the order of the ranks."""
    optimizer = case.optimizer(model.parameters(), **copy.deepcopy(case.options))

    def forward(x: Tensor) -> Tensor:
        if world.dtype == torch.float64:
            return torch.cat([model(part) for part in x.chunk(world.parts)])
        if isinstance(model, Sparse):
            # A table of sparse gradients stays in fp32: torch cannot differentiate its cast.
            return model(x)
        halves = {name: parameter.to(torch.bfloat16) for name, parameter in model.named_parameters()}
        with torch.autocast("cpu", torch.bfloat16):
            return functional_call(model, halves, (x,)).float()

    def backward(batch_of_ranks: Sequence[Any]) -> Tensor:
        losses = []
        for x, y in batch_of_ranks:
            loss = loss_of(forward(x), y)
            loss.backward()
            losses.append(loss.detach())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad / len(batch_of_ranks)
        return torch.stack(losses).mean()

    for batch_of_ranks in batches:
        train(case, optimizer, functools.partial(backward, batch_of_ranks))


def in_parallel(case: Case, model: nn.Module, loader: DataLoader[Any]) -> None:
    optimizer = case.optimizer(model.parameters(), **copy.deepcopy(case.options))

    def backward(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model(x), y)
        loss.backward()
        return loss

    with parallel_model(model):
        for x, y in shard_loader(loader, batch="global"):
            train(case, optimizer, functools.partial(backward, x, y))


def difference(case: Case, loader: DataLoader[Any], batches: Sequence[Sequence[Any]], world: World) -> float:
    """Train a model both ways; return the largest difference of its parameters, or 0 where it is within tolerance."""
    torch.manual_seed(0)
    model = case.model().to(world.dtype)
    expected = copy.deepcopy(model)
    by_hand(case, expected, batches, world)
    in_parallel(case, model, loader)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    largest = max(largest_difference(*pair) for pair in pairs)
    return largest if largest > world.tolerance else 0.0


def outcomes_of_optimizers(world: World, *, is_sample: bool) -> dict[str, str]:
    """Return what each case ends with; of a sample, each optimizer has its default options only."""
    # The loop of plain torch trains a model of its own on each rank.
    warnings.filterwarnings("ignore", "each of .* processes trains")
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS * BATCH, 4, generator=generator, dtype=torch.float64).to(world.dtype)
    targets = inputs[:, [0, 1, 2, 3, 0]].sin()
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH)
    batches = []
    for batch in shard_loader(loader, batch="global"):
        gathered = [all_gather(tensor) for tensor in batch]
        batches.append(list(zip(*gathered, strict=True)))
    outcomes = {}
    for case in cases():
        if not is_sample or ", default" in case.name:
            check = functools.partial(difference, case, loader, batches, world)
            outcomes[case.name] = outcome_of(check)
    return outcomes


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("is_sample", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["sample", "whole"])
def test_optimizers_of_torch(name: str, is_sample: bool) -> None:
    """All optimizers but those in the table train what plain torch trains."""
    world = WORLDS[name]
    run = distributed(processes=RANKS, **world.options)(outcomes_of_optimizers)
    for outcomes in run.all_ranks(world, is_sample=is_sample):
        assert unexplained(outcomes, REFUSALS[name], is_sample=is_sample) == {}
        assert len(outcomes) > 50
