"""Schedule: predicts the time of a step, and chooses the fastest pipelines, stages, device order and micro-batches.

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

A model that needs few of the devices can run in r pipelines: micro-batch i runs in pipeline i % r. The parameters are
on the devices of the first pipeline. In each step, they are copied to the others, and gradients are copied back:

    step = that of m / r micro-batches + the bytes of the largest stage, to and from r - 1 pipelines, / transfer rate

Source: GPipe, https://arxiv.org/abs/1811.06965
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
# Devices whose memory limits differ by less, as free memory does by the driver's own use, are equal.
_ALIKE = 0.02
# Several pipelines are used only if they are predicted to be this much faster than one.
_MIN_GAIN = 1.03

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
        devices: device of each stage, in order, one pipeline after another; no stage is empty.
        split_points: stage j runs `calls[split_points[j]:split_points[j + 1]]`.
        forward_s: predicted seconds of one micro-batch's forward in each stage.
        backward_s: predicted seconds of one micro-batch's backward in each stage.
        memory_bytes: predicted bytes of each stage of each pipeline.
        predicted_s: predicted seconds of a step.
        pipelines: number of pipelines, which have the same stages.
    """

    devices: tuple[DeviceSpec, ...]
    split_points: tuple[int, ...]
    microbatches: int
    recompute: bool
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    predicted_s: float
    pipelines: int = 1


def step_s(forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int) -> float:
    """Return the predicted seconds of a step, given the seconds of each stage for one micro-batch."""
    return sum(math.fsum(phase) + (microbatches - 1) * max(phase) for phase in (forward_s, backward_s))


def ideal_speedup(stages: int, microbatches: int, pipelines: int = 1) -> float:
    """Return the speedup of equal stages over one device if only filling and draining the pipelines cost time."""
    return stages * microbatches / (math.ceil(microbatches / pipelines) + stages - 1)


def candidates(
    profile: Profile, devices: _Specs, *, microbatches: int | None, memory: Memory, max_pipelines: int | None = None
) -> Iterator[Schedule]:
    """Yield the best schedule for each number of pipelines (at most `max_pipelines`), micro-batches and device order.

    `microbatches=None`: 1, 2, 4, ... in each pipeline.
    """
    for pipelines, stages in _shapes(profile, devices, memory, max_pipelines or len(devices)):
        counts = _microbatch_counts(profile, microbatches, pipelines)
        for m, order in itertools.product(counts, _device_orders(devices)):
            # The first pipeline has the last devices, since the first device comes last.
            ends = [len(order) - index * stages for index in range(pipelines)]
            found = _schedule_for(profile, [order[end - stages : end] for end in ends], m=m, memory=memory)
            if found is not None and m >= pipelines:
                yield found


def best_schedule(profile: Profile, devices: _Specs, **constraints: Any) -> Schedule | None:
    """Return the candidate with the shortest predicted step; None if no split fits the devices."""
    found = candidates(profile, devices, **constraints)
    return min(found, key=lambda each: each.predicted_s * (_MIN_GAIN if each.pipelines > 1 else 1.0), default=None)


def needed_cap(profile: Profile, devices: _Specs, *, microbatches: int | None, memory: Memory) -> float:
    """Return the smallest memory limit per device, in bytes, under which any schedule fits."""
    m = min(microbatches or profile.samples, profile.samples)
    copied = [call.input_bytes * profile.samples for call in profile.calls]
    return smallest_cap(_memory(profile, m=m, memory=memory), len(devices), copied=copied)


def unsplit_bytes(profile: Profile, *, memory: Memory) -> float:
    """Return the bytes of the model and, without recomputation, of the activations of the full batch."""
    return math.fsum(_memory(profile, m=1, memory=replace(memory, recompute=False)))


def _shapes(profile: Profile, devices: _Specs, memory: Memory, max_pipelines: int) -> Iterator[tuple[int, int]]:
    """Yield (pipelines, stages): one pipeline over all devices and, of a model that no device can hold, several.

    What backward recomputes would be recomputed in the first pipeline, so that there is no other one.
    """
    yield 1, len(devices)
    if not memory.recompute and unsplit_bytes(profile, memory=memory) > max(spec.cap_bytes for spec in devices):
        for stages in range(2, len(devices) // 2 + 1):
            yield from ((each, stages) for each in range(2, min(max_pipelines, len(devices) // stages) + 1))


def _microbatch_counts(profile: Profile, given: int | None, pipelines: int) -> list[int]:
    if given is not None:
        return [min(given, profile.samples)]
    # More than 64 micro-batches only add overhead. Smaller ones than measured may behave differently.
    most = min(64, max(1, profile.samples // profile.least_samples))
    return [count for power in range(7) if (count := pipelines * 2**power) <= most]


def _device_orders(devices: Sequence[DeviceSpec]) -> Iterator[tuple[DeviceSpec, ...]]:
    """Yield the orders in which devices can be assigned to stages; of equivalent orders, only the first.

    The first order puts the last stage on the first device, which holds the training loop's targets: outputs, targets
    and loss are then on one device, and only the input is copied.
    """
    seen: set[tuple[int, ...]] = set()
    first, *others = devices
    for order in itertools.islice(itertools.permutations((*others, first)), _MAX_ORDERS):
        kinds = tuple(next(i for i, each in enumerate(devices) if _is_alike(each, spec)) for spec in order)
        if kinds not in seen:
            seen.add(kinds)
            yield order


def _is_alike(one: DeviceSpec, other: DeviceSpec) -> bool:
    """Whether the order of two devices is of no effect; of their rates, only the lowest of all devices is used."""
    return one.speed == other.speed and math.isclose(one.cap_bytes, other.cap_bytes, rel_tol=_ALIKE)


def _memory(profile: Profile, *, m: int, memory: Memory, pipelines: int = 1, is_copy: bool = False) -> list[float]:
    """Return bytes of each call: parameters, gradients, optimizer state, and activations saved by all micro-batches.

    With recomputation, only the call's inputs are saved, plus the activations of the micro-batch being recomputed.
    Other pipelines than the first one (`is_copy`) have no optimizer state.
    """
    weight = 1 + profile.trained_share * (1 + (0.0 if is_copy else memory.optimizer_state))
    samples, kept = math.ceil(profile.samples / m), _samples_of_each(profile, m, pipelines)
    needed = [
        weight * call.parameter_bytes
        + (call.input_bytes * kept + call.saved_bytes * samples if memory.recompute else call.saved_bytes * kept)
        for call in profile.calls
    ]
    # All outputs are joined on the last device of the first pipeline.
    return [*needed[:-1], needed[-1] + profile.output_bytes * (kept if is_copy else profile.samples)]


def _samples_of_each(profile: Profile, m: int, pipelines: int) -> float:
    """Return the largest number of samples that run in one pipeline."""
    return profile.samples * math.ceil(m / pipelines) / m


def _schedule_for(profile: Profile, pipelines: Sequence[_Specs], *, m: int, memory: Memory) -> Schedule | None:
    """Return the best schedule for pipelines on given devices; all have the stages that suit the weakest devices."""
    samples, count = profile.samples / m, len(pipelines)
    forward = [call.forward_s(samples) for call in profile.calls]
    backward = [call.backward_s(samples) for call in profile.calls]
    if memory.recompute:
        backward = [b + f for b, f in zip(backward, forward, strict=True)]
    rate = min(spec.bytes_per_s for each in pipelines for spec in each)
    of_each = [_memory(profile, m=m, memory=memory, pipelines=count, is_copy=index > 0) for index in range(count)]
    transfer = [call.input_bytes * samples / rate for call in profile.calls]
    copied = [call.input_bytes * _samples_of_each(profile, m, count) for call in profile.calls]
    chain = Chain(forward=forward, backward=backward, memory=of_each[0], transfer=transfer, copied=copied)
    slots = Slots(
        caps=[min(spec.cap_bytes for spec in specs) for specs in zip(*pipelines, strict=True)],
        speeds=[min(spec.speed for spec in specs) for specs in zip(*pipelines, strict=True)],
    )
    split_points = split_two_phase(chain, slots)
    if split_points is None:
        return None
    edges = [0.0, *copied[1:], 0.0]
    used = [j for j in range(len(slots)) if split_points[j] < split_points[j + 1]]
    ranges = [(split_points[j], split_points[j + 1]) for j in used]
    forward_s, backward_s = (
        tuple(costs[j] for j in used)
        for costs in (stage_costs(each, chain, slots, split_points) for each in (forward, backward))
    )
    fixed = math.fsum(call.forward_fixed_s + call.backward_fixed_s for call in profile.calls)
    weights = [sum(call.parameter_bytes for call in profile.calls[i:j]) for i, j in ranges]
    copies = max(
        size * sum(each[stage].device != pipelines[0][stage].device for each in pipelines)
        for stage, size in zip(used, weights, strict=True)
    )
    step = step_s(forward_s, backward_s, math.ceil(m / count)) + copies * (1 + profile.trained_share) / rate
    return Schedule(
        devices=tuple(each[stage] for each in pipelines for stage in used),
        split_points=(0, *(j for _, j in ranges)),
        microbatches=m,
        recompute=memory.recompute,
        forward_s=forward_s,
        backward_s=backward_s,
        memory_bytes=tuple(edges[i] + edges[j] + math.fsum(needs[i:j]) for needs in of_each for i, j in ranges),
        # All stages share one Python interpreter, so the fixed costs of micro-batches do not overlap.
        predicted_s=max(step, m * fixed),
        pipelines=count,
    )
