"""Models of one block that share parameters train as one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallelize import (
    BalancedBackend,
    ConfigError,
    DDPBackend,
    SyncError,
    distributed,
    no_sync,
    parallel_model,
    rank,
    world_size,
)

pytestmark = pytest.mark.slow

WORLD = 2


class Generator(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.body = embedding, nn.Linear(4, 4)

    def forward(self, labels: Tensor) -> Tensor:
        return torch.tanh(self.body(self.embedding(labels)))


class Critic(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.score = embedding, nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.score(torch.sin(x) + self.embedding(labels))


def make(*, sparse: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(3)
    embedding = nn.Embedding(5, 4, sparse=sparse)
    return Generator(embedding).double(), Critic(embedding).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's samples and labels of a step; one process gets those of all ranks."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(5, (8,), generator=generator)
    samples = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    return samples.chunk(world_size())[rank()], labels.chunk(world_size())[rank()]


def optimizers(generator: nn.Module, critic: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Return one optimizer for each model, which both hold the shared parameter."""
    return torch.optim.Adam(generator.parameters(), 0.05), torch.optim.AdamW(critic.parameters(), 0.05)


def adversarial(generator: Any, critic: Any, *, freeze: bool = False) -> None:
    """Train the critic between the forward and the backward of the generator."""
    of_generator, of_critic = optimizers(generator, critic)
    for step in range(6):
        real, labels = batch(step)
        critic.requires_grad_(requires_grad=True)
        fake = generator(labels)
        of_critic.zero_grad()
        (critic(fake.detach(), labels) - critic(real, labels)).mean().backward()
        of_critic.step()
        if freeze:
            critic.score.requires_grad_(requires_grad=False)
        of_generator.zero_grad()
        fake = generator(labels)
        (-critic(fake, labels)).mean().backward()
        of_generator.step()


def one_graph(generator: Any, critic: Any) -> None:
    both = torch.optim.SGD({*generator.parameters(), *critic.parameters()}, 0.1)
    for step in range(4):
        _, labels = batch(step)
        both.zero_grad()
        critic(generator(labels), labels).square().mean().backward()
        both.step()


def sum_of_losses(generator: Any, critic: Any) -> None:
    both = optimizers(generator, critic)
    for step in range(4):
        real, labels = batch(step)
        for each in both:
            each.zero_grad()
        (generator(labels).square().mean() + F.softplus(critic(real, labels)).mean()).backward()
        for each in both:
            each.step()


def two_backwards(generator: Any, critic: Any) -> None:
    both = optimizers(generator, critic)
    for step in range(4):
        real, labels = batch(step)
        for each in both:
            each.zero_grad()
        first, second = generator(labels).square().mean(), F.softplus(critic(real, labels)).mean()
        first.backward()
        second.backward()
        for each in both:
            each.step()


def accumulated(generator: Any, critic: Any) -> None:
    both = optimizers(generator, critic)
    for step in range(4):
        for each in both:
            each.zero_grad()
        for index in range(3):
            real, labels = batch(3 * step + index)
            with contextlib.ExitStack() as stack:
                if index < 2:
                    stack.enter_context(no_sync(generator))
                    stack.enter_context(no_sync(critic))
                (critic(generator(labels), labels).square().mean() + critic(real, labels).mean()).backward()
        for each in both:
            each.step()


def alternately_frozen(generator: Any, critic: Any) -> None:
    both = optimizers(generator, critic)
    for step in range(6):
        real, labels = batch(step)
        generator.embedding.requires_grad_(requires_grad=step % 3 != 0)
        generator.body.requires_grad_(requires_grad=step % 3 != 1)
        for each in both:
            each.zero_grad()
        (generator(labels).square().mean() + F.softplus(critic(real, labels)).mean()).backward()
        for each in both:
            each.step()


def adversarial_frozen(generator: Any, critic: Any) -> None:
    adversarial(generator, critic, freeze=True)


PROGRAMS: list[Callable[[Any, Any], None]] = [
    adversarial,
    adversarial_frozen,
    one_graph,
    sum_of_losses,
    two_backwards,
    accumulated,
    alternately_frozen,
]


def assert_one_process_is_the_same(train: Callable[[Any, Any], None], **options: Any) -> None:
    @distributed(processes=WORLD, **options)
    def run() -> tuple[dict[str, Tensor], ...]:
        with parallel_model(*make()) as models:
            train(*models)
        return tuple(model.state_dict() for model in models)

    expected = make()
    train(*expected)
    for states in run.all_ranks():
        for state, model in zip(states, expected, strict=True):
            torch.testing.assert_close(state, model.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:optimizer parameters need to be organized:FutureWarning")  # torch 2.15, of sets
@pytest.mark.parametrize("train", PROGRAMS, ids=lambda each: each.__name__)
def test_models_that_share_a_parameter_equal_one_process(train: Callable[[Any, Any], None]) -> None:
    """The shared gradient is averaged exactly once, whichever model's backward computes it."""
    assert_one_process_is_the_same(train)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view"])
def test_with_options_of_ddp(option: str) -> None:
    """Options concern the parameters of one model only."""
    assert_one_process_is_the_same(sum_of_losses, backend=DDPBackend(**{option: True}))


def test_models_that_share_everything() -> None:
    """Two ways to call the same layers."""

    def train(first: Any, second: Any) -> None:
        optimizer = torch.optim.SGD(first.parameters(), 0.1)
        for step in range(4):
            real, _ = batch(step)
            optimizer.zero_grad()
            first(real).square().mean().backward()
            second(real).square().mean().backward()
            optimizer.step()

    def pair() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        layer = nn.Linear(4, 4).double()
        return nn.Sequential(layer, nn.Tanh()), nn.Sequential(layer, nn.ReLU())

    @distributed(processes=WORLD)
    def run() -> dict[str, Tensor]:
        with parallel_model(*pair()) as models:
            train(*models)
        return models[0].state_dict()

    expected = pair()
    train(*expected)
    for state in run.all_ranks():
        torch.testing.assert_close(state, expected[0].state_dict(), rtol=1e-9, atol=1e-12)


def test_with_amp() -> None:
    """Ranks stay equal under mixed precision."""

    @distributed(processes=WORLD, amp=True)
    def run() -> dict[str, Tensor]:
        models = tuple(model.float() for model in make())
        with parallel_model(*models):
            one_graph(*models)
        return models[0].state_dict()

    first, second = run.all_ranks()
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_gradients_that_are_not_averaged_are_refused() -> None:
    """A step after a last backward under no_sync, and one on gradients assigned from this rank's batch."""

    @distributed(processes=WORLD)
    def run() -> None:
        generator, critic = make()
        with parallel_model(generator, critic):
            _, labels = batch(0)
            optimizer = torch.optim.SGD([generator.embedding.weight], 0.1)
            with no_sync(generator):
                generator(labels).square().mean().backward()
            with pytest.raises(SyncError, match=r"(?s)embedding.weight of Critic.*no_sync"):
                optimizer.step()
            optimizer.zero_grad()
            optimizer.step()
            loss = generator(labels).square().mean()
            (generator.embedding.weight.grad,) = torch.autograd.grad(loss, [generator.embedding.weight])
            with pytest.raises(SyncError, match=r"embedding.weight of Critic is not averaged.*differs"):
                optimizer.step()

    run()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"backend": "fsdp"}, "backend='fsdp'"),
        ({"average": "tokens"}, "average='tokens'"),
        ({"sparse": True}, "sparse=True"),
        ({"amp": "O2"}, "amp_engine='native'"),
    ],
)
def test_what_cannot_share_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    """The error names the parameter, the option and the way out."""
    models = make(sparse=options.pop("sparse", False))
    message = rf"(?s)embedding.weight of Generator, which another model of the block shares, with .*{named}.*methods="
    with pytest.raises(ConfigError, match=message), parallel_model(*models, **options):
        pass


def test_a_pipeline_cannot_share() -> None:
    """Balanced pipelines place each model's layers by themselves."""
    backend = BalancedBackend()
    with pytest.raises(ConfigError, match="which another model of the block shares, with backend='balanced'"):
        parallel_model(*make(), backend=backend).__enter__()
