"""Schedule: predicts the time of a step, and chooses the fastest number of micro-batches, stages and device order.

The user's loop computes the loss of the full batch, so all forward passes run before all backward passes, which begin
with the last micro-batch. Each phase fills and drains the pipeline. With k = 3 stages and m = 4 micro-batches:

    stage 0   0 1 2 3                         3 2 1 0
    stage 1     0 1 2 3          loss       3 2 1 0
    stage 2       0 1 2 3                 3 2 1 0
              ───────────── time ──────────────────────>

    step = sum of all stages' forward times  + (m - 1) * the slowest stage's forward time
         + sum of all stages' backward times + (m - 1) * the slowest stage's backward time

With k equal stages the pipeline is at best k * m / (m + k - 1) times as fast as one device. Starting backward passes
before all forward passes have ended (1F1B) would need the loss inside the pipeline, and save memory but not time.

Source: GPipe, https://arxiv.org/abs/1811.06965
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from parallelize.backends.balanced.hardware import DeviceSpec
from parallelize.backends.balanced.partition import Chain, Slots, smallest_cap, split_two_phase, stage_costs

__all__ = [
    "Memory",
    "Profile",
    "Schedule",
    "UnitCall",
    "best_schedule",
    "candidates",
    "ideal_speedup",
    "needed_cap",
    "step_s",
    "unsplit_bytes",
]

# Maximum number of device orders that are tried.
_MAX_ORDERS = 24

_Specs = Sequence[DeviceSpec]


@dataclass(frozen=True, kw_only=True)
class UnitCall:
    """Measured cost of one call of a unit (a submodule that is not split further), up to the next unit's call.

    A micro-batch of b samples takes `fixed + per_sample * b` seconds. The fixed part (Python overhead, kernel launches,
    loading weights from memory) does not shrink with the micro-batch.

    Args:
        unit: the submodule's name in the model.
        parameter_bytes: bytes of the parameters and buffers that no earlier call has used.
        saved_bytes: bytes per sample that autograd saves for backward.
        input_bytes: bytes per sample to transfer if a stage begins at this call, or to keep for recomputation.
    """

    unit: str
    forward_fixed_s: float
    forward_per_sample_s: float
    backward_fixed_s: float
    backward_per_sample_s: float
    parameter_bytes: int
    saved_bytes: float
    input_bytes: float

    def forward_s(self, samples: float) -> float:
        """Return the seconds of forward for a micro-batch of this many samples."""
        return self.forward_fixed_s + self.forward_per_sample_s * samples

    def backward_s(self, samples: float) -> float:
        """Return the seconds of backward for a micro-batch of this many samples."""
        return self.backward_fixed_s + self.backward_per_sample_s * samples


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured costs of a model on its first batch.

    Args:
        calls: costs of each unit call, in call order.
        samples: number of samples in the batch.
        unsplit_s: seconds of a step on the full batch without a pipeline; None: the model does not fit on one device.
        trained_share: fraction of the parameters that require grad.
        least_samples: size of the smallest measured micro-batch.
        output_bytes: bytes per sample of outputs and of a loss of them, on the device of the last stage.
    """

    calls: tuple[UnitCall, ...]
    samples: int
    unsplit_s: float | None = None
    trained_share: float = 1.0
    least_samples: int = 1
    output_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Assumptions for predicting how much memory a stage uses.

    Args:
        optimizer_state: bytes of optimizer state per byte of a trained parameter.
        recompute: whether activations are recomputed in backward.
    """

    optimizer_state: float = 2.0
    recompute: bool = False


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Stages, their devices and a number of micro-batches, with the predicted times and memory.

    Args:
        devices: device of each stage, in order; no stage is empty.
        split_points: stage j runs `calls[split_points[j]:split_points[j + 1]]`.
        forward_s: predicted seconds of one micro-batch's forward in each stage.
        backward_s: predicted seconds of one micro-batch's backward in each stage.
        memory_bytes: predicted bytes of each stage.
        predicted_s: predicted seconds of a step.
    """

    devices: tuple[DeviceSpec, ...]
    split_points: tuple[int, ...]
    microbatches: int
    recompute: bool
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    predicted_s: float


def step_s(forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int) -> float:
    """Return the predicted seconds of a step, given the seconds of each stage for one micro-batch."""
    return sum(math.fsum(phase) + (microbatches - 1) * max(phase) for phase in (forward_s, backward_s))


def ideal_speedup(stages: int, microbatches: int) -> float:
    """Return the speedup of equal stages over one device if only filling and draining the pipeline cost time."""
    return stages * microbatches / (microbatches + stages - 1)


def candidates(profile: Profile, devices: _Specs, *, microbatches: int | None, memory: Memory) -> Iterator[Schedule]:
    """Yield the best schedule for each order of devices and number of micro-batches (None: try 1, 2, 4, ...)."""
    choices = _microbatch_counts(profile) if microbatches is None else [min(microbatches, profile.samples)]
    for m, order in itertools.product(choices, _device_orders(devices)):
        found = _schedule_for(profile, order, m=m, memory=memory)
        if found is not None:
            yield found


def best_schedule(profile: Profile, devices: _Specs, *, microbatches: int | None, memory: Memory) -> Schedule | None:
    """Return the candidate with the shortest predicted step; None if no split fits the devices."""
    found = candidates(profile, devices, microbatches=microbatches, memory=memory)
    return min(found, key=lambda each: each.predicted_s, default=None)


def needed_cap(profile: Profile, devices: _Specs, *, microbatches: int | None, memory: Memory) -> float:
    """Return the smallest memory limit per device, in bytes, under which any schedule fits."""
    m = min(microbatches or profile.samples, profile.samples)
    copied = [call.input_bytes * profile.samples for call in profile.calls]
    return smallest_cap(_memory(profile, m=m, memory=memory), len(devices), copied=copied)


def unsplit_bytes(profile: Profile, *, memory: Memory) -> float:
    """Return the bytes of the model and, without recomputation, of the activations of the full batch."""
    return math.fsum(_memory(profile, m=1, memory=replace(memory, recompute=False)))


def _microbatch_counts(profile: Profile) -> list[int]:
    # More than 64 micro-batches only add overhead. Smaller ones than measured may behave differently.
    most = profile.samples // profile.least_samples
    return [2**power for power in range(7) if 2**power <= max(1, most)]


def _device_orders(devices: Sequence[DeviceSpec]) -> Iterator[tuple[DeviceSpec, ...]]:
    """Yield the orders in which devices can be assigned to stages; of equivalent orders, only the first.

    The first order puts the last stage on the first device, which holds the training loop's targets: outputs, targets
    and loss are then on one device, and only the input is copied.
    """
    seen: set[tuple[tuple[float, float, float], ...]] = set()
    first, *others = devices
    for order in itertools.islice(itertools.permutations((*others, first)), _MAX_ORDERS):
        kinds = tuple((spec.cap_bytes, spec.speed, spec.bytes_per_s) for spec in order)
        if kinds not in seen:
            seen.add(kinds)
            yield order


def _memory(profile: Profile, *, m: int, memory: Memory) -> list[float]:
    """Return bytes of each call: parameters, gradients, optimizer state, and activations saved by all m micro-batches.

    With recomputation, only the call's inputs are saved, plus the activations of the micro-batch being recomputed.
    """
    weight = 1 + profile.trained_share * (1 + memory.optimizer_state)
    samples = math.ceil(profile.samples / m)
    needed = [
        weight * call.parameter_bytes
        + (call.input_bytes * profile.samples + call.saved_bytes * samples if memory.recompute else 0.0)
        + (0.0 if memory.recompute else call.saved_bytes * profile.samples)
        for call in profile.calls
    ]
    return [*needed[:-1], needed[-1] + profile.output_bytes * profile.samples]


def _schedule_for(profile: Profile, order: tuple[DeviceSpec, ...], *, m: int, memory: Memory) -> Schedule | None:
    samples = profile.samples / m
    forward = [call.forward_s(samples) for call in profile.calls]
    backward = [call.backward_s(samples) for call in profile.calls]
    if memory.recompute:
        backward = [b + f for b, f in zip(backward, forward, strict=True)]
    rate = min(spec.bytes_per_s for spec in order)
    needs = _memory(profile, m=m, memory=memory)
    transfer = [call.input_bytes * samples / rate for call in profile.calls]
    copied = [call.input_bytes * profile.samples for call in profile.calls]
    chain = Chain(forward=forward, backward=backward, memory=needs, transfer=transfer, copied=copied)
    slots = Slots(caps=[spec.cap_bytes for spec in order], speeds=[spec.speed for spec in order])
    split_points = split_two_phase(chain, slots)
    if split_points is None:
        return None
    edges = [0.0, *copied[1:], 0.0]
    used = [j for j in range(len(order)) if split_points[j] < split_points[j + 1]]
    forward_s = stage_costs(forward, chain, slots, split_points)
    backward_s = stage_costs(backward, chain, slots, split_points)
    fixed = math.fsum(call.forward_fixed_s + call.backward_fixed_s for call in profile.calls)
    return Schedule(
        devices=tuple(order[j] for j in used),
        split_points=(0, *(split_points[j + 1] for j in used)),
        microbatches=m,
        recompute=memory.recompute,
        forward_s=tuple(forward_s[j] for j in used),
        backward_s=tuple(backward_s[j] for j in used),
        memory_bytes=tuple(
            edges[i] + edges[j] + math.fsum(needs[i:j]) for i, j in itertools.pairwise(split_points) if i < j
        ),
        # All stages share one Python interpreter, so the fixed costs of micro-batches do not overlap.
        predicted_s=max(step_s([forward_s[j] for j in used], [backward_s[j] for j in used], m), m * fixed),
    )
