"""Time of a step of pipelined models, compared with one device, torchgpipe and torch.distributed.pipelining."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from parallelize import distributed, parallel_model
from parallelize.backends.balanced.hardware import DeviceSpec
from parallelize.backends.balanced.partition import Chain, Memory, split
from parallelize.backends.balanced.plan import Plan, PlannerOptions, ideal_speedup, plan
from parallelize.backends.balanced.plugin import BalancedBackend
from parallelize.backends.balanced.schedule import Line, Profile, UnitCall, best_plan, step_s

DEVICES = ("cpu", "cpu")


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
        self.tokens, self.positions = nn.Embedding(2000, 256), nn.Embedding(128, 256)
        self.blocks = nn.ModuleList(Block(256) for _ in range(6))
        self.norm, self.head = nn.LayerNorm(256), nn.Linear(256, 2000, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:  # B T
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
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
    return nn.Sequential(*(Block(256) for _ in range(6))), torch.randn(16, 128, 256)


def conv_chain() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    for inputs in (3, 64, 64, 64):
        layers += [nn.Conv2d(inputs, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)), torch.randn(16, 3, 48, 48)


def resnet() -> tuple[nn.Module, Tensor]:
    sizes = [(48, 48, 1), (48, 48, 1), (48, 96, 2), (96, 96, 1), (96, 192, 2), (192, 192, 1), (192, 384, 2)]
    body = [Residual(*each) for each in sizes]
    ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(384, 10)]
    return nn.Sequential(nn.Conv2d(3, 48, 3, 1, 1), *body, *ends), torch.randn(16, 3, 48, 48)


def llama() -> tuple[nn.Module, Tensor] | None:
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        intermediate_size=704,
        vocab_size=2000,
        use_cache=False,
    )
    return LlamaModel(config), torch.randint(2000, (16, 128))


def tiny() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))), torch.randn(32, 64)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor] | None]] = {
    "GPT blocks": gpt_blocks,
    "GPT, tied": lambda: (Gpt(), torch.randint(2000, (16, 128))),
    "conv chain": conv_chain,
    "ResNet": resnet,
    "U-Net": lambda: (UNet(), torch.randn(16, 3, 48, 48)),
    "Llama": llama,
    "tiny": tiny,
}


def step(model: Callable[..., Any], x: Tensor) -> float:
    began = time.perf_counter()
    output = model(x)
    output = output if isinstance(output, Tensor) else output[0]
    output.float().pow(2).mean().backward()
    return time.perf_counter() - began


def in_turns(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every way once per round, so that other load on the machine affects all alike; discard the first round."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            took = way()
            if number:
                found[name].append(took)
    return found


def by_parameters(made: Plan, model: nn.Module) -> Plan:
    """Split the same calls as Accelerate's device map does: equal bytes of parameters."""
    modules, seen, sizes = dict(model.named_modules()), set(), []
    for name in made.events:
        new = [each for each in modules[name].parameters() if id(each) not in seen]
        seen |= {id(each) for each in new}
        sizes.append(float(sum(each.numel() for each in new)))
    return replace(made, bounds=by_cost(sizes, 2))


def by_cost(costs: list[float], count: int) -> tuple[int, ...]:
    bounds = split(Chain(seconds=costs, memory=Memory(held=costs)), caps=[float("inf")] * count, speeds=[1.0] * count)
    assert bounds is not None
    return bounds


def planned(model: nn.Module, x: Tensor, **options: Any) -> Plan:
    """Return the plan that the backend makes."""
    with parallel_model(model, backend=BalancedBackend(devices=DEVICES, **options)):
        model(x)
    return plan(model)


def pipelined(model: nn.Module, x: Tensor, made: Plan) -> float:
    """Return the seconds of a step by a plan: the second step in its block; others are timed outside of the block."""
    with parallel_model(model, backend=BalancedBackend(devices=DEVICES, plan=made)):
        step(model, x)
        return step(model, x)


def torchgpipe_ways(model: nn.Module, x: Tensor, m: int, made: Plan) -> dict[str, Callable[[], float]]:
    """Return steps of torchgpipe, for nn.Sequential only, with the stages of our plan rounded to layers."""
    if importlib.util.find_spec("torchgpipe") is None or not isinstance(model, nn.Sequential):
        return {}
    from torchgpipe import GPipe

    first = int(made.events[made.bounds[1]].split(".")[0])
    ways = {}
    for checkpoint in ("never", "except_last"):
        piped = GPipe(
            copy.deepcopy(model), [first, len(model) - first], devices=DEVICES, chunks=m, checkpoint=checkpoint
        )
        ways[f"torchgpipe {checkpoint}"] = lambda piped=piped: step(piped, x)
    return ways


def pipelining(model: nn.Module, x: Tensor, m: int, made: Plan, rounds: int) -> list[float]:
    """Time torch.distributed.pipelining's GPipe in two processes, with `schedule.step` as the loop and our stages."""
    first = int(made.events[made.bounds[1]].split(".")[0])

    @distributed(processes=2)
    def run() -> list[float]:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        torch.set_num_threads(1)
        rank = dist.get_rank()
        part = model[:first] if rank == 0 else model[first:]
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, m, loss_fn=lambda output, _target: output.float().pow(2).mean())
        found = []
        for _ in range(rounds + 2):
            dist.barrier()
            began = time.perf_counter()
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=x, losses=[])
            dist.barrier()
            found.append(time.perf_counter() - began)
        return found[2:]

    return run()


def measure(name: str, m: int, rounds: int) -> list[str]:
    made = MODELS[name]()
    if made is None:
        return []
    model, x = made
    rows = []
    chosen, auto = planned(model, x, microbatches=m), planned(model, x)
    what = f"{auto.microbatches} micro-batches" if auto.is_split else "not divided"
    found = in_turns(
        {
            "undivided": lambda: step(model, x),
            "undivided, in micro-batches": lambda: sum(step(model, part) for part in x.chunk(m)),
            "balanced": lambda: pipelined(model, x, chosen),
            f"balanced, auto: {what}": lambda: pipelined(model, x, auto),
            "cut by parameters": lambda: pipelined(model, x, by_parameters(chosen, model)),
            **torchgpipe_ways(model, x, m, chosen),
        },
        rounds,
    )
    if isinstance(model, nn.Sequential) and name != "tiny":
        found["torch pipelining, 2 processes"] = pipelining(model, x, m, chosen, rounds)
    whole, pieces = found["undivided"], found["undivided, in micro-batches"]
    for way_name, times in found.items():
        fast, median = min(whole) / min(times), statistics.median(whole) / statistics.median(times)
        is_whole = way_name.startswith("undivided") or (" auto" in way_name and auto.microbatches != m)
        share = "" if is_whole else f"{100 * min(pieces) / min(times) / ideal_speedup(2, m):.0f} %"
        rows.append(f"| {name}, m={m} | {way_name} | {1000 * min(times):.0f} | {fast:.2f}x | {median:.2f}x | {share} |")
        print(rows[-1], flush=True)
    return rows


def quality() -> None:
    """Print the predicted speedup of measured profiles on more devices than this machine has."""
    print("\n| model | devices | ideal | balanced | cut by parameters |\n|---|---|---|---|---|")
    for name, make in MODELS.items():
        made = make()
        if made is None or name == "tiny":
            continue
        model, x = made
        with parallel_model(model, backend=BalancedBackend(devices=("cpu",) * 8, microbatches=16)):
            model(x)
        found = plan(model)
        forward, backward, sizes = per_call(found, model, x)
        for count in (2, 4, 8):
            calls = [unit_call(name, f, b) for name, f, b in zip(found.events, forward, backward, strict=True)]
            profile = Profile(calls=tuple(calls), samples=16)
            devices = [DeviceSpec(device=f"{i}", cap_bytes=float("inf")) for i in range(count)]
            chosen = best_plan(profile, devices, PlannerOptions(microbatches=16, recompute=False))
            stages = [slice(*pair) for pair in itertools.pairwise(by_cost(sizes, count))]
            other = step_s([sum(forward[s]) for s in stages], [sum(backward[s]) for s in stages], 16)
            whole = 16 * (sum(forward) + sum(backward))
            print(
                f"| {name} | {count} | {ideal_speedup(count, 16):.2f}x "
                f"| {whole / (chosen.predicted_s if chosen else whole):.2f}x | {whole / other:.2f}x |",
                flush=True,
            )


def unit_call(name: str, forward: float, backward: float) -> UnitCall:
    return UnitCall(
        unit=name,
        forward=Line(0.0, forward),
        backward=Line(0.0, backward),
        parameter_bytes=0,
        saved=Line(0.0, 0.0),
        input_bytes=0.0,
    )


def per_call(found: Plan, model: nn.Module, x: Tensor) -> tuple[list[float], list[float], list[float]]:
    """Return seconds per sample of each unit call of a plan, and its parameter bytes."""
    from parallelize.backends.balanced.batch import Batch
    from parallelize.backends.balanced.profiling import Profiler, profile_model
    from parallelize.backends.balanced.side_effects import ModelState
    from parallelize.backends.balanced.stage_threads import stages_on
    from parallelize.plugins.base import Inner, Session

    modules = dict(model.named_modules())
    device, batch = torch.device("cpu"), Batch(((x,), {}), dim=0)
    profiler = Profiler(
        inner=Inner(model, original_methods={"forward": model.forward}, session=Session()),
        stages=stages_on([device]),
        routes={id(modules[name]): [0] for name in found.events},
        output_device=device,
        batch=batch,
        sizes=(max(1, batch.size // 16), max(1, batch.size // 2)),
        state=ModelState(model, [device]),
    )
    calls = profile_model(profiler).calls
    return (
        [call.forward.at(1) for call in calls],
        [call.backward.at(1) for call in calls],
        [float(call.parameter_bytes) for call in calls],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--microbatches", nargs="*", type=int, default=[4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-quality", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {Path(__file__).name}")
    print("ideal of 2 stages:", {m: f"{ideal_speedup(2, m):.2f}x" for m in options.microbatches})
    print("\n| model | way | least ms | by least | by median | of ideal |\n|---|---|---|---|---|---|")
    for name in options.models:
        for m in options.microbatches:
            measure(name, m, options.rounds)
    if not options.no_quality:
        quality()


if __name__ == "__main__":
    main()
