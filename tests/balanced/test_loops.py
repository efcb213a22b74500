"""Loops as people write them: each trains the weights of one device, split or, where that is right, whole."""

from __future__ import annotations

import contextlib
import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallelize import parallel_model
from parallelize.backends.balanced.plugin import BalancedBackend

STEPS = 5


def rows(step: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


def tokens(step: int) -> Tensor:
    return torch.randint(40, (8, 6), generator=torch.Generator().manual_seed(step))


class Net(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Any:
        return self.c(self.inner(self.b(torch.tanh(self.a(x)))))


def train(model: Any, loss: Callable[[Any, int], Tensor] | None = None) -> None:
    """Train by SGD with the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss or (lambda model, step: model(rows(step)).square().mean()))(model, step).backward()
        optimizer.step()


# Hugging Face: the loss is computed in forward.
def language_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 8, "use_cache": False}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))  # type: ignore[no-any-return]  # of a model without types


def labelled(model: Any, step: int) -> Tensor:
    labels = tokens(step)
    labels[:5, 3:] = -100  # micro-batches have different numbers of targets
    loss: Tensor = model(input_ids=tokens(step), labels=labels).loss
    return loss


def cached(model: Any) -> None:
    model.config.use_cache = True
    train(model, labelled)


class Capacity(nn.Module):
    """Experts that drop the samples over their capacity."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        most, y = math.ceil(0.6 * len(x) / 2), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            kept = (chosen == index).nonzero()[:, 0][:most]
            y = y.index_add(0, kept, expert(x[kept]) * weight[kept, None])
        return x + y


class Sparse(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(torch.sparse.mm(x, torch.eye(8)) if x.is_sparse else x)


class Listing(Net):
    """Overrides `parameters`, as some libraries do for groups of an optimizer."""

    def parameters(self, groups: Any = None) -> Any:  # type: ignore[override]  # the case
        return iter([each for _, each in self.named_parameters()])


class Grouped(Net):
    """Overrides `parameters` by a method with another signature, which returns a list; and `named_parameters`."""

    def parameters(self, groups: Any) -> Any:  # type: ignore[override]  # the case
        return [{"params": list(nn.Module.parameters(self)), "lr": rate} for rate in groups]

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter([("a.weight", self.a.weight)])


def grouped(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters([0.1]))
    for step in range(STEPS):
        optimizer.zero_grad()
        model(rows(step)).square().mean().backward()
        optimizer.step()


class Observed(Net):
    """Has a buffer that gets its shape in the first forward, as torch.ao's observers have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor([]))

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        lowest = y.detach().amin(0)
        if not self.low.numel():
            self.low.resize_(lowest.shape).copy_(lowest)
        self.low.copy_(torch.minimum(self.low, lowest))
        return y


def compiled_step(model: Any) -> None:
    """The function that is compiled calls the model; the model itself is not compiled."""
    train(model, torch.compile(lambda model, step: F.mse_loss(model(rows(step)), rows(step + 1)), backend="eager"))


class Nested(Net):
    def forward(self, batch: dict[str, Any], *more: Any) -> Any:
        x = super().forward(batch["x"][0] + batch["x"][1][0])
        return {"y": (x, [x * 2, {"z": x.sum(1)}]), "name": "nested", "nothing": None}


def nested(model: Any, step: int) -> Tensor:
    output = model({"x": (rows(step), [rows(step + 1)])}, None, 3)
    assert output["name"] == "nested"
    return 0.1 * (output["y"][0].sum(1) + output["y"][1][1]["z"]).square().mean() + output["y"][1][0].square().mean()  # type: ignore[no-any-return]  # of a model without types


class Momentum(Net):
    """A momentum encoder, and a queue of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.a).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(16, 8))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            for mine, other in zip(self.slow.parameters(), self.a.parameters(), strict=True):
                mine.data.mul_(0.9).add_(other.data, alpha=0.1)
            key = self.slow(x)
        scores = super().forward(x) @ self.queue.clone().t()
        at = int(self.pointer)
        self.queue[at : at + len(x)] = key
        self.pointer[()] = (at + len(x)) % 16
        return scores + (super().forward(x) * key).sum(1, keepdim=True)


def scaled(model: Any) -> None:
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(rows(step)).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


def compiled() -> nn.Module:
    model = Net(nn.GELU())
    model.b.compile(backend="eager")
    return model


class Selecting(nn.Module):
    """Returns a loss, and the hidden values of tokens that are not zero, cut to the longest sample if `is_cut`."""

    def __init__(self, is_cut: bool = False) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(40, 4), nn.Linear(4, 4), nn.Linear(4, 40)
        self.is_cut = is_cut

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.mix(self.embed(tokens)))
        loss = F.cross_entropy(self.head(h).transpose(1, 2), tokens)
        return loss, h[:, : int((tokens != 0).sum(1).max())] if self.is_cut else h[tokens != 0]


def batch(step: int) -> Tensor:
    """Return a batch whose samples have 2 tokens that are not zero; in some steps, some have others."""
    even = torch.zeros(8, 5, dtype=torch.long)
    even[:, :2] = 7
    ragged, longer = even.clone(), even.clone()
    ragged[0, 2] = ragged[5, 3] = ragged[5, 4] = 9
    longer[2:4, 2] = longer[6, 1:] = 3
    return (even, even, even, ragged, longer)[step]


def selected(model: Any, step: int) -> Tensor:
    loss, rows = model(batch(step))
    return loss + rows.square().sum()  # type: ignore[no-any-return]  # of a model without types


class Program(NamedTuple):
    """A model, its loss or its whole loop, and a part of the warning if its batches run whole."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any, int], Tensor] | None = None
    loop: Callable[[Any], None] | None = None
    whole: str | None = None


PROGRAMS = {
    "language model": Program(language_model, labelled),
    "language model with a cache": Program(language_model, loop=cached, whole="DynamicCache(.|\n)*use_cache = False"),
    "experts with a capacity": Program(lambda: Net(Capacity()), whole="differs from that of the batch"),
    "sparse inputs": Program(Sparse, lambda m, i: m(rows(i).to_sparse()).square().mean()),
    "sparse inputs later": Program(
        Sparse, lambda m, i: m(rows(i).to_sparse() if i > 2 else rows(i)).square().mean(), whole="no dense tensor"
    ),
    "batch norm in evaluation": Program(lambda: Net(nn.BatchNorm1d(8).eval().requires_grad_(False)).eval()),
    "a compiled submodule": Program(compiled),
    "a class that overrides parameters()": Program(Listing),
    "a class whose parameters() has another signature": Program(Grouped, loop=grouped),
    "a buffer that gets its shape in the first forward": Program(Observed, whole="forward changes low"),
    "a compiled function that calls the model": Program(Net, loop=compiled_step),
    "nested containers": Program(Nested, nested),
    "a momentum encoder with a queue": Program(
        Momentum, lambda m, i: m(rows(i)).square().mean(), whole="forward changes"
    ),
    "GradScaler of the user's": Program(Net, loop=scaled),
    "outputs of ever new lengths": Program(Selecting, selected),
    "outputs that fit no tensor later": Program(lambda: Selecting(is_cut=True), selected, whole="cannot be joined"),
}


@contextlib.contextmanager
def caught() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in found if "are not split" in str(each.message)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loop(name: str) -> None:
    """Its weights are those of one device; if batches run whole, one warning names the reason."""
    program = PROGRAMS[name]
    torch.manual_seed(0)
    model = program.make()
    alone = copy.deepcopy(model)
    loop = program.loop or (lambda model: train(model, program.loss))
    with caught() as texts, parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=2)):
        loop(model)
        saved = copy.deepcopy(model.state_dict())
    assert len(texts) == (program.whole is not None), texts
    if program.whole is not None:
        assert re.search(program.whole, texts[0]), texts
    loop(alone)
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-4, atol=1e-4, msg=key)
        assert torch.equal(saved[key], model.state_dict()[key])


def test_a_first_batch_without_samples_runs_whole() -> None:
    """Batches of a filter may be empty; those that follow are split or not as the plan says."""
    model = Net()
    with parallel_model(model, backend=BalancedBackend(devices=["cpu", "cpu"], microbatches=2)):
        assert model(torch.zeros(0, 8)).shape == (0, 8)
        assert model(rows(0)).shape == (8, 8)
