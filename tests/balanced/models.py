"""Models of many shapes, and pipelines over them with given split points instead of measured ones."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallelize import parallel_model
from parallelize.backends.balanced.plan import Plan
from parallelize.backends.balanced.plugin import BalancedBackend
from parallelize.run.containers import leaves

WIDTH = 16


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.short = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += x if self.short is None else self.short(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.layers = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.relu(self.norm(self.stem(x)))).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:  # B T D
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, 2, D // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
        x = x + self.out(y)
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Tied embedding, positions from the input's shape, loss inside forward if there are targets."""

    def __init__(self, *, dropout: float = 0.0, tied: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, WIDTH), nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:  # B T
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else (logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.first, self.second = nn.LSTM(8, 8, batch_first=True), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # B T -> B T 11, B 8
        y, _ = self.first(self.tokens(tokens))
        y, (hidden, _) = self.second(y)
        return self.head(y), hidden[-1]


class Experts(nn.Module):
    """Each sample uses one expert; some experts get no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(8, 8), nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.outer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if rows.numel():
                y = y.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return self.outer(x + y)


class Chain(nn.Module):
    """Three layers; some tests use them in another forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Reused(nn.Module):
    """One layer called several times, and a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(self.layer(x)) * self.gain
        return self.head(x)


class Triple(nn.Module):
    """Saves nothing for backward, so that its input may be changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 3.0


class InPlace(nn.Module):
    """Over three stages: h is computed in the first, changed in place in the second, used in the third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), Triple(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.b(h)
        h.mul_(0.5)
        return self.c(y) + h


@dataclass(frozen=True)
class Case:
    """A model with a batch.

    Args:
        make: creates the model.
        inputs: returns arguments and keyword arguments for a number of samples.
        batch_dim: of inputs and outputs.
        is_exact: whether micro-batches compute the same as the full batch: not with batch norm, nor with a branch that
            depends on a mean over samples.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    batch_dim: int = 0
    is_exact: bool = True


def _transformer() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sequence-first encoders have no nested tensors
        return nn.Transformer(WIDTH, 2, 1, 2, 32, dropout=0.0)


def images(n: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(n, 3, 16, 16),), {}


def rows(n: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(n, 8),), {}


def tokens(n: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randint(11, (n, 8)),), {}


CASES: dict[str, Case] = {
    "resnet": Case(ResNet, images, is_exact=False),
    "gpt, tied": Case(Gpt, tokens),
    "gpt, loss inside": Case(Gpt, lambda n: ((torch.randint(11, (n, 8)),), {"targets": torch.randint(11, (n, 8))})),
    "transformer, sequence first": Case(
        _transformer, lambda n: ((torch.randn(7, n, WIDTH), torch.randn(5, n, WIDTH)), {}), batch_dim=1
    ),
    "lstm": Case(Lstm, tokens),
    "experts": Case(Experts, rows),
    "reused layer": Case(Reused, rows),
    "in place": Case(InPlace, rows),
}


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(7)
    return make()


def batch_of(case: Case, samples: int = 8, *, seed: int = 1) -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(seed)
    return case.inputs(samples)


def call_order(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """Return the submodules without submodules, in the order in which forward calls them, also again."""
    called: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda _m, _a, name=name: called.append(name))  # type: ignore[misc]  # a default binds the name
        for name, module in model.named_modules()
        if name and not list(module.children())
    ]
    buffers = copy.deepcopy(dict(model.named_buffers()))
    with torch.no_grad():
        model(*args, **kwargs)
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    for handle in handles:
        handle.remove()
    return called


def plan_for(
    model: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    stages: int = 2,
    microbatches: int = 4,
    device: str = "cpu",
    **more: Any,
) -> Plan:
    """Build a plan with the same number of submodules in every stage, without profiling."""
    units = tuple(dict.fromkeys(call_order(model, *inputs)))
    bounds = tuple(len(units) * stage // stages for stage in range(stages + 1))
    values: dict[str, Any] = {
        "model": type(model).__name__,
        "samples": 8,
        "units": units,
        "bounds": bounds,
        "devices": (device,) * stages,
        "microbatches": microbatches,
    }
    return Plan(**{**values, **more})


@contextlib.contextmanager
def pipelined(
    model: Any, inputs: tuple[tuple[Any, ...], dict[str, Any]], *, batch_dim: int = 0, **options: Any
) -> Iterator[Any]:
    """Run the block with the plan of `plan_for`."""
    plan = plan_for(model, inputs, **options)
    with parallel_model(model, backend=BalancedBackend(devices=plan.devices, plan=plan, batch_dim=batch_dim)) as same:
        yield same


def loss_of(output: Any) -> Tensor:
    """Return a scalar that weights every value of every output differently."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(())
    for leaf in leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            weight = torch.randn(leaf.shape, generator=generator).to(leaf.device) if leaf.dim() else 1.0
            total = total + (leaf * weight).sum().cpu()
    return total


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: each.grad for name, each in model.named_parameters()}


def assert_equal_gradients(got: nn.Module, expected: nn.Module, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    wanted = gradients(expected)
    for name, gradient in gradients(got).items():
        want = wanted[name]
        if want is None or gradient is None:
            assert (want is None) == (gradient is None), name
        else:
            # Sums in another order differ by the rounding of their terms, which may cancel each other.
            least = atol * max([1.0, *want.abs().flatten().tolist()])
            torch.testing.assert_close(gradient, want, rtol=rtol, atol=least, msg=lambda text, n=name: f"{n}: {text}")


@contextlib.contextmanager
def not_split_once(message: str | None) -> Iterator[None]:
    """Expect one warning of a kind of batch that is not split; None: expect none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(each.message) for each in caught if "are not split" in str(each.message)]
    assert len(texts) == (message is not None), texts
    assert re.search(message or "", "".join(texts)), texts


def tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
