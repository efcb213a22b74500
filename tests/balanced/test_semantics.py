"""Semantics that users rely on besides numbers: hooks, modes, RNG, errors, memory, copies."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from balanced.models import (
    CASES,
    Gpt,
    ResNet,
    assert_equal_gradients,
    batch_of,
    gradients,
    images,
    loss_of,
    pipelined,
    rows,
    seeded,
)
from torch import nn
from torch.nn import functional as F

from parallelize import parallel_model
from parallelize.backends.balanced.plugin import BalancedBackend

INPUTS = batch_of(CASES["gpt, tied"])
X = INPUTS[0][0]


def test_hooks_run_once_with_the_full_gradient() -> None:
    """Tensor hooks and post-accumulate hooks of every parameter, also tied ones, run once per backward."""
    model = seeded(Gpt)
    fired: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _g, n=name: fired.update({n: fired.get(n, 0) + 1}))
        parameter.register_post_accumulate_grad_hook(
            lambda _p, n=name: fired.update({f"{n}!": fired.get(f"{n}!", 0) + 1})
        )
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with pipelined(model, INPUTS):
        loss_of(model(X)).backward()
    assert set(fired.values()) == {1}
    assert len(fired) == 2 * len(list(model.parameters()))
    # Once in `call_order`, once here.
    assert len(calls) == 2


def test_dropout_depends_on_the_seed_only() -> None:
    """Runs with one seed are bitwise equal; another seed, and each sample, differ."""
    model = seeded(lambda: Gpt(dropout=0.5))
    with pipelined(model, INPUTS):
        found = []
        for _ in range(4):
            torch.manual_seed(3)
            model.zero_grad()
            output = model(X)
            loss_of(output).backward()
            found.append((output.detach(), gradients(model)["tokens.weight"].clone()))
        torch.manual_seed(4)
        other = model(X)
        alike = model(X[:1].repeat(8, 1))
    for output, gradient in found[1:]:
        assert torch.equal(output, found[0][0])
        assert torch.equal(gradient, found[0][1])
    assert not torch.equal(other, found[0][0])
    assert not torch.equal(alike[0], alike[2])


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_tracks_the_full_batch(momentum: float | None) -> None:
    """The first batch norm's running statistics equal the plain model's, for uneven batches too; a step counts once."""
    model = seeded(ResNet)
    model.norm.momentum = momentum
    plain = copy.deepcopy(model)
    x = images(11)[0][0]
    with pipelined(model, images(8)):
        for batch in (x, x[:8] + 1.0):
            model(batch)
            plain(batch)
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean)
    torch.testing.assert_close(model.norm.running_var, plain.norm.running_var)
    assert all(module.num_batches_tracked == 2 for module in model.modules() if isinstance(module, nn.BatchNorm2d))


class Normed(nn.Module):
    """Gives the input of its batch norm by name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.norm(input=x))


@pytest.mark.parametrize("attributes", [
    {},
    {"track_running_stats": False},
    {"momentum": None, "num_batches_tracked": None},
])  # fmt: skip
@pytest.mark.parametrize("microbatches", [1, 4])
def test_batch_norm_updates_what_torch_updates(microbatches: int, attributes: dict[str, Any]) -> None:
    """A batch norm that tracks no statistics keeps them; a call of it outside of the model's forward updates them."""
    model = seeded(Normed)
    for name, value in attributes.items():
        setattr(model.norm, name, value)
    plain = copy.deepcopy(model)
    x = torch.randn(8, 8)
    with pipelined(model, rows(8), microbatches=microbatches):
        for either in (model, plain):
            either(x).sum().backward()
            either.norm(x + 1.0)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_mixed_precision_of_the_block(level: str) -> None:
    """amp= computes in bfloat16 on all stages, returns fp32, and a step gives the same weights as on one stage."""
    weights = []
    for stages in (1, 2):
        model = seeded(lambda: Gpt(tied=False))
        backend = BalancedBackend(devices=("cpu",) * stages, microbatches=4)
        with parallel_model(model, backend=backend, amp=level):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            output = model(X)
            assert output.dtype is torch.float32
            F.cross_entropy(output.flatten(0, 1), X.flatten()).backward()
            optimizer.step()
        weights.append(list(model.parameters()))
    for one, two in zip(*weights, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.fails_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.b(self.a(x))
        if (x > 50).any():
            raise ValueError("a bad sample")
        if self.fails_backward:
            h.register_hook(self.fail)
        return self.c(h)

    def fail(self, _gradient: torch.Tensor) -> None:
        raise ZeroDivisionError("in backward")


def test_an_exception_in_a_stage_reaches_the_caller() -> None:
    """Errors of forward and backward are raised unchanged, nothing hangs, the next step has the right gradients."""
    model = seeded(Fragile)
    plain = copy.deepcopy(model)
    x = torch.randn(8, 8)
    bad = x.clone()
    bad[5, 0] = 99
    with pipelined(model, rows(8)):
        with pytest.raises(ValueError, match="a bad sample"):
            model(bad)
        model.fails_backward = True
        with pytest.raises(ZeroDivisionError, match="in backward"):
            loss_of(model(x)).backward()
        model.fails_backward = False
        model.zero_grad()
        loss_of(model(x)).backward()
    loss_of(plain(x)).backward()
    assert_equal_gradients(model, plain)


def test_a_step_leaves_no_cycle_behind() -> None:
    """A forward's graph and activations are freed with its output, with or without backward, without the collector."""
    activations: list[weakref.ref[torch.Tensor]] = []

    class Noting(Gpt):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
            x = self.tokens(tokens)
            activations.append(weakref.ref(x))
            return self.head(self.norm(self.blocks[0](x)))

    model = seeded(lambda: Noting(dropout=0.5))
    with pipelined(model, INPUTS):
        model(X)
        gc.collect()
        gc.disable()
        try:
            for is_used in (True, False):
                output = model(X)
                if is_used:
                    loss_of(output).backward()
                del output
                assert not any(each() is not None for each in activations)
        finally:
            gc.enable()


def test_a_first_batch_in_inference_mode() -> None:
    """Planning on a batch without gradients prepares for training too."""
    model = seeded(Gpt)
    plain = copy.deepcopy(model)
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4)):
        with torch.inference_mode():
            torch.testing.assert_close(model(X + 0), plain(X), rtol=1e-4, atol=1e-5)
        loss_of(model(X)).backward()
    loss_of(plain(X)).backward()
    assert_equal_gradients(model, plain, rtol=1e-4, atol=1e-4)


def test_a_last_batch_with_batch_norm_may_be_small() -> None:
    """With training batch norm, a batch smaller than planned is split into fewer parts, of at least two samples."""
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    inputs = rows(16)
    with pipelined(model, inputs, samples=16) as same:
        same(*inputs[0])
        norm = copy.deepcopy(model[1])
        x = torch.randn(5, 8)
        parts = torch.cat([model[2](norm(model[0](part))) for part in x.split((3, 2))])
        torch.testing.assert_close(same(x), parts)
