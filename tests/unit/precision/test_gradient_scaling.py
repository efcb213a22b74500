"""Loss scaling in an unchanged loop, compared with a hand-written loop that uses torch.amp.GradScaler.

fp16 is refused on the CPU, but loss scaling works on fp32 gradients too: these tests open the internal session with
a policy that scales and does not autocast.
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
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from parallelize.errors import ConfigError
from parallelize.plugins.base import Amp
from parallelize.precision.loss_scale import LossScale, max_flag
from parallelize.precision.native import NativeSession, Policy, mixed_precision

CPU = torch.device("cpu")
INF = float("inf")


@contextlib.contextmanager
def scaling(*models: nn.Module, **amp: Any) -> Iterator[NativeSession]:
    """Open a block of `models` with loss scaling by these options, each forward routed."""
    with mixed_precision(Policy(device=CPU, loss_scaling=Amp(**amp)), models=models) as session:
        for model in models:
            model.forward = routed(session, model)
        try:
            yield session
        finally:
            for model in models:
                del model.forward


def routed(session: NativeSession, model: nn.Module) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return session.route(original, *args, **kwargs)

    original = model.forward
    return forward


class TwoTowers(nn.Module):
    """Two towers without shared parameters: inf in the gradients of one leaves the other finite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.b = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.a(x).square().mean() + self.b(y).square().mean()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}

CLIPPINGS: dict[str, Callable[[nn.Module], object]] = {
    "none": lambda m: None,
    "norm": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5),
    "twice": lambda m: [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for _ in range(2)],
    "value": lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01),
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
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(2, 5, 3, generator=generator)
    if "a" in infinite:
        x[0, 0] = INF
    if "b" in infinite:
        y[0, 0] = INF
    return x, y


def optimizers_of(model: TwoTowers, kinds: Sequence[str]) -> list[torch.optim.Optimizer]:
    """Return one optimizer with two groups, or one per tower."""
    if len(kinds) == 1:
        groups = [{"params": model.a.parameters()}, {"params": model.b.parameters(), "weight_decay": 0.1}]
        return [OPTIMIZERS[kinds[0]](groups)]
    return [OPTIMIZERS[kind](half.parameters()) for kind, half in zip(kinds, (model.a, model.b), strict=True)]


def by_hand(schedule: Sequence[Iteration], kinds: Sequence[str], rules: dict[str, Any]) -> tuple[TwoTowers, list, list]:
    model = TwoTowers()
    optimizers = optimizers_of(model, kinds)
    scaler, scales = torch.amp.GradScaler("cpu", **rules), []
    for number, each in enumerate(schedule):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=each.set_to_none)
        for micro, infinite in enumerate(each.micro_batches):
            scaler.scale(model(*batch(10 * number + micro, infinite)) / len(each.micro_batches)).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        CLIPPINGS[each.clipping](model)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.state_dict())
    return model, optimizers, scales


def unchanged(
    schedule: Sequence[Iteration], kinds: Sequence[str], rules: dict[str, Any]
) -> tuple[TwoTowers, list, list]:
    model, scales = TwoTowers(), []
    optimizers = optimizers_of(model, kinds)
    with scaling(model, **rules) as session:
        for number, each in enumerate(schedule):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=each.set_to_none)
            for micro, infinite in enumerate(each.micro_batches):
                (model(*batch(10 * number + micro, infinite)) / len(each.micro_batches)).backward()
            CLIPPINGS[each.clipping](model)
            for optimizer in optimizers:
                optimizer.step()
            scales.append(session.state_dict())
    return model, optimizers, scales


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, here), there in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=0, equal_nan=True, msg=name)


@settings(max_examples=60)
@given(
    schedule=st.lists(iterations, min_size=1, max_size=6),
    kinds=st.one_of(
        st.sampled_from(sorted(OPTIMIZERS)).map(lambda kind: (kind,)),
        st.tuples(st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from(sorted(OPTIMIZERS))),
    ),
    init_scale=st.sampled_from([1.0, 2.0**16, 2.0**100, 2.0**126]),
    growth_interval=st.integers(1, 3),
)
def test_any_schedule_equals_grad_scaler(
    schedule: list[Iteration], kinds: tuple[str, ...], init_scale: float, growth_interval: int
) -> None:
    """Weights, optimizer state and the scale after every iteration equal GradScaler's, bit for bit."""
    rules = {"init_scale": init_scale, "growth_interval": growth_interval}
    hand, hand_optimizers, hand_scales = by_hand(schedule, kinds, rules)
    ours, our_optimizers, our_scales = unchanged(schedule, kinds, rules)
    assert our_scales == hand_scales
    assert_same(ours, hand)
    for one, other in zip(our_optimizers, hand_optimizers, strict=True):
        state, reference = one.state_dict()["state"], other.state_dict()["state"]
        torch.testing.assert_close(state, reference, rtol=0, atol=0, equal_nan=True)


def test_the_comparison_can_fail() -> None:
    """The property above fails if a step is taken although a gradient is inf."""
    schedule = [Iteration(("a",), "value", set_to_none=True)] * 2
    plain = TwoTowers()
    optimizer = OPTIMIZERS["sgd"](plain.parameters())
    for _ in schedule:
        optimizer.zero_grad()
        plain(*batch(0, "a")).backward()
        CLIPPINGS["value"](plain)
        optimizer.step()
    hand, _, _ = by_hand(schedule, ("sgd",), {})
    with pytest.raises(AssertionError):
        assert_same(plain, hand)


def unscaled_gradients(model: nn.Module, loss: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    loss().backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def test_gradients_between_backward_and_step_are_unscaled() -> None:
    """`.grad` after backward is the same as without scaling, also during gradient accumulation."""
    model = TwoTowers()
    inputs = batch(0, "")
    expected = unscaled_gradients(model, lambda: model(*inputs))
    with scaling(model):
        model.zero_grad()
        for count in (1, 2, 3):
            model(*inputs).backward()
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, gradient * count)


def test_optimizers_that_share_a_loss_update_the_scale_once() -> None:
    """Two optimizers that step after one backward update the scale once; with one backward each, twice."""
    model = TwoTowers()
    optimizers = optimizers_of(model, ("sgd", "sgd"))
    with scaling(model, init_scale=4.0, growth_interval=1) as session:
        model(*batch(0, "")).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert session.state_dict()["scale"] == 8.0
        for optimizer in optimizers:
            model(*batch(0, "")).backward()
            optimizer.step()
        assert session.state_dict()["scale"] == 32.0


def test_the_scale_is_updated_by_the_backward_after_a_step() -> None:
    """Backwards without a step in between do not update the scale."""
    model = TwoTowers()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with scaling(model, init_scale=4.0, growth_interval=1) as session:
        for _ in range(3):
            model(*batch(0, "")).backward()
        assert session.state_dict()["scale"] == 4.0
        optimizer.step()
        model(*batch(0, "a")).backward()
        assert session.state_dict()["scale"] == 8.0


def test_saving_between_two_steps_keeps_the_found_inf_flags() -> None:
    """The second optimizer's step is skipped although `state_dict` ended the iteration."""
    model = TwoTowers()
    optimizers = optimizers_of(model, ("sgd", "sgd"))
    before = [each.detach().clone() for each in model.parameters()]
    with scaling(model) as session:
        model(*batch(0, "ab")).backward()
        for optimizer in optimizers:
            optimizer.step()
            session.state_dict()
    torch.testing.assert_close(list(model.parameters()), before)


class Pair(nn.Module):
    """A generator or a discriminator."""

    def __init__(self, seed: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def gan(g: Pair, d: Pair, *, steps: int, backward: Callable[[torch.Tensor], None], step: Callable[[Any], None]) -> None:
    """The usual loop: d(g(z)) once detached and once not, with d's gradients of g's backward left over."""
    torch.manual_seed(1)
    g_optimizer, d_optimizer = torch.optim.Adam(g.parameters(), lr=0.01), torch.optim.Adam(d.parameters(), lr=0.01)
    for number in range(steps):
        real, z = torch.randn(6, 3), torch.randn(6, 3)
        if number == 2:
            real[0, 0] = INF
        d_optimizer.zero_grad()
        backward(d(g(z).detach()).mean() - d(real).mean())
        step(d_optimizer)
        g_optimizer.zero_grad()
        backward(-d(g(z)).mean())
        step(g_optimizer)


def test_a_gan_trains_as_with_grad_scaler() -> None:
    """Two models in a chain, two optimizers with separate iterations, inf in one of them."""
    rules = {"init_scale": 2.0**10, "growth_interval": 2}
    scaler = torch.amp.GradScaler("cpu", **rules)

    def step(optimizer: torch.optim.Optimizer) -> None:
        scaler.step(optimizer)
        scaler.update()

    hand, ours = (Pair(0, 3), Pair(1, 1)), (Pair(0, 3), Pair(1, 1))
    # By hand d's left-over gradients are scaled by an older scale; d_optimizer.zero_grad() drops them, as below.
    gan(*hand, steps=5, backward=lambda loss: scaler.scale(loss).backward(), step=step)
    with scaling(*ours, **rules) as session:
        gan(*ours, steps=5, backward=lambda loss: loss.backward(), step=lambda optimizer: optimizer.step())
        assert session.state_dict() == scaler.state_dict()
    for one, other in zip(ours, hand, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_scales_once(reentrant: bool) -> None:
    """Gradients through a checkpoint are unscaled, although a reentrant one calls backward inside backward."""

    class Checkpointed(Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model = Checkpointed(0, 2)
    x = torch.randn(4, 3, requires_grad=True)
    expected = unscaled_gradients(model, lambda: model(x).square().sum())
    of_x, x.grad = x.grad, None
    with scaling(model):
        actual = unscaled_gradients(model, lambda: model(x).square().sum())
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(x.grad, of_x)


def losses_of(model: Pair, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return a backward of each form that torch accepts."""

    def penalty() -> None:
        x.grad = None
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.mean() + (slope.norm() - 1).square()).backward()

    def edge() -> None:
        loss = model(x).sum()
        torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss))

    def with_graph() -> None:
        model(x).square().sum().backward(create_graph=True)
        torch.stack([each.grad.square().sum() for each in model.parameters()]).sum().backward()

    def leaf_in_the_loss() -> None:
        (model(x).sum() * x.sum()).backward()

    def retained() -> None:
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    def regularised() -> None:
        (model(x).sum() + sum(each.square().sum() for each in model.parameters())).backward()

    def in_a_custom_object() -> None:
        class Box:
            def __init__(self, value: torch.Tensor) -> None:
                self.value = value

        def unboxed(box: Any) -> Any:
            return model.layers(box.value)

        unboxed(Box(x * 2)).sum().backward()

    return {
        "sum": lambda: model(x).sum().backward(),
        "gradient": lambda: model(x).backward(torch.full((4, 2), 0.5)),
        "two roots": lambda: torch.autograd.backward([model(x).sum(), model(x * 2).mean()]),
        "two roots, gradients": lambda: torch.autograd.backward(
            [model(x), model(x).sum()], [torch.ones(4, 2), torch.tensor(3.0)]
        ),
        "inputs": lambda: model(x).sum().backward(inputs=[x]),
        "edge": edge,
        "penalty": penalty,
        "create_graph": with_graph,
        "regularised": regularised,
        "history before the model": lambda: model(x.exp()).sum().backward(),
        "leaf in the loss": leaf_in_the_loss,
        "retain_graph": retained,
        "object": in_a_custom_object,
    }


@pytest.mark.parametrize("form", sorted(losses_of(Pair(0, 2), torch.ones(4, 3))))
@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True:UserWarning")
def test_every_form_of_backward_gives_unscaled_gradients(form: str) -> None:
    """The gradients of parameters and of other leaves equal those without scaling."""

    def gradients() -> list[torch.Tensor | None]:
        model = Pair(0, 2)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with block(model):
            losses_of(model, x)[form]()
            losses_of(model, x)["sum"]()
        return [None if each.grad is None else each.grad.detach() for each in (*model.parameters(), x)]

    block: Callable[..., Any] = contextlib.nullcontext
    expected = gradients()
    block = scaling
    torch.testing.assert_close(gradients(), expected)


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("on", ["parameter", "activation"])
def test_hooks_get_unscaled_gradients(on: str, when: str) -> None:
    """A hook that clips in backward clips as without scaling; a hook that returns None changes nothing."""

    class Clipped(Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layers[0](x)
            if on == "activation" and h.requires_grad:
                h.register_hook(clip)
                h.register_hook(seen.append)
            return self.layers[2](h)

    def clip(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(-0.01, 0.01)

    def gradients(block: Callable[..., Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        seen.clear()
        model = Clipped(0, 2)
        if on == "parameter" and when == "before":
            model.layers[0].weight.register_hook(clip)
        with block(model):
            if on == "parameter" and when == "inside":
                model.layers[0].weight.register_hook(clip)
            model(torch.ones(4, 3)).square().mean().backward()
        hooks = model.layers[0].weight._backward_hooks
        if when == "before" and hooks:
            assert list(hooks.values()) == [clip]
        return [each.grad for each in model.parameters()], list(seen)

    seen: list[torch.Tensor] = []
    torch.testing.assert_close(gradients(scaling), gradients(contextlib.nullcontext))


def test_a_retained_gradient_is_unscaled() -> None:
    """retain_grad() on the output of the model."""
    model = Pair(0, 2)
    x = torch.randn(4, 3)
    with scaling(model):
        out = model(x)
        out.retain_grad()
        out.sum().backward()
    torch.testing.assert_close(out.grad, torch.ones(4, 2))


class HalfLinear(nn.Linear):
    """A linear layer that computes in fp16, as under autocast, in which small gradients underflow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.half(), self.weight.half(), self.bias.half())


def half_linear() -> HalfLinear:
    torch.manual_seed(0)
    return HalfLinear(16, 16)


@pytest.mark.parametrize("factor", [1e-8, 1.0, 1e3])
@pytest.mark.parametrize("create_graph", [True, False])
def test_autograd_grad_neither_underflows_nor_overflows(factor: float, create_graph: bool) -> None:
    """In fp16 the gradients of a tiny loss are not 0, and those of a large loss, which overflow if scaled, finite."""
    model = half_linear()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.autograd.grad(F.linear(x, model.weight, model.bias).sum() * factor, model.parameters())
    with scaling(model):
        loss = model(x).float().sum() * factor
        found = torch.autograd.grad(loss, model.parameters(), create_graph=create_graph)
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=0)


def test_autograd_grad_of_an_output_in_half() -> None:
    """`grad_outputs` in fp16 times the whole scale would be inf."""
    model = half_linear()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    with scaling(model):
        out = model(x)
        (found,) = torch.autograd.grad(out, model.bias, torch.ones_like(out) * 1e-6, retain_graph=True)
        torch.testing.assert_close(found, torch.full((16,), 4e-6), rtol=0.05, atol=0)
        (found,) = torch.autograd.grad(out, model.bias, torch.full_like(out, 1e4))
        torch.testing.assert_close(found, torch.full((16,), 4e4))


def test_a_gradient_penalty_in_half_reaches_the_weights() -> None:
    """The gradient of a gradient of a tiny loss, through create_graph=True, equals that in fp32."""

    def penalty(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        (slope,) = torch.autograd.grad(call(x).float().square().mean() * 1e-6, x, create_graph=True)
        model.zero_grad()
        (slope * 1e5).square().sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad

    model = half_linear()
    expected = penalty(model, lambda x: F.linear(x, model.weight, model.bias))
    with scaling(model, init_scale=2.0**10):
        torch.testing.assert_close(penalty(model, model), expected, rtol=0.05, atol=5e-7)


def grads_of(model: Pair, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return a call of torch.autograd.grad of each form that torch accepts."""
    unused = torch.ones(2, requires_grad=True)
    out = model(x)
    grad = torch.autograd.grad
    return {
        "parameters": lambda: grad(out.sum(), model.parameters()),
        "one input": lambda: grad(out.sum(), x),
        "grad_outputs": lambda: grad(out, [x], torch.full_like(out, 0.5)),
        "two outputs": lambda: grad([out, out.sum()], x, [torch.ones_like(out), None]),
        "unused": lambda: grad(out.sum(), [x, unused], allow_unused=True),
        "materialized": lambda: grad(out.sum(), [x, unused], materialize_grads=True),
        "batched": lambda: grad(out, x, torch.eye(out.numel()).reshape(-1, *out.shape), is_grads_batched=True),
        "by position": lambda: grad(out.sum(), x, None, False, True, True, True),
        "edge": lambda: grad(torch.autograd.graph.get_gradient_edge(out.sum()), x),
        "inf": lambda: grad((out * INF).sum(), x),
        "without gradients": lambda: grad(x.detach().sum() + unused.sum(), unused),
    }


@pytest.mark.parametrize("form", sorted(grads_of(Pair(0, 2), torch.ones(4, 3, requires_grad=True))))
def test_every_form_of_autograd_grad_is_unscaled(form: str) -> None:
    """The gradients equal those without scaling."""
    model = Pair(0, 2)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = grads_of(model, x)[form]()
    with scaling(model):
        torch.testing.assert_close(grads_of(model, x)[form](), expected, equal_nan=True)


class Passing(TorchFunctionMode):
    """Passes every function on; torch.autograd.grad calls itself again under a function mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Passing])
@pytest.mark.parametrize("factor", [1.0, 1e34])
def test_hooks_and_retained_gradients_of_autograd_grad_are_unscaled(mode: Callable[[], Any], factor: float) -> None:
    """Also if the gradients are computed again because scaled ones overflow, in fp32 by a factor of 1e34."""

    def run(block: Callable[..., Any]) -> Any:
        seen: list[torch.Tensor] = []
        model = Pair(0, 2)
        x = torch.ones(4, 3, requires_grad=True)
        with block(model), mode():
            out = model(x)
            out.register_hook(seen.append)
            out.retain_grad()
            out.sum().backward(retain_graph=True)
            grads = torch.autograd.grad(out.sum() * factor, x)
        return seen[0], seen[-1], out.grad, grads

    torch.testing.assert_close(run(scaling), run(contextlib.nullcontext))


def test_autograd_grad_inside_backward_is_not_scaled_again() -> None:
    """A custom function that calls torch.autograd.grad in backward gets a gradient that is scaled already."""

    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(x.square(), x, gradient)[0]

    model = Pair(0, 2)
    x = torch.randn(4, 3)
    expected = unscaled_gradients(model, lambda: Squared.apply(model(x)).sum())
    with scaling(model):
        torch.testing.assert_close(unscaled_gradients(model, lambda: Squared.apply(model(x)).sum()), expected)


@pytest.mark.parametrize("function", [torch.autograd.backward, torch.autograd.grad], ids=["backward", "grad"])
def test_functions_imported_before_the_block_warn_at_the_step(function: Callable[..., Any]) -> None:
    """They are not patched: gradients are right where they do not underflow, and the first step warns, once."""
    model, plain = Pair(0, 2), Pair(0, 2)
    x = torch.randn(4, 3)

    def step(model: Pair) -> None:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        if found := function(loss, inputs=list(model.parameters())):
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                parameter.grad = gradient
        optimizer.step()

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    step(plain)
    step(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with scaling(model):
        with pytest.warns(UserWarning, match="without loss scaling.*imported before the block") as caught:
            step(model)
        assert caught[0].filename == __file__
        step(model)
    assert_same(model, plain)


def test_gradients_that_overflow_in_a_graph_for_one_pass() -> None:
    """The error of the second pass, as under backend="balanced", names the overflow; one of the first is unchanged."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.count = 0
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            ctx.count += 1
            if ctx.count > 1:
                raise RuntimeError("only once")
            return gradient

    model = half_linear()
    x = torch.ones(4, 16)
    with scaling(model):
        loss = Once.apply(model(x)).float().sum()
        with pytest.raises(ConfigError, match="gradients overflow with the loss scale"):
            torch.autograd.grad(loss * 1e3, model.weight)
        with pytest.raises(RuntimeError, match="only once"):
            torch.autograd.grad(loss, model.weight)


def test_ranks_with_shards_compute_gradients_again_together() -> None:
    """Under fsdp autograd.grad runs collectives: inf on another rank repeats the pass on this one."""
    flags: list[float] = []

    def inf_on_another_rank(flag: torch.Tensor) -> None:
        flags.append(flag.item())
        flag.fill_(1)

    model = Pair(0, 2)
    x = torch.randn(4, 3)
    expected = torch.autograd.grad(model(x).sum(), model.parameters())
    policy = Policy(device=CPU, loss_scaling=Amp(), all_reduce_flag=inf_on_another_rank)
    with mixed_precision(policy, models=[model]) as session:
        found = torch.autograd.grad(session.route(model, x).sum(), model.parameters())
    torch.testing.assert_close(found, expected)
    assert flags == [0, 0]


def test_a_loss_that_never_touches_the_model_is_left_alone() -> None:
    """A module outside the block trains with a separate optimizer as if the block did not exist."""
    model, own, twin = Pair(0, 2), Pair(1, 2), Pair(1, 2)
    x = torch.full((4, 3), INF)
    with scaling(model, init_scale=4.0, growth_interval=1) as session:
        for each in (own, twin):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            each(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        assert session.state_dict()["scale"] == 4.0
        own(x).sum().backward()
        assert own.layers[0].weight.grad.isnan().any()
        assert session.state_dict()["scale"] == 4.0
    assert_same(own, twin)


def test_an_exception_in_backward_leaves_unscaled_gradients() -> None:
    """Gradients from before are unchanged, and the next backward works."""
    model = Pair(0, 2)
    x = torch.randn(4, 3, requires_grad=True)
    expected = unscaled_gradients(model, lambda: model(x).sum())

    def fail(_gradient: torch.Tensor) -> None:
        raise RuntimeError("planted")

    with scaling(model):
        out = model(x)
        out.register_hook(fail)
        with pytest.raises(RuntimeError, match="planted"):
            out.sum().backward()
        torch.testing.assert_close([each.grad for each in model.parameters()], expected)
        torch.testing.assert_close(unscaled_gradients(model, lambda: model(x).sum()), expected)


def test_a_skipped_step_gives_no_warning_and_leaves_the_optimizer() -> None:
    """A scheduler counts the step; state, groups and attributes of the optimizer are unchanged; gradients stay."""
    model = Pair(0, 2)
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
    torch.testing.assert_close(list(model.parameters()), before)


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
    model = Pair(0, 2)
    naive = Naive(model.parameters())
    optimizer = wrap(naive)
    before = [each.clone() for each in model.parameters()]
    with scaling(model):
        model(torch.full((4, 3), INF)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(list(model.parameters()), before)
        model.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    assert naive.steps == 1
    assert not torch.equal(model.layers[0].weight, before[0])


def test_sparse_gradients_are_unscaled() -> None:
    """An embedding with sparse gradients trains as with GradScaler."""
    results = []
    for block in (contextlib.nullcontext, scaling):
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


class CopyArguments(TorchFunctionMode):
    """Records the target and `non_blocking` of each `Tensor.to`."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.to:
            self.seen.append((args[1].type, kwargs["non_blocking"]))
        return function(*args, **(kwargs or {}))


def test_a_copy_of_the_scale_to_the_cpu_blocks() -> None:
    """A host that does not wait for a copy to the CPU could read it before it is complete."""
    scale = LossScale(Amp(init_scale=8.0), device=CPU)
    with CopyArguments() as copies:
        on_cpu, reciprocal = scale.on(CPU)
        scale.on(torch.device("meta"))
        max_flag([torch.ones(())], device=CPU)
        max_flag([torch.ones(())], device=torch.device("meta"))
    assert copies.seen == [("cpu", False), ("meta", True)] * 2
    assert (on_cpu.item(), reciprocal.item()) == (8.0, 0.125)


def test_scales_that_autograd_grad_tries() -> None:
    """From the loss scale, or from 256 times less where backward starts in half precision, down to none."""

    def tried(init_scale: float, *, has_half_outputs: bool) -> list[float]:
        scales = LossScale(Amp(init_scale=init_scale), device=CPU).for_grad(has_half_outputs=has_half_outputs)
        return [each.state_dict()["scale"] for each in scales]

    assert tried(1024.0, has_half_outputs=False) == [1024.0, 4.0, 1.0]
    assert tried(1024.0, has_half_outputs=True) == [4.0, 1.0]
    assert tried(256.0, has_half_outputs=False) == [256.0, 1.0]
    assert tried(512.0, has_half_outputs=False) == [512.0, 2.0, 1.0]


def test_a_scale_moves_with_its_growth_counter() -> None:
    """The scale is then on the device of the gradients, and so is its reciprocal."""
    scale, meta = LossScale(Amp(init_scale=8.0), device=CPU), torch.device("meta")
    scale.move_to(meta)
    assert scale.device == meta
    scale.update(torch.zeros((), device=meta))  # fails if the counter is on another device
    assert [each.device for each in scale.on(meta)] == [meta, meta]


def test_state_resumes_the_trajectory() -> None:
    """The state has the keys of GradScaler; another block that loads it resumes with the same scale and counter."""
    rules = {"init_scale": 4.0, "growth_interval": 3}

    def train(model: TwoTowers, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            model(*batch(number, "a" if number == 4 else "")).backward()
            optimizer.step()

    uninterrupted, resumed = TwoTowers(), TwoTowers()
    of_uninterrupted, of_resumed = (OPTIMIZERS["adamw"](each.parameters()) for each in (uninterrupted, resumed))
    with scaling(uninterrupted, **rules) as session:
        train(uninterrupted, of_uninterrupted, range(8))
        expected = session.state_dict()
    with scaling(resumed, **rules) as session:
        train(resumed, of_resumed, range(2))
        saved = session.state_dict()
    assert saved.keys() == torch.amp.GradScaler("cpu").state_dict().keys()
    with scaling(resumed) as session:
        session.load_state_dict(saved)
        train(resumed, of_resumed, range(2, 8))
        assert session.state_dict() == expected
    assert_same(resumed, uninterrupted)


def test_nested_blocks_use_one_scale() -> None:
    """A loss through models of two nested blocks is scaled once, and the outer block works after the inner one ends."""
    outer, inner = Pair(0, 3), Pair(1, 2)
    x = torch.randn(4, 3)
    chain = nn.Sequential(outer, inner)
    expected = unscaled_gradients(chain, lambda: chain(x).square().sum())
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.0)
    with scaling(outer, init_scale=2.0**100, growth_interval=1) as of_outer:
        with scaling(inner) as of_inner:
            torch.testing.assert_close(unscaled_gradients(chain, lambda: chain(x).square().sum()), expected)
            optimizer.step()
            assert of_inner.state_dict() == of_outer.state_dict()
        assert unscaled_gradients(outer, lambda: outer(x).sum())
        with pytest.raises(ConfigError, match="no model of the block has"):
            optimizer.step()


def refusal_closure(model: Pair) -> None:
    model(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step(lambda: 0.0)


def refusal_closure_by_name(model: Pair) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step(closure=lambda: 0.0)


def refusal_in_backward(model: Pair) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = model.layers[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    try:
        model(torch.ones(1, 3)).sum().backward()
    finally:
        handle.remove()


def refusal_unknown(model: Pair) -> None:
    extra = nn.Parameter(torch.ones(7))
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [extra]}], lr=0.1)
    (model(torch.ones(1, 3)).sum() * extra.sum()).backward()
    optimizer.step()


def refusal_unknown_alone(model: Pair) -> None:
    extra = nn.Parameter(torch.ones(7))
    (model(torch.ones(1, 3)).sum() * extra.sum()).backward()
    torch.optim.SGD([extra], lr=0.1).step()


def refusal_scaler(model: Pair) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()


REFUSALS = {
    refusal_closure: ("SGD.step(closure) under loss scaling", "call backward before step()"),
    refusal_closure_by_name: ("SGD.step(closure) under loss scaling", "needs no loss scaling"),
    refusal_in_backward: ("SGD.step() inside backward", "after backward()"),
    refusal_unknown: ("param_groups[1]['params'][0] of shape (7,)", "parallel_model(model, criterion)"),
    refusal_unknown_alone: ("param_groups[0]['params'][0] of shape (7,)", "parallel_model(model, criterion)"),
    refusal_scaler: ("GradScaler of your own", "delete the scaler"),
}


@pytest.mark.parametrize("refused", REFUSALS, ids=lambda each: each.__name__)
def test_what_cannot_be_scaled_is_refused(refused: Callable[[Pair], None]) -> None:
    """Each error says what is wrong, and how to fix it."""
    what, fix = REFUSALS[refused]
    model = Pair(0, 2)
    with scaling(model), pytest.raises(ConfigError) as caught:
        refused(model)
    assert what in str(caught.value)
    assert fix in caught.value.faults[0].fix


def test_a_parameter_in_fp16_is_refused() -> None:
    """Its gradients could not be unscaled without underflow."""
    with (
        pytest.raises(ConfigError, match=r"parameter 'layers.0.weight' is in torch.float16"),
        scaling(Pair(0, 2).half()),
    ):
        pass


def test_a_disabled_scaler_is_accepted() -> None:
    """GradScaler(enabled=False), left over in a script, does nothing."""
    model = Pair(0, 2)
    with scaling(model):
        torch.amp.GradScaler("cpu", enabled=False).scale(model(torch.ones(1, 3)).sum()).backward()


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
    before = patched_functions()
    model = Pair(0, 2)
    with contextlib.suppress(RuntimeError), scaling(model):
        assert patched_functions() != before
        model(torch.ones(1, 3)).sum().backward()
        if error is not None:
            raise error
    assert patched_functions() == before
    assert torch.autograd.backward.__name__ == "backward"


def test_a_block_that_fails_at_entry_removes_its_patches() -> None:
    """An error at entry leaves no patch behind."""
    before = patched_functions()
    with pytest.raises(ConfigError), scaling(Pair(0, 2).half()):
        pass
    assert patched_functions() == before
