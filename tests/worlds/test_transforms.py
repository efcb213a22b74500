"""Transforms of torch.func through a block's model train the weights of one process, or are refused by their name."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import outcomes_of
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from parallelize import BalancedBackend, ConfigError, all_reduce, distributed, parallel_model, rank, world_size

# Of torch's decompositions, which forward AD imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

WORLD = 2
STEPS = 3
BALANCED = BalancedBackend(devices=("cpu", "cpu"), microbatches=2)

# model, inputs, targets -> the loss
Loss = Callable[[Any, Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {}


class Net(nn.Module):
    """Two buffers are broadcast in one message before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(2, 1)
        self.register_buffer("mean", torch.full((2,), 0.5))
        self.register_buffer("deviation", torch.full((2,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.mean) / self.deviation
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a batch; one process gets all."""
    whole = torch.randn(8, 2, generator=torch.Generator().manual_seed(step))
    x = whole.chunk(world_size())[rank()]
    return x, x.sum(1, keepdim=True)


def loss(function: Loss) -> Loss:
    LOSSES[function.__name__] = function
    return function


@loss
def of_jvp(model: Any, x: Tensor, y: Tensor) -> Tensor:
    output, tangent = jvp(model, (x,), (torch.ones_like(x),))
    return (output - y).square().mean() + tangent.square().mean()


@loss
def of_vmap(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return (vmap(model)(x) - y).square().mean()


@loss
def of_jacrev(model: Any, x: Tensor, _: Tensor) -> Tensor:
    return vmap(jacrev(lambda sample: model(sample).squeeze(-1)))(x).square().mean()


@loss
def of_jacfwd(model: Any, x: Tensor, _: Tensor) -> Tensor:
    return vmap(jacfwd(lambda sample: model(sample).squeeze(-1)))(x).square().mean()


@loss
def of_hessian(model: Any, x: Tensor, _: Tensor) -> Tensor:
    return vmap(hessian(lambda sample: model(sample).squeeze(-1)))(x).square().mean()


@loss
def of_grad_of_a_functional_call(model: Any, x: Tensor, _: Tensor) -> Tensor:
    parameters = dict(model.named_parameters())
    slopes = vmap(grad(lambda sample: functional_call(model, parameters, (sample[None],)).sum()))
    return slopes(x).square().mean()


@loss
def of_a_tangent(model: Any, x: Tensor, _: Tensor) -> Tensor:
    with forward_ad.dual_level():
        output = model(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(output).tangent.square().mean()


def of_gradients_of_samples(model: Any, x: Tensor, y: Tensor) -> None:
    """Gradients are clipped sample by sample, as differential privacy does, and assigned."""

    def loss_of_sample(parameters: Any, sample: Tensor, target: Tensor) -> Tensor:
        return (functional_call(model, parameters, (sample[None],)) - target).square().mean()

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = vmap(grad(loss_of_sample), in_dims=(None, 0, 0))(parameters, x, y)
    for name, parameter in model.named_parameters():
        parameter.grad = all_reduce(gradients[name].clamp(-0.1, 0.1).mean(0), "mean")


def of_a_derivative_by_autograd(model: Any, x: Tensor, _: Tensor) -> Tensor:
    """What fsdp's errors suggest."""
    x = x.requires_grad_()
    (slopes,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slopes.square().mean()


def trained(compute: Any, block: Any, *, is_warm: bool = False) -> list[Tensor]:
    """Train by a loss, or by gradients that are assigned; a plain forward comes before if it is warm."""
    torch.manual_seed(7)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with block(model):
        if is_warm:
            model(batch(0)[0]).sum().backward()
        for step in range(STEPS):
            optimizer.zero_grad()
            value = compute(model, *batch(step))
            if value is not None:
                value.backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def by_one_process(*_: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


DDP: dict[str, Any] = {**LOSSES, "of_gradients_of_samples": of_gradients_of_samples}
FSDP: dict[str, Any] = {**LOSSES, "of_a_derivative_by_autograd": of_a_derivative_by_autograd}


@functools.cache
def results_of_two_ranks(backend: str) -> list[dict[str, Any]]:
    """Return what each rank has, or its traceback: all losses are trained in one launch."""
    block = functools.partial(parallel_model, backend=backend)
    losses = DDP if backend == "ddp" else FSDP
    run = distributed(processes=WORLD)(outcomes_of)
    return run.all_ranks({name: functools.partial(trained, losses[name], block) for name in losses})


@pytest.mark.parametrize("name", DDP)
def test_two_replicas_equal_one_process(name: str) -> None:
    """Gradients are averaged through every transform."""
    expected = trained(DDP[name], by_one_process)
    for of_rank in results_of_two_ranks("ddp"):
        assert not isinstance(of_rank[name], str), of_rank[name]
        torch.testing.assert_close(of_rank[name], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_fsdp_is_right_or_names_the_transform(name: str) -> None:
    """Where gradients are lost, an error says that it is torch.func or forward AD, and what to write instead."""
    expected = trained(LOSSES[name], by_one_process)
    for of_rank in results_of_two_ranks("fsdp"):
        if isinstance(of_rank[name], str):
            assert "Error: torch.func or forward AD" in of_rank[name]
            assert "torch.autograd.grad(..., create_graph=True)" in of_rank[name]
        else:
            torch.testing.assert_close(of_rank[name], expected, rtol=0, atol=1e-6)


def test_what_fsdp_suggests_equals_one_process() -> None:
    """torch.autograd.grad with a graph is differentiated through sharded parameters."""
    expected = trained(of_a_derivative_by_autograd, by_one_process)
    for of_rank in results_of_two_ranks("fsdp"):
        torch.testing.assert_close(of_rank["of_a_derivative_by_autograd"], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:batches like this one are not split:UserWarning")
def test_a_pipeline_runs_transforms_whole(name: str) -> None:
    """No micro-batches are compared in a transform; the stages run, and the weights are those of one process."""
    block = functools.partial(parallel_model, backend=BALANCED)
    expected = trained(LOSSES[name], by_one_process, is_warm=True)
    torch.testing.assert_close(trained(LOSSES[name], block, is_warm=True), expected, rtol=0, atol=1e-6)


def test_a_pipeline_says_that_a_transform_is_not_split() -> None:
    """One warning names torch.func."""
    block = functools.partial(parallel_model, backend=BALANCED)
    with pytest.warns(UserWarning, match=r"not split into micro-batches: forward is inside a transform of torch\.func"):
        trained(of_vmap, block, is_warm=True)


@pytest.mark.parametrize("options", [{"backend": BALANCED}, {"backend": "auto"}, {"logical": 2}])
def test_a_first_batch_that_is_transformed_is_refused(options: dict[str, Any]) -> None:
    """What an engine measures or divides is a batch whose values and samples are there."""
    block = functools.partial(parallel_model, **options)
    with pytest.raises(ConfigError, match=r"a forward of the model inside a transform of torch\.func"):
        trained(of_vmap, block)
