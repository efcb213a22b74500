"""torch.compile and mixed precision: before the block, inside it, around model, loss or the whole step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parallelize.model import parallel_model
from parallelize.plugins.base import Amp
from parallelize.precision.native_session import Policy, mixed_precision

# dynamo itself asks tensors that are no leaves for .grad, wherever a graph goes on after a break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 1, 0, 1])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def block(model: nn.Module, amp: str) -> Any:
    return parallel_model(model, amp=amp, backend="ddp", processes=1)


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="eager")


def nothing(model: nn.Module) -> Callable[[], torch.Tensor]:
    return lambda: F.cross_entropy(model(X), Y)


def the_model(model: nn.Module) -> Callable[[], torch.Tensor]:
    call = compiled(model)
    return lambda: F.cross_entropy(call(X), Y)


def the_loss(model: nn.Module) -> Callable[[], torch.Tensor]:
    return compiled(lambda: F.cross_entropy(model(X), Y))


def in_place(model: nn.Module) -> Callable[[], torch.Tensor]:
    model.compile(backend="eager")
    return lambda: F.cross_entropy(model(X), Y)


@pytest.mark.parametrize("amp", ["O1", "O2"])
@pytest.mark.parametrize("what", [the_model, the_loss, in_place], ids=lambda each: each.__name__)
def test_compiling_changes_nothing(what: Any, amp: str) -> None:
    """Loss in full precision, gradients those of the loop without it, autocast off after each step and the block."""
    results = []
    for how in (nothing, what):
        model = net()
        with block(model, amp):
            loss_of = how(model)
            for _ in range(2):
                loss = loss_of()
                model.zero_grad()
                loss.backward()
                assert not torch.is_autocast_enabled("cpu")
        assert loss.dtype is torch.float32
        assert not torch.is_autocast_enabled("cpu")
        results.append((loss.detach(), [each.grad for each in model.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


def test_a_model_compiled_before_the_block() -> None:
    """model.compile() first, then the block."""
    results = []
    for how in (lambda model: None, lambda model: model.compile(backend="eager")):
        model = net()
        how(model)
        with block(model, "bf16"):
            F.cross_entropy(model(X), Y).backward()
        results.append([each.grad for each in model.parameters()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


def test_a_compiled_step_with_a_window_open() -> None:
    """A forward without backward leaves autocast on; a compiled step then ends it, and dynamo cannot bring it back."""
    model = net()
    with block(model, "bf16"):

        @compiled
        def step() -> torch.Tensor:
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            return loss

        model(X)
        assert torch.is_autocast_enabled("cpu")
        step()
        F.cross_entropy(model(X), Y).backward()
        assert not torch.is_autocast_enabled("cpu")
        model(X)
        step()
    assert not torch.is_autocast_enabled("cpu")


def test_a_compiled_step_is_scaled() -> None:
    """A whole step in a compiled function: true gradients, inf left out, as without compiling."""
    results = []
    for compile_step in (lambda function: function, compiled):
        model, scales = net(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = Policy(device=torch.device("cpu"), scaling=Amp(init_scale=2.0**10, growth_interval=2))
        with mixed_precision(policy, models=[model]) as session:

            @compile_step
            def step(x: torch.Tensor, model=model, session=session) -> torch.Tensor:
                loss = F.cross_entropy(session.route(model, x), Y)
                loss.backward()
                return loss

            for number in range(5):
                optimizer.zero_grad()
                step(X * float("inf") if number == 2 else X)
                optimizer.step()
                scales.append(session.state_dict()["scale"])
        results.append((scales, [each.detach() for each in model.parameters()]))
    torch.testing.assert_close(results[1], results[0])
    assert results[0][0] == [1024, 2048, 1024, 1024, 2048]
