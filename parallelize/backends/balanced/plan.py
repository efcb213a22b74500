"""Plan: which device runs which submodules, why, and how long a step takes; can be printed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import nn

from parallelize.errors import ConfigError
from parallelize.run.surroundings import surroundings


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Split of a model over devices, with its predicted times and the reason for it.

    `print(plan)` draws the stages.

    Args:
        model: name of the model's class.
        samples: number of samples in the profiled batch.
        units: names of the submodules between which the model can be split, in the order of their
            first calls; each is the largest one that begins there.
        bounds: split points; stage j runs `units[bounds[j]:bounds[j + 1]]`.
        devices: device of each stage.
        microbatches: maximum number of micro-batches per batch.
        forward_s: predicted seconds of one micro-batch's forward in each stage.
        backward_s: predicted seconds of one micro-batch's backward in each stage.
        memory_bytes: predicted bytes of each stage: parameters, gradients, optimizer state and
            saved activations.
        unsplit_s: predicted seconds of a step on one device; None: the model does not fit on it.
        predicted_s: predicted seconds of a step by this plan.
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
    why: str = ""

    @property
    def is_split(self) -> bool:
        """Whether the model has stages; otherwise it runs unchanged on the one device."""
        return len(self.bounds) > 1

    @property
    def speedup(self) -> float | None:
        """Return the predicted speedup over one device; None: not known."""
        if self.unsplit_s is None or not self.predicted_s:
            return None
        return self.unsplit_s / self.predicted_s

    def unit_devices(self) -> dict[str, torch.device]:
        """Return the device of each unit by its name; {} if the model is not split."""
        devices: dict[str, torch.device] = {}
        # A plan that does not split has a device, and no stage.
        for device, units in zip(self.devices, self._units_of_stages(), strict=False):
            devices.update(dict.fromkeys(units, torch.device(device)))
        return devices

    def _units_of_stages(self) -> list[tuple[str, ...]]:
        return [self.units[begin:end] for begin, end in itertools.pairwise(self.bounds)]

    def __str__(self) -> str:
        if not self.is_split:
            return f"{self.model}: not split, on {self.devices[0]}\n  why: {self.why}"
        stages = len(self.devices)
        speed = f", {self.speedup:.2f}x as fast as one device" if self.speedup else ""
        ideal = f"(ideal {ideal_speedup(stages, self.microbatches):.2f}x)"
        lines = [f"{self.model}: {stages} stages, {self.microbatches} micro-batches{speed} {ideal}"]
        # A plan that was written by hand has no times and no bytes.
        none = (0.0,) * stages
        columns = zip(
            self.devices,
            self._units_of_stages(),
            self.forward_s or none,
            self.backward_s or none,
            self.memory_bytes or none,
            strict=True,
        )
        total_s = sum(self.forward_s) + sum(self.backward_s)
        for number, (device, units, forward_s, backward_s, size) in enumerate(columns):
            span = units[0] if len(units) == 1 else f"{units[0]} .. {units[-1]}"
            share = (forward_s + backward_s) / max(total_s, 1e-12)
            bar = f"{'█' * round(24 * share):·<24} {share:4.0%} of time"
            lines.append(f"  {number}  {device}  {span:<24}  {bar}  {size / 2**20:.1f} MiB")
        lines.append(f"  why: {self.why}")
        return "\n".join(lines)


def plan(model: nn.Module) -> Plan:
    """Return the plan by which `backend="balanced"` splits a model; `print` it to see the stages.

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
    """Return the speedup of equal stages over one device if only filling and draining costs time.

    The pipeline is filled in forward, and drained in backward.
    """
    return stages * microbatches / (microbatches + stages - 1)
