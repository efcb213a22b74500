"""Autocast in the forward of a model: bf16 on the CPU, compared with hand-written torch.autocast, bit for bit."""

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
from parallelize.plugins.base import Amp

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


def fit(
    model: nn.Module, context: Callable[[], Any] = contextlib.nullcontext, *, in_thread: bool = False
) -> list[torch.Tensor]:
    """Train; the context is that of forward and loss, of autocast by hand."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []

    def forward(x: torch.Tensor, y: torch.Tensor) -> None:
        with context():
            losses.append(F.cross_entropy(model(x), y))

    for batch in batches(8):
        if in_thread:
            thread = threading.Thread(target=forward, args=batch)
            thread.start()
            thread.join()
        else:
            forward(*batch)
        optimizer.zero_grad()
        losses[-1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [each.detach() for each in losses]


def assert_same(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()), rtol=0, atol=0)


def block(*models: nn.Module, amp: object = "bf16", **options: Any) -> Any:
    return parallel_model(*models, amp=amp, backend="ddp", processes=1, **options)


class Refined(Net):
    """Takes a step on its input inside its forward, as a sampler or an adaptation at test time does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        refined = x.clone().requires_grad_()
        refined.flatten(1).mm(refined.flatten(1).T).float().sum().backward()
        torch.optim.SGD([refined], lr=0.1).step()
        return super().forward(refined.detach())


@pytest.mark.parametrize(
    ("amp", "make", "in_thread"),
    [
        ("O1", Net, False),
        ("O0", Net, False),  # full precision
        ("O1", Refined, False),  # the layers after backward in forward stay under autocast
        ("O1", Net, True),  # threads share cached casts, which may be of weights before the step
    ],
)
def test_the_trajectory_is_that_of_autocast_by_hand(amp: object, make: type[Net], in_thread: bool) -> None:
    """Losses, weights and batch-norm statistics are equal, bit for bit."""
    hand, ours = make(), make()
    expected = fit(hand, contextlib.nullcontext if amp == "O0" else autocast, in_thread=in_thread)
    with block(ours, amp=amp):
        losses = fit(ours, in_thread=in_thread)
    assert losses == expected
    assert len(set(map(float, losses))) == 8
    assert_same(ours, hand)
    assert not is_on()


def is_on() -> bool:
    return torch.is_autocast_enabled("cpu")


def test_autocast_is_on_in_the_forward_only() -> None:
    """Outputs are in fp32, and loss, backward and step run without autocast, also after a forward that raises."""
    model, seen = Net(), dict[str, bool]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.update(step=is_on()))
    model.head.register_forward_hook(lambda *_: seen.update(forward=is_on()))
    x, y = next(batches(1))
    with block(model):
        with pytest.raises(RuntimeError):
            model(torch.randn(1))
        assert not is_on()
        out = model(x)
        assert not is_on()
        assert out.dtype is torch.float32
        out.register_hook(lambda _: seen.update(backward=is_on()))
        F.cross_entropy(out, y).backward()
        optimizer.step()
    assert seen == {"forward": True, "backward": False, "step": False}
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_is_as_precise_as_inside_autocast(mode: Callable[[], Any]) -> None:
    """Without gradients, too, outputs are cast to fp32, for the loss and for numpy."""
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
    """Containers keep their types, with outputs in fp32."""
    model = Returning(wrap)
    x = torch.randn(4, 3)
    for mode in (torch.enable_grad, torch.no_grad):
        with block(model), mode():
            out = model({"x": x})
        assert type(out) is type(wrap(x))
        assert unwrap(out).dtype is torch.float32


def with_loss(y: torch.Tensor) -> Any:
    return {"loss": y.square().mean(), "logits": y, "other": [y + 1]}


@pytest.mark.parametrize(
    ("wrap", "amp", "dtype"),
    [
        (with_loss, "bf16", HALF),
        (lambda y: {"loss": y.detach().sum(), "logits": y}, "bf16", torch.float32),  # a number, no loss
        (lambda y: {"loss": y[:, :1].exp().mean(), "logits": y[:, 1:]}, "bf16", torch.float32),  # not a loss of these
        (lambda y: {"loss": y.square().mean(), "logits": y.detach()}, "bf16", torch.float32),
        (lambda y: {"logits": y}, Amp(outputs="as computed"), HALF),
        (with_loss, Amp(outputs="as computed"), HALF),
    ],
    ids=["beside its loss", "beside a number", "beside an auxiliary loss", "detached", "as computed", "both"],
)
def test_outputs_that_are_left_as_computed(
    wrap: Callable[[torch.Tensor], Any], amp: object, dtype: torch.dtype
) -> None:
    """Outputs whose loss forward returns, too, are not copied, nor any if the option says so; the loss is in fp32."""
    model = Returning(wrap)
    x = torch.randn(4, 3)
    with block(model, amp=amp):
        out = model(x)
        assert out["logits"].dtype is dtype
        assert out.get("loss", x).dtype is torch.float32
        with torch.no_grad():
            assert model(x)["logits"].dtype is torch.float32


def test_outputs_in_fp32_are_returned_as_they_are() -> None:
    """Where nothing is cast, the container of the outputs is the user's own object."""
    box = {"x": torch.ones(2), "name": "a"}
    model = Returning(lambda _: box)
    with block(model):
        assert model(torch.ones(3)) is box


@pytest.mark.parametrize("amp", ["O1", "O2", "O3"])
def test_inputs_are_not_cast(amp: str) -> None:
    """Integers stored as floats keep their values."""

    class Lookup(nn.Linear):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            assert torch.equal(ids, torch.tensor([1234567.0, 3.0]))
            return ids * self.weight

    model = Lookup(2, 1)
    with block(model, amp=amp):
        model(torch.tensor([1234567.0, 3.0])).sum().backward()
        with torch.no_grad():
            model(torch.tensor([1234567.0, 3.0]))


def test_methods_are_autocast_too() -> None:
    """A routed method runs under autocast like forward; a forward inside it returns half precision."""

    class WithLoss(Net):
        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.seen = self(x).dtype
            return F.cross_entropy(self(x), y)

    model = WithLoss()
    x, y = next(batches(1))
    with block(model, methods=["loss"]):
        loss = model.loss(x, y)
        assert model.seen is HALF
        assert not is_on()
        loss.backward()


def load(model: nn.Module, other: nn.Module) -> None:
    model.load_state_dict(other.state_dict())


def swap_data(model: nn.Module, other: nn.Module) -> None:
    """Write to .data, which changes no version counter."""
    for here, there in zip(model.state_dict(keep_vars=True).values(), other.state_dict().values(), strict=True):
        here.data.copy_(there)


def add_in_data(model: nn.Module, other: nn.Module) -> None:
    for here, there in zip(model.parameters(), other.parameters(), strict=True):
        here.data.add_(there.data - here.data)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("change", [load, swap_data, add_in_data])
def test_weights_that_change_between_two_forwards_are_used(change: Callable[..., None], is_training: bool) -> None:
    """A checkpoint, averaged weights or a finite difference takes effect without a backward or step in between."""
    model = Net().train(is_training)
    other = copy.deepcopy(model).eval()
    with torch.no_grad():
        for each in other.parameters():
            each.mul_(2)
    x, _ = next(batches(1))
    with autocast():
        expected = other(x).float()
    with block(model):
        model(x)
        change(model.eval(), other)
        model.bn.load_state_dict(other.bn.state_dict())
        assert torch.equal(model(x), expected)
        with torch.no_grad():
            assert torch.equal(model(x), expected)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_users_autocast_decides(enabled: bool) -> None:
    """Around model and loss, also if it disables autocast; around the loss, about products of outputs in fp32."""
    model, expected = Net(), HALF if enabled else torch.float32
    x, _ = next(batches(1))
    with block(model):
        with torch.autocast("cpu", HALF, enabled=enabled):
            assert model(x).dtype is expected
        out = model(x)
        with torch.autocast("cpu", HALF, enabled=enabled):
            product = out @ out.T
            assert is_on() is enabled
        assert not is_on()
        assert (out.dtype, product.dtype) == (torch.float32, expected)
        product.float().sum().backward()
    assert model.head.weight.grad.isfinite().all()


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
