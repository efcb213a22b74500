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
from typing import NamedTuple

from parallelize.backends.balanced.hardware import DeviceSpec
from parallelize.backends.balanced.partition import Chain, Memory, smallest_cap, split
from parallelize.backends.balanced.plan import Plan, PlannerOptions

__all__ = ["Line", "Profile", "UnitCall", "best_plan", "needed_cap", "plans", "step_s", "unsplit_bytes"]

# The slowest forward stage and the slowest backward stage limit a step: in most models the same one, but not if parts
# are frozen. So chains are split by forward + weight * backward, and the shortest of these steps is chosen. For random
# chains of up to 40 calls, it is that of the best split if backward takes twice as long as forward, 0.2 % longer if the
# ratio differs between calls, and 2 % longer if the first half has no backward.
_BACKWARD_WEIGHTS = (1.0, 0.5, 2.0, 0.25, 4.0, 0.125, 8.0)
# Maximum number of device orders that are tried: eight devices, four each of two kinds, have as many.
_MAX_ORDERS = 70
# Devices whose memory limits differ by less, as free memory does by the driver's own use, are equal.
_ALIKE = 0.02
# Several pipelines are used only if they are predicted to be this much faster than one.
_MIN_GAIN = 1.03

_Specs = Sequence[DeviceSpec]


class Line(NamedTuple):
    """Seconds or bytes of a micro-batch by its number of samples.

    The fixed part (Python overhead, kernel launches, loading weights; masks, weights cast anew in each call) does not
    shrink with the micro-batch.
    """

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, samples: float, microbatches: int = 1) -> float:
        """Return what `microbatches` of them take that have this many samples in total."""
        return self.fixed * microbatches + self.per_sample * samples


_NOTHING = Line()


@dataclass(frozen=True, kw_only=True)
class UnitCall:
    """Measured cost of one call of a unit (a submodule that is not split further), up to the next unit's call.

    Args:
        unit: the submodule's name in the model.
        parameter_bytes: bytes of the parameters and buffers that no earlier call has used.
        saved: bytes that autograd saves for backward during the call, unless it is recomputed.
        input_bytes: bytes per sample to transfer if a stage begins at this call, or to keep for recomputation.
        saved_after: bytes that autograd saves between this call and the next one.
        working: bytes that forward or backward need besides.
        shared_bytes: bytes that autograd saves once for all micro-batches, as weights that autocast has cast.
    """

    unit: str
    forward: Line
    backward: Line
    parameter_bytes: int
    saved: Line
    input_bytes: float
    saved_after: Line = _NOTHING
    working: Line = _NOTHING
    shared_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured costs of a model on its first batch.

    Args:
        calls: costs of each unit call, in call order.
        samples: number of samples in the batch.
        trained_share: fraction of the parameters that require grad.
        least_samples: size of the smallest measured micro-batch.
        output_bytes: bytes per sample of outputs and of a loss of them, on the device of the last stage.
        model: name of the model's class.
        signature: see `Plan`.
    """

    calls: tuple[UnitCall, ...]
    samples: int
    trained_share: float = 1.0
    least_samples: int = 1
    output_bytes: float = 0.0
    model: str = ""
    signature: str = ""


def step_s(forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int) -> float:
    """Return the predicted seconds of a step, given the seconds of each stage for one micro-batch."""
    return sum(math.fsum(phase) + (microbatches - 1) * max(phase) for phase in (forward_s, backward_s))


def plans(profile: Profile, devices: _Specs, options: PlannerOptions) -> Iterator[Plan]:
    """Yield the best plan for each number of pipelines, micro-batches and device order; recompute="auto" is True."""
    for pipelines, stages in _shapes(profile, devices, options):
        # The first pipeline has the last devices, since the first device comes last.
        ends = [len(devices) - index * stages for index in range(pipelines)]
        for m in _microbatch_counts(profile, options.microbatches, pipelines):
            memory = [
                _memory(profile, m=m, options=options, is_split=stages > 1, pipelines=pipelines, is_copy=index > 0)
                for index in range(pipelines)
            ]
            orders = _device_orders(devices) if m >= pipelines else ()
            slots = ([order[end - stages : end] for end in ends] for order in orders)
            yield from filter(None, (_plan_for(profile, each, m=m, memory=memory, options=options) for each in slots))


def best_plan(profile: Profile, devices: _Specs, options: PlannerOptions) -> Plan | None:
    """Return the plan with the shortest predicted step; None if no split fits the devices."""

    def value(found: Plan) -> float:
        return (found.predicted_s or 0.0) * (_MIN_GAIN if found.pipelines > 1 else 1.0)

    return min(plans(profile, devices, options), key=value, default=None)


def needed_cap(profile: Profile, devices: _Specs, options: PlannerOptions) -> float:
    """Return the smallest memory limit per device, in bytes, under which any plan fits."""
    m = min(options.microbatches or profile.samples, profile.samples)
    return smallest_cap(_memory(profile, m=m, options=options, is_split=len(devices) > 1), len(devices))


def unsplit_bytes(profile: Profile, options: PlannerOptions) -> float:
    """Return the bytes of a step of the unsplit model, without recomputation."""
    memory = _memory(profile, m=1, options=replace(options, recompute=False), is_split=False)
    return memory.of(0, len(profile.calls))


def _shapes(profile: Profile, devices: _Specs, options: PlannerOptions) -> Iterator[tuple[int, int]]:
    """Yield (pipelines, stages): one pipeline over all devices and, of a model that no device can hold, several.

    With recomputation there is one: `StagedModel.recomputing` begins a run in the first pipeline, and backward does not
    have the copies of parameters that the forward of another pipeline has used.
    """
    yield 1, len(devices)
    most = options.max_pipelines or len(devices)
    if not options.recompute and unsplit_bytes(profile, options) > max(spec.cap_bytes for spec in devices):
        for stages in range(2, len(devices) // 2 + 1):
            yield from ((each, stages) for each in range(2, min(most, len(devices) // stages) + 1))


def _microbatch_counts(profile: Profile, given: int | None, pipelines: int) -> list[int]:
    """Return 1, 2, 4, ... in each pipeline; or the given number."""
    if given is not None:
        return [min(given, profile.samples)]
    # More than 64 micro-batches only add overhead. Smaller ones than measured may behave differently.
    most = min(64, max(1, profile.samples // profile.least_samples))
    return [count for power in range(7) if (count := pipelines * 2**power) <= most]


def _device_orders(devices: _Specs) -> Iterator[tuple[DeviceSpec, ...]]:
    """Return the orders in which devices can be assigned to stages; of equivalent orders, only the first.

    The first order puts the last stage on the first device, which holds the training loop's targets: outputs, targets
    and loss are then on one device, and only the input is copied.
    """
    first, *others = devices
    return itertools.islice(_distinct_orders((*others, first)), _MAX_ORDERS)


def _distinct_orders(devices: tuple[DeviceSpec, ...]) -> Iterator[tuple[DeviceSpec, ...]]:
    if not devices:
        yield ()
    for index, each in enumerate(devices):
        if not any(_is_alike(each, earlier) for earlier in devices[:index]):
            yield from ((each, *rest) for rest in _distinct_orders(devices[:index] + devices[index + 1 :]))


def _is_alike(one: DeviceSpec, other: DeviceSpec) -> bool:
    """Whether the order of two devices is of no effect; of their rates, only the lowest of all devices is used."""
    return one.speed == other.speed and math.isclose(one.cap_bytes, other.cap_bytes, rel_tol=_ALIKE)


def _memory(
    profile: Profile, *, m: int, options: PlannerOptions, is_split: bool, pipelines: int = 1, is_copy: bool = False
) -> Memory:
    """Return the bytes of each call in a pipeline; other pipelines than the first one (`is_copy`) have no optimizer.

    Parameters and optimizer state; until its backward, what autograd saves of each micro-batch; and gradients, once one
    micro-batch has run backward. With recomputation, a call's input is saved, and the rest needed while its backward
    runs. An optimizer with several states per parameter computes with one more, for all parameters at once.
    If the model `is_split`, inputs come from another device.
    """
    calls, samples, count = profile.calls, math.ceil(profile.samples / m), math.ceil(m / pipelines)
    kept = profile.samples * count / m  # samples of all micro-batches in one pipeline
    left = max(1, count - 1) / count
    recompute, trained = bool(options.recompute), profile.trained_share
    states = 0.0 if is_copy else options.optimizer_state
    copied = [call.input_bytes * kept for call in calls]
    held, backward = [], []
    for call, received in zip(calls, copied, strict=True):
        saved = (received if recompute else call.saved.at(kept, count)) + call.saved_after.at(kept, count)
        weights = (1 + trained * states) * call.parameter_bytes
        held.append(weights + saved + call.shared_bytes)
        # Gradients of the weights that autocast has cast are in their dtype until the casts are free.
        gradients = max(trained * call.parameter_bytes, (1 + trained) * call.shared_bytes)
        backward.append(weights + saved * left + gradients)
    for each in (held, backward):  # all outputs are joined on the last device of the first pipeline
        each[-1] += profile.output_bytes * (kept if is_copy else profile.samples)
    in_step = 1 + trained * (1 + states + max(0.0, states - 1))
    return Memory(
        held=held,
        backward=backward,
        working=[call.working.at(samples) + recompute * call.saved.at(samples) for call in calls],
        step=[in_step * call.parameter_bytes for call in calls],
        received=[0.0 if recompute or not (index or is_split) else each for index, each in enumerate(copied)],
        returned=copied,
    )


def _plan_for(
    profile: Profile, pipelines: Sequence[_Specs], *, m: int, memory: Sequence[Memory], options: PlannerOptions
) -> Plan | None:
    """Return the best plan for pipelines on given devices; all have the stages that suit the weakest devices."""
    samples, count, recompute = profile.samples / m, len(pipelines), bool(options.recompute)
    forward = [call.forward.at(samples) for call in profile.calls]
    backward = [call.backward.at(samples) + recompute * call.forward.at(samples) for call in profile.calls]
    rate = min(spec.bytes_per_s for each in pipelines for spec in each)
    transfer = [call.input_bytes * samples / rate for call in profile.calls]
    chain = Chain(seconds=forward, memory=memory[0], transfer=transfer)
    caps = [min(spec.cap_bytes for spec in specs) for specs in zip(*pipelines, strict=True)]
    speeds = [min(spec.speed for spec in specs) for specs in zip(*pipelines, strict=True)]
    phases = [replace(chain, seconds=each) for each in (forward, backward)]
    bounds = _split(*phases, caps=caps, speeds=speeds, microbatches=math.ceil(m / count))
    if bounds is None:
        return None
    used = [(slot, i, j) for slot, (i, j) in enumerate(itertools.pairwise(bounds)) if i < j]
    forward_s, backward_s = (each.stages_s(bounds, speeds) for each in phases)
    copies = max(
        sum(call.parameter_bytes for call in profile.calls[i:j])
        * sum(each[slot].device != pipelines[0][slot].device for each in pipelines)
        for slot, i, j in used
    )
    step = step_s(forward_s, backward_s, math.ceil(m / count)) + copies * (1 + profile.trained_share) / rate
    fixed = math.fsum(call.forward.fixed + call.backward.fixed for call in profile.calls)
    return Plan(
        model=profile.model,
        signature=profile.signature,
        samples=profile.samples,
        events=tuple(call.unit for call in profile.calls),
        bounds=(0, *(j for _, _, j in used)),
        devices=tuple(each[slot].device for each in pipelines for slot, _, _ in used),
        microbatches=m,
        recompute=recompute,
        forward_s=forward_s,
        backward_s=backward_s,
        memory_bytes=tuple(each.of(i, j) for each in memory for _, i, j in used),
        # All stages share one Python interpreter, so the fixed costs of micro-batches do not overlap.
        predicted_s=max(step, m * fixed),
        pipelines=count,
    )


def _split(
    forward: Chain, backward: Chain, *, caps: Sequence[float], speeds: Sequence[float], microbatches: int
) -> tuple[int, ...] | None:
    """Return the bounds of the stages with the shortest step, of those found; None if no stages fit the caps."""

    def split_by(weight: float) -> tuple[int, ...] | None:
        seconds = [f + weight * b for f, b in zip(forward.seconds, backward.seconds, strict=True)]
        transfer = [(1 + weight) * each for each in forward.transfer]
        return split(replace(forward, seconds=seconds, transfer=transfer), caps=caps, speeds=speeds)

    def step(bounds: Sequence[int]) -> float:
        return step_s(forward.stages_s(bounds, speeds), backward.stages_s(bounds, speeds), microbatches)

    return min(filter(None, map(split_by, _BACKWARD_WEIGHTS)), key=step, default=None)
