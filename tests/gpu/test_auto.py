"""backend="auto" with one process for two GPUs: one device, dp or balanced; trained as on one device."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
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
