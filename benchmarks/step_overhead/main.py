"""Cost of a training step in a `parallel_model` block, compared with DistributedDataParallel, Fabric and Accelerate.

All contenders train the same model on the same batches in the same processes, a few steps each in turns, so that other
load affects all of them; a ratio compares steps of the same turn. With one rank the hand-written loop uses no DDP.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import parallelize


class Mlp(nn.Module):
    """A model so small that launching kernels takes longer than running them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Gpt(nn.Module):
    """The architecture of GPT-2; on GPUs with 124 M parameters: 12 layers, width 768, 50 257 tokens."""

    def __init__(self, *, layers: int, width: int, tokens: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h, src_mask=self.mask, is_causal=True)
        return self.head(h)


@dataclass(frozen=True)
class Work:
    """A model, its batch, its loss and the number of steps per turn."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.device], torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    steps: int


def works(*, on_gpu: bool) -> dict[str, Work]:
    shape = {"layers": 12, "width": 768, "tokens": 50257} if on_gpu else {"layers": 2, "width": 128, "tokens": 512}
    rows, length = (8, 1024) if on_gpu else (2, 64)
    size = "124M" if on_gpu else "small"
    return {
        "MLP": Work(Mlp, lambda device: torch.randn(32, 64, device=device), lambda y, _: y.square().mean(), 100),
        f"GPT {size}": Work(
            lambda: Gpt(**shape, length=length),
            lambda device: torch.randint(shape["tokens"], (rows, length), device=device),
            lambda y, x: F.cross_entropy(y.flatten(0, 1), x.flatten()),
            10,
        ),
    }


Step = Callable[[torch.Tensor], None]


@contextlib.contextmanager
def by_hand(work: Work) -> Iterator[Step]:
    model = work.make().to(parallelize.device())
    called = nn.parallel.DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        work.loss(called(x), x).backward()
        optimizer.step()

    yield step


@contextlib.contextmanager
def ours(work: Work, **options: Any) -> Iterator[Step]:
    model = work.make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        work.loss(model(x), x).backward()
        optimizer.step()

    with parallelize.parallel_model(model, **options):
        yield step


@contextlib.contextmanager
def fabric(work: Work) -> Iterator[Step]:
    from lightning_fabric import Fabric

    size = dist.get_world_size()
    kind = "cuda" if parallelize.device().type == "cuda" else "cpu"
    runner = Fabric(accelerator=kind, devices=size, strategy="ddp" if size > 1 else "auto")
    runner.launch()
    plain = work.make()
    model, optimizer = runner.setup(plain, torch.optim.AdamW(plain.parameters(), 1e-4))

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        runner.backward(work.loss(model(x), x))
        optimizer.step()

    yield step


@contextlib.contextmanager
def accelerate(work: Work) -> Iterator[Step]:
    from accelerate import Accelerator

    runner = Accelerator(cpu=parallelize.device().type == "cpu")
    plain = work.make()
    model, optimizer = runner.prepare(plain, torch.optim.AdamW(plain.parameters(), 1e-4))

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        runner.backward(work.loss(model(x), x))
        optimizer.step()

    yield step


CONTENDERS: dict[str, tuple[str, Callable[[Work], Any]]] = {
    "by hand": ("torch", by_hand),
    "parallelize": ("parallelize", ours),
    "parallelize, by tokens": ("parallelize", functools.partial(ours, average="tokens")),
    "Fabric": ("lightning_fabric", fabric),
    "Accelerate": ("accelerate", accelerate),
}


@dataclass(frozen=True)
class Cost:
    """Cost of one step in one turn: wall seconds, CPU seconds of the training thread, peak GPU memory in GiB."""

    wall_s: float
    cpu_s: float
    peak_gib: float


def _timed(step: Step, x: torch.Tensor, *, steps: int) -> Cost:
    on_gpu = x.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        step(x)
    if on_gpu:
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter() - start, time.thread_time() - start_cpu
    return Cost(wall / steps, cpu / steps, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0)


def measure(name: str, contenders: Sequence[str], turns: int) -> dict[str, list[Cost]]:
    """Return one measurement per turn for each contender; runs in every process."""
    work = works(on_gpu=parallelize.device().type == "cuda")[name]
    x = work.batch(parallelize.device())
    found: dict[str, list[Cost]] = {each: [] for each in contenders}
    with contextlib.ExitStack() as stack:
        steps: dict[str, Step] = {}
        for each in contenders:
            torch.manual_seed(0)  # equal weights: the speed of a CPU depends on the values
            steps[each] = stack.enter_context(CONTENDERS[each][1](work))
            _timed(steps[each], x, steps=max(3, work.steps // 5))
        for turn in range(turns):
            # Rotate the order: the first contender of a turn finds other cache contents than the last.
            order = [*contenders[turn % len(contenders) :], *contenders[: turn % len(contenders)]]
            for each in order:
                found[each].append(_timed(steps[each], x, steps=work.steps))
    return found


def report(name: str, ranks: int, found: dict[str, list[Cost]]) -> None:
    for each, turns in found.items():
        pairs = list(zip(turns, found["by hand"], strict=True))
        wall = statistics.median(one.wall_s / other.wall_s for one, other in pairs)
        cpu = statistics.median(one.cpu_s / other.cpu_s for one, other in pairs)
        step = statistics.median(turn.wall_s for turn in turns) * 1e3
        memory = max(turn.peak_gib for turn in turns)
        shown = f"{memory:.2f} GiB" if memory else "-"
        print(f"| {name} | {ranks} | {each} | {step:.2f} ms | {wall:.3f} | {cpu:.3f} | {shown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--works", nargs="+", help="some of the models")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    present = [name for name, (package, _) in CONTENDERS.items() if importlib.util.find_spec(package)]
    place = (
        torch.cuda.get_device_name() if gpus else f"{platform.machine()}, {torch.get_num_threads()} thread(s) per rank"
    )
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {place}, {options.turns} turns\n")
    print("| model | ranks | | step | ratio of wall time | ratio of CPU time | peak |\n|---|---|---|---|---|---|---|")
    for ranks in options.ranks:
        where: dict[str, Any] = {"gpus": ranks} if gpus >= ranks else {"processes": ranks}
        for name in options.works or works(on_gpu="gpus" in where):
            call = parallelize.distributed(**where)(measure)
            report(name, ranks, call(name, present, options.turns))


if __name__ == "__main__":
    main()
