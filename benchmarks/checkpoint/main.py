"""Time to save and load a training state, compared with torch.save and torch.load."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import parallelize


def state(megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an AdamW after one step, `megabytes` MB in all: a third weights, the rest moments."""
    width = 2048
    layers = max(round(megabytes * 1e6 / 3 / (4 * width * width)), 1)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


TrainingState = tuple[nn.Module, torch.optim.Optimizer]


def torch_save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def torch_save_and_sync(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch_save(path, model, optimizer)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def torch_load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    content = torch.load(path, weights_only=True)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])


def our_save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parallelize.save(path, model=model, optimizer=optimizer)


def our_load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parallelize.load(path, model=model, optimizer=optimizer)


SAVES: dict[str, Callable[..., None]] = {
    "torch.save": torch_save,
    "torch.save, then fsync": torch_save_and_sync,
    "parallelize.save": our_save,
}
LOADS: dict[str, tuple[Callable[..., None], str]] = {
    "torch.load": (torch_load, "torch.save"),
    "parallelize.load": (our_load, "parallelize.save"),
}


def seconds(call: Callable[..., None], path: Path, training_state: TrainingState) -> float:
    os.sync()  # flush dirty pages that an earlier call has left
    started = time.monotonic()
    call(path, *training_state)
    return time.monotonic() - started


def measure(megabytes: int, rounds: int) -> dict[str, list[float]]:
    training_state, taken = state(megabytes), {name: [] for name in (*SAVES, *LOADS)}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name, call in SAVES.items():
                path = Path(folder) / name
                path.unlink(missing_ok=True)
                taken[name].append(seconds(call, path, training_state))
            for name, (call, written_by) in LOADS.items():
                taken[name].append(seconds(call, Path(folder) / written_by, training_state))
    return taken


def stalls(megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of steps that save, in the foreground and in the background."""
    taken: dict[str, list[float]] = {"step that saves": [], "step that saves in the background": []}
    for name, in_background in zip(taken, (False, True), strict=True):
        model, optimizer = state(megabytes)
        objects = {"model": model, "optimizer": optimizer}
        with (
            tempfile.TemporaryDirectory() as folder,
            parallelize.checkpoints(folder, every=1, keep=1, in_background=in_background, **objects) as saved,
        ):
            for number in range(rounds + 1):
                os.sync()
                started = time.monotonic()
                saved.step()
                if number:  # the first step allocates the buffers of the copy
                    taken[name].append(time.monotonic() - started)
                saved.wait()  # in a real run the write ends long before the next save
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    taken = measure(arguments.megabytes, arguments.rounds)
    taken |= stalls(arguments.megabytes, arguments.rounds)
    print(
        f"{arguments.megabytes} MB, {arguments.rounds} rounds, {platform.machine()}, {os.cpu_count()} cores, ", end=""
    )
    print(f"Python {platform.python_version()}, torch {torch.__version__}\n")
    print("| | median / least | of plain torch |\n|---|---|---|")
    for name, each in taken.items():
        plain = taken["torch.load" if name in LOADS else "torch.save"]
        ratio = statistics.median(each) / statistics.median(plain)
        print(f"| {name} | {statistics.median(each):.2f} / {min(each):.2f} s | {ratio:.2f}x |")


if __name__ == "__main__":
    main()
