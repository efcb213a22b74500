"""Models that change what nn.Module does, by their class or on the instance, train the weights of one process."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import outcomes_of
from torch import Tensor, nn

from parallelize import BalancedBackend, all_gather, distributed, no_sync, parallel_model, rank, world_size

WORLD = 2
STEPS = 3
ENUMERATING = ("parameters", "named_parameters", "buffers", "named_buffers")

# Returns the weights that a model gets in `block`, and what it computes afterwards.
Program = Callable[[Any], list[Tensor]]
PROGRAMS: dict[str, Program] = {}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
        self.head = nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return self.head(self.body(x)) * self.scale * factor


class Trainable(Net):
    """Its optimizer gets what is trained; these are arguments of libraries that wrap models."""

    def parameters(self, only_trained: bool = True) -> Iterator[nn.Parameter]:  # type: ignore[override]  # other arguments, as of libraries
        for _, each in self.named_parameters(only_trained):
            yield each

    def named_parameters(self, only_trained: bool = True) -> Iterator[tuple[str, nn.Parameter]]:  # type: ignore[override]  # other arguments, as of libraries
        for name, each in super().named_parameters():
            if each.requires_grad or not only_trained:
                yield name, each


class OnlyHead(Net):
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.head.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.head.named_parameters(*args, **kwargs)

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        return iter(())


class Around(nn.Module):
    """A model whose submodule hides its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OnlyHead(), OnlyHead()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) + self.blocks[1](x)


class Called(Net):
    def __call__(self, x: Tensor, **kwargs: Any) -> Any:
        return super().__call__(x, **kwargs) + self.head.bias


def batch(step: int) -> Tensor:
    """Return this rank's part of a batch; one process gets all."""
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return whole.chunk(world_size())[rank()]


def all_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [each for _, each in nn.Module.named_parameters(model)]


def trained(model: Any, block: Any, change: Callable[[Any], None] | None = None) -> list[Tensor]:
    """Train a model, which may be changed in the block; return its weights, and its output after the block."""
    optimizer = torch.optim.SGD(all_parameters(model), lr=0.1)
    forward_of_user = vars(model).get("forward")
    with block(model):
        if change is not None:
            change(model)
            forward_of_user = vars(model)["forward"]
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
    assert vars(model).get("forward") is forward_of_user
    assert not any(name in vars(part) for part in model.modules() for name in ENUMERATING)
    output = model(torch.ones(2, 6, dtype=torch.float64))
    return [each.detach().clone() for each in (*all_parameters(model), output)]


def program(run: Program) -> Program:
    PROGRAMS[run.__name__] = run
    return run


@program
def forward_assigned_to_itself(block: Any) -> list[Tensor]:
    model = Net()
    model.forward = model.forward
    return trained(model, block)


@program
def forward_is_a_partial(block: Any) -> list[Tensor]:
    model = Net()
    model.forward = functools.partial(model.forward, factor=3.0)
    return trained(model, block)


@program
def forward_is_a_function(block: Any) -> list[Tensor]:
    model = Net()
    original = model.forward
    model.forward = lambda x: original(x) * 2
    return trained(model, block)


@program
def forward_is_a_method(block: Any) -> list[Tensor]:
    model = Net()
    model.forward = types.MethodType(lambda self, x: Net.forward(self, x) * 2, model)
    return trained(model, block)


@program
def forward_of_a_submodule_is_a_partial(block: Any) -> list[Tensor]:
    model = Net()
    model.head.forward = functools.partial(model.head.forward)
    return trained(model, block)


@program
def call_is_overridden(block: Any) -> list[Tensor]:
    return trained(Called(), block)


def double_forward(model: Any) -> None:
    original = model.forward
    model.forward = lambda x: original(x) * 2


@program
def forward_around_that_of_the_block(block: Any) -> list[Tensor]:
    return trained(Net(), block, double_forward)


def scale_forward(model: Any) -> None:
    model.forward = functools.partial(model.forward, factor=3.0)


@program
def partial_of_the_blocks_forward(block: Any) -> list[Tensor]:
    return trained(Net(), block, scale_forward)


def replace_forward(model: Any) -> None:
    model.forward = types.MethodType(lambda self, x: Net.forward(self, x) * 2, model)


@program
def forward_in_place_of_that_of_the_block(block: Any) -> list[Tensor]:
    return trained(Net(), block, replace_forward)


@program
def parameters_are_those_that_are_trained(block: Any) -> list[Tensor]:
    """The ranks start from other values of what the override leaves out."""
    model = Trainable()
    if rank() == 1:
        with torch.no_grad():
            model.body[0].weight += 1.0
    model.body.requires_grad_(False)
    return trained(model, block)


@program
def parameters_are_those_of_the_head(block: Any) -> list[Tensor]:
    return trained(OnlyHead(), block)


@program
def parameters_of_submodules_are_hidden(block: Any) -> list[Tensor]:
    return trained(Around(), block)


@program
def no_sync_with_a_forward_that_is_set_in_the_block(block: Any) -> list[Tensor]:
    """The block knows the model, whatever its forward is: the ranks keep gradients of their own."""
    model = Net()
    with block(model):
        double_forward(model)
        with no_sync(model):
            model(batch(rank())).sum().backward()
    gradients = all_gather(model.head.weight.grad)
    backend = getattr(block, "keywords", {}).get("backend")
    assert len(gradients) == 1 or torch.equal(*gradients) == (backend == "fsdp")
    return []


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def result(name: str, block: Any) -> list[Tensor]:
    torch.manual_seed(7)
    with in_double():
        return PROGRAMS[name](block)


def by_one_process(*_: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


@functools.cache
def results_of_two_ranks(backend: str) -> list[dict[str, Any]]:
    """Return what each rank has, or its traceback: all programs run in one launch."""
    block = functools.partial(parallel_model, backend=backend)
    run = distributed(processes=WORLD)(outcomes_of)
    return run.all_ranks({name: functools.partial(result, name, block) for name in PROGRAMS})


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_two_processes_equal_one(backend: str, name: str) -> None:
    """What is trained, started from and compared does not depend on what the model's own methods say."""
    expected = result(name, by_one_process)
    for of_rank in results_of_two_ranks(backend):
        assert not isinstance(of_rank[name], str), of_rank[name]
        torch.testing.assert_close(of_rank[name], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_pipeline_equals_one_process(name: str) -> None:
    """The stages of `balanced` are found through every forward."""
    backend = BalancedBackend(devices=("cpu", "cpu"), microbatches=2)
    found = result(name, functools.partial(parallel_model, backend=backend))
    torch.testing.assert_close(found, result(name, by_one_process), rtol=0, atol=1e-9)
