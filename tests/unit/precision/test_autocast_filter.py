"""Which operations run under the autocast that is held between a forward and its backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from parallelize.data.shard_loader import shard_loader
from parallelize.model import parallel_model

HALF = torch.bfloat16
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1])


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def block(*models: nn.Module) -> Any:
    return parallel_model(*models, amp="bf16", backend="ddp", processes=1)


def no_grad_forward(model: nn.Module) -> torch.Tensor:
    out = model(X)
    with torch.no_grad():
        model(X)
    return out


@pytest.mark.parametrize("forward", [lambda model: model(X), no_grad_forward], ids=["forward", "evaluated too"])
def test_operations_of_the_user_keep_their_dtypes(forward: Callable[[nn.Module], torch.Tensor]) -> None:
    """Between a forward and its backward, and after a forward without one, a product of plain tensors is in fp32."""
    model, other = net(), net()
    with block(model):
        out = forward(model)
        assert (X @ X).dtype is torch.float32
        assert torch.einsum("ij,jk", [X, X]).dtype is torch.float32
        assert torch.equal(F.linear(input=X, weight=X), X @ X.T)
        with torch.no_grad():
            assert other(X).dtype is torch.float32
            assert (model.weight @ model.weight.T).dtype is torch.float32
        assert (out @ X).dtype is HALF
        assert (out.detach() @ X).dtype is HALF
        assert (model.weight @ model.weight.T).dtype is HALF
        assert F.mse_loss(out, X).dtype is torch.float32
        out.sum().backward()
        assert model.weight.grad is not None


def test_an_autocast_of_the_user_covers_every_operation() -> None:
    """A context that the user enters between forward and backward is not filtered, and its state is unchanged."""
    model = net()
    with block(model):
        model(X)
        with torch.autocast("cpu", HALF):
            assert (X @ X).dtype is HALF
        with torch.autocast("cpu", enabled=False):
            assert (X @ X).dtype is torch.float32
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")


def test_drawing_a_batch_ends_the_loss() -> None:
    """A model of the user's own computes in fp32 after the next batch is drawn; outputs in half stay usable."""
    model, other = net(), net()
    with block(model):
        loader = iter(shard_loader(torch.utils.data.DataLoader(X, batch_size=2)))
        out = model(next(loader))
        assert other(X).dtype is HALF
        next(loader)
        assert other(X).dtype is torch.float32
        assert (out @ X).dtype is HALF
        assert F.cross_entropy(out, Y).dtype is torch.float32
        model(X)
        assert other(X).dtype is HALF


class Counting(TorchFunctionMode):
    """Counts the functions that it sees."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), default_device, Counting])
def test_function_modes_of_the_user_stay_in_order(mode: Callable[[], Any]) -> None:
    """A mode entered before the forward or after it is exited as usual, and the filter is off after backward."""
    model = net()
    modes = torch.overrides._get_current_function_mode_stack
    with block(model):
        before = modes()
        with mode():
            out = model(X)
        assert len(modes()) == len(before) + 1
        assert (X @ X).dtype is torch.float32
        with mode() as each:
            assert torch.empty(1).device.type == ("cpu" if isinstance(each, Counting) else "meta")
            out.sum().backward()
            assert torch.empty(1).device.type == ("cpu" if isinstance(each, Counting) else "meta")
        assert modes() == before


def test_the_forward_of_a_model_is_not_filtered() -> None:
    """A product of buffers inside the model is in half, also in a second forward, of the same or another block."""

    class WithBuffer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((X @ X).dtype)
            return super().forward(x)

    seen: list[torch.dtype] = []
    one, other = WithBuffer(4, 4), WithBuffer(4, 4)
    with block(one), block(other):
        loss = one(X).sum() + one(X).sum() + other(X).sum()
        with torch.no_grad():
            other(X)
        assert (X @ X).dtype is torch.float32
        loss.backward()
    assert seen == [HALF] * 4
