"""A steady step reads nothing of the device and copies no numbers to it, for either of which the host would wait."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import BalancedBackend, DDPBackend, DPBackend, device, distributed, parallel_model, shard_loader
from parallelize.gradients.averaging import Average
from parallelize.plugins.base import Backend

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

WARM_UP, STEPS = 8, 4
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def waits_are_errors() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def mean_of_classes(outputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """A mean over targets that are not ignored: the device counts them."""
    return F.cross_entropy(outputs, classes)


def mean_of_outputs(outputs: torch.Tensor, _classes: torch.Tensor) -> torch.Tensor:
    """A mean whose count the host knows."""
    return outputs.square().mean()


def sum_that_is_divided(outputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """A sum over a count that the host knows."""
    return F.cross_entropy(outputs, classes, reduction="sum") / len(classes)


@distributed(gpus=2)
def train(average: Average, loss_of: Loss) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(8, 8, device=device())
    classes = torch.randint(4, (8,), device=device())
    with parallel_model(model, average=average):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(WARM_UP + STEPS):
            with waits_are_errors() if step >= WARM_UP else contextlib.nullcontext():
                loss = loss_of(model(x), classes)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


@pytest.mark.parametrize("loss_of", [mean_of_classes, mean_of_outputs, sum_that_is_divided])
@pytest.mark.parametrize("average", ["ranks", "sum", "tokens"])
def test_no_average_waits(average: Average, loss_of: Loss) -> None:
    """The weight of a loss stays on the device, or is an argument of a kernel."""
    train(average, loss_of)


@distributed(gpus=2)
def train_on_uneven_batches(samples: int, batch_size: int) -> int:
    model = nn.Linear(8, 1)
    data = DataLoader(TensorDataset(torch.randn(samples, 8)), batch_size=batch_size)
    steps = 0
    with parallel_model(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for (x,) in shard_loader(data, batch="global"):
            # The loader's own copies are none of this test.
            with waits_are_errors() if steps >= WARM_UP else contextlib.nullcontext():
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            steps += 1
    return steps


def test_the_weights_of_uneven_batches_do_not_wait() -> None:
    """Batches of five samples are three and two on two ranks, and their gradients are weighted by that."""
    assert train_on_uneven_batches(5 * (WARM_UP + STEPS), 5) == WARM_UP + STEPS


class ModelWithLoss(nn.Module):
    """Its forward returns a mean, which is joined from those of parts of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - classes[:, None]).square().mean()


@pytest.mark.parametrize(
    "backend", [DPBackend(), BalancedBackend(devices=("cuda:0", "cuda:1"), microbatches=2)], ids=["dp", "balanced"]
)
def test_losses_of_parts_are_joined_without_a_wait(backend: Backend) -> None:
    """The weights of the parts are numbers that the host knows."""
    model = ModelWithLoss()
    x, classes = torch.randn(8, 8).cuda(), torch.arange(8).cuda() % 4
    with parallel_model(model, backend=backend, gpus=2):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(WARM_UP + STEPS):
            with waits_are_errors() if step >= WARM_UP else contextlib.nullcontext():
                loss = model(x, classes)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


class Net(nn.Module):
    """Two layers, and one that a pass may leave out."""

    def __init__(self, *, uses_all: bool = True) -> None:
        super().__init__()
        self.first, self.last, self.extra = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(4, 4)
        self.uses_all = uses_all

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(self.first(x).relu())
        return self.extra(y) if self.uses_all else y


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches on the device."""
    return [(torch.randn(8, 8, device=device()), torch.randint(4, (8,), device=device())) for _ in range(count)]


@distributed(gpus=2)
def waits_per_step(
    options: dict[str, Any], *, reduction: str, fused: bool, micro_batches: int, uses_all: bool
) -> float:
    """Train, and return how often the host has waited in a step of the last ones."""
    from fake_cuda.counters import host_waits

    model, data, before = Net(uses_all=uses_all), batches(WARM_UP + STEPS), 0
    with parallel_model(model, **options):
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        for number, (x, y) in enumerate(data):
            if number == WARM_UP:
                before = host_waits()
            optimizer.zero_grad()
            for part, labels in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
                F.cross_entropy(model(part), labels, reduction=reduction).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        found = host_waits() - before
    return found / STEPS


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
@pytest.mark.parametrize(
    ("options", "more"),
    [
        pytest.param({"backend": "ddp"}, {}, id="ddp"),
        pytest.param({"backend": "fsdp"}, {}, id="fsdp"),
        pytest.param({"backend": "ddp", "amp": "fp16"}, {}, id="ddp, fp16"),
        pytest.param({"backend": "fsdp", "amp": "fp16"}, {}, id="fsdp, fp16"),
        pytest.param({"backend": "ddp", "amp": "O2"}, {}, id="ddp, O2"),
        pytest.param({"backend": "ddp", "average": "tokens"}, {}, id="tokens"),
        pytest.param({"backend": "ddp", "average": "sum"}, {"reduction": "sum"}, id="sum"),
        pytest.param({"backend": "fsdp", "average": "sum"}, {"reduction": "sum"}, id="fsdp, sum"),
        pytest.param({"backend": "ddp"}, {"micro_batches": 2}, id="accumulation"),
    ],
)
@pytest.mark.skipif("FAKE_CUDA" not in os.environ, reason="needs the counter of tests/fake_cuda")
def test_no_step_waits(options: dict[str, Any], more: dict[str, Any], fused: bool) -> None:
    """With every way to average, precision and backend."""
    given: dict[str, Any] = {"reduction": "mean", "micro_batches": 1, "uses_all": True, **more}
    assert waits_per_step.all_ranks(options, fused=fused, **given) == [0, 0]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
@pytest.mark.skipif("FAKE_CUDA" not in os.environ, reason="needs the counter of tests/fake_cuda")
def test_a_step_with_unused_parameters_waits_once(fused: bool) -> None:
    """Whether another rank has used one must be known when backward returns, as under DDP's find_unused_parameters."""
    options = {"backend": DDPBackend(bucket_cap_mb=0.00001)}
    waits = waits_per_step.all_ranks(options, fused=fused, reduction="mean", micro_batches=1, uses_all=False)
    assert max(waits) <= 1
