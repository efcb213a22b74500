"""Throughput of a decorated function in 1, 2, 4, ... processes (or on as many GPUs), compared with linear scaling.

    python benchmarks/scaling/main.py                     the training below
    python benchmarks/scaling/main.py package.module:train
    python benchmarks/scaling/main.py path/to/script.py:train --counts 1 2 4 8 --svg scaling.svg

The function takes no arguments. It returns the number of samples that this process has trained on, or that number and
the seconds it took: `return samples, seconds`. Without the seconds, the time is that of the full call, including the
start of the processes.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import all_reduce, barrier, device, distributed, parallel_model, shard_loader

BATCH = 32  # per process (weak scaling)


@distributed()
def train(seconds: float) -> tuple[int, float]:
    """Train a small convolutional net on noise for at least `seconds`; return (samples of this process, seconds)."""
    if device().type == "cpu":
        torch.set_num_threads(1)  # one core per process, also in a world of one
    wide = 32 if device().type == "cpu" else 256
    layers = [nn.Conv2d(3, wide, 3, padding=1), nn.ReLU(), nn.Conv2d(wide, wide, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * wide, 10))
    loader = DataLoader(TensorDataset(torch.randn(8192, 3, 32, 32), torch.randint(10, (8192,))), batch_size=BATCH)
    optimizer = torch.optim.AdamW(model.parameters())
    samples, begin = 0, 0.0
    with parallel_model(model):
        for step, (x, y) in enumerate(itertools.chain.from_iterable(itertools.repeat(shard_loader(loader)))):
            if step == 3:  # after warm-up: buckets, buffers, caches
                barrier()
                samples, begin = 0, time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            samples += len(x)
            # All ranks stop at the same step. Reading the value also waits for the device.
            if step > 3 and step % 4 == 3 and all_reduce(time.perf_counter() - begin, "min") > seconds:
                break
    return samples, time.perf_counter() - begin


def load(target: str) -> Any:
    """Import the decorated function named "module:function" or "path.py:function"."""
    home, _, name = target.rpartition(":")
    if not home.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return getattr(importlib.import_module(home), name)
    path = Path(home).resolve()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def throughput(function: Any, count: int, args: tuple[Any, ...]) -> float:
    """Return the samples per second of all processes in one call."""
    placed = function.options(gpus=count) if torch.cuda.is_available() else function.options(processes=count)
    begin = time.perf_counter()
    values = placed.all_ranks(*args)
    call_s = time.perf_counter() - begin
    pairs = [value if isinstance(value, (tuple, list)) else (value, call_s) for value in values]
    return sum(samples for samples, _ in pairs) / max(seconds for _, seconds in pairs)


def measure(function: Any, counts: Sequence[int], rounds: int, args: tuple[Any, ...]) -> dict[int, list[float]]:
    """Return the samples per second of each round, by number of processes; the first round is warm-up."""
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for number in range(rounds + 1):
        for count in (*counts[number % len(counts) :], *counts[: number % len(counts)]):
            rate = throughput(function, count, args)
            if number:
                rates[count].append(rate)
            print(f"round {number}, {count}: {rate:.1f} samples/s", file=sys.stderr)
    return rates


def table(rates: Mapping[int, float], rounds: Mapping[int, list[float]]) -> str:
    """Return a Markdown table; the ideal is linear scaling from the first row."""
    first = min(rates)
    lines = ["| processes | samples/s | least to most | speedup | of the ideal |", "|---|---|---|---|---|"]
    for count, rate in rates.items():
        speedup = rate / rates[first]
        ideal = 100 * speedup * first / count
        least, most = min(rounds[count]), max(rounds[count])
        lines.append(f"| {count} | {rate:.1f} | {least:.1f} to {most:.1f} | {speedup:.2f}x | {ideal:.0f} % |")
    return "\n".join(lines)


def bars(rates: Mapping[int, float]) -> str:
    """Return text bars: filled up to the measured rate, dots up to the ideal one."""
    first = min(rates)
    each = rates[first] / first
    scale = 50 / max(each * max(rates), *rates.values())
    lines = []
    for count, rate in rates.items():
        filled = round(rate * scale)
        lines.append(f"{count:>4}  {'█' * filled}{'·' * max(round(each * count * scale) - filled, 0)}  {rate:.1f}")
    return "\n".join(lines)


def svg(rates: Mapping[int, float], title: str) -> str:
    """Return an SVG plot: measured rates as a line, the ideal dashed."""
    first, most = min(rates), max(rates)
    ideal = {count: rates[first] / first * count for count in rates}
    top = max(*ideal.values(), *rates.values())

    def at(count: int, rate: float) -> str:
        return f"{70 + 500 * count / most:.1f},{320 - 270 * rate / top:.1f}"

    measured, dashed = (" ".join(at(count, rate) for count, rate in each.items()) for each in (rates, ideal))
    marks = []
    for count, rate in rates.items():
        x, y = at(count, rate).split(",")
        marks.append(f'<circle cx="{x}" cy="{y}" r="4" fill="#0a64a4"/>')
        marks.append(f'<text x="{x}" y="{float(y) + 20:.1f}" text-anchor="middle">{rate:.0f}</text>')
        marks.append(f'<text x="{x}" y="340" text-anchor="middle">{count}</text>')
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="620" height="370" font-family="sans-serif" font-size="12">
<rect width="620" height="370" fill="white"/>
<text x="70" y="30" font-size="14">{title}</text>
<path d="M70 50V320H590" stroke="#888" fill="none"/>
<text x="330" y="360" text-anchor="middle">processes</text>
<text x="20" y="190" transform="rotate(-90 20 190)" text-anchor="middle">samples/s</text>
<polyline points="{dashed}" fill="none" stroke="#888" stroke-dasharray="5 4"/>
<polyline points="{measured}" fill="none" stroke="#0a64a4" stroke-width="2"/>
{chr(10).join(marks)}
<text x="80" y="66" fill="#0a64a4">measured</text><text x="150" y="66" fill="#666">dashed: ideal</text>
</svg>
"""


def default_counts() -> list[int]:
    most = torch.cuda.device_count() if torch.cuda.is_available() else os.cpu_count() or 1
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", help="module:function or path.py:function; default: a small training")
    parser.add_argument("--counts", type=int, nargs="+", default=default_counts(), help="processes, or GPUs")
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of each, after a warm-up call (default: 5)")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="duration of a call of the default training (default: 4)"
    )
    parser.add_argument("--svg", type=Path, help="write the plot to this file")
    options = parser.parse_args()
    function, args = (load(options.target), ()) if options.target else (train, (options.seconds,))
    counts = sorted(set(options.counts))
    found = measure(function, counts, max(options.rounds, 1), args)
    rates = {count: statistics.median(each) for count, each in found.items()}
    name = options.target or "a small convolutional net"
    what = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {options.rounds} rounds"
    print(f"{name}: median of all processes together. {what}, {versions}.\n\n{table(rates, found)}\n\n{bars(rates)}")
    if options.svg is not None:
        options.svg.write_text(svg(rates, title=f"{name.rpartition('/')[2]}: samples a second"))


if __name__ == "__main__":
    main()
