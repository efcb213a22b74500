"""fp16 in an unchanged loop, compared with a hand-written loop that uses torch.amp.GradScaler.

fp16 is refused on the CPU: it is slow there. These tests let the engine accept it.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallelize import Amp, ConfigError, load, parallel_model, save
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


class Tower(nn.Sequential):
    """A tower, whose gradients may have inf while those of another one are finite."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


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


@settings(max_examples=20)
@given(
    schedule=st.lists(iterations, min_size=1, max_size=6),
    kinds=st.lists(st.sampled_from(sorted(OPTIMIZERS)), min_size=1, max_size=2),
    init_scale=st.sampled_from([1.0, 2.0**10, 2.0**16, 2.0**30]),
    growth_interval=st.integers(1, 3),
)
def test_any_schedule_equals_grad_scaler(
    schedule: list[Iteration], kinds: list[str], init_scale: float, growth_interval: int
) -> None:
    """Weights, optimizer state and scales are GradScaler's, bit for bit, also if the loop has its own in a block."""
    rules = {"init_scale": init_scale, "growth_interval": growth_interval}
    hand = Towers(kinds)
    hand.train(schedule, torch.amp.GradScaler("cpu", **rules))
    for scaler, ours_rules in ((OFF, rules), (torch.amp.GradScaler("cpu", **rules), {"init_scale": 2.0**16})):
        ours = Towers(kinds)
        with scaling(*ours.models, **ours_rules):
            ours.train(schedule, scaler)
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


def test_a_gan_trains_as_with_grad_scaler() -> None:
    """Two models in a chain, separate iterations of two optimizers, one with inf, gradients of g's loss left in d."""
    rules = {"init_scale": 2.0**10, "growth_interval": 2}
    scaler = torch.amp.GradScaler("cpu", **rules)

    def train(g: nn.Module, d: nn.Module, scaler: torch.amp.GradScaler) -> None:
        g_optimizer, d_optimizer = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (g, d))
        for number in range(5):
            real, z = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(number))
            if number == 2:
                real[0, 0] = INF
            for optimizer in (d_optimizer, g_optimizer):
                optimizer.zero_grad()
                loss = d(g(z).detach()).mean() - d(real).mean() if optimizer is d_optimizer else -d(g(z)).mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

    torch.manual_seed(0)
    hand = nn.Linear(3, 3), Tower()
    ours = copy.deepcopy(hand)
    train(*map(ByHand, hand), scaler)
    with scaling(*ours, **rules):
        train(*ours, OFF)
        assert state_of(ours[0]) == scaler.state_dict()
    for one, other in zip(ours, hand, strict=True):
        assert_same(list(one.parameters()), list(other.parameters()))


def losses_of(model: Tower, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return a backward of each form that torch accepts."""

    def regularised() -> None:
        (model(x).sum() + sum(each.square().sum() for each in model.parameters())).backward()

    def with_leaf() -> None:
        (model(x).sum() * x.sum()).backward()

    def retained() -> None:
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    def checkpointed(reentrant: bool) -> None:
        hidden = x * 2
        for layer in model:
            hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
        hidden.square().sum().backward()

    backward = torch.autograd.backward
    return {
        "sum": lambda: model(x).sum().backward(),
        "gradient": lambda: model(x).backward(torch.full((4, 1), 0.5)),
        "two roots": lambda: backward([model(x).sum(), model(x * 2).mean()]),
        "two roots, gradients": lambda: backward([model(x), model(x).sum()], [torch.ones(4, 1), torch.tensor(3.0)]),
        "inputs": lambda: model(x).sum().backward(inputs=[x]),
        "inputs of a generator": lambda: model(x).sum().backward(inputs=(each for each in [x])),
        "a checkpoint around the model": lambda: checkpoint(model, x, use_reentrant=True).sum().backward(),
        "checkpoints of layers": lambda: checkpointed(reentrant=False),
        "reentrant checkpoints of layers": lambda: checkpointed(reentrant=True),
        "edge": lambda: backward(torch.autograd.graph.get_gradient_edge(model(x).sum())),
        "regularised": regularised,
        "history before the model": lambda: model(x.exp()).sum().backward(),
        "leaf in the loss": with_leaf,
        "retain_graph": retained,
        "a submodule": lambda: model[2](model[0](x * 2)).sum().backward(),
    }


@pytest.mark.filterwarnings("ignore:amp= has no effect")  # of calls of submodules
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


def test_a_leaf_that_only_the_model_knows_is_unscaled() -> None:
    """In each of several backward passes, and an optimizer of such leaves skips its step on inf."""
    hidden, of_plain = (torch.ones(3, requires_grad=True) for _ in range(2))

    class Hiding(Tower):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * hidden)

    model, plain = Hiding(), Tower()
    optimizer = torch.optim.SGD([hidden], lr=0.1)
    with scaling(model):
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            plain(torch.ones(2, 3) * of_plain).sum().backward()
            torch.testing.assert_close(hidden.grad, of_plain.grad, rtol=0.01, atol=1e-3)
        model(torch.full((2, 3), INF)).sum().backward()
        optimizer.step()
        assert torch.equal(hidden, torch.ones(3))


def test_a_loss_that_does_not_reach_the_model_is_left_alone() -> None:
    """That of an input which the model returns, and of a module outside the block, with an optimizer of its own."""

    class Passing(Tower):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), x

    model, own, twin = Passing(), Tower(1), Tower(1)
    x = torch.ones(4, 3, requires_grad=True)
    with scaling(model, init_scale=4.0, growth_interval=1):
        model(x * 2)[1].sum().backward()
        for each in (own, twin):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            each(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        own(torch.full((4, 3), INF)).sum().backward()
        assert own[0].weight.grad.isnan().any()
        assert state_of(model)["scale"] == 4.0
    assert torch.equal(x.grad, torch.full((4, 3), 2.0))
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


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: [torch.optim.SGD(parameters, lr=0.1, momentum=0.9)],
        lambda parameters: [torch.optim.SGD([each], lr=0.1) for each in parameters],
        lambda parameters: [Naive(parameters)],
        lambda parameters: [Wrapping(Naive(parameters))],
    ],
    ids=["SGD", "one for each parameter", "plain", "wrapped"],
)
def test_a_skipped_step_changes_nothing(make: Callable[[Any], list[Any]]) -> None:
    """Inf in one gradient, left by an accumulated pass, skips the steps of all optimizers of the model; no warning."""
    model = Tower()
    optimizers = make(list(model.parameters()))
    model.mask = nn.Parameter(torch.tensor([-INF]), requires_grad=False)  # a constant is no update of weights by hand
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1)
    before = [each.clone() for each in model.parameters()]
    x = torch.ones(4, 3)
    with warnings.catch_warnings(), scaling(model):
        warnings.simplefilter("error")  # torch's, if a scheduler steps before its optimizer
        for factor in (INF, 1.0):
            (model(x).sum() + model[2].bias.sum() * factor).backward()
        for optimizer in optimizers:
            optimizer.step()
            state_of(model)  # saving between two steps keeps the flags
        scheduler.step()
        assert_same(list(model.parameters()), before)
        assert not any(each.state or getattr(each, "steps", 0) for each in optimizers)
        assert model[0].weight.grad is not None
        model.zero_grad()
        model(x).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert not torch.equal(model[0].weight, before[0])


def test_sparse_gradients_are_unscaled() -> None:
    """An embedding with sparse gradients trains as without a scale."""
    results = []
    for block in (lambda _: contextlib.nullcontext(), scaling):
        torch.manual_seed(0)
        model = nn.Embedding(6, 2, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with block(model):
            for _ in range(2):
                model.zero_grad()
                for _ in range(2):
                    model(torch.tensor([1, 1, 3])).square().sum().backward()
                optimizer.step()
        results.append(model.weight.detach())
    torch.testing.assert_close(*results)


def test_a_saved_scale_resumes_the_trajectory(tmp_path: Path) -> None:
    """Another block that loads it goes on with the same scale and counter; a model outside of a block ignores it."""
    rules = {"init_scale": 4.0, "growth_interval": 3}
    models = uninterrupted, resumed = Tower(), Tower()
    of_uninterrupted, of_resumed = (OPTIMIZERS["adamw"](each.parameters()) for each in models)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            model(batch(number, "a" if number == 4 else "")[0]).square().mean().backward()
            optimizer.step()

    with scaling(uninterrupted, **rules):
        train(uninterrupted, of_uninterrupted, range(8))
        expected = state_of(uninterrupted)
    with scaling(resumed, **rules):
        train(resumed, of_resumed, range(2))
        save(tmp_path / "a.pt", model=resumed)
    with scaling(resumed):
        load(tmp_path / "a.pt", model=resumed)
        train(resumed, of_resumed, range(2, 8))
        assert state_of(resumed) == expected
    assert_same(list(resumed.parameters()), list(uninterrupted.parameters()))
    load(tmp_path / "a.pt", model=resumed)


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


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.sub_(0.01 * each.grad)


def test_weights_that_are_updated_by_hand_are_scaled() -> None:
    """Without an optimizer gradients are unscaled, too, and a loop that drops inf itself finds a scale that works."""
    model = Tower()
    with scaling(model, init_scale=2.0**30):
        for _ in range(20):
            model.zero_grad()
            model(batch(0, "")[0]).square().mean().backward()
            if is_finite := all(each.grad.isfinite().all() for each in model.parameters()):
                descend(model)
    assert is_finite
    assert not torch.equal(model[0].weight, Tower()[0].weight)


def output(model: Tower) -> torch.Tensor:
    return model(torch.ones(1, 3))


def update_by_hand(model: Tower) -> None:
    for _ in range(2):
        model.zero_grad()
        (output(model).sum() * 1e6).backward()
        descend(model)


def step_with_closure(model: Tower, *args: Any, **kwargs: Any) -> None:
    output(model).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step(*args, **kwargs)


def step_in_backward(model: Tower) -> None:
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.1)
    with torch.autograd.graph.register_multi_grad_hook(weights, lambda _: optimizer.step()):
        output(model).sum().backward()


def step_in_hook(model: Tower) -> None:
    model[0].weight.register_post_accumulate_grad_hook(lambda each: each.data.sub_(each.grad))


imported_before = torch.autograd.backward


HOOK, CLOSURE, BF16 = "Tensor.register_hook under loss", "SGD.step(closure) under loss scaling", "amp='bf16'"
WITHOUT_SCALE = ("update by hand", "closure", "closure by name")  # bf16 is not compared with these
REFUSALS: dict[str, tuple[Callable[[Tower], Any], str, str]] = {  # the error, and its fix
    "update by hand": (update_by_hand, "an update of weights without an optimizer", "torch.optim"),
    "closure": (lambda model: step_with_closure(model, lambda: 0.0), CLOSURE, "call backward before step()"),
    "closure by name": (lambda model: step_with_closure(model, closure=lambda: 0.0), CLOSURE, BF16),
    "in backward": (step_in_backward, "SGD.step() inside backward", "after backward()"),
    "grad": (
        lambda model: torch.autograd.grad(output(model).sum(), model.parameters()),
        "why: torch.autograd.grad, a backward()",
        BF16,
    ),
    "imported before": (
        lambda model: imported_before(output(model).sum()),
        "a backward pass that is not scaled",
        "loss.backward() in the block",
    ),
    "create_graph": (
        lambda model: output(model).sum().backward(create_graph=True),
        "backward(create_graph=True) under",
        BF16,
    ),
    "inputs": (
        lambda model: (out := output(model)).sum().backward(inputs=[out]),
        "backward(inputs=) of a tensor that is not a leaf",
        BF16,
    ),
    "hook": (lambda model: output(model).register_hook(print), HOOK, BF16),
    "hook of a parameter": (lambda model: model[0].weight.register_hook(print), HOOK, BF16),
    "step in a hook": (step_in_hook, "Tensor.register_post_accumulate_grad_hook under loss scaling", BF16),
    "retain_grad": (lambda model: output(model).retain_grad(), "Tensor.retain_grad under loss scaling", BF16),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_scaled_is_refused(name: str) -> None:
    """Each error says what is wrong, and how to fix it; under bf16 it works."""
    refused, what, fix = REFUSALS[name]
    model = Tower()
    with scaling(model), pytest.raises(ConfigError) as caught:
        refused(model)
    assert what in str(caught.value)
    assert fix in caught.value.faults[0].fix
    output(model).sum().backward()
    if name not in WITHOUT_SCALE:
        with warnings.catch_warnings(), parallel_model(Tower(), amp="bf16", backend="ddp", processes=1) as model:
            warnings.simplefilter("ignore")  # torch's, of create_graph
            refused(model)


@pytest.mark.parametrize(
    ("change", "rules", "message"),
    [
        (lambda model: model.half(), {}, r"parameter '0.weight' in torch.float16"),
        (lambda model: model[0].weight.register_hook(print), {}, r"a hook on parameter '0.weight'"),
        (step_in_hook, {}, r"a hook on parameter '0.weight'"),
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


def test_every_patch_is_removed() -> None:
    """Functions and hooks of torch are restored after an exception; inside the block they are patched."""
    before, model = patched_functions(), Tower()
    with contextlib.suppress(RuntimeError), scaling(model):
        assert patched_functions() != before
        assert torch.autograd.backward.__name__ == "backward"
        raise RuntimeError
    assert patched_functions() == before
