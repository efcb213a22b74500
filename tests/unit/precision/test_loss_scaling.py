"""fp16 in an unchanged loop, compared with a hand-written loop that uses torch.amp.GradScaler.

fp16 is refused on the CPU: it is slow there. These tests let the engine accept it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallelize import Amp, ConfigError, parallel_model
from parallelize.precision.loss_scaling import LossScale
from parallelize.precision.native import NativePrecision
from parallelize.torch_patches.forward import route_of

HALF, INF = torch.float16, float("inf")


@pytest.fixture(autouse=True, scope="module")
def fp16_on_cpus() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativePrecision, "dtypes", {"cpu": frozenset({torch.bfloat16, HALF})})
        yield


def scaling(*models: nn.Module, level: Any = "O1", **amp: Any) -> contextlib.AbstractContextManager[Any]:
    options = Amp(level, dtype=HALF, **{"init_scale": 2.0**8, **amp})
    return parallel_model(*models, amp=options, backend="ddp", processes=1)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return the state of the loss scale in the block of a model, as `parallelize.save` does."""
    route = route_of(model)
    assert route is not None
    return route.owner.session.state_dict()


class ByHand(nn.Module):
    """A model whose forward runs under autocast, with outputs in fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        with torch.autocast("cpu", HALF):
            return self.model(*args).float()


class Tower(nn.Module):
    """A tower, whose gradients may have inf while those of another one are finite."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}

CLIPPINGS: dict[str, Callable[[Any], object]] = {
    "none": lambda p: None,
    "norm": lambda p: nn.utils.clip_grad_norm_(p, 0.5),
    "twice": lambda p: [nn.utils.clip_grad_norm_(p, 0.5) for _ in range(2)],
    "value": lambda p: nn.utils.clip_grad_value_(p, 0.01),
}


@dataclass(frozen=True)
class Iteration:
    """One optimizer step: per micro-batch the towers whose input has inf, and how gradients are clipped and zeroed."""

    micro_batches: tuple[str, ...]
    clipping: str
    set_to_none: bool


iterations = st.builds(
    Iteration,
    micro_batches=st.lists(st.sampled_from(["", "", "", "a", "b", "ab"]), min_size=1, max_size=3).map(tuple),
    clipping=st.sampled_from(sorted(CLIPPINGS)),
    set_to_none=st.booleans(),
)


def batch(number: int, infinite: str) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(number))
    if "a" in infinite:
        x[0, 0] = INF
    if "b" in infinite:
        y[0, 0] = INF
    return x, y


@dataclass
class Towers:
    """Two models with one optimizer for both, or one for each, and the state of the scale after each step."""

    kinds: Sequence[str]

    def __post_init__(self) -> None:
        self.models = Tower(0), Tower(1)
        self.parameters = [each for model in self.models for each in model.parameters()]
        groups: list[Any] = [list(model.parameters()) for model in self.models]
        if len(self.kinds) == 1:
            groups = [[{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.1}]]
        self.optimizers = [OPTIMIZERS[kind](group) for kind, group in zip(self.kinds, groups, strict=True)]
        self.scales: list[Any] = []

    def train(self, schedule: Sequence[Iteration], scaler: torch.amp.GradScaler) -> None:
        """Train by hand if the scaler is enabled."""
        is_by_hand = scaler.is_enabled()
        a, b = map(ByHand, self.models) if is_by_hand else self.models
        for number, each in enumerate(schedule):
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=each.set_to_none)
            for micro, infinite in enumerate(each.micro_batches):
                x, y = batch(10 * number + micro, infinite)
                loss = (a(x).square().mean() + b(y).square().mean()) / len(each.micro_batches)
                scaler.scale(loss).backward()
            for optimizer in self.optimizers:
                scaler.unscale_(optimizer)
            CLIPPINGS[each.clipping](self.parameters)
            for optimizer in self.optimizers:
                scaler.step(optimizer)
            scaler.update()
            self.scales.append(scaler.state_dict() if is_by_hand else state_of(self.models[0]))


OFF = torch.amp.GradScaler("cpu", enabled=False)


def assert_same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> None:
    torch.testing.assert_close(list(one), list(other), rtol=0, atol=0, equal_nan=True)


@settings(max_examples=40)
@given(
    schedule=st.lists(iterations, min_size=1, max_size=6),
    kinds=st.one_of(
        st.sampled_from(sorted(OPTIMIZERS)).map(lambda kind: (kind,)),
        st.tuples(st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from(sorted(OPTIMIZERS))),
    ),
    init_scale=st.sampled_from([1.0, 2.0**10, 2.0**16, 2.0**30]),
    growth_interval=st.integers(1, 3),
)
def test_any_schedule_equals_grad_scaler(
    schedule: list[Iteration], kinds: tuple[str, ...], init_scale: float, growth_interval: int
) -> None:
    """Weights, optimizer state and the scale after every iteration equal GradScaler's, bit for bit."""
    rules = {"init_scale": init_scale, "growth_interval": growth_interval}
    hand, ours = Towers(kinds), Towers(kinds)
    hand.train(schedule, torch.amp.GradScaler("cpu", **rules))
    with scaling(*ours.models, **rules):
        ours.train(schedule, OFF)
    assert ours.scales == hand.scales
    assert_same(ours.parameters, hand.parameters)
    for one, other in zip(ours.optimizers, hand.optimizers, strict=True):
        state, reference = one.state_dict()["state"], other.state_dict()["state"]
        torch.testing.assert_close(state, reference, rtol=0, atol=0, equal_nan=True)


@given(
    found=st.lists(st.booleans(), max_size=60),
    init_scale=st.integers(-20, 120).map(lambda each: 2.0**each),
    growth_factor=st.sampled_from([2.0, 4.0, 2.0**30]),
    backoff_factor=st.sampled_from([0.5, 0.125]),
    growth_interval=st.integers(1, 4),
)
def test_the_scale_follows_the_rules_of_grad_scaler(found: list[bool], **rules: Any) -> None:
    """After any sequence of steps with and without inf; it stays at the greatest power of two of fp32."""
    scale, scaler = LossScale(Amp(**rules)), torch.amp.GradScaler("cpu", **rules)
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler.scale(torch.ones(1))
    for each in found:
        parameter.grad = torch.tensor([INF if each else 0.0])
        scaler.step(optimizer)
        scaler.update()
        scale.update(has_inf=each)
        assert scale.state == scaler.state_dict()


def gradients_of(model: nn.Module, loss: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    loss().backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def test_optimizers_of_one_model_skip_together() -> None:
    """Inf in a gradient of one layer skips the steps of all layers of the model."""
    model = Tower()
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in model.parameters()]
    before = [each.detach().clone() for each in model.parameters()]
    with scaling(model):
        (model(torch.ones(1, 3)).sum() + model.layers[2].bias.sum() * INF).backward()
        for optimizer in optimizers:
            optimizer.step()
            state_of(model)  # saving between two steps keeps the flags
    assert_same(list(model.parameters()), before)


def gan(g: nn.Module, d: nn.Module, scaler: torch.amp.GradScaler) -> None:
    """The usual loop: d(g(z)) once detached and once not, with d's gradients of g's backward left over."""
    torch.manual_seed(1)
    g_optimizer, d_optimizer = torch.optim.Adam(g.parameters(), lr=0.01), torch.optim.Adam(d.parameters(), lr=0.01)

    def step(optimizer: torch.optim.Optimizer) -> None:
        scaler.step(optimizer)
        scaler.update()

    for number in range(5):
        real, z = torch.randn(6, 3), torch.randn(6, 3)
        if number == 2:
            real[0, 0] = INF
        d_optimizer.zero_grad()
        scaler.scale(d(g(z).detach()).mean() - d(real).mean()).backward()
        step(d_optimizer)
        g_optimizer.zero_grad()
        scaler.scale(-d(g(z)).mean()).backward()
        step(g_optimizer)


def test_a_gan_trains_as_with_grad_scaler() -> None:
    """Two models in a chain, two optimizers with separate iterations, inf in one of them."""
    rules = {"init_scale": 2.0**10, "growth_interval": 2}
    scaler = torch.amp.GradScaler("cpu", **rules)

    def pair() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, size)) for size in (3, 1)]

    hand, ours = pair(), pair()
    gan(*map(ByHand, hand), scaler)
    with scaling(*ours, **rules):
        gan(*ours, OFF)
        assert state_of(ours[0]) == scaler.state_dict()
    for one, other in zip(ours, hand, strict=True):
        assert_same(list(one.parameters()), list(other.parameters()))


def losses_of(model: Tower, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return a backward of each form that torch accepts."""

    class Box:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    def edge() -> None:
        loss = model(x).sum()
        torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss))

    def retained() -> None:
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    def regularised() -> None:
        (model(x).sum() + sum(each.square().sum() for each in model.parameters())).backward()

    def with_leaf() -> None:
        (model(x).sum() * x.sum()).backward()

    def checkpointed(reentrant: bool) -> None:
        hidden = x * 2
        for layer in model.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
        hidden.square().sum().backward()

    def unboxed(box: Box) -> torch.Tensor:
        return model.layers(box.value)

    return {
        "sum": lambda: model(x).sum().backward(),
        "gradient": lambda: model(x).backward(torch.full((4, 1), 0.5)),
        "two roots": lambda: torch.autograd.backward([model(x).sum(), model(x * 2).mean()]),
        "two roots, gradients": lambda: torch.autograd.backward(
            [model(x), model(x).sum()], [torch.ones(4, 1), torch.tensor(3.0)]
        ),
        "inputs": lambda: model(x).sum().backward(inputs=[x]),
        "inputs of a generator": lambda: model(x).sum().backward(inputs=(each for each in [x])),
        "a checkpoint around the model": lambda: checkpoint(model, x, use_reentrant=True).sum().backward(),
        "checkpoints of layers": lambda: checkpointed(reentrant=False),
        "reentrant checkpoints of layers": lambda: checkpointed(reentrant=True),
        "edge": edge,
        "regularised": regularised,
        "history before the model": lambda: model(x.exp()).sum().backward(),
        "leaf in the loss": with_leaf,
        "retain_graph": retained,
        "a submodule, an object": lambda: unboxed(Box(x * 2)).sum().backward(),
    }


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("form", sorted(losses_of(Tower(), torch.ones(4, 3))))
def test_every_form_of_backward_gives_unscaled_gradients(form: str, level: str) -> None:
    """The gradients of parameters and of other leaves equal those without scaling, also when they accumulate."""

    def gradients(block: Callable[..., Any]) -> list[torch.Tensor | None]:
        model = Tower()
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with block(model):
            losses_of(model, x)[form]()
            losses_of(model, x)["sum"]()
        return [None if each.grad is None else each.grad.detach() for each in (*model.parameters(), x)]

    expected = gradients(lambda _: contextlib.nullcontext())
    found = gradients(lambda model: scaling(model, level=level))
    assert {each.dtype for each in found if each is not None} == {torch.float32}
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


class Hiding(Tower):
    """A model that uses a leaf that is neither a parameter nor an input."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["hidden"] = torch.ones(3, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * self.__dict__["hidden"])


def test_a_loss_of_an_input_that_the_model_returns() -> None:
    """Its backward does not reach the model: it is left alone, not refused."""

    class Passing(Tower):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), x

    model, x = Passing(), torch.ones(4, 3, requires_grad=True)
    with scaling(model):
        model(x * 2)[1].sum().backward()
    assert torch.equal(x.grad, torch.full((4, 3), 2.0))


def test_a_leaf_that_only_the_model_knows_is_unscaled() -> None:
    """In each of several backward passes, and an optimizer of such leaves skips its step on inf."""
    model, plain = Hiding(), Hiding()
    x = torch.ones(2, 3)
    hidden = model.__dict__["hidden"]
    optimizer = torch.optim.SGD([hidden], lr=0.1)
    with scaling(model):
        for count in (1, 2):
            model(x).sum().backward()
            plain(x).sum().backward()
            torch.testing.assert_close(hidden.grad, plain.__dict__["hidden"].grad, rtol=0.01, atol=1e-3)
            assert hidden.grad.abs().max() < 10 * count
        model(x * INF).sum().backward()
        before = hidden.detach().clone()
        optimizer.step()
        assert torch.equal(hidden, before)


def test_a_loss_that_never_touches_the_model_is_left_alone() -> None:
    """A module outside the block trains with a separate optimizer as if the block did not exist."""
    model, own, twin = Tower(), Tower(1), Tower(1)
    with scaling(model, init_scale=4.0, growth_interval=1):
        for each in (own, twin):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            each(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        own(torch.full((4, 3), INF)).sum().backward()
        assert own.layers[0].weight.grad.isnan().any()
        assert state_of(model)["scale"] == 4.0
    assert_same(list(own.parameters()), list(twin.parameters()))


def test_an_exception_in_backward_leaves_unscaled_gradients() -> None:
    """Gradients from before are unchanged, and the next backward works."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("planted")

    model, x = Tower(), torch.randn(4, 3)
    with scaling(model):
        expected = gradients_of(model, lambda: model(x).sum())
        with pytest.raises(RuntimeError, match="planted"):
            Failing.apply(model(x)).sum().backward()
        assert_same([each.grad for each in model.parameters()], expected)
        assert_same(gradients_of(model, lambda: model(x).sum()), expected)


def test_a_skipped_step_gives_no_warning_and_leaves_the_optimizer() -> None:
    """A scheduler counts the step; state, groups and attributes of the optimizer are unchanged; gradients stay."""
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = [each.clone() for each in model.parameters()]
    with warnings.catch_warnings(), scaling(model):
        warnings.simplefilter("error")
        model(torch.full((4, 3), INF)).sum().backward()
        optimizer.step()
        scheduler.step()
        assert not optimizer.state
        assert all(each.grad is not None for each in model.parameters())
    assert_same(list(model.parameters()), before)


class Naive(torch.optim.Optimizer):
    """An optimizer that requires a gradient for every parameter, and counts its steps in an attribute."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(each.grad, alpha=group["lr"])


class Wrapping(torch.optim.Optimizer):
    """An optimizer that wraps another one, with the same groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)

    def step(self, closure: None = None) -> None:
        self.inner.step()


@pytest.mark.parametrize("wrap", [lambda each: each, Wrapping], ids=["plain", "wrapped"])
def test_steps_of_any_optimizer_class_are_skipped(wrap: Callable[[Any], torch.optim.Optimizer]) -> None:
    """A step that would fail without gradients, or is taken by a wrapped optimizer, is skipped too."""
    model = Tower()
    naive = Naive(model.parameters())
    optimizer = wrap(naive)
    before = [each.clone() for each in model.parameters()]
    with scaling(model):
        model(torch.full((4, 3), INF)).sum().backward()
        optimizer.step()
        assert_same(list(model.parameters()), before)
        model.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    assert naive.steps == 1
    assert not torch.equal(model.layers[0].weight, before[0])


def test_sparse_gradients_are_unscaled() -> None:
    """An embedding with sparse gradients trains as with GradScaler."""
    results = []
    for block in (lambda _: contextlib.nullcontext(), scaling):
        torch.manual_seed(0)
        model = nn.Embedding(6, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        with block(model):
            for _ in range(2):
                model.zero_grad()
                for _ in range(2):
                    model(torch.tensor([1, 1, 3])).square().sum().backward()
                optimizer.step()
        results.append(model.weight.detach())
    torch.testing.assert_close(*results)


def test_state_resumes_the_trajectory() -> None:
    """The state has the keys of GradScaler; another block that loads it resumes with the same scale and counter."""
    rules = {"init_scale": 4.0, "growth_interval": 3}

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            model(batch(number, "a" if number == 4 else "")[0]).square().mean().backward()
            optimizer.step()

    uninterrupted, resumed = Tower(), Tower()
    of_uninterrupted, of_resumed = (OPTIMIZERS["adamw"](each.parameters()) for each in (uninterrupted, resumed))
    with scaling(uninterrupted, **rules):
        train(uninterrupted, of_uninterrupted, range(8))
        expected = state_of(uninterrupted)
    with scaling(resumed, **rules):
        train(resumed, of_resumed, range(2))
        saved = state_of(resumed)
    assert saved.keys() == torch.amp.GradScaler("cpu").state_dict().keys()
    with scaling(resumed):
        route_of(resumed).owner.session.load_state_dict(saved)
        train(resumed, of_resumed, range(2, 8))
        assert state_of(resumed) == expected
    assert_same(list(resumed.parameters()), list(uninterrupted.parameters()))


def test_nested_blocks_use_one_scale() -> None:
    """A loss through models of two nested blocks is scaled once, and the outer block works after the inner one ends."""
    outer, inner, x = nn.Linear(3, 3), nn.Linear(3, 2), torch.randn(4, 3)
    chain = nn.Sequential(outer, inner)
    expected = gradients_of(chain, lambda: ByHand(inner)(ByHand(outer)(x)).square().sum())
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.0)
    with scaling(outer, init_scale=2.0**4, growth_interval=1):
        with scaling(inner):
            torch.testing.assert_close(
                gradients_of(chain, lambda: chain(x).square().sum()), expected, rtol=0.01, atol=0.01
            )
            optimizer.step()
            assert state_of(inner) == state_of(outer)
            assert state_of(inner)["scale"] == 2.0**5
        assert gradients_of(outer, lambda: outer(x).sum())


def test_a_parameter_of_two_models_is_unscaled_once() -> None:
    """Accumulated gradients of a shared parameter are those of one model with both."""
    first, second, x = nn.Linear(3, 3), nn.Linear(3, 3), torch.ones(2, 3)
    second.weight = first.weight
    both = nn.ModuleList([first, second])
    for block in (lambda *_: contextlib.nullcontext(), scaling):
        both.zero_grad()
        with block(first, second):
            for _ in range(2):
                (first(x) + second(x)).sum().backward()
        torch.testing.assert_close(first.weight.grad, torch.full((3, 3), 8.0))
        torch.testing.assert_close(second.bias.grad, torch.full((3,), 4.0))


@pytest.mark.parametrize("kind", ["sgd", "fused"])
def test_a_scaler_of_the_users_own_scales_instead(kind: str) -> None:
    """The loop of torch's documentation, in a block: the same weights and scales, bit for bit."""
    schedule = [Iteration((infinite,), "norm", set_to_none=True) for infinite in ("", "a", "", "", "ab", "")]
    rules = {"init_scale": 2.0**10, "growth_interval": 2}
    hand, ours = Towers((kind,)), Towers((kind,))
    hand.train(schedule, torch.amp.GradScaler("cpu", **rules))
    with scaling(*ours.models, init_scale=2.0**16):
        ours.train(schedule, torch.amp.GradScaler("cpu", **rules))
    assert ours.scales == hand.scales
    assert_same(ours.parameters, hand.parameters)


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.sub_(0.01 * each.grad)


def test_a_frozen_mask_of_infinity_is_no_update_by_hand() -> None:
    """Inf that an accumulated pass leaves is skipped by the step, whatever constants the model has."""
    model = Tower()
    model.mask = nn.Parameter(torch.tensor([float("-inf")]), requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [each.detach().clone() for each in model.parameters()]
    with scaling(model):
        for factor in (float("inf"), 1.0):
            (model(torch.ones(1, 3)).sum() * factor).backward()
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


def test_weights_that_are_updated_by_hand_are_scaled() -> None:
    """Without an optimizer gradients are unscaled, too, and a loop that drops inf itself finds a scale that works."""
    model, plain = Tower(), Tower()
    with scaling(model, init_scale=2.0**30):
        for number in range(20):
            model.zero_grad()
            model(batch(0, "")[0]).square().mean().backward()
            if all(each.grad.isfinite().all() for each in model.parameters()):
                descend(model)
            elif number == 19:
                pytest.fail("the scale has not backed off")
    assert not torch.equal(model.layers[0].weight, plain.layers[0].weight)


def output(model: Tower) -> torch.Tensor:
    return model(torch.ones(1, 3))


def sgd(model: Tower) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def update_by_hand(model: Tower) -> None:
    for _ in range(2):
        model.zero_grad()
        (output(model).sum() * 1e6).backward()
        descend(model)


def step_in_backward(model: Tower) -> None:
    optimizer, weights = sgd(model), list(model.parameters())
    handle = torch.autograd.graph.register_multi_grad_hook(weights, lambda _: optimizer.step())
    try:
        output(model).sum().backward()
    finally:
        handle.remove()


def backward_to_output(model: Tower) -> None:
    out = output(model)
    out.sum().backward(inputs=[out])


def step_in_hook(model: Tower) -> None:
    model.layers[0].weight.register_post_accumulate_grad_hook(lambda each: each.data.sub_(each.grad))


imported_before = torch.autograd.backward
WITHOUT_SCALE = ("update by hand", "closure", "closure by name")  # bf16 is not compared with these
REFUSALS: dict[str, tuple[Callable[[Tower], Any], str, str]] = {
    "update by hand": (update_by_hand, "an update of weights without an optimizer", "torch.optim"),
    "closure": (
        lambda model: (output(model).sum().backward(), sgd(model).step(lambda: 0.0)),
        "SGD.step(closure) under loss scaling",
        "call backward before step()",
    ),
    "closure by name": (
        lambda model: sgd(model).step(closure=lambda: 0.0),
        "SGD.step(closure) under loss scaling",
        "amp='bf16'",
    ),
    "in backward": (step_in_backward, "SGD.step() inside backward", "after backward()"),
    "grad": (
        lambda model: torch.autograd.grad(output(model).sum(), model.parameters()),
        "why: torch.autograd.grad, a backward()",
        "amp='bf16'",
    ),
    "imported before": (
        lambda model: imported_before(output(model).sum()),
        "a backward pass that is not scaled",
        "loss.backward() in the block",
    ),
    "create_graph": (
        lambda model: output(model).sum().backward(create_graph=True),
        "backward(create_graph=True) under",
        "amp='bf16'",
    ),
    "inputs": (backward_to_output, "backward(inputs=) of a tensor that is not a leaf", "amp='bf16'"),
    "hook": (lambda model: output(model).register_hook(print), "Tensor.register_hook under loss scaling", "amp='bf16'"),
    "hook of a parameter": (
        lambda model: model.layers[0].weight.register_hook(print),
        "Tensor.register_hook under loss scaling",
        "amp='bf16'",
    ),
    "step in a hook": (step_in_hook, "Tensor.register_post_accumulate_grad_hook under loss scaling", "amp='bf16'"),
    "retain_grad": (lambda model: output(model).retain_grad(), "Tensor.retain_grad under loss scaling", "amp='bf16'"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_scaled_is_refused(name: str) -> None:
    """Each error says what is wrong, and how to fix it."""
    refused, what, fix = REFUSALS[name]
    model = Tower()
    with scaling(model), pytest.raises(ConfigError) as caught:
        refused(model)
    assert what in str(caught.value)
    assert fix in caught.value.faults[0].fix
    model(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize(
    ("change", "rules", "message"),
    [
        (lambda model: model.half(), {}, r"parameter 'layers.0.weight' in torch.float16"),
        (lambda model: model.layers[0].weight.register_hook(print), {}, r"a hook on parameter 'layers.0.weight'"),
        (step_in_hook, {}, r"a hook on parameter 'layers.0.weight'"),
        (lambda _: None, {"growth_factor": 1.5}, r"growth_factor=1.5(?s:.*)power of two"),
    ],
)
def test_a_block_that_cannot_scale_is_refused_at_its_entry(
    change: Callable[[Tower], Any], rules: dict[str, float], message: str
) -> None:
    """Parameters in fp16 or with hooks, and factors that are no powers of two; no patch stays."""
    before, model = patched_functions(), Tower()
    change(model)
    with pytest.raises(ConfigError, match=message), scaling(model, **rules):
        pass
    assert patched_functions() == before


def test_backward_after_the_block_is_refused() -> None:
    """It would not be scaled; the error does not take it for another function."""
    model = Tower()
    with scaling(model):
        loss = model(torch.ones(1, 3)).sum()
    with pytest.raises(ConfigError, match=r"(?s)a backward pass that is not scaled.*in the block"):
        loss.backward()


def test_what_bf16_supports() -> None:
    """All that is refused under fp16 works under bf16, with unscaled gradients."""
    for name, (refused, *_) in REFUSALS.items():
        if name not in WITHOUT_SCALE:
            with warnings.catch_warnings(), parallel_model(Tower(), amp="bf16", backend="ddp", processes=1) as model:
                warnings.simplefilter("ignore")  # torch's, of create_graph
                refused(model)


def patched_functions() -> list[Any]:
    optimizer: Any = __import__("torch.optim.optimizer", fromlist=["optimizer"])
    return [
        torch.autograd.backward,
        torch.autograd.grad,
        torch.Tensor.backward,
        torch.Tensor.retain_grad,
        torch.Tensor.register_hook,
        torch.amp.GradScaler.scale,
        set(vars(torch.Tensor)),
        dict(optimizer._global_optimizer_pre_hooks),
        dict(optimizer._global_optimizer_post_hooks),
    ]


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_every_patch_is_removed(error: type[Exception] | None) -> None:
    """Functions and hooks of torch are restored, also after an exception; inside the block they are patched."""
    before, model = patched_functions(), Tower()
    with contextlib.suppress(RuntimeError), scaling(model):
        assert patched_functions() != before
        model(torch.ones(1, 3)).sum().backward()
        if error is not None:
            raise error
    assert patched_functions() == before
    assert torch.autograd.backward.__name__ == "backward"
