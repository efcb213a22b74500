"""Plan: which device runs which submodules, why, and how long a step takes; can be printed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import nn

from parallelize.errors import ConfigError
from parallelize.run.surroundings import surroundings

__all__ = ["Plan", "ideal_speedup", "plan", "remember"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Split of a model over devices, with its predicted and measured times and the reason for it.

    `print(plan)` draws the stages.

    Args:
        model: name of the model's class.
        samples: number of samples in the profiled batch.
        units: names of the submodules between which the model can be split, in the order of their first calls; each
            is the largest one that begins there.
        bounds: split points; stage j runs `units[bounds[j]:bounds[j + 1]]`.
        devices: device of each stage.
        microbatches: maximum number of micro-batches per batch.
        forward_s: predicted seconds of one micro-batch's forward in each stage.
        backward_s: predicted seconds of one micro-batch's backward in each stage.
        memory_bytes: predicted bytes of each stage: parameters, gradients, optimizer state and saved activations.
        unsplit_s: measured seconds of a step on one device; None: the model does not fit on one device.
        predicted_s: predicted seconds of a step by this plan.
        measured_s: measured seconds of a step by this plan; None: not measured.
        is_split: whether the model is split; otherwise it runs unchanged on the one device in `devices`.
        why: why the model is split this way, or not split.
    """

    samples: int
    devices: tuple[str, ...]
    units: tuple[str, ...] = ()
    bounds: tuple[int, ...] = (0,)
    microbatches: int = 1
    model: str = ""
    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()
    memory_bytes: tuple[float, ...] = ()
    unsplit_s: float | None = None
    predicted_s: float | None = None
    measured_s: float | None = None
    is_split: bool = True
    why: str = ""

    @property
    def speedup(self) -> float | None:
        """Return the speedup over one device, measured if possible, else predicted; None: not known."""
        step = self.measured_s or self.predicted_s
        return None if self.unsplit_s is None or not step else self.unsplit_s / step

    def unit_devices(self) -> dict[str, torch.device]:
        """Return the device of each unit by its name; {} if the model is not split."""
        stages = zip(self.devices, itertools.pairwise(self.bounds), strict=False)
        return {name: torch.device(device) for device, (begin, end) in stages for name in self.units[begin:end]}

    def __str__(self) -> str:
        if not self.is_split:
            return f"{self.model}: not split, on {self.devices[0]}\n  why: {self.why}"
        count = len(self.devices)
        speed = f", {self.speedup:.2f}x as fast as one device" if self.speedup else ""
        headline = (
            f"{self.model}: {count} stages, {self.microbatches} micro-batches{speed} "
            f"(ideal {ideal_speedup(count, self.microbatches):.2f}x)"
        )
        lines = [headline]
        times = [sum(each) for each in zip(self.forward_s, self.backward_s, strict=True)] or [0.0] * count
        sizes = self.memory_bytes or [0.0] * count
        stages = zip(self.devices, itertools.pairwise(self.bounds), times, sizes, strict=True)
        for index, (device, (begin, end), seconds, size) in enumerate(stages):
            names, share = self.units[begin:end], seconds / max(sum(times), 1e-12)
            span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
            bar = f"{'█' * round(24 * share):·<24} {share:4.0%} of time"
            lines.append(f"  {index}  {device}  {span:<24}  {bar}  {size / 2**20:.1f} MiB")
        return "\n".join([*lines, f"  why: {self.why}"])


def plan(model: nn.Module) -> Plan:
    """Return the plan by which `backend="balanced"` splits a model over devices; `print` it to see the stages.

        with parallel_model(model, backend="balanced"):
            loss_of(model(x)).backward()
            print(parallelize.plan(model))

    Args:
        model: has run a batch inside a block like this one; the block may have ended.

    Raises:
        ConfigError: the model has no plan, because it has not run a batch yet.
    """
    latest = surroundings().script.plans.get(model)
    if latest is None:
        raise ConfigError(
            f"plan({type(model).__name__})",
            why="a plan is made from the first batch that the model runs under backend='balanced'",
            fix="run one batch first: with parallel_model(model, backend='balanced'): model(x)",
        )
    return latest


def remember(model: nn.Module, made: Plan) -> None:
    """Store the plan of a model, which `plan(model)` then returns, also after the block."""
    surroundings().script.plans[model] = made


def ideal_speedup(stages: int, microbatches: int) -> float:
    """Return the speedup of equal stages over one device if only filling and draining the pipeline costs time."""
    return stages * microbatches / (microbatches + stages - 1)
