"""Cost of a training step in a `parallel_model` block, compared with DistributedDataParallel, Fabric and Accelerate.

All contenders train the same model on the same batches in the same processes, a few steps each in turns, so that other
load affects all of them; a ratio compares steps of the same turn. With one rank the hand-written loop uses no DDP,
under O1 and O2 it enters torch.autocast, and under fsdp it applies fully_shard. Calls of Python functions in a step are
counted: other load changes none.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import parallelize


class Mlp(nn.Module):
    """A model so small that launching kernels takes longer than running them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Many(nn.Module):
    """A model of 1,000 small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(500)])

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
    shape = {"layers": 12, "width": 768, "tokens": 50257} if on_gpu else {"layers": 6, "width": 128, "tokens": 512}
    rows, length = (8, 1024) if on_gpu else (2, 64)
    size = "124M" if on_gpu else "of 6 layers"
    return {
        "MLP": Work(Mlp, lambda device: torch.randn(32, 64, device=device), lambda y, _: y.square().mean(), 100),
        f"GPT {size}": Work(
            lambda: Gpt(**shape, length=length),
            lambda device: torch.randint(shape["tokens"], (rows, length), device=device),
            lambda y, x: F.cross_entropy(y.flatten(0, 1), x.flatten()),
            5,
        ),
        "1,000 parameters": Work(
            Many, lambda device: torch.randn(16, 16, device=device), lambda y, _: y.square().mean(), 3
        ),
    }


Step = Callable[[torch.Tensor], None]


@contextlib.contextmanager
def by_hand(work: Work, amp: str | None) -> Iterator[Step]:
    model = work.make().to(parallelize.device())
    called = nn.parallel.DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    kind = parallelize.device().type

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast(kind, torch.bfloat16) if amp else contextlib.nullcontext():
            loss = work.loss(called(x), x)
        loss.backward()
        optimizer.step()

    yield step


@contextlib.contextmanager
def ours(work: Work, amp: str | None, **options: Any) -> Iterator[Step]:
    model = work.make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        work.loss(model(x), x).backward()
        optimizer.step()

    with parallelize.parallel_model(model, amp=amp, **options):
        yield step


@contextlib.contextmanager
def fully_shard_by_hand(work: Work, _amp: str | None) -> Iterator[Step]:
    model = work.make().to(parallelize.device())
    for block in model.blocks if isinstance(model, Gpt) else ():
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        work.loss(model(x), x).backward()
        optimizer.step()

    yield step


@contextlib.contextmanager
def fabric(work: Work, _amp: str | None) -> Iterator[Step]:
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
def accelerate(work: Work, _amp: str | None) -> Iterator[Step]:
    from accelerate import Accelerator

    runner = Accelerator(cpu=parallelize.device().type == "cpu")
    plain = work.make()
    model, optimizer = runner.prepare(plain, torch.optim.AdamW(plain.parameters(), 1e-4))

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        runner.backward(work.loss(model(x), x))
        optimizer.step()

    yield step


CONTENDERS: dict[str, tuple[str, Callable[[Work, str | None], Any]]] = {
    "by hand": ("torch", by_hand),
    "parallelize": ("parallelize", ours),
    "parallelize, by tokens": ("parallelize", functools.partial(ours, average="tokens")),
    "Fabric": ("lightning_fabric", fabric),
    "Accelerate": ("accelerate", accelerate),
}
SHARDED: dict[str, tuple[str, Callable[[Work, str | None], Any]]] = {
    "fully_shard by hand": ("torch", fully_shard_by_hand),
    "parallelize, fsdp": ("parallelize", functools.partial(ours, backend="fsdp")),
}
WARMUP = 5  # the first step compares inputs, and learns in which order gradients arrive
LEVELS = {"O0": None, "O1 bf16": "bf16", "O2 bf16": "O2", "fsdp": None}


@dataclass(frozen=True)
class Cost:
    """Cost of one step in one turn: wall seconds, CPU seconds of all threads, peak GPU memory in GiB."""

    wall_s: float
    cpu_s: float
    peak_gib: float


def _timed(step: Step, x: torch.Tensor, *, steps: int) -> Cost:
    on_gpu = x.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step(x)
    if on_gpu:
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    return Cost(wall / steps, cpu / steps, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0)


def _calls(step: Step, x: torch.Tensor) -> int:
    """Count the calls of Python functions in a step: the least of three."""
    numbers = []

    def profile(_frame: FrameType, event: str, _argument: Any) -> None:
        numbers[-1] += event == "call"

    for _ in range(3):
        numbers.append(0)
        sys.setprofile(profile)
        try:
            step(x)
        finally:
            sys.setprofile(None)
    return min(numbers)


def _compiled(make: Callable[[], nn.Module]) -> nn.Module:
    torch.compiler.reset()  # of the models before it, dynamo compiles a few only
    model = make()
    model.compile()
    return model


def measure(
    name: str, level: str, contenders: Sequence[str], turns: int, *, is_compiled: bool
) -> dict[str, tuple[int, list[Cost]]]:
    """Return the calls of a step, and one measurement per turn, for each contender; runs in every process."""
    work = works(on_gpu=parallelize.device().type == "cuda")[name]
    if is_compiled:
        work = replace(work, make=functools.partial(_compiled, work.make))
    x = work.batch(parallelize.device())
    calls: dict[str, int] = {}
    found: dict[str, list[Cost]] = {each: [] for each in contenders}
    for turn in range(turns):
        # Rotate the order: the first contender of a turn finds other cache contents than the last.
        for each in [*contenders[turn % len(contenders) :], *contenders[: turn % len(contenders)]]:
            torch.manual_seed(0)  # equal weights: the speed of a CPU depends on the values
            # One at a time: a block adds hooks and patches that every loop in the process would run through.
            with (CONTENDERS | SHARDED)[each][1](work, LEVELS[level]) as step:
                _timed(step, x, steps=WARMUP)
                found[each].append(_timed(step, x, steps=work.steps))
                if turn == turns - 1:
                    calls[each] = _calls(step, x)
    return {each: (calls[each], found[each]) for each in contenders}


def report(name: str, ranks: int, level: str, found: dict[str, tuple[int, list[Cost]]]) -> None:
    calls_by_hand, turns_by_hand = next(iter(found.values()))
    for each, (calls, turns) in found.items():
        pairs = list(zip(turns, turns_by_hand, strict=True))
        wall = statistics.median(one.wall_s / other.wall_s for one, other in pairs)
        cpu = statistics.median(one.cpu_s / other.cpu_s for one, other in pairs)
        step = statistics.median(turn.cpu_s for turn in turns) * 1e3
        memory = max(turn.peak_gib for turn in turns)
        on_gpu = [f"{wall:.3f}", f"{memory:.2f} GiB"] if memory else []
        ratios = [f"{cpu:.3f}", f"{calls / calls_by_hand:.3f}"]
        row = [name, str(ranks), level, each, f"{step:.2f} ms", str(calls), *ratios, *on_gpu]
        print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--works", nargs="+", help="some of the models")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--compile", action="store_true", help="of models that torch.compile compiles")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    present = [name for name, (package, _) in CONTENDERS.items() if importlib.util.find_spec(package)]
    place = (
        torch.cuda.get_device_name() if gpus else f"{platform.machine()}, {torch.get_num_threads()} thread(s) per rank"
    )
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {place}, {options.turns} turns\n")
    columns = ["model", "ranks", "level", "loop", "CPU time", "calls", "ratio of CPU time", "ratio of calls"]
    columns += ["ratio of wall time", "peak"] if gpus else []
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for ranks in options.ranks:
        shared = (0,) * ranks  # one GPU, by gloo
        where: dict[str, Any] = {"gpus": ranks if gpus >= ranks else shared} if gpus else {"processes": ranks}
        for name in options.works or works(on_gpu="gpus" in where):
            call = parallelize.distributed(**where)(measure)
            for level in options.levels:
                loops = {"O0": present, "fsdp": list(SHARDED)}.get(level, ["by hand", "parallelize"])
                if level != "fsdp" or ranks > 1:
                    found = call(name, level, loops, options.turns, is_compiled=options.compile)
                    report(name, ranks, level + ", compiled" * options.compile, found)


if __name__ == "__main__":
    main()
