"""What crosses the border of a run on two GPUs: checkpoints, arguments, results, batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import checkpoints, device, distributed, parallel_model, rank, shard_loader

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.timeout(200),
]

BACKENDS = ["ddp", "fsdp", "dp"]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def test_a_generator_draws_on_the_device_of_each_rank() -> None:
    """One of CUDA that the caller passes is on the rank's device, and comes back in place."""
    generator = torch.Generator("cuda").manual_seed(3)
    draws = distributed(gpus=2)(lambda each: torch.randn(2, device=device(), generator=each).cpu())
    first, second = draws.all_ranks(generator), draws.all_ranks(generator)
    own = torch.Generator("cuda").manual_seed(3)
    expected = [torch.randn(2, device="cuda", generator=own).cpu() for _ in range(2)]
    for found, one in zip((first, second), expected, strict=True):
        assert all(torch.equal(each, one) for each in found)


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=16)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for x, y in batches:
        step(model, optimizer, x, y)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach().cpu() for name, each in model.state_dict().items()}


def train_with_checkpoints(folder: Path, *, in_background: bool, steps: int) -> tuple[int, dict[str, torch.Tensor]]:
    """Train two epochs, but no more than `steps` steps in all; return the steps before this call, and the weights."""
    model, optimizer = make()
    with parallel_model(model):
        batches = shard_loader(loader(), batch="global")
        things: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": batches}
        with checkpoints(folder, every=1, in_background=in_background, **things) as saved:
            before = saved.steps
            for _ in range(batches.epoch, 2):
                for x, y in batches:
                    step(model, optimizer, x, y)
                    saved.step()
                    if saved.steps == steps:
                        return before, {}
    return before, weights_of(model)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resumed_run_goes_on_as_on_the_cpu(backend: str, in_background: bool, tmp_path: Path) -> None:
    """A run that ends within its first epoch, and is started again, trains the weights of two epochs on the CPU."""
    model, optimizer = make()
    for _ in range(2):
        fit(model, optimizer, loader())
    run = distributed(gpus=[1, 0], backend=backend)(train_with_checkpoints).all_ranks
    run(tmp_path / "saved", in_background=in_background, steps=3)
    for before, found in run(tmp_path / "saved", in_background=in_background, steps=-1):
        assert before == 3
        torch.testing.assert_close(found, weights_of(model), rtol=1e-4, atol=1e-5)


def test_arguments_and_results_on_the_second_gpu_keep_their_values() -> None:
    """A tensor and a model on cuda:1 reach the ranks with their values, and the ranks' results come back."""
    x, (model, _) = torch.arange(3.0, device="cuda:1"), make()
    model.to("cuda:1")

    @distributed(gpus=2)
    def run(x: torch.Tensor, model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, float]:
        return x.cpu() + rank(), torch.full((2,), float(rank()), device=device()), model[0].weight.sum().item()

    for number, (moved, made, total) in enumerate(run.all_ranks(x, model)):
        assert moved.tolist() == [number, number + 1, number + 2]
        assert made.cpu().tolist() == [number, number]
        assert total == pytest.approx(model[0].weight.sum().item())
    assert {each.device for each in model.parameters()} == {torch.device("cuda", 1)}


@pytest.mark.parametrize("amp", [None, "bf16"])
def test_parts_have_the_same_bits_on_one_and_two_devices(amp: str | None) -> None:
    """Under `logical=4`, with dropout and batch norm, one GPU and two train bitwise equal weights."""

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        with parallel_model(model):
            fit(model, optimizer, shard_loader(loader(), batch="global"))

    def trained(gpus: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4)
        model = nn.Sequential(*layers)
        distributed(gpus=gpus, logical=4, seed=0, amp=amp)(train)(model)
        return weights_of(model)

    one, two = trained(1), trained(2)
    assert not [name for name, each in one.items() if not torch.equal(two[name], each)]


def workspaces() -> str | None:
    return os.environ.get("CUBLAS_WORKSPACE_CONFIG")


@pytest.mark.parametrize(
    ("options", "users", "expected"),
    [
        ({"logical": 4}, None, ":4096:8"),
        ({}, None, None),
        ({"logical": 4}, ":16:8", ":16:8"),
    ],
    ids=["logical", "plain", "of the user"],
)
@pytest.mark.parametrize("gpus", [1, 2])
def test_products_of_matrices_have_the_same_bits_under_logical(
    gpus: int, options: dict[str, int], users: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS gets workspaces for that, from a variable of each process, in the run alone; the user's value stays."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if users is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", users)
    assert distributed(gpus=gpus, **options)(workspaces).all_ranks() == [expected] * gpus
    assert workspaces() == users


def test_a_block_of_a_script_sets_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that nobody has launched."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with parallel_model(nn.Linear(2, 2), backend="ddp", gpus=1, logical=2):
        assert workspaces() == ":4096:8"
    assert workspaces() is None
