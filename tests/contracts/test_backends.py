"""What every backend keeps of the user's model, and what it declares that it cannot."""

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

from parallelize import ConfigError, SyncError, distributed, no_sync, parallel_model, rank
from parallelize.cluster.devices import Hardware
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import lay_out
from parallelize.plugins import registry
from parallelize.plugins.base import Backend
from parallelize.runtime import context
from parallelize.runtime.context import Runtime

BACKENDS = registry.names("backends")
SEVERAL = [name for name in BACKENDS if registry.find("backends", name).max_nodes is None]


def backend_of(name: str) -> Backend:
    """The backend as its contract is tested; fsdp gathers state dictionaries only where it is asked to."""
    kind = registry.find("backends", name)
    return kind(full_state_dict=True, roll_call_s=1.0) if "state_dict" in kind.cannot_keep else kind()


@contextlib.contextmanager
def nodes_of_one_process(backend: Backend) -> Iterator[None]:
    """The processes of a run, each taken for a node of its own: a world for backends of one process per node."""
    size = dist.get_world_size()
    if backend.process_per == "device":
        yield
        return
    world = World(rank=rank(), node_rank=rank(), world_size=size)
    layout = lay_out(Config.parse(backend=backend, num_nodes=size), Hardware(), world)
    with context.activate(Runtime(world, layout)):
        yield


def in_world(name: str) -> Callable[[Callable[[Backend], Any]], list[Any]]:
    """Runs a function of the backend in as many processes as it can be spread over on the CPU; values by rank."""
    processes = 2 if name in SEVERAL else 1

    def run(function: Callable[[Backend], Any]) -> list[Any]:
        @distributed(processes=processes)
        def call() -> Any:
            backend = backend_of(name)
            with nodes_of_one_process(backend):
                return function(backend)

        return call.all_ranks()

    return run


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(7)
    return make()


def shares(animal: Any, *, size: int, step: int) -> list[tuple[torch.Tensor, ...]]:
    """The batches of all ranks at a step; joined, the batch of one process."""
    torch.manual_seed(100 + step)
    columns = [column.chunk(size) for column in animal.batch(4 * size)]
    return list(zip(*columns, strict=True))


def shape_of(model: nn.Module) -> Any:
    """Everything that a block could have left behind: classes, attributes, hooks, identities."""
    return [
        (
            name,
            type(module),
            {key: sorted(map(str, value)) if isinstance(value, dict) else None for key, value in vars(module).items()},
            [id(parameter) for parameter in module.parameters()],
        )
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("animal", [name for name in ZOO if ZOO[name].is_exact])
@pytest.mark.parametrize("name", BACKENDS)
def test_it_trains_what_one_process_trains_on_the_whole_batch(name: str, animal: str) -> None:
    """Losses and weights after some steps, to the rounding of another order of sums."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[torch.Tensor]:
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            loss = ZOO[animal].loss(model(*batch))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    def spread(backend: Backend) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        model = seeded(ZOO[animal].make)
        size = dist.get_world_size()
        batches = [shares(ZOO[animal], size=size, step=step)[rank()] for step in range(3)]
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        with parallel_model(model, backend=backend, optimizers=optimizer):
            losses = train(model, optimizer, batches)
        return losses, model.state_dict()

    ranks = in_world(name)(spread)
    alone = seeded(ZOO[animal].make)
    joined = [
        tuple(torch.cat(column) for column in zip(*shares(ZOO[animal], size=len(ranks), step=step), strict=True))
        for step in range(3)
    ]
    losses = train(alone, torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9), joined)
    torch.testing.assert_close(sum(torch.stack(each) for each, _ in ranks) / len(ranks), torch.stack(losses))
    for _, weights in ranks:
        torch.testing.assert_close(weights, dict(alone.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_block_gives_everything_back(name: str) -> None:
    """Classes, attributes, hooks and Parameter objects are after the block what they were before."""

    def enter_and_leave(backend: Backend) -> None:
        for make in (ZOO["transformer"].make, Mlp):
            model = make()
            before = shape_of(model)
            with parallel_model(model, backend=backend, methods="loss" if make is Mlp else ()) as same:
                assert same is model
                assert isinstance(model, make)
                assert type(model).__name__ == make.__name__
                ZOO["transformer" if make is not Mlp else "mlp"].loss(
                    model(*ZOO["transformer" if make is not Mlp else "mlp"].batch(4))
                ).backward()
            assert shape_of(model) == before
            assert all(parameter.numel() for parameter in model.parameters())

    in_world(name)(enter_and_leave)


@pytest.mark.parametrize("name", BACKENDS)
def test_an_exception_leaves_no_trace_and_waits_for_nobody(name: str) -> None:
    """A rank that leaves by an exception issues no collective: the next one is the barrier that the other waits at."""

    def fail(backend: Backend) -> None:
        model = Mlp()
        before = shape_of(model)

        def run() -> None:
            model(torch.ones(2, 6)).mean().backward()
            if rank() == 1:
                dist.barrier()
            raise KeyError

        with pytest.raises(KeyError), parallel_model(model, backend=backend):
            run()
        if rank() == 0 and dist.get_world_size() > 1:
            dist.barrier()
        if "parameters" in backend.cannot_keep:
            with pytest.raises(SyncError, match="in parts, one on each rank"):
                model(torch.ones(2, 6))
        else:
            assert shape_of(model) == before
            model(torch.ones(2, 6))

    in_world(name)(fail)


@pytest.mark.parametrize("name", BACKENDS)
def test_copies_are_plain_models_or_refused(name: str) -> None:
    """deepcopy, copy and pickle give a model without a trace of the block, or say why they cannot."""

    def copies(backend: Backend) -> None:
        model = Mlp()
        refused = "copies" in backend.cannot_keep and dist.get_world_size() > 1
        with parallel_model(model, backend=backend):
            for make_copy in (copy.deepcopy, copy.copy, lambda each: pickle.loads(pickle.dumps(each))):
                if refused:
                    with pytest.raises(ConfigError, match=r"a copy or a pickle of Mlp"):
                        make_copy(model)
                    continue
                other = make_copy(model)
                assert vars(other).keys() == vars(Mlp()).keys()
                if rank() == 0:
                    other(torch.ones(2, 6)).sum().backward()

    in_world(name)(copies)


@pytest.mark.parametrize("name", BACKENDS)
def test_one_rank_evaluates_alone_or_is_refused(name: str) -> None:
    """Forward under no_grad and inference_mode waits for no other rank, or says that it must not be alone."""

    def evaluate(backend: Backend) -> None:
        model = ZOO["mlp"].make()
        with parallel_model(model, backend=backend):
            model(torch.ones(2, 6)).mean().backward()
            if rank() == 0:
                for context in (torch.no_grad, torch.inference_mode):
                    with context():
                        if "one-rank forward" in backend.cannot_keep:
                            with pytest.raises(SyncError, match="1 of 2 ranks run a forward without gradients"):
                                model(torch.ones(2, 6))
                        else:
                            model(torch.ones(2, 6))
            dist.barrier()

    in_world(name)(evaluate)


@pytest.mark.parametrize("name", BACKENDS)
def test_state_dictionaries_have_the_models_own_keys(name: str) -> None:
    """Inside the block: the plain model's keys and whole tensors; what one backend saves every other loads."""

    def save(backend: Backend) -> dict[str, torch.Tensor]:
        model = seeded(ZOO["transformer"].make)
        with parallel_model(model, backend=backend):
            inside = {key: value.clone() for key, value in model.state_dict().items()}
            model.load_state_dict({key: value + 1 for key, value in inside.items()})
        for key, value in model.state_dict().items():
            assert torch.equal(value, inside[key] + 1), key
        return inside

    alone = seeded(ZOO["transformer"].make).state_dict()
    for saved in in_world(name)(save):
        assert list(saved) == list(alone)
        for key, value in saved.items():
            assert type(value) is torch.Tensor
            assert torch.equal(value, alone[key])


@pytest.mark.parametrize("name", BACKENDS)
def test_accumulated_gradients_are_those_of_the_joint_batch(name: str) -> None:
    """no_sync for all but the last micro-batch gives the gradients of all of them at once."""

    def accumulate(backend: Backend) -> dict[str, torch.Tensor]:
        model = seeded(Mlp)
        size = dist.get_world_size()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        with parallel_model(model, backend=backend, optimizers=optimizer):
            for step in range(3):
                (x,) = shares(ZOO["mlp"], size=size, step=step)[rank()]
                with no_sync(model) if step < 2 else contextlib.nullcontext():
                    (ZOO["mlp"].loss(model(x)) / 3).backward()
            optimizer.step()
        return model.state_dict()

    ranks = in_world(name)(accumulate)
    alone = seeded(Mlp)
    for step in range(3):
        for (x,) in shares(ZOO["mlp"], size=len(ranks), step=step):
            (ZOO["mlp"].loss(alone(x)) / 3 / len(ranks)).backward()
    torch.optim.SGD(alone.parameters(), 1.0).step()
    for weights in ranks:
        torch.testing.assert_close(weights, dict(alone.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_submodule_called_past_the_model_is_right_or_refused(name: str) -> None:
    """model.encoder(x): SyncError with the name where ranks would drift apart, right where there is one process."""

    def bypass(backend: Backend) -> None:
        model = Mlp()
        with parallel_model(model, backend=backend):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)

            def train() -> None:
                model.encoder(torch.ones(2, 6)).mean().backward()
                optimizer.step()

            if dist.get_world_size() > 1:
                with pytest.raises(SyncError, match="encoder"):
                    train()
            else:
                train()

    in_world(name)(bypass)


@pytest.mark.parametrize("name", BACKENDS)
def test_routed_methods_train_as_forward_does(name: str) -> None:
    """methods=["loss"]: the same weights as calling forward and computing the loss outside."""

    def train(backend: Backend) -> dict[str, torch.Tensor]:
        model = seeded(Mlp)
        (x,) = shares(ZOO["mlp"], size=dist.get_world_size(), step=0)[rank()]
        with parallel_model(model, backend=backend, methods=["loss"]):
            optimizer = torch.optim.SGD(model.parameters(), 1.0)
            model.loss(x).backward()
            optimizer.step()
        return model.state_dict()

    ranks = in_world(name)(train)
    alone = seeded(Mlp)
    for (x,) in shares(ZOO["mlp"], size=len(ranks), step=0):
        (alone.loss(x) / len(ranks)).backward()
    torch.optim.SGD(alone.parameters(), 1.0).step()
    for weights in ranks:
        torch.testing.assert_close(weights, dict(alone.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_what_it_cannot_keep_is_said(name: str) -> None:
    """Every declaration names a property that these tests know, and gives its reason."""
    known = {"parameters", "block classes", "copies", "one-rank forward", "state_dict"}
    declared = registry.find("backends", name).cannot_keep
    assert declared.keys() <= known
    assert all(declared.values())
