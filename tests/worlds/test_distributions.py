"""Policies that return a distribution of torch.distributions train what one process trains."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributions, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from parallelize import ConfigError, FSDPBackend, distributed, parallel_model, rank

pytestmark = pytest.mark.slow

ACTIONS = 3


class Head(nn.Module):
    """Computes a distribution of actions from features and a parameter of its own.

    Args:
        distribution: returns the distribution.
    """

    def __init__(self, distribution: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, ACTIONS)
        self.log_std = nn.Parameter(torch.zeros(ACTIONS))
        self.distribution = distribution

    def forward(self, x: torch.Tensor) -> Any:
        return self.distribution(self.linear(x), self.log_std.exp())


class Policy(nn.Module):
    def __init__(self, distribution: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = Head(distribution)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def normal(x: torch.Tensor, std: torch.Tensor) -> distributions.Independent:
    return distributions.Independent(distributions.Normal(x, std), 1)


def mixture(x: torch.Tensor, std: torch.Tensor) -> distributions.Distribution:
    weights = distributions.Categorical(logits=x)
    return distributions.MixtureSameFamily(weights, distributions.Normal(x, std))


# A distribution of features and standard deviations.
POLICIES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "logits": lambda x, std: distributions.Categorical(logits=x * std),
    "probabilities": lambda x, std: distributions.Categorical((x * std).softmax(-1)),
    "normal": distributions.Normal,
    "normal, of the parameter alone": lambda x, std: distributions.Normal(x.detach(), std),
    "multivariate": lambda x, std: distributions.MultivariateNormal(x, torch.diag(std)),
    "independent": normal,
    "squashed": lambda x, std: distributions.TransformedDistribution(
        normal(x, std), [distributions.AffineTransform(0.0, std), distributions.TanhTransform(cache_size=1)]
    ),
    "mixture": mixture,
    "of parameters": lambda _, std: distributions.Normal(std, std + 1),
    "in a tuple": lambda x, std: (distributions.Normal(x, std), x.sum(-1)),
}


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def loss_of(output: Any, x: torch.Tensor) -> torch.Tensor:
    """Return a loss of a policy gradient."""
    value = torch.zeros(())
    if isinstance(output, tuple):
        output, value = output
    actions = torch.tanh(x.sum(-1, keepdim=True).expand(-1, ACTIONS)) / 2
    if not output.event_shape and output.batch_shape == x.shape[:1]:
        actions = actions[:, 0]
    if isinstance(output, distributions.Categorical):
        actions = (actions > 0).long()
    advantage = x.mean(-1)
    log_probability = output.log_prob(actions)
    if log_probability.ndim > 1:
        log_probability = log_probability.sum(-1)
    return -(log_probability * advantage).mean() + value.square().mean()


def train(name: str, block: Callable[[nn.Module], Any], shares: int) -> dict[str, Any]:
    """Return the weights after three steps on this rank's share of each batch."""
    torch.manual_seed(0)
    policy = Policy(POLICIES[name]).double()
    with block(policy):
        optimizer = torch.optim.SGD(policy.parameters(), 0.1)
        for step in range(3):
            x = batch(step).chunk(shares)[rank() % shares]
            optimizer.zero_grad()
            loss_of(policy(x), x).backward()
            optimizer.step()
    return dict(policy.state_dict())


BACKENDS: dict[str, Any] = {
    "ddp": {},
    "tokens": {"average": "tokens"},
    "fsdp": {"backend": "fsdp"},
    "fsdp, one unit": {"backend": FSDPBackend(blocks=10**6)},
    "fsdp, a unit for the head": {"backend": FSDPBackend(blocks=[Head])},
}
"""Options of a block."""


@distributed(processes=2)
def weights() -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for name in POLICIES:
        expected = train(name, contextlib.nullcontext, 1)
        for backend, options in BACKENDS.items():
            try:
                found[name, backend] = expected, train(name, functools.partial(parallel_model, **options), 2)
            except Exception as error:  # noqa: BLE001 - the test of this case fails, and not all tests
                found[name, backend] = expected, repr(error)
    return found


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str], Any]:
    return weights()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_policy_that_returns_a_distribution(name: str, backend: str, results: dict[Any, Any]) -> None:
    """Its tensors are found as outputs: the weights are those of one process."""
    expected, found = results[name, backend]
    assert not isinstance(found, str), found
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_a_distribution_is_not_cast() -> None:
    """Its tensors depend on each other: an output dtype is refused by name."""

    @distributed(processes=2)
    def run() -> None:
        policy = MixedPrecisionPolicy(output_dtype=torch.float32)
        backend = FSDPBackend(blocks=10**6, mixed_precision=policy)
        train("normal", functools.partial(parallel_model, backend=backend), 2)

    with pytest.raises(ConfigError, match=r"(?s)output_dtype=torch.float32\) with a Normal.*cast in forward"):
        run()
