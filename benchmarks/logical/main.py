"""CPU time of a training step with `logical=V`, compared with plain ddp on the same global batches.

Calls take turns within a round. Each trains the same model with the same samples in a step of all processes; only their
division into parts differs. With one process the plain loop has no engine at all.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import all_gather, distributed, parallel_model, shard_loader

SAMPLES, WARMUP = 16, 3  # of all processes in a step
TOKENS, LENGTH = 512, 64


class Gpt(nn.Module):
    """GPT of 6 layers, of width 128, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(TOKENS, 128), nn.Linear(128, TOKENS)
        layer = nn.TransformerEncoderLayer(128, 2, 512, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(x)))


class Convolutions(nn.Module):
    """A residual network of 8 convolutions, with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv1d(1, 32, 3, padding=1), nn.Conv1d(32, TOKENS, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(32, 32, 3, padding=1), nn.BatchNorm1d(32), nn.ReLU()) for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x.unsqueeze(1) / TOKENS)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h).transpose(1, 2)


MODELS = {"GPT of 6 layers": Gpt, "8 convolutions": Convolutions}


def train(name: str, samples: int, steps: int) -> float:
    """Return the mean CPU time of a step, in seconds, over the processes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    data = TensorDataset(torch.randint(TOKENS, (SAMPLES * (steps + WARMUP), LENGTH)))
    begin = 0.0
    with parallel_model(model, buffers="rank0"):
        for number, (x,) in enumerate(shard_loader(DataLoader(data, batch_size=samples))):
            if number == WARMUP:
                begin = time.process_time()
            loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        cpu_s = (time.process_time() - begin) / steps
        return float(all_gather(torch.tensor(cpu_s)).mean())


def measure(name: str, processes: int, parts: Sequence[int], rounds: int, steps: int) -> None:
    calls = {None: SAMPLES // processes, **{each: SAMPLES // each for each in parts if each % processes == 0}}
    found: dict[int | None, list[float]] = {each: [] for each in calls}
    for _ in range(rounds):
        for logical, samples in calls.items():
            run = distributed(processes=processes, logical=logical, seed=0)(train)
            found[logical].append(run(name, samples, steps))
    for logical, times in found.items():
        ratio = statistics.median(one / other for one, other in zip(times, found[None], strict=True))
        loop = "ddp" if logical is None else f"logical={logical}"
        row = [name, str(processes), loop, f"{statistics.median(times) * 1e3:.2f} ms", f"{ratio:.3f}"]
        print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 2, 4, 8])
    options = parser.parse_args()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {options.rounds} rounds\n")
    print("| model | processes | loop | CPU time of a step | ratio of CPU time |\n|---|---|---|---|---|")
    for name in options.models:
        for processes in options.processes:
            measure(name, processes, options.parts, options.rounds, options.steps)


if __name__ == "__main__":
    main()
