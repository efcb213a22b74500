"""Time to save and load a training state, compared with torch.save and torch.load."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import platform
import statistics
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import parallelize

_STEPS_PER_SAVE = 40
_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait_for_device() -> None:
    """Wait until the GPU, if there is one, has done what was asked of it."""
    if _DEVICE.type == "cuda":
        torch.cuda.synchronize()


def state(megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an AdamW after one step, `megabytes` MB in all: a third weights, the rest moments."""
    width = 2048
    layers = max(round(megabytes * 1e6 / 3 / (4 * width * width)), 1)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, device=_DEVICE) for _ in range(layers)))
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
    content = torch.load(path, weights_only=True, map_location=_DEVICE)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])


def torch_load_and_check(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert zipfile.ZipFile(path).testzip() is None
    torch_load(path, model, optimizer)


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
    "zipfile.testzip, then torch.load": (torch_load_and_check, "torch.save"),
    "parallelize.load": (our_load, "parallelize.save"),
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one call took.

    Args:
        elapsed_s: seconds until it returned.
        processor_s: seconds of processor time of all threads, which other load of the machine changes little.
    """

    elapsed_s: float
    processor_s: float


def cost(call: Callable[..., None], path: Path, training_state: TrainingState) -> Cost:
    os.sync()  # flush dirty pages that an earlier call has left
    wait_for_device()
    started, processor_started = time.monotonic(), time.process_time()
    call(path, *training_state)
    wait_for_device()
    return Cost(time.monotonic() - started, time.process_time() - processor_started)


def measure(megabytes: int, rounds: int) -> dict[str, list[Cost]]:
    training_state = state(megabytes)
    costs: dict[str, list[Cost]] = {name: [] for name in (*SAVES, *LOADS)}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name, call in SAVES.items():
                path = Path(folder) / name
                path.unlink(missing_ok=True)
                costs[name].append(cost(call, path, training_state))
            for name, (call, written_by) in LOADS.items():
                costs[name].append(cost(call, Path(folder) / written_by, training_state))
    return costs


def stalls(megabytes: int, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Return, by way of saving, the seconds that a save holds the loop, and those of steps while it is written."""
    model, optimizer = state(megabytes)
    inputs, weight = torch.randn(256, 2048, device=_DEVICE), next(model.parameters())

    def step() -> float:
        started = time.monotonic()
        with torch.no_grad():
            inputs @ weight
        wait_for_device()
        return time.monotonic() - started

    @contextlib.contextmanager
    def ours(folder: Path) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
        objects = {"model": model, "optimizer": optimizer}
        with parallelize.checkpoints(folder, every=1, keep=1, **objects) as saved:
            saved.step()  # allocates the memory of the copy
            saved.wait()
            yield saved.step, saved.wait

    @contextlib.contextmanager
    def async_dcp(folder: Path) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
        writes: list[Any] = []

        def save() -> None:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
            writes.append(dcp.async_save(states, checkpoint_id=folder / "dcp"))

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield save, lambda: writes.pop().result()
        finally:
            dist.destroy_process_group()

    @contextlib.contextmanager
    def plain(folder: Path) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
        yield lambda: torch_save(folder / "plain.pt", model, optimizer), bool

    @contextlib.contextmanager
    def nothing(_folder: Path) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
        yield bool, bool

    ways = {"no save": nothing, "torch.save": plain, "dcp.async_save": async_dcp, "checkpoints": ours}
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for name, way in ways.items():
        with tempfile.TemporaryDirectory() as folder, way(Path(folder)) as (save, wait):
            for _ in range(rounds):
                os.sync()
                started = time.monotonic()
                save()
                taken[name][0].append(time.monotonic() - started)
                taken[name][1].extend(step() for _ in range(_STEPS_PER_SAVE))
                wait()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    costs = measure(arguments.megabytes, arguments.rounds)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {_DEVICE.type}"
    print(f"{arguments.megabytes} MB, {arguments.rounds} rounds, {machine}, ", end="")
    print(f"Python {platform.python_version()}, torch {torch.__version__}\n")
    print("| | median / least | of plain torch | processor time | of plain torch |\n|---|---|---|---|---|")
    for name, costs_of_name in costs.items():
        plain_name = "torch.load" if name in LOADS else "torch.save"
        elapsed = [each.elapsed_s for each in costs_of_name]
        plain = statistics.median(each.elapsed_s for each in costs[plain_name])
        cells = f"{statistics.median(elapsed):.2f} / {min(elapsed):.2f} s | {statistics.median(elapsed) / plain:.2f}x"
        processor = statistics.median(each.processor_s for each in costs_of_name)
        plain_processor = statistics.median(each.processor_s for each in costs[plain_name])
        print(f"| {name} | {cells} | {processor:.2f} s | {processor / plain_processor:.2f}x |")

    print("\n| | holds the loop, median / least | of torch.save | a step while it writes |\n|---|---|---|---|")
    held = stalls(arguments.megabytes, arguments.rounds)
    plain, undisturbed = statistics.median(held["torch.save"][0]), statistics.median(held["no save"][1])
    for name, (stall, steps) in held.items():
        cells = f"{statistics.median(stall):.2f} / {min(stall):.2f} s | {statistics.median(stall) / plain:.2f}x"
        print(f"| {name} | {cells} | {statistics.median(steps) / undisturbed:.2f}x |")


if __name__ == "__main__":
    main()
