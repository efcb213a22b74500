"""Contract tests of every backend: properties that the model keeps, apart from the declared `limitations`."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import outcomes_of
from torch import nn
from zoo import ZOO, Mlp

from parallelize import SyncError, distributed, parallel_model, rank
from parallelize.cluster.devices import Hardware
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import compute_layout
from parallelize.plugins import registry
from parallelize.plugins.base import Backend
from parallelize.run import context
from parallelize.run.context import Runtime

BACKENDS = registry.names("backends")
MULTI_NODE = [name for name in BACKENDS if registry.find("backends", name).max_nodes is None]


@contextlib.contextmanager
def one_process_per_node(backend: Backend) -> Iterator[None]:
    """For a backend of one process per node, treat each process of the run as a separate node."""
    size = dist.get_world_size()
    if backend.process_per == "device":
        yield
        return
    world = World(rank=rank(), node_rank=rank(), world_size=size)
    layout = compute_layout(Config.parse(backend=backend, num_nodes=size), Hardware(), world)
    with context.activate(Runtime(world, layout)):
        yield


def in_world(name: str) -> Callable[[Callable[[Backend], Any]], list[Any]]:
    """Return a runner that calls a function with the backend in 2 CPU processes if possible; values by rank."""
    processes = 2 if name in MULTI_NODE else 1

    def run(function: Callable[[Backend], Any]) -> list[Any]:
        @distributed(processes=processes)
        def call() -> Any:
            backend = registry.find("backends", name)()
            with one_process_per_node(backend):
                return function(backend)

        return call.all_ranks()

    return run


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(7)
    return make()


def structure_of(model: nn.Module) -> Any:
    """Return all that a block could change in a model: classes, attributes, hooks, parameter identities."""
    return [
        (
            name,
            type(module),
            {key: sorted(map(str, value)) if isinstance(value, dict) else None for key, value in vars(module).items()},
            [id(parameter) for parameter in module.parameters()],
        )
        for name, module in model.named_modules()
    ]


def a_step_is_that_of_one_process_on_the_full_batch(backend: Backend) -> None:
    """The gradients of all ranks are averaged, also of a method in methods=; tests/one_word has whole programs."""

    def step(model: Any, x: torch.Tensor, *, is_method: bool) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        (model.loss(x) if is_method else ZOO["mlp"].loss(model(x))).backward()
        optimizer.step()
        return dict(model.state_dict())

    for is_method in (False, True):
        expected = step(seeded(Mlp), torch.randn(8, 6), is_method=is_method)
        model, x = seeded(Mlp), torch.randn(8, 6)
        with parallel_model(model, backend=backend, methods=["loss"]):
            step(model, x.chunk(dist.get_world_size())[rank()], is_method=is_method)
        torch.testing.assert_close(dict(model.state_dict()), expected, rtol=1e-5, atol=1e-6)


def the_block_restores_the_model(backend: Backend) -> None:
    """Classes, attributes, hooks and Parameter objects are the same after the block as before it."""
    for kind, methods in (("transformer", ()), ("mlp", "loss")):
        entry = ZOO[kind]
        model: Any = entry.make()
        before, made = structure_of(model), type(model)
        with parallel_model(model, backend=backend, methods=methods) as same:
            assert same is model
            assert isinstance(model, made)
            assert type(model).__name__ == made.__name__
            entry.loss(model(*entry.batch(4))).backward()
        assert structure_of(model) == before
        assert all(parameter.numel() for parameter in model.parameters())


def copies_are_plain_models(backend: Backend) -> None:
    """deepcopy, copy and pickle give a plain model."""
    model = Mlp()
    with parallel_model(model, backend=backend):
        for make_copy in (copy.deepcopy, copy.copy, lambda each: pickle.loads(pickle.dumps(each))):
            other = make_copy(model)
            assert vars(other).keys() == vars(Mlp()).keys()
            # A shallow copy shares the parameters.
            if rank() == 0 or "copies" in backend.limitations or make_copy is copy.copy:
                other(torch.ones(2, 6)).sum().backward()


def state_dicts_have_the_models_keys(backend: Backend) -> None:
    """A state dict in the block has the plain model's keys and full tensors, and can be loaded back."""
    model, reference = (seeded(ZOO["transformer"].make) for _ in range(2))
    with parallel_model(model, backend=backend):
        state = model.state_dict()
        inside = {key: value.clone() for key, value in state.items()}
        assert list(state) == list(reference.state_dict())
        model.load_state_dict({key: value + 1 for key, value in inside.items()})
    for key, value in reference.state_dict().items():
        assert type(inside[key]) is torch.Tensor
        assert torch.equal(inside[key], value)
        assert torch.equal(model.state_dict()[key], value + 1), key


CHECKS = [
    a_step_is_that_of_one_process_on_the_full_batch,
    the_block_restores_the_model,
    copies_are_plain_models,
    state_dicts_have_the_models_keys,
]


@functools.cache
def outcomes(name: str) -> list[dict[str, Any]]:
    """Run the checks in one launch; return their outcomes by rank."""
    return in_world(name)(
        lambda backend: outcomes_of({each.__name__: functools.partial(each, backend) for each in CHECKS})
    )


@pytest.mark.parametrize("check", CHECKS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_check_holds_on_all_ranks(name: str, check: Callable[[Backend], None]) -> None:
    """What the check's docstring says."""
    for each in outcomes(name):
        assert each[check.__name__] is None, each[check.__name__]


@pytest.mark.parametrize("name", BACKENDS)
def test_an_exception_restores_the_model_without_collectives(name: str) -> None:
    """A rank that raises calls no collective, so its next barrier matches the other rank's."""

    def fail(backend: Backend) -> None:
        model = Mlp()
        before = structure_of(model)

        def run() -> None:
            model(torch.ones(2, 6)).mean().backward()
            if rank() == 1:
                dist.barrier()
            raise KeyError

        with pytest.raises(KeyError), parallel_model(model, backend=backend):
            run()
        if rank() == 0 and dist.get_world_size() > 1:
            dist.barrier()
        if "exceptions" not in backend.limitations:
            assert structure_of(model) == before
        model(torch.ones(2, 6))

    in_world(name)(fail)


@pytest.mark.parametrize("name", BACKENDS)
def test_one_rank_evaluates_alone_or_is_named(name: str) -> None:
    """Forward under no_grad and inference_mode waits for no other rank, or the two lines that wait are named."""

    def evaluate(backend: Backend) -> None:
        model = ZOO["mlp"].make()
        with parallel_model(model, backend=backend):
            model(torch.ones(2, 6)).mean().backward()
            if rank() == 0:
                for context in (torch.no_grad, torch.inference_mode):
                    with context():
                        model(torch.ones(2, 6))
            dist.barrier()

    waits = "one-rank forward" in registry.find("backends", name).limitations
    named = pytest.raises(SyncError, match=r"rank 0 waits at .* in forward .* rank 1 waits at .* in barrier")
    with named if waits else contextlib.nullcontext():
        in_world(name)(evaluate)


@pytest.mark.parametrize("name", BACKENDS)
def test_limitations_are_known(name: str) -> None:
    """Every declared limitation is a property of these tests, with a reason."""
    known = {"copies", "exceptions", "one-rank forward"}
    declared = registry.find("backends", name).limitations
    assert declared.keys() <= known
    assert all(declared.values())
