"""How much of the averaging of gradients is hidden behind the backward pass, beside DistributedDataParallel.

Two ranks, on one GPU if there is one (by gloo, through the host), or on two GPUs (by NCCL), or on the CPU. In a turn
each loop makes a few steps: without any averaging, the averaging alone, and both. What is hidden is the part of the
averaging that does not make the step longer: (alone + without - both) / alone.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import parallelize

_BUCKET = 25 << 18  # elements of 25 MiB in fp32, as DistributedDataParallel sends them

Loop = Callable[[], None]


def model(width: int, depth: int) -> nn.Module:
    """Return a model whose backward takes as long as its forward twice, and whose layers are equal."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())])


def seconds(loop: Loop, steps: int) -> float:
    """Return the time of a step."""
    wait = torch.cuda.synchronize if parallelize.device().type == "cuda" else bool
    dist.barrier()
    wait()
    started = time.perf_counter()
    for _ in range(steps):
        loop()
    wait()
    return (time.perf_counter() - started) / steps


def train(width: int, depth: int, rows: int, steps: int, turns: int) -> dict[str, list[float]]:
    """Return the seconds of a step in each turn, by loop."""
    torch.set_num_threads(1)
    device = parallelize.device()
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(parallelize.rank())).to(device)
    alone, ours = model(width, depth).to(device), model(width, depth).to(device)
    by_ddp = nn.parallel.DistributedDataParallel(model(width, depth).to(device))
    flat = torch.zeros(sum(map(torch.numel, alone.parameters())), device=device).split(_BUCKET)

    def step(net: nn.Module) -> Loop:
        def one() -> None:
            net.zero_grad()
            net(x).square().mean().backward()

        return one

    def average() -> None:
        for work in [dist.all_reduce(each, async_op=True) for each in flat]:
            work.wait()

    taken: dict[str, list[float]] = {}
    with parallelize.parallel_model(ours):
        loops: dict[str, Loop] = {
            "without averaging": step(alone),
            "averaging alone": average,
            "DistributedDataParallel": step(by_ddp),
            "parallelize": step(ours),
        }
        for turn in range(turns + 1):
            for name, loop in loops.items():
                duration = seconds(loop, steps)
                if turn:  # the first one warms up
                    taken.setdefault(name, []).append(duration)
    return taken


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, help="samples of a rank; default: 4096 on a GPU, 256 on the CPU")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    where: dict[str, Any] = {"gpus": (0, 1)} if gpus > 1 else {"gpus": (0, 0)} if gpus else {"processes": 2}
    width, depth, rows = (2048, 12, 4096) if gpus else (512, 8, 256)
    run = parallelize.distributed(**where)(train)
    taken = run(width, depth, arguments.rows or rows, arguments.steps, arguments.turns)
    middle = {name: statistics.median(each) for name, each in taken.items()}
    without, alone = middle["without averaging"], middle["averaging alone"]
    device = torch.cuda.get_device_name() if gpus else f"{platform.machine()}, one thread a rank"
    print(
        f"{where}, {device}, {arguments.turns} turns, Python {platform.python_version()}, torch {torch.__version__}\n"
    )
    print("| | a step | of that without averaging | hidden part of the averaging |\n|---|---|---|---|")
    for name, each in middle.items():
        is_both = name in ("DistributedDataParallel", "parallelize")
        hidden = f"{max(0.0, alone + without - each) / alone:.0%}" if is_both else "-"
        print(f"| {name} | {1000 * each:.2f} ms | {each / without:.2f}x | {hidden} |")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
