"""backend="auto" with one process for two GPUs: one device, dp or balanced; trained as on one device."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cublas import take_workspaces
from torch import nn

from parallelize import AutoBackend, parallel_model, plan

pytestmark = pytest.mark.gpu2

WIDTH, BLOCKS = 256, 8


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def trained_alone(batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for x in batches:
        step(model, optimizer, x)
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("samples", "share", "engines"),
    [(256, None, {"ddp", "dp", "balanced"}), (256, 3.5, {"dp", "balanced"}), (8, 1.9, {"balanced"})],
    ids=["all fit", "one device has no room for what is saved", "nor for gradients"],
)
def test_one_process_with_two_gpus(
    samples: int, share: float | None, engines: set[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The fastest engine that fits trains the weights of one device, and a second block knows it."""
    caplog.set_level(logging.INFO, "parallelize")
    batches = [torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(each)) for each in range(3)]
    model = make()
    size = sum(each.nbytes for each in model.parameters())
    memory = None if share is None else int(share * size)
    backend = AutoBackend(process_per="node", memory=memory, plan=str(tmp_path / "plan.json"))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for part in (batches[:2], batches[2:]):
        with parallel_model(model, backend=backend):
            for x in part:
                step(model, optimizer, x)
    (table,) = (each for each in caplog.messages if "engines of backend='auto'" in each)
    rows = [line.strip() for line in table.splitlines() if line.startswith("  ") and ":" in line]
    assert [row.partition(":")[0] for row in rows] == ["ddp", "dp", "balanced"]
    (chosen,) = (row.partition(":")[0] for row in rows if row.endswith("(chosen)"))
    assert chosen in engines
    assert {row.partition(":")[0] for row in rows if not row.endswith("(does not fit)")} <= engines
    if chosen == "balanced":
        assert len({*plan(model).devices}) == 2
    for name, value in trained_alone(batches).items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), value, rtol=1e-4, atol=1e-5)


class _Workspace(torch.autograd.Function):
    """Takes memory in backward that nobody can predict, as kernels of convolutions do: so many copies of its input."""

    copies = 0.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        torch.empty(int(_Workspace.copies * gradient.numel()), device=gradient.device)
        return gradient


class WithWorkspace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Workspace.apply(self.layers(x))


def predicted_bytes(samples: int, caplog: pytest.LogCaptureFixture) -> float:
    """Return what a device needs under ddp, as predicted where memory is no limit."""
    model = WithWorkspace()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with parallel_model(model, backend=AutoBackend(process_per="node")):
        step(model, optimizer, torch.randn(samples, WIDTH))
    (table,) = (each for each in caplog.messages if "engines of backend='auto'" in each)
    caplog.clear()
    (gibibytes,) = re.findall(r"ddp: ([0-9.]+) GiB", table)
    return float(gibibytes) * 2**30


@contextlib.contextmanager
def limited(size: float) -> Iterator[None]:
    """Limit what this process allocates on each GPU, in bytes beside what it has."""
    devices = range(torch.cuda.device_count())
    gc.collect()
    torch.cuda.empty_cache()
    for device in devices:
        most = torch.cuda.memory_allocated(device) + size
        torch.cuda.set_per_process_memory_fraction(most / torch.cuda.mem_get_info(device)[1], device)
    try:
        yield
    finally:
        for device in devices:
            torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.skipif("FAKE_CUDA" not in os.environ, reason="counts bytes, and no workspaces of libraries or segments")
@pytest.mark.parametrize(
    ("limit", "is_tried"),
    [(1.1, False), (1.3, True)],
    ids=["less than a tenth is free", "backward runs out of memory"],
)
def test_a_model_that_needs_more_than_predicted(
    limit: float, is_tried: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is split over the devices, and not an error of memory."""
    caplog.set_level(logging.INFO, "parallelize")
    samples = 2048
    take_workspaces("cuda:0", "cuda:1")
    size = predicted_bytes(samples, caplog)
    monkeypatch.setattr(_Workspace, "copies", 0.4 * size / (4 * samples * WIDTH))
    x = torch.randn(samples, WIDTH)
    model, alone = WithWorkspace(), WithWorkspace()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with limited(limit * size), parallel_model(model, backend=AutoBackend(process_per="node")):
        step(model, optimizer, x)
        step(model, optimizer, x)
    assert any("do not fit on a device" in each for each in caplog.messages) is is_tried
    (table,) = (each for each in caplog.messages if "engines of backend='auto'" in each)
    assert re.search(r"  ddp: .*\(does not fit\)", table)
    optimizer = torch.optim.SGD(alone.parameters(), 0.5)
    step(alone, optimizer, x)
    step(alone, optimizer, x)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), value, rtol=1e-4, atol=1e-5)
