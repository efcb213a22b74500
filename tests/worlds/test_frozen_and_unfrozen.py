"""Training that freezes and unfreezes the same parameters again and again equals one process, with few engines."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallelize import DDPBackend, distributed, no_sync, parallel_model, rank, world_size

pytestmark = pytest.mark.slow

WORLD = 2
PARTS = ("encoder", "decoder", "left", "right")
SETS: tuple[tuple[str, ...], ...] = (PARTS[:1], PARTS[1:], PARTS)


class Net(nn.Module):
    """A model with two branches, of which a forward uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(8, 8)
        self.left, self.right = nn.Linear(8, 1), nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, branches: str = "both") -> torch.Tensor:
        self.calls += 1.0 + (rank() if dist.is_initialized() else 0)
        hidden = torch.tanh(self.decoder(torch.tanh(self.encoder(x))))
        left = self.left(hidden) if branches != "right" else 0
        return left + self.right(hidden) if branches != "left" else left


def batch(step: int, *, samples: int = 8) -> torch.Tensor:
    """Return this rank's batch of a step; one process gets the batches of all ranks."""
    whole = torch.randn(samples, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return whole.chunk(world_size())[rank()]


def train_only(model: nn.Module, names: tuple[str, ...]) -> None:
    for name, child in model.named_children():
        child.requires_grad_(name in names)


@contextlib.contextmanager
def constructions() -> Iterator[list[int]]:
    """Count the DistributedDataParallel modules that are constructed in the context."""
    original: Any = DistributedDataParallel.__init__
    found: list[int] = []

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        found.append(1)
        original(self, *args, **kwargs)

    replaced: Any = DistributedDataParallel
    replaced.__init__ = counted
    try:
        yield found
    finally:
        replaced.__init__ = original


def alternate(model: Any, *, branch_of: Callable[[int], str] = lambda _: "both", micro_batches: int = 1) -> None:
    """Train other parameters at each step, with a forward without backward before each change."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1)
    for step in range(12):
        train_only(model, SETS[step % len(SETS)])
        for index in range(micro_batches):
            is_last = index == micro_batches - 1
            with contextlib.nullcontext() if is_last else no_sync(model):
                output = model(batch(step * micro_batches + index), branch_of(step))
                (output.square().mean() / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            model(batch(step), branch_of(step))


def start() -> Net:
    torch.manual_seed(7)
    return Net().double()


def trained_by(train: Callable[..., Any], *args: Any, **options: Any) -> list[dict[str, torch.Tensor]]:
    """Return the weights after a call on two ranks, which constructs at most one DDP module per set."""

    @distributed(processes=WORLD, **options)
    def run() -> tuple[dict[str, torch.Tensor], int]:
        model = start()
        with constructions() as found, parallel_model(model):
            train(model, *args)
        return model.state_dict(), len(found)

    results = run.all_ranks()
    # Until a static graph is recorded, its engine cannot be paused: that of the block's beginning is built again.
    is_static = "backend" in options and options["backend"].static_graph
    assert all(count <= len(SETS) + is_static for _, count in results)
    return [state for state, _ in results]


def mean_hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = dist.all_reduce(bucket.buffer().div_(WORLD), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"comm_hook": (None, mean_hook)},
        {"gradient_as_bucket_view": True, "find_unused_parameters": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_alternating_training_equals_one_process(options: dict[str, Any], micro_batches: int) -> None:
    """Three sets of trained parameters in turn: three engines, and the weights of one process."""
    expected = start()
    alternate(expected, micro_batches=micro_batches)
    states = trained_by(lambda model: alternate(model, micro_batches=micro_batches), backend=DDPBackend(**options))
    for state in states:
        del state["calls"]
        torch.testing.assert_close(state, dict(expected.named_parameters()), rtol=1e-9, atol=1e-12)


def test_a_branch_that_a_paused_engine_has_not_seen_stays_without_gradient() -> None:
    """An unused parameter keeps no gradient, so that AdamW does not decay it, whichever engines were used between."""

    def branch_of(step: int) -> str:
        return "left" if step % 2 else "right"

    expected = start()
    alternate(expected, branch_of=branch_of)
    backend = DDPBackend(find_unused_parameters=True)
    for state in trained_by(lambda model: alternate(model, branch_of=branch_of), backend=backend):
        del state["calls"]
        torch.testing.assert_close(state, dict(expected.named_parameters()), rtol=1e-9, atol=1e-12)


def test_alternating_training_with_amp() -> None:
    """Mixed precision trains all ranks alike, close to one process."""
    expected = start().float()

    @distributed(processes=WORLD, amp=True)
    def run(processes_model: nn.Module) -> tuple[dict[str, torch.Tensor], int]:
        with constructions() as found, parallel_model(processes_model):
            alternate_float(processes_model)
        return processes_model.state_dict(), len(found)

    one = copy.deepcopy(expected)
    alternate_float(one)
    (first, count), (second, _) = run.all_ranks(expected)
    assert count == len(SETS)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    del first["calls"]
    torch.testing.assert_close(first, dict(one.named_parameters()), rtol=0.1, atol=0.05)


def alternate_float(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(9):
        train_only(model, SETS[step % len(SETS)])
        model(batch(step).float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def adversarial(generator: Any, critic: Any) -> None:
    """Train a GAN; the generator's step trains no parameter of the critic but its frozen trunk's output scale."""
    steps = torch.optim.Adam(generator.parameters(), 0.02), torch.optim.Adam(critic.parameters(), 0.02)
    for step in range(8):
        critic.requires_grad_(True)
        generator.requires_grad_(False)
        steps[1].zero_grad()
        (critic(generator(batch(step))) - critic(batch(step + 100))).mean().backward()
        steps[1].step()
        critic.requires_grad_(False)
        generator.requires_grad_(True)
        if step % 3 == 0:
            generator[0].requires_grad_(False)
        steps[0].zero_grad()
        (-critic(generator(batch(step)))).mean().backward()
        steps[0].step()


def make_gan() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double(), start()


def test_a_gan_that_freezes_both_sides_equals_one_process() -> None:
    """The critic has one set of trained parameters, the generator two: three engines."""

    @distributed(processes=WORLD)
    def run() -> tuple[Any, Any, int]:
        generator, critic = make_gan()
        with constructions() as found, parallel_model(generator, critic):
            adversarial(generator, critic)
        return dict(generator.named_parameters()), dict(critic.named_parameters()), len(found)

    generator, critic = make_gan()
    adversarial(generator, critic)
    for trained_generator, trained_critic, count in run.all_ranks():
        torch.testing.assert_close(trained_generator, dict(generator.named_parameters()), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(trained_critic, dict(critic.named_parameters()), rtol=1e-9, atol=1e-12)
        assert count == 3


def test_paused_engines_are_closed_beyond_their_memory() -> None:
    """Sets that never return do not hold gradient buckets of more than twice the model's size; values stay exact."""

    def unfreeze(model: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step, last in enumerate((1, 2, 3, 4, 3, 4, 3, 2)):
            train_only(model, PARTS[::-1][:last])
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()

    @distributed(processes=WORLD)
    def run() -> tuple[dict[str, torch.Tensor], float]:
        model = start()
        with parallel_model(model):
            held = model.forward.__func__.route.handler._engines._paused
            unfreeze(model)
            size = sum(each.nbytes for structure, *_ in held for each in structure.trained.values())
        return dict(model.named_parameters()), size / sum(each.nbytes for each in model.parameters())

    expected = start()
    unfreeze(expected)
    for weights, size in run.all_ranks():
        torch.testing.assert_close(weights, dict(expected.named_parameters()), rtol=1e-9, atol=1e-12)
        assert 1 < size <= 2


def test_buffers_are_rank_0s_and_changes_of_frozen_weights_too() -> None:
    """After a switch, buffers and weights that ranks changed differently while frozen are rank 0's."""

    @distributed(processes=WORLD)
    def run() -> dict[str, torch.Tensor]:
        model = start()
        with parallel_model(model):
            train_only(model, ("encoder",))
            model(batch(0)).square().mean().backward()
            nn.init.constant_(model.decoder.weight, float(rank()))
            train_only(model, ("decoder",))
            model(batch(0)).square().mean().backward()
        return model.state_dict()

    first, second = run.all_ranks()
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert first["decoder.weight"].unique().tolist() == [0.0]
    assert first["calls"] == 2
