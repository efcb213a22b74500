"""Custom Functions under fsdp whose backward runs modules again: adjoints, reversible nets, checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Checks
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallelize import FSDPBackend, SyncError, parallel_model, rank

pytestmark = pytest.mark.slow

WIDTH = 4


class Adjoint(torch.autograd.Function):
    """Differentiates a module in backward, as odeint_adjoint of torchdiffeq does."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            inputs = (x, *parameters)
            gradients = torch.autograd.grad(ctx.module(x), inputs, gradient, allow_unused=True)
        return None, *gradients


class Reversible(torch.autograd.Function):
    """Keeps no activations: backward inverts the module, and accumulates its gradients, as RevNet does."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.module = module
        first, second = x.chunk(2, dim=1)
        with torch.no_grad():
            output = torch.cat((first, second + torch.tanh(module(first))), dim=1)
        ctx.save_for_backward(output)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        first, _ = ctx.saved_tensors[0].chunk(2, dim=1)
        gradient_of_first, gradient_of_second = gradient.chunk(2, dim=1)
        with torch.enable_grad():
            first = first.detach().requires_grad_()
            torch.autograd.backward(torch.tanh(ctx.module(first)), gradient_of_second)
        return None, torch.cat((gradient_of_first + first.grad, gradient_of_second), dim=1)


def adjoint(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return Adjoint.apply(module, x, *module.parameters())


def reversible(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return Reversible.apply(module, torch.cat((x, x), dim=1))[:, WIDTH:]


Run = Callable[[nn.Module, torch.Tensor], torch.Tensor]

RUNS: dict[str, Run] = {
    "adjoint": adjoint,
    "reversible": reversible,
    "checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=False),
    "reentrant checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=True),
}


class Step(nn.Module):
    """Runs a submodule of its own by a Function."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.inner, x) * self.scale


class Net(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.steps = nn.ModuleList([Step(run) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for step in self.steps:
            x = step(x)
        return x


def seeded(run: Run) -> Net:
    torch.manual_seed(3)
    return Net(run).double()


def whole_batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def own_batch(step: int) -> torch.Tensor:
    return whole_batch(step).chunk(2)[rank()]


def train(model: nn.Module, batch: Callable[[int], torch.Tensor]) -> None:
    """Step by the gradients of two passes each, the first of which runs twice."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        model(batch(step + 2)).square().mean().backward()
        optimizer.step()


# The submodules that a Function runs again are of the root, of a unit, of one that stays gathered, or units.
BACKENDS = {
    "root": FSDPBackend(blocks=10**6),
    "unit": FSDPBackend(blocks=[Step]),
    "kept unit": FSDPBackend(blocks=[Step], reshard_after_forward=False),
    "units": FSDPBackend(blocks=[nn.Sequential]),
    "units of layers": FSDPBackend(blocks=[nn.Linear]),
}

# An adjoint gets the parameters as arguments, before the forward that would gather those of a unit of their own.
REFUSED = [("adjoint", "units"), ("adjoint", "units of layers")]

check = Checks(processes=2, timeout=120)


def check_run(run: str, backend: str) -> None:
    expected, model = seeded(RUNS[run]), seeded(RUNS[run])
    train(expected, whole_batch)
    with parallel_model(model, backend=BACKENDS[backend]):
        train(model, own_batch)
    torch.testing.assert_close(dict(model.named_parameters()), dict(expected.named_parameters()))


def check_refused(run: str, backend: str) -> None:
    model = seeded(RUNS[run])
    refused = pytest.raises(SyncError, match=r"(?s)torch.autograd.grad of sharded parameters.*backend='ddp'")
    with parallel_model(model, backend=BACKENDS[backend]), refused:
        train(model, own_batch)


for each_run in RUNS:
    for each_backend in BACKENDS:
        each_check = check_refused if (each_run, each_backend) in REFUSED else check_run
        check[f"{each_run}, {each_backend}"] = functools.partial(each_check, each_run, each_backend)


@check
def a_function_around_the_whole_model() -> None:
    """An adjoint of the model itself would be differentiated by sharded parameters; that is refused by name."""
    model = seeded(RUNS["checkpoint"])
    refused = pytest.raises(SyncError, match=r"(?s)torch.autograd.grad of sharded parameters.*backend='ddp'")
    with refused, parallel_model(model, backend="fsdp"):
        adjoint(model, own_batch(0)).square().mean().backward()


@check
def a_function_around_a_part_of_the_model_outside_of_forward() -> None:
    """Its gradients accumulate in the originals."""
    expected, model = (seeded(RUNS["checkpoint"]) for _ in range(2))

    def loss(net: Net, x: torch.Tensor) -> torch.Tensor:
        return (net(x) + reversible(net.steps[0].inner, net.stem(x))).square().mean()

    loss(expected, whole_batch(0)).backward()
    with parallel_model(model, backend=FSDPBackend(blocks=[Step])):
        loss(model, own_batch(0)).backward()
    expected_gradients = {name: each.grad for name, each in expected.named_parameters()}
    torch.testing.assert_close({name: each.grad for name, each in model.named_parameters()}, expected_gradients)


@pytest.mark.parametrize("name", check)
def test_a_function_that_runs_a_module_again(name: str) -> None:
    """It trains the weights of one process; what cannot get its gradients is refused by name."""
    check.assert_holds(name)
