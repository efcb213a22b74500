"""Overhead of iterating a loader: this library, other libraries and a hand-written loop, side by side.

(a) host: CPU time of an epoch over a dataset in memory, with 0 and 2 worker processes, against a hand-sharded
    DataLoader; with seed=, the order is drawn from the seed and the number of the epoch.
(b) device: the time of a step whose compute takes about as long as copying its batch of 50 MB, against a loop that
    copies with `.to(device, non_blocking=True)`; needs a GPU.
(c) start: the CPU time until the first batch of a shuffled epoch of 10**7 samples.

Contenders take turns, so that noise affects all of them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import itertools
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

Contender = Callable[[DataLoader[Any], torch.device], Iterable[Any]]

# Each wraps a loader in an iterable that is iterated once per epoch.


class ByHand:
    """The recipe of torch's documentation; on a GPU with pinned memory and non_blocking copies."""

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        self.sampler = DistributedSampler(loader.dataset, 1, 0)
        self.device, self.epoch = device, -1
        self.loader = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            sampler=self.sampler,
            num_workers=loader.num_workers,
            persistent_workers=loader.persistent_workers,
            pin_memory=device.type == "cuda",
        )

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        self.sampler.set_epoch(self.epoch)
        if self.device.type == "cpu":
            return iter(self.loader)
        return ([each.to(self.device, non_blocking=True) for each in batch] for batch in self.loader)


def parallelize(loader: DataLoader[Any], _device: torch.device) -> Iterable[Any]:
    from parallelize import shard_loader

    return shard_loader(loader)


def parallelize_seeded(loader: DataLoader[Any], _device: torch.device) -> Iterable[Any]:
    from parallelize import shard_loader

    return shard_loader(loader, seed=0)


def fabric(loader: DataLoader[Any], device: torch.device) -> Iterable[Any]:
    # Two distributions contain it.
    name = "lightning_fabric" if importlib.util.find_spec("lightning_fabric") else "lightning.fabric"
    return importlib.import_module(name).Fabric(accelerator=device.type, devices=1).setup_dataloaders(loader)


def accelerate(loader: DataLoader[Any], device: torch.device) -> Iterable[Any]:
    from accelerate import Accelerator

    return Accelerator(cpu=device.type == "cpu").prepare(loader)


CONTENDERS: dict[str, tuple[Contender, str]] = {
    "by hand": (ByHand, ""),
    "parallelize": (parallelize, ""),
    "parallelize, seed=0": (parallelize_seeded, ""),
    "Fabric": (fabric, "lightning_fabric|lightning"),
    "Accelerate": (accelerate, "accelerate"),
}


def installed() -> dict[str, Contender]:
    def is_installed(modules: str) -> bool:
        return not modules or any(map(importlib.util.find_spec, modules.split("|")))

    return {name: make for name, (make, needs) in CONTENDERS.items() if is_installed(needs)}


def versions() -> str:
    installed_versions = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    names = ("torch", "lightning", "lightning-fabric", "accelerate")
    return ", ".join(f"{name} {installed_versions[name]}" for name in names if name in installed_versions)


def timed(
    epochs: dict[str, Callable[[], None]], rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Measure the seconds of each contender's epochs; contenders take turns, in another order every round.

    The default clock is this process's CPU time, which other programs change less than the time that passes.
    """
    seconds: dict[str, list[float]] = {name: [] for name in epochs}
    for epoch in epochs.values():
        epoch()
    orders = itertools.cycle(itertools.permutations(epochs))
    for _ in range(rounds):
        for name in next(orders):
            begin = clock()
            epochs[name]()
            seconds[name].append(clock() - begin)
    return seconds


def report(title: str, seconds: dict[str, list[float]], steps: int) -> None:
    """Print the median and the least time of a step, and the ratios of both to the hand-written loop's.

    The ratio of medians is the median of the ratios within each round.
    """
    print(f"\n{title}\n\n| | median | least | over by hand |\n|---|---|---|---|")
    for name, times in seconds.items():
        per_step = [each / steps * 1e6 for each in times]
        ratios = [time_s / by_hand_s for time_s, by_hand_s in zip(times, seconds["by hand"], strict=True)]
        ratio, least = statistics.median(ratios), min(times) / min(seconds["by hand"])
        cell = f"{ratio:.3f}x / {least:.3f}x"
        print(f"| {name} | {statistics.median(per_step):.1f} us | {min(per_step):.1f} us | {cell} |")


def on_host(workers: int, rounds: int) -> None:
    """Measure an epoch over 20,000 samples of 64 floats, in batches of 64."""
    data = TensorDataset(torch.randn(20_000, 64), torch.randint(10, (20_000,)))
    cpu = torch.device("cpu")

    def epoch(make: Contender) -> Callable[[], None]:
        loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        batches = make(loader, cpu)

        def run() -> None:
            for _ in batches:
                pass

        return run

    epochs = {name: epoch(make) for name, make in installed().items()}
    report(f"(a) a batch of 64 from memory, {workers} workers", timed(epochs, rounds), 313)


class Indices(Dataset[int]):
    """10**7 samples that take no time."""

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> int:
        return index


def start_of_epoch(rounds: int) -> None:
    """Measure the CPU time until the first batch of an epoch of 10**7 samples."""
    cpu = torch.device("cpu")

    def first_batch(make: Contender) -> Callable[[], None]:
        batches = make(DataLoader(Indices(), batch_size=64, shuffle=True), cpu)
        return lambda: next(iter(batches))

    epochs = {name: first_batch(make) for name, make in installed().items() if name != "parallelize, seed=0"}
    report("(c) the first batch of 10**7 samples", timed(epochs, rounds), 1)


class Images(Dataset[Any]):
    """Batches of 50 MB, already in memory."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.batch = torch.randn(128, 98_304)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return [self.batch]


def on_device(rounds: int, steps: int = 60) -> None:
    """Measure a step that computes for about as long as its batch of 50 MB takes to copy."""
    device = torch.device("cuda")
    weight = torch.randn(98_304, 4096, device=device)

    def compute(batch: torch.Tensor, times: int) -> None:
        for _ in range(times):
            batch @ weight

    pinned = torch.empty(128, 98_304, pin_memory=True)
    resident = pinned.to(device)
    copy_s = _seconds(lambda: resident.copy_(pinned, non_blocking=True))
    times = max(round(copy_s / _seconds(lambda: compute(resident, 1))), 1)

    def epoch(make: Contender) -> Callable[[], None]:
        loader = DataLoader(Images(steps), batch_size=None, num_workers=2, persistent_workers=True, pin_memory=True)
        batches = make(loader, device)

        def run() -> None:
            for (batch,) in batches:
                compute(batch, times)
            torch.cuda.synchronize()

        return run

    print(f"\ncopying a batch: {copy_s * 1e3:.2f} ms, computing on it: {times} matrix products")
    epochs = {name: epoch(make) for name, make in installed().items()}
    report("(b) a step with a batch of 50 MB", timed(epochs, rounds, time.perf_counter), steps)


def _seconds(work: Callable[[], Any], times: int = 20) -> float:
    work()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="epochs of each contender (default: 25)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{platform.machine()}, Python {platform.python_version()}, {versions()}")
    for workers in (0, 2):
        on_host(workers, arguments.rounds)
    start_of_epoch(min(arguments.rounds, 10))
    if torch.cuda.is_available():
        on_device(arguments.rounds)
    else:
        print("\n(b) needs a GPU")


if __name__ == "__main__":
    main()
