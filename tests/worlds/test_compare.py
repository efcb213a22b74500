"""`train.compare`: one process and two train on the same batches, in fp32, and the table shows where they part."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import WorkerError, distributed, no_sync, parallel_model, rank, shard_loader, world_size

ROOT = Path(__file__).parents[2]

IGNORED = -100


def samples() -> TensorDataset:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)
    return TensorDataset(x, torch.where(x[:, 3] > 0.3, IGNORED, y))


LAYERS = {"norm": lambda: nn.BatchNorm1d(8), "dropout": lambda: nn.Dropout(0.3)}


def make_model(kind: str) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), LAYERS.get(kind, nn.Identity)(), nn.Tanh(), nn.Linear(8, 3))


@distributed(processes=2)
def train(kind: str, model: nn.Module | None = None, batch_size: int = 4) -> None:
    if kind == "weights":
        torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    model = model or make_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (world_size() if kind == "rate" else 1))
    batch_size = batch_size * 2 // world_size() if kind == "batch" else batch_size
    loader = DataLoader(samples(), batch_size=batch_size, shuffle=True)
    with parallel_model(model):
        for x, y in loader if kind == "unsharded" else shard_loader(loader):
            optimizer.zero_grad()
            target = y if kind == "tokens" else y.clamp(min=0)
            loss = F.cross_entropy(model(x), target, reduction="sum" if kind == "sum" else "mean")
            (loss * (1 + 2e-3 * rank()) if kind == "slight" else loss).backward()
            optimizer.step()


@pytest.mark.parametrize("options", [{}, {"backend": "fsdp"}, {"amp": "bf16"}], ids=["ddp", "fsdp", "amp"])
def test_equal_steps_are_the_same_training(options: dict[str, str]) -> None:
    """Losses, gradients and weights of one and of two processes agree up to rounding, and the epoch ends both."""
    model = make_model("")
    before = [each.clone() for each in model.parameters()]
    comparison = train.options(**options).compare(99, "", model)
    assert comparison.is_same, str(comparison)
    assert str(comparison).splitlines()[0].split() == ["step", "alone", "together", "largest", "differences"]
    assert "\nThe same training: fp32 explains differences of gradients up to " in str(comparison)
    assert len(comparison.steps) == 5  # 40 samples by 2 processes, 4 each
    assert max(step.weight_difference for step in comparison.steps) < 1e-5  # also with amp: both runs are in fp32
    assert (comparison.amp_difference is not None) == ("amp" in options)
    if comparison.amp_difference is not None:
        assert 1e-4 < comparison.amp_difference < 0.1
        assert (
            str(comparison).splitlines()[-1].startswith("With amp, gradients of the same run differ from fp32 by up to")
        )
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    "kind", ["norm", "dropout", "sum", "tokens", "batch", "unsharded", "weights", "slight", "rate"]
)
def test_the_runs_part(kind: str) -> None:
    """Also by what is a few times more than fp32 explains; another learning rate is seen in the next step."""
    comparison = train.compare(2, kind)
    assert not comparison.is_same
    assert comparison.first_difference == (2 if kind == "rate" else 1)
    assert comparison.steps[0].gradient.startswith("Sequential.")
    guide = " ".join((ROOT / "examples/guides/debugging.md").read_text().split())
    tries = str(comparison).partition("Try in turn:\n")[2].splitlines()
    assert len(tries) == 3
    assert all(each.strip() in guide for each in tries)


@distributed(processes=2)
def train_unevenly(tail: str | None) -> None:
    data = TensorDataset(*samples()[:39])  # the fifth step has 7, for two batches of 4
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = shard_loader(DataLoader(data, batch_size=4, shuffle=True), tail=tail)
    with parallel_model(model):
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y.clamp(min=0)).backward()
                optimizer.step()


@pytest.mark.parametrize("tail", [None, "drop", "weighted"])
def test_a_shuffled_loader_that_does_not_divide_evenly(tail: str | None) -> None:
    """One process reads what all ranks read, with the units that they repeat or leave out."""
    comparison = train_unevenly.compare(99, tail)
    assert comparison.is_same, str(comparison)
    assert len(comparison.steps) == 10


@distributed(processes=2)
def train_other(kind: str) -> None:
    """Accumulate gradients of two optimizers, train outside of a block, fail alone, or do not train."""
    if kind == "nothing":
        return
    if kind == "alone" and world_size() == 1:
        raise ValueError("needs two")
    first, second = nn.Linear(6, 6), nn.Linear(6, 3)
    optimizers = [torch.optim.Adam(each.parameters()) for each in (first, second)]
    loader = shard_loader(DataLoader(samples(), batch_size=2), tail="weighted")
    if kind == "outside":
        for x, _ in loader:
            first(x).pow(2).mean().backward()
            optimizers[0].step()
    with parallel_model(first, second):
        for number, (x, y) in enumerate(loader):
            with no_sync(first), no_sync(second):
                F.cross_entropy(second(first(x)), y.clamp(min=0)).backward()
            F.cross_entropy(second(first(x * number)), y.clamp(min=0)).backward()
            for each in optimizers:
                each.step()


def test_each_step_of_several_optimizers_is_compared() -> None:
    """Two models, accumulation and Adam; the names of the weights contain the model's class."""
    comparison = train_other.compare(6, "accumulate")
    assert comparison.is_same, str(comparison)
    assert len(comparison.steps) == 6
    assert comparison.steps[0].weight.startswith("Linear.")


@distributed(processes=2)
def train_in_full_fp32() -> None:
    matmul = torch.backends.cuda.matmul
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.allow_tf32
    assert not matmul.allow_fp16_reduced_precision_reduction
    assert not matmul.allow_bf16_reduced_precision_reduction
    train("equal")


def test_runs_compute_in_full_fp32() -> None:
    """The caller's setting of TF32, which workers have, does not hold in runs that are compared."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert train_in_full_fp32.compare(1).is_same
    finally:
        torch.set_float32_matmul_precision(precision)


@pytest.mark.filterwarnings("ignore:.*parallel_model")
def test_runs_that_cannot_be_compared() -> None:
    """Training outside of a block parts; no step is an error; an exception of a run says in which run it was raised."""
    assert not train_other.compare(2, "outside").is_same
    with pytest.raises(WorkerError, match=r"without an optimizer step(.|\n)*torch.optim"):
        train_other.compare(2, "nothing")
    with pytest.raises(ValueError, match="needs two") as caught:
        train_other.compare(2, "alone")
    if hasattr(caught.value, "__notes__"):
        assert any("rank 0 of 1" in note for note in caught.value.__notes__)
