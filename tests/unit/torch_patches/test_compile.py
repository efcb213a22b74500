"""torch.compile with mixed precision: before the block, inside it, on the model, the loss or the whole step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parallelize.model import parallel_model
from parallelize.plugins.base import Amp
from parallelize.precision.native import NativePrecision

# dynamo reads .grad of non-leaf tensors when it resumes after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 1, 0, 1])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def block(model: nn.Module, amp: Any) -> Any:
    return parallel_model(model, amp=amp, backend="ddp", processes=1)


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="eager")


def not_compiled(model: nn.Module) -> Callable[[], torch.Tensor]:
    return lambda: F.cross_entropy(model(X), Y)


def the_model(model: nn.Module) -> Callable[[], torch.Tensor]:
    return not_compiled(compiled(model))


def the_loss(model: nn.Module) -> Callable[[], torch.Tensor]:
    return compiled(not_compiled(model))


def in_place(model: nn.Module) -> Callable[[], torch.Tensor]:
    model.compile(backend="eager")
    return not_compiled(model)


def past_the_limit(model: nn.Module) -> Callable[[], torch.Tensor]:
    """Dynamo compiles the model no more, but runs it."""
    call = compiled(model)
    with torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False):
        for rows in (2, 3, 4, 5):
            call(X[:rows])
    return not_compiled(call)


@pytest.mark.parametrize("is_before", [False, True], ids=["in the block", "before the block"])
@pytest.mark.parametrize("amp", ["O1", "O2"])
@pytest.mark.parametrize("what", [the_model, the_loss, in_place, past_the_limit], ids=lambda each: each.__name__)
def test_compiling_changes_nothing(what: Any, amp: str, is_before: bool) -> None:
    """Loss in fp32, gradients equal to those without compiling, autocast off after each step and after the block."""
    results = []
    for how in (not_compiled, what):
        model = net()
        loss_of = how(model) if is_before else None
        with block(model, amp):
            loss_of = loss_of or how(model)
            for _ in range(2):
                loss = loss_of()
                model.zero_grad()
                loss.backward()
                assert not torch.is_autocast_enabled("cpu")
        assert loss.dtype is torch.float32
        assert not torch.is_autocast_enabled("cpu")
        results.append((loss.detach(), [each.grad for each in model.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


def test_a_compiled_step_leaves_autocast() -> None:
    """A compiled step with backward in it, after a forward without, leaves autocast off."""
    model = net()
    with block(model, "bf16"):

        @compiled
        def step() -> torch.Tensor:
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            return loss

        for _ in range(2):
            model(X)
            step()
            assert not torch.is_autocast_enabled("cpu")


def test_a_compiled_step_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled training step has unscaled gradients and skips on inf, as without compiling."""
    monkeypatch.setattr(NativePrecision, "dtypes", {"cpu": frozenset({torch.float16})})
    results = []
    for compile_step in (lambda function: function, compiled):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        moved = []
        with block(model, Amp(dtype=torch.float16, init_scale=2.0**10)):

            @compile_step
            def step(x: torch.Tensor, model=model) -> torch.Tensor:
                loss = F.cross_entropy(model(x), Y)
                loss.backward()
                return loss

            for number in range(5):
                optimizer.zero_grad()
                step(X * float("inf") if number == 2 else X)
                before = model[0].weight.detach().clone()
                optimizer.step()
                moved.append(not torch.equal(model[0].weight, before))
        results.append((moved, [each.detach() for each in model.parameters()]))
    torch.testing.assert_close(results[1], results[0])
    assert results[0][0] == [True, True, False, True, True]


def test_a_compiled_loss_is_one_graph() -> None:
    """torch.compile traces a loss without a graph break."""
    model = net()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss_of(out: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out @ out.T, Y)

    with block(model, "bf16"):
        for _ in range(2):
            out = model(X)
            expected = F.cross_entropy(out @ out.T, Y)
            loss = loss_of(out)
            torch.testing.assert_close(loss, expected)
            loss.backward()
