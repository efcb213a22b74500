"""The choice of backend="auto", and its predictions, beside what each engine takes, for models under memory limits.

Each model trains in two processes under ddp, under fsdp without resharding after forward and under fsdp, without a
limit, which measures time and memory. Then auto trains it under three limits, which are set by setrlimit (RLIMIT_DATA)
in each process, above what it uses before the model is made. An engine fits if it has taken nine tenths at most.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import logging
import math
import os
import re
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Freed tensors go back to the system at once, so that the resident set is what is in use; read when a process begins.
os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"

import torch
from torch import nn

from parallelize import FSDPBackend, distributed, parallel_model

MIB = 2**20
ENGINES: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp reshard_after_forward=False": FSDPBackend(reshard_after_forward=False),
    "fsdp": "fsdp",
}


class Blocks(nn.Module):
    """Blocks one after another, and a head."""

    def __init__(self, blocks: list[nn.Module], head: nn.Module, stem: nn.Module | None = None) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem or nn.Identity(), nn.ModuleList(blocks), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recurrent(nn.Module):
    """An LSTM, and a head on its last output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(width, width, 2, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def dense(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


def normalized(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1))


def convolution(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())


def attention(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)


@dataclass(frozen=True)
class Entry:
    """A model, its batch, and its optimizer."""

    model: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]


momentum = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
ZOO: dict[str, Entry] = {
    "wide MLP, Adam": Entry(
        lambda: Blocks([dense(1536) for _ in range(4)], nn.Linear(1536, 10)),
        lambda: torch.randn(16, 1536),
        torch.optim.Adam,
    ),
    "wide MLP, SGD": Entry(
        lambda: Blocks([dense(1536) for _ in range(4)], nn.Linear(1536, 10)),
        lambda: torch.randn(16, 1536),
        functools.partial(torch.optim.SGD, lr=1e-3),
    ),
    "MLP, large batch": Entry(
        lambda: Blocks([normalized(512) for _ in range(8)], nn.Linear(512, 10)),
        lambda: torch.randn(2048, 512),
        torch.optim.AdamW,
    ),
    "convolutions": Entry(
        lambda: Blocks([convolution(32) for _ in range(6)], nn.Flatten(), nn.Conv2d(3, 32, 3, padding=1)),
        lambda: torch.randn(16, 3, 32, 32),
        momentum,
    ),
    "transformer": Entry(
        lambda: Blocks([attention(384) for _ in range(6)], nn.Linear(384, 10)),
        lambda: torch.randn(4, 64, 384),
        torch.optim.AdamW,
    ),
    "language model": Entry(
        lambda: Blocks([attention(256) for _ in range(2)], nn.Linear(256, 8000), nn.Embedding(8000, 256)),
        lambda: torch.randint(8000, (4, 64)),
        torch.optim.AdamW,
    ),
    "LSTM": Entry(lambda: Recurrent(768), lambda: torch.randn(8, 32, 768), momentum),
    "large embedding": Entry(
        lambda: Blocks([dense(128)], nn.Linear(128, 10), nn.Embedding(100_000, 128)),
        lambda: torch.randint(100_000, (64, 16)),
        torch.optim.Adagrad,
    ),
}


def status(key: str) -> int:
    """Return bytes from /proc/self/status."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


class Lines(logging.Handler):
    """The lines that the library logs."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def train(name: str, backend: Any, limit: int | None, steps: int) -> tuple[float, int, str]:
    """Return the shortest seconds of a step, the bytes that training has taken, and what was logged."""
    log = Lines()
    logger = logging.getLogger("parallelize")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    entry = ZOO[name]
    warm_up(backend, entry)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + limit,) * 2)
    seconds = []
    torch.manual_seed(0)
    model = entry.model()
    optimizer = entry.optimizer(model.parameters())
    with parallel_model(model, backend=backend, restore=False):
        for _ in range(steps):
            begin = time.perf_counter()
            optimizer.zero_grad()
            model(entry.batch()).square().mean().backward()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
        taken = status("VmHWM") - before
    return min(seconds[1:]), taken, log.text


def warm_up(backend: Any, entry: Entry) -> None:
    """Import and allocate what does not belong to the model, such as compiled kernels."""
    model = entry.model()
    model(entry.batch()).square().mean().backward()
    entry.optimizer(model.parameters()).step()
    model = Blocks([dense(8)], nn.Linear(8, 1))
    with parallel_model(model, backend=backend):
        model(torch.randn(4, 8)).mean().backward()
    gc.collect()


def measured(name: str, backend: Any, limit: int | None, steps: int) -> tuple[float, int, str] | None:
    """Train in two processes; None: it does not fit."""
    try:
        return distributed(processes=2, logs="rank0")(train)(name, backend, limit, steps)
    except Exception:  # libraries say in many ways that memory is missing
        if limit is None:
            raise
        return None


def predictions(text: str) -> dict[str, float]:
    """Return the bytes of each engine in the line that the library logs."""
    units = {"KiB": 2**10, "MiB": MIB, "GiB": 2**30}
    line = text.rpartition("of a device: ")[2].partition("\n")[0]
    rows = re.findall(r"(ddp|fsdp(?: \w+=\w+)?) ([\d.]+) ([KMG]iB)", line)
    return {engine: float(size) * units[unit] for engine, size, unit in rows}


def chosen(text: str) -> str:
    """Return the engine that was chosen, as the line says."""
    return text.rpartition(": backend='auto' has chosen ")[2].partition(",")[0]


def limits_of(sizes: dict[str, int]) -> list[int]:
    """Return three limits: with room for all engines, just enough for the largest, and one that is too small for it.

    The last one lies in the largest gap of the measured sizes. If these hardly differ, it is too small for all.
    """
    ordered = sorted(sizes.values())
    below, above = max(itertools.pairwise(ordered), key=lambda pair: pair[1] - pair[0])
    middle = (above + below) / 2 if above > 1.1 * below else 0.75 * ordered[0]
    return [int(size / 0.9) for size in (1.5 * ordered[-1], 1.15 * ordered[-1], middle)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(ZOO), choices=list(ZOO), metavar="NAME")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--rounds", type=int, default=2, help="in which the engines take turns; the fastest step counts"
    )
    options = parser.parse_args()
    rows, right, errors = [], [], []
    print("Predicted and measured, per process\n")
    print("| model | engine | MiB predicted | MiB measured | predicted / measured | ms measured |")
    print("|---|---|---|---|---|---|")
    for name in options.models:
        auto = measured(name, "auto", None, options.steps)
        assert auto is not None
        seconds: dict[str, float] = dict.fromkeys(ENGINES, math.inf)
        sizes: dict[str, int] = {}
        for engine, backend in [*ENGINES.items()] * options.rounds:
            found = measured(name, backend, None, options.steps)
            assert found is not None
            seconds[engine], sizes[engine] = min(seconds[engine], found[0]), found[1]
        for engine, size in predictions(auto[2]).items():
            errors.append(size / sizes[engine])
            print(
                f"| {name} | {engine} | {size / MIB:.0f} | {sizes[engine] / MIB:.0f} | {errors[-1]:.2f} "
                f"| {seconds[engine] * 1000:.1f} |",
                flush=True,
            )
        for limit in limits_of(sizes):
            rows.append(under_limit(name, limit, sizes, seconds, options.steps))
            right.append(rows[-1][1])
    print("\nThe choice under memory limits\n")
    print("| model | MiB allowed | fits | measured best | chosen | ratio of chosen to best |")
    print("|---|---|---|---|---|---|")
    print("\n".join(row for row, _ in rows))
    near = sum(0.85 <= each <= 1.15 for each in errors)
    print(
        f"\nThe choice is the measured best of those that fit, or within 10 % of it, in {sum(right)} of {len(right)} "
        f"cases; predicted memory is within 15 % of the measured in {near} of {len(errors)}."
    )


def under_limit(
    name: str, limit: int, sizes: dict[str, int], seconds: dict[str, float], steps: int
) -> tuple[str, bool]:
    """Return the row of a model under a limit, and whether the choice is the best, or within 10 % of it.

    Where no engine fits, the best is none, and an error is the right answer.
    """
    fitting = [engine for engine, size in sizes.items() if size <= 0.9 * limit]
    best = min(fitting, key=lambda engine: seconds[engine], default=None)
    auto = measured(name, "auto", limit, steps)
    choice = None if auto is None else chosen(auto[2])
    ratio = seconds[choice] / seconds[best] if choice in fitting and best is not None else 0.0
    fits = ", ".join(fitting) or "none"
    ratio_cell = f"{ratio:.2f}" if fitting else ""  # without a best, there is nothing to compare with
    row = f"| {name} | {limit / MIB:.0f} | {fits} | {best or 'none'} | {choice or 'none'} | {ratio_cell} |"
    return row, choice == best or 0 < ratio <= 1.1


if __name__ == "__main__":
    main()
