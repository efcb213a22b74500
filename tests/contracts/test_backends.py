"""Contract tests of every backend: properties that the model keeps, apart from the declared `limitations`."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zoo import ZOO, Mlp

from parallelize import SyncError, distributed, no_sync, parallel_model, rank
from parallelize.cluster.devices import Hardware
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import compute_layout
from parallelize.plugins import registry
from parallelize.plugins.base import Backend
from parallelize.runtime import context
from parallelize.runtime.context import Runtime

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


def shards(entry: Any, *, size: int, step: int) -> list[tuple[torch.Tensor, ...]]:
    """Return the batches of all ranks at a step; concatenated, they are the batch of one process."""
    torch.manual_seed(100 + step)
    columns = [column.chunk(size) for column in entry.batch(4 * size)]
    return list(zip(*columns, strict=True))


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


@pytest.mark.parametrize("model_name", [name for name in ZOO if ZOO[name].is_exact])
@pytest.mark.parametrize("name", BACKENDS)
def test_training_equals_one_process_on_the_full_batch(name: str, model_name: str) -> None:
    """Losses and weights after some steps equal those of one process, up to rounding of sums."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[torch.Tensor]:
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            loss = ZOO[model_name].loss(model(*batch))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    def train_in_parallel(backend: Backend) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        model = seeded(ZOO[model_name].make)
        size = dist.get_world_size()
        batches = [shards(ZOO[model_name], size=size, step=step)[rank()] for step in range(3)]
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        with parallel_model(model, backend=backend):
            losses = train(model, optimizer, batches)
        return losses, model.state_dict()

    ranks = in_world(name)(train_in_parallel)
    reference = seeded(ZOO[model_name].make)
    joined = [
        tuple(torch.cat(column) for column in zip(*shards(ZOO[model_name], size=len(ranks), step=step), strict=True))
        for step in range(3)
    ]
    losses = train(reference, torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9), joined)
    torch.testing.assert_close(sum(torch.stack(each) for each, _ in ranks) / len(ranks), torch.stack(losses))
    for _, weights in ranks:
        torch.testing.assert_close(weights, dict(reference.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_block_restores_the_model(name: str) -> None:
    """Classes, attributes, hooks and Parameter objects are the same after the block as before it."""

    def enter_and_leave(backend: Backend) -> None:
        for make in (ZOO["transformer"].make, Mlp):
            model = make()
            before = structure_of(model)
            with parallel_model(model, backend=backend, methods="loss" if make is Mlp else ()) as same:
                assert same is model
                assert isinstance(model, make)
                assert type(model).__name__ == make.__name__
                ZOO["transformer" if make is not Mlp else "mlp"].loss(
                    model(*ZOO["transformer" if make is not Mlp else "mlp"].batch(4))
                ).backward()
            assert structure_of(model) == before
            assert all(parameter.numel() for parameter in model.parameters())

    in_world(name)(enter_and_leave)


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
def test_copies_are_plain_models(name: str) -> None:
    """deepcopy, copy and pickle give a plain model."""

    def copies(backend: Backend) -> None:
        model = Mlp()
        with parallel_model(model, backend=backend):
            for make_copy in (copy.deepcopy, copy.copy, lambda each: pickle.loads(pickle.dumps(each))):
                other = make_copy(model)
                assert vars(other).keys() == vars(Mlp()).keys()
                # A shallow copy shares the parameters.
                if rank() == 0 or "copies" in backend.limitations or make_copy is copy.copy:
                    other(torch.ones(2, 6)).sum().backward()

    in_world(name)(copies)


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
def test_state_dicts_have_the_models_keys(name: str) -> None:
    """A state dict in the block has the plain model's keys and full tensors, and can be loaded back."""

    def save(backend: Backend) -> dict[str, torch.Tensor]:
        model = seeded(ZOO["transformer"].make)
        with parallel_model(model, backend=backend):
            inside = {key: value.clone() for key, value in model.state_dict().items()}
            model.load_state_dict({key: value + 1 for key, value in inside.items()})
        for key, value in model.state_dict().items():
            assert torch.equal(value, inside[key] + 1), key
        return inside

    reference = seeded(ZOO["transformer"].make).state_dict()
    for saved in in_world(name)(save):
        assert list(saved) == list(reference)
        for key, value in saved.items():
            assert type(value) is torch.Tensor
            assert torch.equal(value, reference[key])


@pytest.mark.parametrize("name", BACKENDS)
def test_accumulated_gradients_are_those_of_the_full_batch(name: str) -> None:
    """no_sync for all but the last micro-batch gives the gradients of the concatenated batch."""

    def accumulate(backend: Backend) -> dict[str, torch.Tensor]:
        model = seeded(Mlp)
        size = dist.get_world_size()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        with parallel_model(model, backend=backend):
            for step in range(3):
                (x,) = shards(ZOO["mlp"], size=size, step=step)[rank()]
                with no_sync(model) if step < 2 else contextlib.nullcontext():
                    (ZOO["mlp"].loss(model(x)) / 3).backward()
            optimizer.step()
        return model.state_dict()

    ranks = in_world(name)(accumulate)
    reference = seeded(Mlp)
    for step in range(3):
        for (x,) in shards(ZOO["mlp"], size=len(ranks), step=step):
            (ZOO["mlp"].loss(reference(x)) / 3 / len(ranks)).backward()
    torch.optim.SGD(reference.parameters(), 1.0).step()
    for weights in ranks:
        torch.testing.assert_close(weights, dict(reference.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_call_of_a_submodule_trains_as_in_one_process(name: str) -> None:
    """The gradients of model.encoder(x) are averaged as those of model(x)."""

    def bypass(backend: Backend) -> Any:
        model = seeded(Mlp)
        with parallel_model(model, backend=backend):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model.encoder(torch.full((2, 6), rank() + 1.0)).mean().backward()
            optimizer.step()
        return model.encoder.weight.detach()

    ranks = in_world(name)(bypass)
    reference = seeded(Mlp)
    for number in range(len(ranks)):
        (reference.encoder(torch.full((2, 6), number + 1.0)).mean() / len(ranks)).backward()
    torch.optim.SGD(reference.parameters(), 0.1).step()
    for weight in ranks:
        torch.testing.assert_close(weight, reference.encoder.weight.detach())


@pytest.mark.parametrize("name", BACKENDS)
def test_routed_methods_train_as_forward_does(name: str) -> None:
    """methods=["loss"] trains the same weights as a call of forward with the loss outside."""

    def train(backend: Backend) -> dict[str, torch.Tensor]:
        model = seeded(Mlp)
        (x,) = shards(ZOO["mlp"], size=dist.get_world_size(), step=0)[rank()]
        with parallel_model(model, backend=backend, methods=["loss"]):
            optimizer = torch.optim.SGD(model.parameters(), 1.0)
            model.loss(x).backward()
            optimizer.step()
        return model.state_dict()

    ranks = in_world(name)(train)
    reference = seeded(Mlp)
    for (x,) in shards(ZOO["mlp"], size=len(ranks), step=0):
        (reference.loss(x) / len(ranks)).backward()
    torch.optim.SGD(reference.parameters(), 1.0).step()
    for weights in ranks:
        torch.testing.assert_close(weights, dict(reference.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_limitations_are_known(name: str) -> None:
    """Every declared limitation is a property of these tests, with a reason."""
    known = {"copies", "exceptions", "one-rank forward"}
    declared = registry.find("backends", name).limitations
    assert declared.keys() <= known
    assert all(declared.values())
