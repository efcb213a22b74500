"""How long autocast lasts in an unchanged loop: bf16 on the CPU equals hand-written torch.autocast, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from parallelize.model import parallel_model
from parallelize.runtime.function_modes import function_modes

HALF = torch.bfloat16


def autocast() -> torch.autocast:
    return torch.autocast("cpu", HALF)


class Net(nn.Module):
    """Convolutions, batch norm, layer norm, a matrix product and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.ln = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn(self.conv(x))).flatten(2).transpose(1, 2)
        x = self.ln(x)
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.head(x.mean(1))


def batches(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(6, 3, 5, 5, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def by_hand(model: nn.Module, steps: int) -> list[torch.Tensor]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for x, y in batches(steps):
        with autocast():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def unchanged(model: nn.Module, steps: int) -> list[torch.Tensor]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for x, y in batches(steps):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def assert_same(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()), rtol=0, atol=0)


def block(*models: nn.Module, amp: object = "bf16", **options: Any) -> Any:
    return parallel_model(*models, amp=amp, backend="ddp", processes=1, **options)


def assert_trains_as_by_hand(
    train: Callable[[nn.Module, Callable[[], Any]], None], make: Callable[[], nn.Module]
) -> None:
    """`train` gets a model, and the context of its forwards: autocast by hand, none in a block."""
    hand, ours = make(), make()
    train(hand, autocast)
    with block(ours):
        train(ours, contextlib.nullcontext)
    assert_same(ours, hand)


@pytest.mark.parametrize("amp", [True, "bf16", "O1"])
def test_the_trajectory_is_that_of_autocast_by_hand(amp: object) -> None:
    """Losses, weights and batch-norm statistics are equal, bit for bit."""
    hand, ours = Net(), Net()
    expected = by_hand(hand, 8)
    with block(ours, amp=amp):
        losses = unchanged(ours, 8)
    assert losses == expected
    assert len(set(map(float, losses))) == 8
    assert_same(ours, hand)


def test_autocast_held_over_the_loop_trains_on_stale_weights() -> None:
    """With autocast around the whole loop the property above fails: this is why autocast is exited at backward."""
    hand, held = Net(), Net()
    expected = by_hand(hand, 8)
    with autocast():
        losses = unchanged(held, 8)
    assert losses != expected


def is_on() -> bool:
    return torch.is_autocast_enabled("cpu")


def test_autocast_is_held_for_forward_and_loss_only() -> None:
    """Autocast is on from forward to the start of backward; off in backward, in the step, and after the block."""
    model = Net()
    seen: dict[str, bool] = {}

    class Spy(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            seen["step"] = is_on()
            super().step()

    optimizer = Spy(model.parameters(), lr=0.1)
    (x, y), (other, _) = batches(2)
    with block(model):
        assert not is_on()
        out = model(x)
        assert is_on()
        assert out.dtype is HALF
        out.register_hook(lambda _: seen.update(backward=is_on()))
        loss = F.cross_entropy(out, y)
        assert loss.dtype is torch.float32
        loss.backward()
        assert not is_on()
        optimizer.step()
        model(other)
        assert is_on()
        optimizer.step()
        assert not is_on()
        model(other)
    assert seen == {"backward": False, "step": False}
    assert not is_on()
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


def test_an_exception_in_forward_leaves_autocast() -> None:
    """A forward that raises exits autocast."""
    model = Net()
    with block(model):
        with pytest.raises(RuntimeError):
            model(torch.randn(1))
        assert not is_on()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_is_as_precise_as_inside_autocast(mode: Callable[[], Any]) -> None:
    """Without gradients autocast covers the forward only, and outputs are cast to fp32, for the loss and for numpy."""
    hand, ours = Net().eval(), Net().eval()
    x, y = next(batches(1))
    with mode(), autocast():
        expected = F.cross_entropy(hand(x), y)
        logits = hand(x)
    assert logits.dtype is HALF
    with block(ours), mode():
        found = ours(x)
        assert not is_on()
        assert torch.equal(found, logits.float())
        assert torch.equal(F.cross_entropy(found, y), expected)
        found.numpy()


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Returning(nn.Module):
    """Returns the output of a linear layer inside a container."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.wrap = wrap

    def forward(self, x: Any) -> Any:
        return self.wrap(self.linear(x["x"] if isinstance(x, Mapping) else x))


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda y: {"a": [y, 1]}, lambda out: out["a"][0]),
        (lambda y: (y, None), lambda out: out[0]),
        (lambda y: Output(logits=y), lambda out: out.logits),
    ],
    ids=["dict of lists", "tuple", "dataclass"],
)
def test_containers_of_any_kind(wrap: Callable[[Any], Any], unwrap: Callable[[Any], torch.Tensor]) -> None:
    """Containers keep their types; outputs are half precision in training and fp32 in evaluation."""
    model = Returning(wrap)
    x = torch.randn(4, 3)
    with block(model):
        out = model({"x": x})
        assert type(out) is type(wrap(x))
        assert unwrap(out).dtype is HALF
        unwrap(out).sum().backward()
        with torch.no_grad():
            out = model({"x": x})
        assert type(out) is type(wrap(x))
        assert unwrap(out).dtype is torch.float32


@pytest.mark.parametrize("amp", ["O1", "O2", "O3"])
def test_inputs_are_not_cast(amp: str) -> None:
    """Integers stored as floats keep their values."""

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.seen: Any = None

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.seen = ids.clone()
            return ids * self.scale

    model = Lookup()
    ids = torch.tensor([1234567.0, 3.0])
    with block(model, amp=amp):
        model(ids).sum().backward()
        assert torch.equal(model.seen, ids)
        with torch.no_grad():
            model(ids)
        assert torch.equal(model.seen, ids)


def test_methods_are_autocast_too() -> None:
    """A routed method enters autocast like forward."""

    class WithLoss(Net):
        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.seen = self(x).dtype
            return F.cross_entropy(self(x), y)

    model = WithLoss()
    x, y = next(batches(1))
    with block(model, methods=["loss"]):
        loss = model.loss(x, y)
        assert is_on()
        assert model.seen is HALF
        loss.backward()
        assert not is_on()


def test_weights_that_change_while_autocast_is_held_are_used() -> None:
    """A checkpoint loaded between two forwards, without backward or step in between, takes effect."""
    model = Net().eval()
    other = Net().eval()
    with torch.no_grad():
        for each in other.parameters():
            each.mul_(2)
    x, _ = next(batches(1))
    with autocast():
        expected = other(x)
    with block(model):
        model(x)
        assert is_on()
        model.load_state_dict(other.state_dict())
        assert torch.equal(model(x), expected)
        with torch.no_grad():
            assert torch.equal(model(x), expected.float())


def test_weights_swapped_in_to_evaluate_are_used() -> None:
    """Averaged weights written to .data, which changes no version counter, take effect after eval()."""
    model = Net()
    averaged = copy.deepcopy(model).eval()
    with torch.no_grad():
        for each in averaged.parameters():
            each.mul_(2)
    x, _ = next(batches(1))
    with autocast():
        expected = averaged(x)
    with block(model):
        model(x)
        model.eval()
        for here, there in zip(model.state_dict(keep_vars=True).values(), averaged.state_dict().values(), strict=True):
            here.data.copy_(there)
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_users_autocast_takes_precedence(enabled: bool) -> None:
    """The user's own autocast around model and loss decides, also if it disables autocast."""
    model = Net()
    x, y = next(batches(1))
    with block(model):
        with torch.autocast("cpu", HALF, enabled=enabled):
            out = model(x)
            loss = F.cross_entropy(out, y)
        assert not is_on()
        assert out.dtype is (HALF if enabled else torch.float32)
        loss.backward()


def test_an_autocast_entered_after_the_forward_is_exited_first() -> None:
    """A loss in fp32 inside an inner autocast context, with backward inside it: the autocast state is restored."""
    model, hand = Net(), Net()
    x, y = next(batches(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    hand_optimizer = torch.optim.SGD(hand.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        with autocast():
            out = hand(x)
        hand_optimizer.zero_grad()
        F.cross_entropy(out.float(), y).backward()
        hand_optimizer.step()
    with block(model):
        for _ in range(2):
            out = model(x)
            with torch.autocast("cpu", enabled=False):
                optimizer.zero_grad()
                F.cross_entropy(out.float(), y).backward()
                optimizer.step()
        optimizer.step()
        assert not is_on()
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()
    hand_optimizer.step()
    assert_same(model, hand)


@pytest.mark.parametrize("around_model", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_computes_what_it_did(reentrant: bool, around_model: bool) -> None:
    """Activation checkpoints inside the model, or around it, give the same gradients as no checkpoint."""

    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.conv, x, use_reentrant=reentrant)
            return self.head(self.ln(x.flatten(2).transpose(1, 2)).mean(1))

    model, hand = Checkpointed(), Checkpointed()
    x, y = next(batches(1))
    x.requires_grad_()
    with autocast():
        loss = F.cross_entropy(hand(x), y)
    loss.backward()
    with block(model):
        out = checkpoint(model, x, use_reentrant=reentrant) if around_model else model(x)
        F.cross_entropy(out, y).backward()
        assert not is_on()
    for here, there in zip(model.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(here.grad, there.grad, rtol=0, atol=0)


def test_a_gradient_penalty_is_differentiated_outside_autocast() -> None:
    """torch.autograd.grad runs without autocast, the penalty computed from it with autocast, as in torch's recipe."""

    def train(model: nn.Module, on: Callable[[], Any]) -> None:
        x, y = next(batches(1))
        x.requires_grad_()
        with on():
            loss = F.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        with on():
            loss = loss + (slope.flatten(1) @ slope.flatten(1).T).norm()
        loss.backward()

    model, hand = (nn.Sequential(nn.Flatten(), nn.Linear(75, 8), nn.Tanh(), nn.Linear(8, 5)) for _ in range(2))
    hand.load_state_dict(model.state_dict())
    train(hand, autocast)
    with block(model):
        train(model, contextlib.nullcontext)
    for here, there in zip(model.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(here.grad, there.grad, rtol=0, atol=0)


def test_two_models_in_a_chain() -> None:
    """d(g(x)) and g(d(x)), with two nested blocks."""

    def train(g: nn.Module, d: nn.Module, on: Callable[[], Any]) -> None:
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
        with on():
            loss = d(g(x)).square().mean() + g(d(x)).square().mean()
        loss.backward()
        assert not is_on()

    def pair() -> tuple[nn.Linear, nn.Linear]:
        torch.manual_seed(0)
        return nn.Linear(3, 3), nn.Linear(3, 3)

    hand, ours = pair(), pair()
    train(*hand, autocast)
    with block(ours[0]), block(ours[1]):
        train(*ours, contextlib.nullcontext)
    assert not is_on()
    for here, there in zip(ours, hand, strict=True):
        torch.testing.assert_close(here.weight.grad, there.weight.grad, rtol=0, atol=0)


def test_fp16_on_the_cpu_is_refused() -> None:
    """The error suggests bf16."""
    with pytest.raises(ValueError, match="bf16"), block(Net(), amp="fp16"):
        pass


def test_level_0_is_full_precision() -> None:
    """O0 changes nothing."""
    hand, ours = Net(), Net()
    expected = unchanged(hand, 2)
    with block(ours, amp="O0"):
        assert unchanged(ours, 2) == expected
    assert_same(ours, hand)


def test_loops_that_bf16_does_not_refuse() -> None:
    """step(closure) and an optimizer step in backward work, because bf16 needs no loss scaling."""
    model = Net()
    x, y = next(batches(1))
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with block(model):
        lbfgs.step(closure)
        sgd = torch.optim.SGD([model.head.weight], lr=0.1)
        handle = model.head.weight.register_post_accumulate_grad_hook(lambda _: sgd.step())
        F.cross_entropy(model(x), y).backward()
        handle.remove()


class Refined(nn.Module):
    """Takes a step on its input inside its forward, as a sampler or an adaptation at test time does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        refined = x.clone().requires_grad_()
        (refined @ refined.T).float().sum().backward()
        torch.optim.SGD([refined], lr=0.1).step()
        return self.layer(refined.detach())


def test_a_forward_that_calls_backward_and_steps_stays_under_autocast() -> None:
    """The layer after it computes in bf16, as by hand, and neither autocast nor a function mode outlasts the block."""

    def train(model: nn.Module, context: Callable[[], Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            with context():
                loss = model(torch.randn(5, 4, generator=torch.Generator().manual_seed(step))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert_trains_as_by_hand(train, Refined)
    assert not is_on()
    assert not function_modes()


def test_forwards_in_threads_that_end_use_the_current_weights() -> None:
    """All threads share autocast's cached casts; those of a thread that has ended are of weights before the step."""

    def train(model: nn.Module, context: Callable[[], Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = next(batches(1))
        for _ in range(3):
            losses: list[torch.Tensor] = []

            def forward(losses: list[torch.Tensor] = losses) -> None:
                with context():
                    losses.append(F.cross_entropy(model(x), y))

            thread = threading.Thread(target=forward)
            thread.start()
            thread.join()
            optimizer.zero_grad()
            losses[0].backward()
            optimizer.step()

    assert_trains_as_by_hand(train, Net)
