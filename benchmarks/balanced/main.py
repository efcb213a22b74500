"""Time of a step of a model split over devices: simulated on 2, 4 and 8 pretended devices, or measured on real ones."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallelize import parallel_model
from parallelize.backends.balanced import planner
from parallelize.backends.balanced.partition import split, sums
from parallelize.backends.balanced.plan import Plan, ideal_speedup, plan
from parallelize.backends.balanced.plugin import BalancedBackend
from parallelize.backends.balanced.profiling import DeviceSpec, Profile, device_specs
from parallelize.backends.measuring import seconds_of

FAKE_CUDA = Path(__file__).parents[2] / "tests" / "fake_cuda"
MICROBATCHES = 8
# Tensors here are small, since the CPU computes them; the devices are as many times slower than a large GPU, so that
# the times have the proportions of large tensors.
SMALLER = 1000
# Layers here are thin: they compute less for each byte that is moved to the next stage. Links are as much faster.
THINNER = 20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # B T D
        heads = self.qkv(self.norm1(x)).unflatten(2, (3, 8, -1)).permute(2, 0, 3, 1, 4)  # 3 B H T D/H
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Tied weights, which torchgpipe and torch.distributed.pipelining do not support."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(500, 64), nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(8))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 500, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:  # B T
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.short(x))


class UNet(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()

        def double(inputs: int, outputs: int) -> nn.Module:
            convs = [nn.Conv2d(inputs, outputs, 3, 1, 1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, 1, 1), nn.ReLU()]
            return nn.Sequential(*convs)

        self.down = nn.ModuleList([double(3, width), double(width, 2 * width), double(2 * width, 4 * width)])
        self.middle = double(4 * width, 8 * width)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width * 2**i, width * 2**i, 2, 2) for i in (2, 1, 0))
        self.join = nn.ModuleList(double(2 * width * 2**i, width * 2**i) for i in (2, 1, 0))
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for down in self.down:
            kept.append(down(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), kept.pop()], 1))
        return self.out(x)


def gpt_blocks() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(Block(64) for _ in range(8))), torch.randn(64, 128, 64)


def conv_chain() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    for inputs in (3, 64, 64, 64):
        layers += [nn.Conv2d(inputs, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)), torch.randn(16, 3, 32, 32)


def resnet() -> tuple[nn.Module, Tensor]:
    sizes = [(48, 48, 1), (48, 48, 1), (48, 96, 2), (96, 96, 1), (96, 192, 2), (192, 192, 1), (192, 384, 2)]
    body = [Residual(*each) for each in sizes]
    ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(384, 10)]
    return nn.Sequential(nn.Conv2d(3, 48, 3, 1, 1), *body, *ends), torch.randn(16, 3, 32, 32)


def tiny() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))), torch.randn(32, 64)


def uniform() -> tuple[nn.Module, Tensor]:
    """Return 39 equal layers, and a smaller one for the loss."""
    widths = [(128, 128)] * 39 + [(128, 8)]
    return nn.Sequential(*(nn.Sequential(nn.Linear(*each), nn.GELU()) for each in widths)), torch.randn(16384, 128)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "equal layers": uniform,
    "GPT blocks": gpt_blocks,
    "GPT, tied": lambda: (Gpt(), torch.randint(500, (64, 64))),
    "conv chain": conv_chain,
    "ResNet": resnet,
    "U-Net": lambda: (UNet(), torch.randn(16, 3, 32, 32)),
}


HOST: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "GPT of 12 blocks": lambda: (nn.Sequential(*(Block(64) for _ in range(12))), torch.randn(8, 16, 64)),
    "ResNet": lambda: (resnet()[0], torch.randn(16, 3, 8, 8)),
    "200 tiny layers": lambda: (nn.Sequential(*(nn.Linear(8, 8) for _ in range(200))), torch.randn(8, 8)),
}


SPECIAL = ("equal layers", "GPT blocks", "ResNet")  # also on unlike devices


@dataclass(frozen=True)
class Machine:
    """Pretended devices.

    Args:
        speeds: one for each device.
        link_gb_per_s: rate of copies between two of them.
        memory: usable bytes of the first device, as a fraction of what the model needs there unsplit; None: no limit.
    """

    speeds: tuple[float, ...]
    link_gb_per_s: float = 400.0
    memory: float | None = None

    @property
    def is_special(self) -> bool:
        """Whether the devices are not like NVLink and all alike."""
        return self != Machine((1.0,) * len(self.speeds))


MACHINES = {
    "2": Machine((1.0,) * 2),
    "4": Machine((1.0,) * 4),
    "8": Machine((1.0,) * 8),
    "4, links of 20 GB/s": Machine((1.0,) * 4, link_gb_per_s=20.0),
    "4, two half as fast": Machine((1.0, 1.0, 0.5, 0.5)),
    "4, little memory on one": Machine((1.0,) * 4, memory=0.15),
}


def step(model: Callable[..., Any], x: Tensor) -> None:
    model(x).mean().backward()


@contextmanager
def recorded_profiles() -> Iterator[list[Profile]]:
    """Collect the profiles from which plans are made."""
    profiles: list[Profile] = []
    profile_of = planner.profile_of

    def record(*args: Any, **options: Any) -> Profile:
        profiles.append(profile_of(*args, **options))
        return profiles[-1]

    planner.profile_of = record
    try:
        yield profiles
    finally:
        planner.profile_of = profile_of


def units_s(model: nn.Module, units: Sequence[str], x: Tensor) -> tuple[Tensor, Tensor]:
    """Time a step on one device; return the seconds of each unit's forward and of its backward.

    A forward lasts until the next unit's begins, a backward until the gradient of the unit's input is known.
    """
    begins: list[torch.Event] = []
    known: dict[int, torch.Event] = {}  # by the unit

    def now() -> torch.Event:
        event = torch.Event(x.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(x.device))
        return event

    def enter(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        unit = len(begins)
        begins.append(now())
        if args[0].requires_grad:
            args[0].register_hook(lambda _: known.update({unit: now()}))

    hooks = [model.get_submodule(name).register_forward_pre_hook(enter) for name in units]
    loss = model(x).mean()
    middle = now()
    loss.backward()
    known[0] = now()
    for hook in hooks:
        hook.remove()
    torch.accelerator.synchronize(x.device)
    forward = [begin.elapsed_time(end) for begin, end in itertools.pairwise([*begins, middle])]
    backward = dict.fromkeys(range(len(units)), 0.0)
    since = middle
    for unit, event in known.items():  # in the order in which they were recorded
        backward[unit] = since.elapsed_time(event)
        since = event
    return torch.tensor(forward).double() / 1e3, torch.tensor([*backward.values()]).double() / 1e3


def best_step(found: Result) -> float:
    """Return the seconds of the best step of all splits, if moving tensors takes no time."""
    backend = BalancedBackend(microbatches=MICROBATCHES)
    search = planner.Search(found.profile, found.specs, backend, torch.device(found.specs[0].device))
    chain = found.profile.chain
    places = [*chain.places, len(chain.units)]
    phases = [sums(each, places) for each in found.units_s]
    steps = []
    for order in set(itertools.permutations(found.specs)) if len(found.specs) < 5 else [found.specs]:
        for power in range(-12, 13):
            seconds = phases[0] + 1.3**power * phases[1]
            cost, bounds = split(
                (seconds / each.speed).masked_fill(search.needed(each) > each.cap_bytes, math.inf) for each in order
            )
            if math.isfinite(cost):
                used = [(each, i, j) for each, (i, j) in zip(order, itertools.pairwise(bounds), strict=True) if i < j]
                times = [[float(phase[i, j]) / each.speed for each, i, j in used] for phase in phases]
                steps.append(planner.step_s(*times, MICROBATCHES))
    return min(steps)


def planned_step(found: Result) -> float:
    """Return the seconds of GPipe's schedule of the plan's stages, if moving tensors takes no time."""
    speeds = {each.device: each.speed for each in found.specs}
    stages = [*zip(found.plan.devices, itertools.pairwise(found.plan.bounds), strict=True)]
    times = [[float(phase[i:j].sum()) / speeds[device] for device, (i, j) in stages] for phase in found.units_s]
    return planner.step_s(*times, MICROBATCHES)


@dataclass(frozen=True)
class Result:
    """Seconds of a step on one device and on several, and the plan.

    `units_s` has the measured seconds of each unit's forward and backward of a micro-batch, on one device.
    """

    unsplit_s: float
    split_s: float
    plan: Plan
    profile: Profile
    specs: list[DeviceSpec]
    units_s: tuple[Tensor, Tensor]


def measure(name: str, devices: list[torch.device], memory: Any = None) -> Result:
    """Time the second step of a model on the first device, and over all."""
    torch.manual_seed(0)
    model, x = MODELS[name]()
    model, x = model.to(devices[0]), x.to(devices[0])
    unsplit_s = [seconds_of(lambda: step(model, x), devices[:1]) for _ in range(2)][1]
    model.zero_grad()
    backend = BalancedBackend(devices=tuple(map(str, devices)), microbatches=MICROBATCHES, memory=memory)
    with recorded_profiles() as profiles, parallel_model(model, backend=backend):
        split_s = [seconds_of(lambda: step(model, x), devices) for _ in range(3)][2]
    specs = device_specs(devices, memory=memory, model=model)
    made = plan(model)
    # The second one adds its gradients to those of the first, as the micro-batches of a step do.
    timed = [units_s(model, profiles[0].chain.units, x[: len(x) // MICROBATCHES]) for _ in range(2)][1]
    return Result(unsplit_s, split_s, made, profiles[0], specs, timed)


def alone(name: str, found: Result) -> str:
    """Return the line of one device, with which the others are compared."""
    ms = f"{found.unsplit_s * 1e3:.1f}"
    return f"| {name} | 1 | {ms} | {ms} | 1.00x | 1.00x | 100 % | 100 % | 100 % |"


def row(name: str, what: str, found: Result) -> str:
    """Return a line of the table."""
    speeds = [each.speed for each in found.specs]
    ideal = ideal_speedup(len(speeds), MICROBATCHES) * sum(speeds) / len(speeds)
    speedup = found.unsplit_s / found.split_s
    return (
        f"| {name} | {what} | {found.unsplit_s * 1e3:.1f} | {found.split_s * 1e3:.1f} | {speedup:.2f}x | {ideal:.2f}x "
        f"| {100 * speedup / ideal:.0f} % | {100 * planned_step(found) / found.split_s:.0f} % "
        f"| {100 * best_step(found) / found.split_s:.0f} % |"
    )


def simulate(name: str) -> None:
    """Print the simulated times of a model's step on the pretended machines."""
    from fake_cuda.durations import Durations

    whole = 0.0
    for what, machine in MACHINES.items():
        if machine.is_special and name not in SPECIAL:
            continue
        Durations(
            tera_flops=50.0 / SMALLER,
            memory_gb_per_s=1500.0 / SMALLER,
            link_gb_per_s=machine.link_gb_per_s * THINNER / SMALLER,
            speeds=machine.speeds,
        ).use()
        devices = [torch.device("cuda", index) for index in range(len(machine.speeds))]
        memory = None if machine.memory is None else (int(machine.memory * whole), *(2**33,) * (len(devices) - 1))
        found = measure(name, devices, memory)
        if not whole:
            whole = sum(found.plan.memory_bytes)
            print(alone(name, found))
        print(row(name, what, found), flush=True)


def host_ms(model: nn.Module, x: Tensor, devices: list[torch.device]) -> tuple[float, float]:
    """Return the milliseconds that the host needs for a forward of a micro-batch: alone, and in the pipeline."""
    model, x = model.to(devices[0]), x.to(devices[0])

    def least(inputs: Tensor, parts: int) -> float:
        found = []
        for _ in range(20):
            seconds_of(lambda: None, devices)
            began = time.perf_counter()
            model(inputs)
            found.append(time.perf_counter() - began)
        return 1e3 * min(found) / parts

    plain = least(x[: len(x) // MICROBATCHES], 1)
    backend = BalancedBackend(devices=tuple(map(str, devices)), microbatches=MICROBATCHES)
    with parallel_model(model, backend=backend):
        model(x).sum().backward()
        return plain, least(x, MICROBATCHES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--devices", nargs="*", help="real devices, such as cuda:0 cuda:1; default: pretended ones")
    parser.add_argument("--no-host", action="store_true", help="leave out the table of the host's time")
    options = parser.parse_args()
    if missing := os.environ.get("FAKE_CUDA_UNAVAILABLE"):
        sys.exit(f"there are no pretended devices here: {missing}")
    if options.devices is None and "FAKE_CUDA" not in os.environ:
        command = [sys.executable, FAKE_CUDA, "--devices=8", sys.executable, __file__, *sys.argv[1:]]
        sys.exit(subprocess.run(command, check=False).returncode)
    torch.set_num_threads(1)
    devices = [*map(torch.device, options.devices or ["cuda:0", "cuda:1"])]
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {MICROBATCHES} micro-batches\n")
    print("| model | devices | one device, ms | split, ms | faster | ideal | of ideal | of schedule | of best split |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.models:
        if options.devices:
            found = measure(name, devices)
            print(alone(name, found), row(name, f"{len(devices)}", found), sep="\n", flush=True)
        else:
            simulate(name)
    if not options.no_host:
        print("\n| model | host, alone, ms | in the pipeline, ms | to alone |\n|---|---|---|---|")
        for name, make in HOST.items():
            plain, piped = host_ms(*make(), devices[:2])
            print(f"| {name} | {plain:.2f} | {piped:.2f} | {piped / plain:.2f}x |", flush=True)


if __name__ == "__main__":
    main()
