"""torch.func.functional_call of a model in a block: meta-learning and hypernetworks train as one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from parallelize import DDPBackend, SyncError, distributed, no_sync, parallel_model, rank, world_size

pytestmark = pytest.mark.slow

WORLD = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Hyper(nn.Module):
    """Computes the weights of a Net from a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(2, sum(each.numel() for each in Net().parameters()))

    def forward(self, condition: Tensor) -> dict[str, Tensor]:
        values, named = self.make(condition), dict(Net().named_parameters())
        parts = values.split([each.numel() for each in named.values()])
        return {name: part.view_as(each) for (name, each), part in zip(named.items(), parts, strict=True)}


def seeded(kind: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(5)
    return kind().double()


def tasks(step: int) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's tasks of a step, each a support and a query set; one process gets all."""
    generator = torch.Generator().manual_seed(step)
    every = torch.randn(4, 2, 6, 3, generator=generator, dtype=torch.float64)
    return [(support, query) for support, query in every.chunk(world_size())[rank()]]


def loss_of(output: Tensor, x: Tensor) -> Tensor:
    return (output - x.sin().sum(1, keepdim=True)).square().mean()


def adapted(model: nn.Module, support: Tensor, names: tuple[str, ...], *, first_order: bool) -> dict[str, Tensor]:
    """Return fast weights after two inner steps."""
    fast = {name: each for name, each in model.named_parameters() if name.startswith(names)}
    for _ in range(2):
        loss = loss_of(functional_call(model, fast, (support,)), support)
        gradients = torch.autograd.grad(loss, list(fast.values()), create_graph=not first_order)
        fast = {name: each - 0.1 * grad for (name, each), grad in zip(fast.items(), gradients, strict=True)}
    return fast


def meta_train(
    model: Any, *, names: tuple[str, ...] = ("",), first_order: bool = False, backwards: bool = False
) -> None:
    """Train the initial weights (MAML); `names`: of the adapted parameters (ANIL); `backwards`: one for each task."""
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(4):
        optimizer.zero_grad()
        losses = []
        for support, query in tasks(step):
            fast = adapted(model, support, names, first_order=first_order)
            losses.append(loss_of(functional_call(model, fast, (query,)), query) / len(tasks(step)))
            if backwards:
                losses.pop().backward()
        if losses:
            sum(losses).backward()
        optimizer.step()


def assert_one_process_is_the_same(train: Callable[[Any], None], **options: Any) -> None:
    @distributed(processes=WORLD, **options)
    def run() -> dict[str, Tensor]:
        model = seeded(Net)
        with parallel_model(model):
            train(model)
        return model.state_dict()

    expected = seeded(Net)
    train(expected)
    for state in run.all_ranks():
        torch.testing.assert_close(state, expected.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "how",
    [{}, {"first_order": True}, {"names": ("head",)}, {"backwards": True}],
    ids=["maml", "first order", "head only", "backward per task"],
)
@pytest.mark.parametrize("find_unused", [False, True])
def test_meta_learning_equals_one_process(how: dict[str, Any], *, find_unused: bool) -> None:
    """Gradients of the outer loss flow through fast weights to the parameters, and are averaged there."""
    backend = DDPBackend(find_unused_parameters=find_unused)
    assert_one_process_is_the_same(lambda model: meta_train(model, **how), backend=backend)


def test_weights_from_torch_func_grad_are_of_this_rank() -> None:
    """Functional gradients run without the engine; assigned to parameters without an average, they are refused."""

    @distributed(processes=WORLD)
    def run() -> None:
        model = seeded(Net)
        x = tasks(0)[0][0]
        weights = {name: each.detach() for name, each in model.named_parameters()}
        with parallel_model(model):
            found = torch.func.grad(lambda given: loss_of(functional_call(model, given, (x,)), x))(weights)
            for name, each in model.named_parameters():
                each.grad = found[name]
            with pytest.raises(SyncError, match="differs between rank 0 and rank 1"):
                torch.optim.SGD(model.parameters(), 0.1).step()

    run()


def hyper_train(hyper: Any, model: Any) -> None:
    optimizer = torch.optim.Adam([*hyper.parameters(), *model.parameters()], 0.01)
    for step in range(3):
        optimizer.zero_grad()
        losses = [loss_of(functional_call(model, hyper(query[0, :2]), (query,)), query) for _, query in tasks(step)]
        (sum(losses) / len(losses)).backward()
        optimizer.step()


def test_a_hypernetwork_equals_one_process() -> None:
    """Weights from another model of the block: only that one has gradients to average."""

    @distributed(processes=WORLD)
    def run() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        hyper, model = seeded(Hyper), seeded(Net)
        with parallel_model(hyper, model):
            hyper_train(hyper, model)
        return hyper.state_dict(), model.state_dict()

    hyper, model = seeded(Hyper), seeded(Net)
    hyper_train(hyper, model)
    for trained_hyper, trained in run.all_ranks():
        torch.testing.assert_close(trained_hyper, hyper.state_dict(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(trained, model.state_dict(), rtol=1e-9, atol=1e-12)


def freezing_train(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        model.body.requires_grad_(step % 2 == 1)
        optimizer.zero_grad()
        for number, (_, query) in enumerate(tasks(step)):
            is_last = number == len(tasks(step)) - 1
            scaled = {name: each * 1.1 for name, each in model.named_parameters()}
            with no_sync(model) if not is_last else torch.enable_grad():
                (loss_of(functional_call(model, scaled, (query,)), query) / len(tasks(step))).backward()
        optimizer.step()


def test_frozen_parameters_and_no_sync() -> None:
    """The engine of the parameters that are trained now runs the call, also if their set has just changed."""
    assert_one_process_is_the_same(freezing_train)
