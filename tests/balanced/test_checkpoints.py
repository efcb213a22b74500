"""torch.utils.checkpoint, called by the user inside a pipelined model."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from balanced.models import assert_equal_gradients, loss_of, pipelined, seeded
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from parallelize import parallel_model
from parallelize.backends.balanced.plugin import BalancedBackend

pytestmark = pytest.mark.slow

INPUTS: tuple[Any, dict[str, Any]] = ((torch.randn(8, 8, dtype=torch.double),), {})


class Chain(nn.Module):
    """Four blocks with dropout; each subclass checkpoints them differently."""

    def __init__(self, dropout: float = 0.4) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        )
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(self.first(x)))

    def body(self, x: Tensor) -> Any:
        return self.blocks(x)


class Modules(Chain):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Reentrant(Chain):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class Functions(Chain):
    """Regions that begin with an operation instead of a module, and draw random numbers."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(self.noisy, block, x, use_reentrant=False)
        return x

    def noisy(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x + torch.rand_like(x)) * torch.rand(8, dtype=torch.double)


class Rows(Chain):
    def body(self, x: Tensor) -> Any:
        return checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)


class Nested(Chain):
    def body(self, x: Tensor) -> Any:
        return checkpoint(Modules.body, self, x, use_reentrant=False)


def assert_true_gradient(model: Any, x: Tensor) -> None:
    """Compare each weight's gradient along a random direction with the loss's difference quotient."""

    def loss() -> Tensor:
        torch.manual_seed(3)
        output: Tensor = model(x)
        return output.square().sum()

    model.zero_grad()
    loss().backward()
    step = 1e-6
    for name, weight in model.named_parameters():
        direction = torch.randn(weight.shape, dtype=weight.dtype, generator=torch.Generator().manual_seed(0))
        found = []
        for signed in (step, -2 * step):
            with torch.no_grad():
                weight.add_(direction, alpha=signed)
            found.append(loss().detach())
        with torch.no_grad():
            weight.add_(direction, alpha=step)
        slope = (weight.grad * direction).sum()
        torch.testing.assert_close((found[0] - found[1]) / (2 * step), slope, rtol=1e-4, atol=1e-5, msg=name)


class Decorated(Chain):
    """Regions of a function that was decorated before the block."""

    def __init__(self, dropout: float = 0.4) -> None:
        super().__init__(dropout)
        self.region: Any = checkpoint(use_reentrant=False)(lambda block, x: block(x))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.region(block, x)
        return x


KINDS = [Modules, Reentrant, Functions, Rows, Nested]
if TorchVersion(torch.__version__) >= "2.15":
    KINDS.append(Decorated)


# `call_order` runs forward without gradients.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_random_numbers_are_drawn_again(kind: type[Chain], microbatches: int, recompute: bool) -> None:
    """Recomputation uses forward's dropout masks, wherever a region begins and whatever surrounds it."""
    model = seeded(kind)
    options: dict[str, Any] = {"microbatches": microbatches, "recompute": recompute}
    with pipelined(model, INPUTS, stages=3, **options):
        assert_true_gradient(model, INPUTS[0][0])


@pytest.mark.parametrize("recompute", [False, True])
def test_a_region_inside_what_is_recomputed(recompute: bool) -> None:
    """A module that contains a checkpoint may be recomputed as a unit."""
    model = seeded(Modules)
    outer = nn.Sequential(nn.Linear(8, 8).double(), model)
    plan: dict[str, Any] = {"events": ("0", "1"), "bounds": (0, 1, 2), "recompute": recompute}
    with pipelined(outer, INPUTS, **plan):
        assert_true_gradient(outer, INPUTS[0][0])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_region_at_the_input(is_reentrant: bool, recompute: bool) -> None:
    """A batch and a parameter that are passed to a region directly get the gradients of the plain model."""

    class First(Chain):
        def forward(self, x: Tensor) -> Any:
            weight = self.first.weight
            return self.head(checkpoint(lambda x, w: self.blocks(x @ w), x, weight, use_reentrant=is_reentrant))

    model = seeded(lambda: First(0.0))
    plain = copy.deepcopy(model)
    x, same = (INPUTS[0][0].clone().requires_grad_() for _ in range(2))
    with pipelined(model, INPUTS, recompute=recompute):
        loss_of(model(x)).backward()
    loss_of(plain(same)).backward()
    torch.testing.assert_close(x.grad, same.grad)
    assert_equal_gradients(model, plain)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_planning_with_a_region_at_the_input(is_reentrant: bool, recompute: bool) -> None:
    """A batch that requires grad may be passed to a region before any module has run."""

    class First(Chain):
        def forward(self, x: Tensor) -> Any:
            for block in (self.first, *self.blocks):
                x = checkpoint(block, x, use_reentrant=is_reentrant)
            return self.head(x)

    model = seeded(First)
    x = INPUTS[0][0].clone().requires_grad_()
    backend = BalancedBackend(devices=("cpu", "cpu"), microbatches=4, recompute=recompute)
    with parallel_model(model, backend=backend):
        assert_true_gradient(model, x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("kind", [Modules, Reentrant, Functions, Rows, Nested])
def test_planning_with_checkpoints(kind: type[Chain]) -> None:
    """Planning leaves no gradients; `backward` and `torch.autograd.grad` equal finite differences."""
    model = seeded(kind)
    x = INPUTS[0][0]
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4)):
        with torch.no_grad():
            model(x)
        assert all(each.grad is None for each in model.parameters())
        assert_true_gradient(model, x)
        if kind is Reentrant:  # torch.autograd.grad refuses it
            return
        torch.manual_seed(3)
        got = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for gradient, parameter in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_a_reentrant_region_without_an_input_that_requires_grad() -> None:
    """As in torch, it gives no gradients and warns."""

    class First(Chain):
        def forward(self, x: Tensor) -> Any:
            return self.head(self.blocks(checkpoint(self.first, x, use_reentrant=True)))

    model = seeded(lambda: First(0.0))
    plain = copy.deepcopy(model)
    for each, block in ((model, pipelined(model, INPUTS)), (plain, contextlib.nullcontext())):
        with block:
            with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
                output = each(*INPUTS[0])
            loss_of(output).backward()
    assert model.first.weight.grad is None
    assert_equal_gradients(model, plain)


def test_a_context_of_the_user_is_entered_both_times() -> None:
    """The contexts of `context_fn` are entered in forward and in backward, once per micro-batch."""
    entered: list[str] = []

    class Noting:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *exc: object) -> None:
            entered.append(f"{self.name} ends")

    class Watched(Chain):
        def body(self, x: Tensor) -> Any:
            contexts = lambda: (Noting("ahead"), Noting("again"))  # noqa: E731  # the usual form
            return checkpoint(self.blocks, x, use_reentrant=False, context_fn=contexts)

    model = seeded(Watched)
    with pipelined(model, INPUTS, microbatches=2):
        model(*INPUTS[0])  # is validated
        entered.clear()
        loss_of(model(*INPUTS[0])).backward()
    assert sorted(entered) == sorted(["ahead", "ahead ends", "again", "again ends"] * 2)


def test_an_exception_inside_a_region() -> None:
    """It reaches the caller unchanged, and the next step runs through all stages."""

    class Fragile(Modules):
        def body(self, x: Tensor) -> Tensor:
            return checkpoint(self.checked, x, use_reentrant=False)

        def checked(self, x: Tensor) -> Any:
            if (x.abs() > 50).any():
                raise ValueError("a bad sample")
            return self.blocks(x)

    model = seeded(lambda: Fragile(0.0))
    plain = copy.deepcopy(model)
    x = INPUTS[0][0]
    with pipelined(model, INPUTS):
        with pytest.raises(ValueError, match="a bad sample"):
            model(x * 1e6)
        loss_of(model(x)).backward()
    loss_of(plain(x)).backward()
    assert_equal_gradients(model, plain)


def test_regions_leave_no_cycle_behind() -> None:
    """A forward's graph is freed with its output, with or without backward, without the garbage collector."""
    model = seeded(Modules)
    activations: list[weakref.ref[Tensor]] = []
    with pipelined(model, INPUTS):
        handle = model.first.register_forward_hook(lambda _m, _a, output: activations.append(weakref.ref(output)))
        model(*INPUTS[0])
        activations.clear()
        gc.collect()
        gc.disable()
        try:
            for is_used in (True, False):
                output = model(*INPUTS[0])
                if is_used:
                    loss_of(output).backward()
                assert len(activations) == 4
                del output
                assert [each() for each in activations] == [None] * 4
                activations.clear()
            handle.remove()
        finally:
            gc.enable()


class OneRegion(Chain):
    """One region, which begins with an operation."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(lambda x: Chain.forward(self, 2 * x), x, use_reentrant=False)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_model_in_one_region_is_split(microbatches: int) -> None:
    """A region may span all stages; the model trains like the plain one."""
    model = seeded(lambda: OneRegion(0.0))
    plain = copy.deepcopy(model)
    with pipelined(model, INPUTS, microbatches=microbatches):
        loss_of(model(*INPUTS[0])).backward()
    loss_of(plain(*INPUTS[0])).backward()
    assert_equal_gradients(model, plain)
