"""Cost of a mixed-precision training step in a `parallel_model` block, compared with torch.amp, Fabric and Accelerate.

Each measurement is a new Python process that trains one net for some steps. Contenders take turns, so that other load
affects all of them. All use the same net, optimizer (fused AdamW), gradient clipping and data.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LIMIT_S = 600.0
MEBIBYTE = 2**20

# B: batch, T: tokens, D: width, V: vocabulary


@dataclass(frozen=True)
class Size:
    """Size of the nets, and the number of warm-up and timed steps."""

    batch: int
    tokens: int
    width: int
    heads: int
    layers: int
    vocabulary: int
    pixels: int
    channels: int
    blocks: int
    warmup: int
    steps: int


SIZES = {
    "full": Size(8, 1024, 768, 12, 12, 50257, 224, 64, 16, 20, 100),  # GPT 124M; a residual net of 33 convolutions
    "small": Size(4, 64, 64, 4, 2, 512, 32, 16, 4, 5, 30),  # for a CPU: small enough to show the overhead of the loop
}


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)
        self.heads = size.heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # B T D
        q, k, v = (each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, 2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """The architecture of GPT-2, with tied embeddings."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Parameter(0.02 * torch.randn(size.tokens, size.width))
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # B T -> B*T V
        x = self.blocks(self.embed(ids) + self.position)
        return F.linear(self.norm(x), self.embed.weight).flatten(0, 1)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.layers(x))


class ResNet(nn.Module):
    """A stem, residual blocks of one width, and a classification head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, size.channels, 7, stride=4)
        self.blocks = nn.Sequential(*(Residual(size.channels) for _ in range(size.blocks)))
        self.head = nn.Linear(size.channels, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def data_of(net: str, size: Size, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    if net == "gpt":
        ids = torch.randint(0, size.vocabulary, (size.batch, size.tokens), device=device)
        return ids, ids.flatten()
    x = torch.randn(4 * size.batch, 3, size.pixels, size.pixels, device=device)
    return x, torch.randint(0, 1000, (len(x),), device=device)


# Each contender is a context manager that yields a function for one training step.
Step = Callable[[], None]


@contextlib.contextmanager
def by_hand(model: Any, optimizer: Any, *, x: Any, y: Any, dtype: str, device: str) -> Iterator[Step]:
    scaler = torch.amp.GradScaler(device, enabled=dtype == "fp16")

    def step() -> None:
        with torch.autocast(device, DTYPES[dtype]):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    yield step


@contextlib.contextmanager
def ours(model: Any, optimizer: Any, *, x: Any, y: Any, dtype: str, device: str) -> Iterator[Step]:
    from parallelize import parallel_model

    place = {"gpus": 1} if device == "cuda" else {"processes": 1}
    with parallel_model(model, amp=dtype, backend="ddp", **place):

        def step() -> None:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        yield step


@contextlib.contextmanager
def fabric(model: Any, optimizer: Any, *, x: Any, y: Any, dtype: str, device: str) -> Iterator[Step]:
    from lightning_fabric import Fabric

    runner = Fabric(accelerator=device, devices=1, precision={"fp16": "16-mixed", "bf16": "bf16-mixed"}[dtype])
    wrapped, stepper = runner.setup(model, optimizer)

    def step() -> None:
        loss = F.cross_entropy(wrapped(x), y)
        stepper.zero_grad()
        runner.backward(loss)
        runner.clip_gradients(wrapped, stepper, max_norm=1.0)
        stepper.step()

    yield step


@contextlib.contextmanager
def accelerate(model: Any, optimizer: Any, *, x: Any, y: Any, dtype: str, device: str) -> Iterator[Step]:
    from accelerate import Accelerator

    runner = Accelerator(mixed_precision=dtype, cpu=device == "cpu")
    wrapped, stepper = runner.prepare(model, optimizer)

    def step() -> None:
        loss = F.cross_entropy(wrapped(x), y)
        stepper.zero_grad()
        runner.backward(loss)
        runner.clip_grad_norm_(wrapped.parameters(), 1.0)
        stepper.step()

    yield step


# name -> (context manager, required package)
CONTENDERS: dict[str, tuple[Callable[..., Any], str]] = {
    "torch.amp by hand": (by_hand, "torch"),
    "parallelize": (ours, "parallelize"),
    "Fabric": (fabric, "lightning_fabric"),
    "Accelerate": (accelerate, "accelerate"),
}


def measure(contender: str, net: str, dtype: str, size: Size, device: str) -> dict[str, float]:
    """Return the median seconds of a step and, on a GPU, the peak memory in MiB; measured in this process."""
    torch.manual_seed(0)
    model = (GPT if net == "gpt" else ResNet)(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x, y = data_of(net, size, device)
    seconds = []
    with CONTENDERS[contender][0](model, optimizer, x=x, y=y, dtype=dtype, device=device) as step:
        for number in range(size.warmup + size.steps):
            if number == size.warmup and device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            if number >= size.warmup:
                seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / MEBIBYTE if device == "cuda" else 0.0
    return {"step_s": statistics.median(seconds), "peak_mib": peak}


def run(contender: str, net: str, dtype: str, options: argparse.Namespace) -> dict[str, float] | None:
    """Run one measurement in a new process; None if it fails."""
    command = [sys.executable, __file__, "--device", options.device, "--size", options.size]
    command += ["--measure", contender, net, dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        print(f"{contender}: exit code {done.returncode}\n{done.stderr[-1500:]}", file=sys.stderr)
        return None
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(results: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """Return the table: seconds per step in the best round and the ratio to torch.amp by hand; on a GPU, memory too."""
    columns = list(next(iter(results.values())))
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, by_column in results.items():
        cells = [_cell(by_column[column], results["torch.amp by hand"][column]) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(found: list[dict[str, float]], reference: list[dict[str, float]]) -> str:
    if not found or not reference:
        return "-"
    step, of_reference = (min(each["step_s"] for each in some) for some in (found, reference))
    text = f"{1000 * step:.2f} ms ({step / of_reference:.2f}x)"
    peak, of_peak = (max(each["peak_mib"] for each in some) for some in (found, reference))
    return text if not peak else f"{text}, {peak / 1024:.2f} GiB ({peak / of_peak:.2f}x)"


def main(options: argparse.Namespace) -> None:
    """Measure every installed contender in turns and print the table."""
    names = [name for name in options.contenders if importlib.util.find_spec(CONTENDERS[name][1])]
    dtypes = ["bf16"] if options.device == "cpu" else list(DTYPES)
    columns = [(net, dtype) for net in options.nets for dtype in dtypes]
    results = {name: {f"{net}, {dtype}": [] for net, dtype in columns} for name in names}
    for number in range(options.rounds):
        for net, dtype in columns:
            for name in (*names[number % len(names) :], *names[: number % len(names)]):
                found = run(name, net, dtype, options)
                results[name][f"{net}, {dtype}"] += [] if found is None else [found]
                print(number, name, net, dtype, found, file=sys.stderr)
    what = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {os.cpu_count()} cores"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {options.rounds} rounds"
    print(f"Median step of the best round (ratio to the loop by hand), size {options.size!r}. {what}, {versions}.\n")
    print(table(results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=["cuda", "cpu"])
    parser.add_argument("--size", default="full" if device == "cuda" else "small", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nets", nargs="+", default=["gpt", "resnet"], choices=["gpt", "resnet"])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        print(json.dumps(measure(*chosen.measure, SIZES[chosen.size], chosen.device)))
    else:
        main(chosen)
