"""Half-precision weights: cast in each forward (O2), or stored in half precision (O3)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from parallelize.model import parallel_model

HALF = torch.bfloat16


def block(model: nn.Module, amp: str) -> Any:
    return parallel_model(model, amp=amp, backend="ddp", processes=1)


class Watching(nn.Linear):
    """Records the dtype of its weight in each forward."""

    seen: list[torch.dtype]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__dict__.setdefault("seen", []).append(self.weight.dtype)
        return super().forward(x)


class Net(nn.Module):
    """A convolution, batch norm, a parameter of the model itself, a recurrent layer, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm1d(4)
        self.position = nn.Parameter(torch.randn(6, 4))
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.linear = Watching(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.conv(x)).transpose(1, 2) + self.position
        x, _ = self.rnn(x)
        return F.linear(self.linear(x), self.linear.weight).mean(1)


X = torch.randn(8, 3, 6, generator=torch.Generator().manual_seed(0))


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).float().square().mean().backward()
        optimizer.step()


def dtypes(tensors: Iterable[torch.Tensor]) -> set[torch.dtype]:
    return {each.dtype for each in tensors}


def test_o2_computes_each_gradient_before_backward_goes_on_to_the_layer_below() -> None:
    """Casts run as soon as they can in backward, so that the all-reduce of their gradients starts."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    events: list[str] = []
    with block(model, "O2"):
        for index, layer in enumerate(model):
            layer.weight.register_post_accumulate_grad_hook(lambda _, index=index: events.append(f"weight {index}"))
            layer.register_full_backward_pre_hook(lambda *_, index=index: events.append(f"layer {index}"))
        model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert events == ["layer 2", "weight 2", "layer 1", "weight 1", "layer 0", "weight 0"]


def test_o2_computes_in_half_over_fp32_weights() -> None:
    """Modules compute with half weights, batch norm with fp32 ones; gradients, copies and the state stay fp32."""
    model = Net()
    parameters, weight = list(model.parameters()), model.linear.weight
    kinds = {module: type(module._parameters) for module in model.modules()}
    seen: list[Any] = []
    model.bn.register_forward_hook(lambda bn, *_: seen.append(bn.weight.dtype))
    # Hooks that run in backward with grad mode off read the parameter itself.
    model.bn.register_full_backward_hook(lambda *_: seen.append(model.linear.weight is weight))
    with block(model, "O2"):
        train(model, 1)
        assert model.linear.seen == [HALF]
        assert seen == [torch.float32, True]
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert dtypes([*model.parameters(), *(each.grad for each in model.parameters())]) == {torch.float32}
        twin = copy.deepcopy(model)
    assert {module: type(module._parameters) for module in model.modules()} == kinds
    for each in (twin, model):
        assert not each.linear._forward_pre_hooks
        each.linear.seen = []
        each(X)
        assert each.linear.seen == [torch.float32]


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_o2_leaves_sparse_gradients_sparse(kind: Any) -> None:
    """An embedding with sparse=True is not cast, and trains as in fp32, beside layers that are cast."""

    def trained(amp: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(kind(8, 4, sparse=True), Watching(4, 2))
        before = model[0].weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with block(model, amp):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.tensor([[0, 3], [3, 5]])).float().square().mean().backward()
                assert model[0].weight.grad.is_sparse
                optimizer.step()
        assert set(model[1].seen) == {HALF if amp == "O2" else torch.float32}
        return model[0].weight.detach() - before

    change = trained("O0")
    assert change.abs().max() > 0.05
    torch.testing.assert_close(trained("O2"), change, rtol=0.05, atol=0.002)


def test_o2_is_autocast_where_only_products_have_weights() -> None:
    """With linear layers alone, O2 casts what autocast casts: gradients are equal, bit for bit."""
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    other = copy.deepcopy(one)
    x = torch.randn(5, 3)
    for model, amp in ((one, "O1"), (other, "O2")):
        with block(model, amp):
            model(x).square().sum().backward()
    for here, there in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(here.grad, there.grad)


def test_o2_recomputes_with_a_parameter_that_is_added_in_the_block() -> None:
    """A recomputed forward finds a parameter that the model got after an earlier backward."""

    class Growing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda x: nn.Linear.forward(self, x) * getattr(self, "scale", 1), x, use_reentrant=False)

    model: Any = Growing(3, 2)
    with block(model, "O2"):
        model(torch.ones(1, 3)).sum().backward()
        model.scale = nn.Parameter(torch.ones(2))
        model(torch.ones(1, 3)).sum().backward()
    assert model.scale.grad is not None


def by_backward(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    loss.backward()
    return [each.grad for each in parameters]


@pytest.mark.parametrize(
    ("reentrant", "gradients"), [(True, by_backward), (False, by_backward), (False, torch.autograd.grad)]
)
def test_o2_casts_again_when_a_checkpoint_recomputes(reentrant: bool, gradients: Callable[..., Any]) -> None:
    """A recomputed forward uses half weights too, and the gradients equal those without a checkpoint."""

    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    model, plain = Checkpointed().eval(), Net().eval()
    x, found = X.clone().requires_grad_(), []
    for each in (model, plain):
        with block(each, "O2"):
            found.append(list(gradients(each(x).float().square().mean(), list(each.parameters()))))
    assert model.linear.seen == [HALF, HALF]
    # A reentrant checkpoint casts a weight once per use, and adds its gradients in fp32 instead of half.
    rtol = 0.01 if reentrant else 0.0
    torch.testing.assert_close(*found, rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)]
)
def test_o2_norms_take_inputs_in_full_precision(norm: nn.Module) -> None:
    """Norms work on fp32 inputs (at the start, or after a sum with the input), although CPUs need equal dtypes."""
    model, x = nn.Sequential(copy.deepcopy(norm), nn.Linear(6, 2)), torch.randn(4, 3, 6)
    x = x[:, 0] if isinstance(norm, nn.GroupNorm) else x
    with block(model, "O2"):
        output = model(x)
        output.float().square().mean().backward()
    torch.testing.assert_close(output.float(), model(x), rtol=0.05, atol=0.05)
    assert all(each.grad is not None for each in model.parameters())


def test_o2_restores_parameters_after_an_exception() -> None:
    """A module whose forward raises has its parameter back."""

    class Failing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("planted")

    model = nn.Sequential(nn.Linear(3, 3), Failing(3, 3))
    with block(model, "O2"):
        with pytest.raises(RuntimeError, match="planted"):
            model(torch.ones(1, 3))
        assert all("weight" not in each.__dict__ for each in model)
        assert model[1].weight.dtype is torch.float32


def test_o2_with_parametrized_weights() -> None:
    """A parametrization computes its weight in fp32."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), nn.Linear(3, 1))
    with block(model, "O2"):
        model(torch.randn(4, 3)).sum().backward()
    assert model[0].parametrizations.weight.original.grad.dtype is torch.float32


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_o3_stores_models_in_half(error: type[Exception] | None) -> None:
    """All weights, of batch norm too, are half in the block; after it, or an error, the same objects are as before."""
    model = Net()
    model.register_buffer("wide", torch.ones(2, dtype=torch.float64))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()

    def all_dtypes() -> list[set[torch.dtype]]:
        momenta = [each["momentum_buffer"] for each in optimizer.state.values()]
        gradients = [each.grad for each in model.parameters()]
        return [dtypes([*model.parameters(), model.bn.running_mean]), dtypes(gradients), dtypes(momenta)]

    step()
    before = [each.detach().clone() for each in parameters]
    with contextlib.suppress(RuntimeError), block(model, "O3"):
        step()
        assert all_dtypes() == [{HALF}] * 3
        if error is not None:
            raise error
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all_dtypes() == [{torch.float32}] * 3
    assert model.wide.dtype is torch.float64
    assert any(not torch.equal(a, b) for a, b in zip(parameters, before, strict=True))
    step()


def test_parameters_that_are_removed_in_a_block_are_not_cast() -> None:
    """Pruning replaces a parameter by a product that a hook computes; it trains as if it was done before the block."""

    def change(model: nn.Module) -> None:
        prune.l1_unstructured(model.linear, "weight", amount=0.3)
        model.linear.bias = None

    before, inside = Net(), Net()
    change(before)
    with block(before, "O2"):
        train(before)
    with block(inside, "O2"):
        change(inside)
        train(inside)
    # Before the block, its weight was cast once, and its gradients were added in half precision.
    torch.testing.assert_close(inside.state_dict(), before.state_dict(), rtol=0, atol=1e-4)
