"""backend="auto" on two GPUs: it chooses by the memory that is free, and a measured forward may lack memory."""

from __future__ import annotations

import itertools
import logging
import re

import pytest
import torch
from cublas import take_workspaces
from torch import nn

from parallelize import device, distributed, parallel_model

pytestmark = pytest.mark.gpu2

WIDTH, BLOCKS = 512, 8
MIB = 2**20
UNIT = {"KiB": 2**10, "MiB": MIB, "GiB": 2**30}
GATHERED = "fsdp reshard_after_forward=False"


class Net(nn.Module):
    """A chain of blocks; its first forward allocates some bytes that no device has, after some that it has."""

    def __init__(self, too_many: int = 0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)])
        self.too_many, self.runs = too_many, itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.too_many and next(self.runs) == 0:
            held = torch.empty(256 * MIB, dtype=torch.uint8, device=x.device)
            torch.empty(self.too_many, dtype=torch.uint8, device=held.device)
        return self.blocks(x)


class Lines(logging.Handler):
    """The lines that the library logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@distributed(gpus=2, seed=0)
def train(limit: float | None, too_many: int = 0) -> tuple[str, int, int]:
    """Return the line about the choice, the most bytes that were allocated, and those that stay reserved.

    Args:
        limit: bytes that this process may have on its GPU, beside what it has; None: all.
        too_many: bytes that the first forward asks for.
    """
    log, logger = Lines(), logging.getLogger("parallelize")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    take_workspaces(device())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    if limit is not None:
        torch.cuda.set_per_process_memory_fraction((before + limit) / torch.cuda.mem_get_info()[1])
    torch.cuda.reset_peak_memory_stats()
    model = Net(too_many)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)
    with parallel_model(model, backend="auto", restore=False):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(64, WIDTH, device=device())).square().mean().backward()
            optimizer.step()
    held = torch.cuda.max_memory_allocated() - before
    torch.cuda.set_per_process_memory_fraction(1.0)
    logger.removeHandler(log)
    return next(iter(log.lines), ""), held, torch.cuda.memory_reserved()


def sizes_in(line: str) -> dict[str, float]:
    """Return what each candidate needs, as a line says."""
    listed = line.partition("of a device: ")[2]
    rows = re.findall(r"(ddp|fsdp(?: \w+=\w+)?) ([\d.]+) ([KMG]iB)", listed)
    return {name: float(size) * UNIT[unit] for name, size, unit in rows}


def chosen(line: str) -> str:
    return line.partition("has chosen ")[2].partition(",")[0]


def test_the_memory_that_is_free_decides() -> None:
    """With 3 % more than the prediction and its tenth, ddp trains within it; with 3 % less, it is not chosen."""
    line, held, _ = train(None)
    needed = sizes_in(line)
    assert [*needed] == ["ddp", GATHERED, "fsdp"]
    assert chosen(line) == "ddp"
    assert held == pytest.approx(needed["ddp"], rel=0.15)
    for factor, engine in [(1.03, "ddp"), (0.97, GATHERED)]:
        limit = factor * needed["ddp"] / 0.9
        line, held, _ = train(limit)
        assert chosen(line) == engine
        assert held <= limit


def test_a_measured_forward_without_memory_is_no_error() -> None:
    """The model does not fit ddp, then, and what the forward had allocated goes back to the device."""
    line, _, reserved = train(None, too_many=2**60)
    assert chosen(line) == GATHERED
    assert "it has run out of memory" in line
    assert reserved < 256 * MIB
