"""Planner: makes the plan from a model and its first batch.

1  place      put the model on the output device; if it does not fit there, split it by the bytes of its parameters
2  profile    find the units, which are not split further; time them at two batch sizes
3  schedule   choose the stages with the shortest predicted step under every device's memory limit
4  time       run the plan, and the unsplit model; if the plan is not faster, do not split

The user's loop computes the loss of the full batch, so all forward passes run before all backward passes, which begin
with the last micro-batch. Each phase fills and drains the pipeline. With k = 3 stages and m = 4 micro-batches:

    stage 0   0 1 2 3                         3 2 1 0
    stage 1     0 1 2 3          loss       3 2 1 0
    stage 2       0 1 2 3                 3 2 1 0
              ───────────── time ──────────────────────>

    step = sum of all stages' forward times  + (m - 1) * the slowest stage's forward time
         + sum of all stages' backward times + (m - 1) * the slowest stage's backward time

The time in which tensors are moved to a stage counts as time of this stage. With k equal stages, and nothing to move,
the pipeline is at best k * m / (m + k - 1) times as fast as one device. Starting backward passes before all forward
passes have ended (1F1B) would need the loss inside the pipeline, and save memory but not time.

The model's forward hooks run during planning. Buffers and RNG states are restored at the end; gradients do not change.

Source: GPipe, https://arxiv.org/abs/1811.06965
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from parallelize.backends.balanced.microbatch import Staged
from parallelize.backends.balanced.partition import split, sums
from parallelize.backends.balanced.plan import Plan
from parallelize.backends.balanced.profiling import (
    DeviceSpec,
    Line,
    Profile,
    device_specs,
    find_units,
    measure_units,
    parameter_bytes,
)
from parallelize.backends.balanced.transfer import place
from parallelize.backends.batches import Batch, WholeReason
from parallelize.backends.measuring import run_backward, seconds_of
from parallelize.backends.model_state import ModelState
from parallelize.errors import ConfigError
from parallelize.plugins.base import Inner

if TYPE_CHECKING:
    from parallelize.backends.balanced.plugin import BalancedBackend

__all__ = ["Planner", "Search", "initial_devices", "step_s"]

_log = logging.getLogger(__name__)

_MIN_SPEEDUP = 1.03
"""The model is split only if the speedup is at least this."""
_SHRUNK = 0.8
"""Fraction of the predicted bytes that is left to the next plan, if a plan has run out of memory."""
_BACKWARD_WEIGHTS = (1.0, 0.5, 2.0, 0.25, 4.0)
"""The slowest forward stage and the slowest backward stage limit a step: in most models the same one, but not if parts
are frozen. So chains are split by forward + weight * backward, and the shortest of these steps is chosen."""
_BYTES_PER_S = 2e10
"""Rate at which tensors are taken to move between devices: that of PCIe."""
_MOST_PLACES = 1000
"""Of longer chains, only every other unit may begin a stage, or every third one, ..."""


@dataclass(kw_only=True)
class Planner:
    """Makes the plan of one model.

    Args:
        inner: holds the model.
        devices: in the user's order.
        output_device: device of the inputs and of the outputs.
        options: the user's options.
        running: returns a context in which a callable runs the model by a plan; its `refusal` is why it did not split
            the batch.
    """

    inner: Inner
    devices: Sequence[torch.device]
    output_device: torch.device
    options: BalancedBackend
    running: Callable[[Plan], contextlib.AbstractContextManager[Any]]
    _why: str = ""  # the batch is not split

    def plan(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Plan:
        """Return the plan, made from one batch, given by the arguments of the model.

        Raises:
            ConfigError: the model does not fit on the devices.
        """
        model = self.inner.model
        self._used = [*dict.fromkeys([self.output_device, *self.devices])]
        self._specs = device_specs(self.devices, memory=self.options.memory, model=model)
        self._state = ModelState(model, self._used)
        with (
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # the step itself gives forward's warnings
            batch = self._divided(inputs)
            if isinstance(batch, WholeReason):
                self._keep_whole(inputs, batch)
            else:
                self._batch = batch
            try:
                found = replace(self._plan(), model=type(model).__name__)
            finally:
                self._state.restore()
        _log.log(logging.INFO if found.is_split else logging.WARNING, "%s", found)
        return found

    def _divided(self, inputs: Any) -> Batch | WholeReason:
        if self.options.microbatches == 1:
            return Batch.whole(inputs)
        return Batch.of(inputs, self.options.batch_dim)

    def _keep_whole(self, inputs: Any, reason: Exception | WholeReason) -> None:
        """From now on, see the batch as one sample."""
        self._why = f"the first batch runs whole: {str(reason).splitlines()[0]}"
        self._batch = Batch.whole(inputs)

    def _plan(self) -> Plan:
        """Make the plan; make it again if it runs out of memory."""
        profile = self._profile()
        if not profile.units:
            return self._leave_unsplit("forward calls no submodules, so there is nowhere to split it")
        try:
            return self._choose(profile)
        except torch.OutOfMemoryError as error:
            text = str(error).partition("\n")[0]
        _log.info("more memory was needed than predicted (%s): planning again", text)
        full = re.search(r"GPU (\d+)", text)  # the error of others does not tell the device
        for index, each in enumerate(self._specs):
            if full is None or each.device == f"cuda:{full[1]}":
                used = self._predicted.get(each.device, each.cap_bytes)
                self._specs[index] = replace(each, cap_bytes=_SHRUNK * used)
        return self._choose(profile)

    def _profile(self) -> Profile:
        """Profile micro-batches of two sizes that fit, or the whole batch if forward fails on parts of it."""
        model, device = self.inner.model, self.output_device
        placed = initial_devices(model, self._specs, self.options, output_device=device)
        place(model, placed, otherwise=device)
        norms = any(isinstance(each, _BatchNorm) for each in model.modules())
        samples, least = self._batch.size, 1
        if norms and samples >= 4:
            least = 2  # with which batch norm trains
        sizes = [max(least, samples // 16), max(least, samples // 4, min(4, samples // 2))]
        while True:
            try:
                return self._measured(placed, sizes)
            except torch.OutOfMemoryError as error:
                if sizes[1] == least:
                    raise ConfigError(
                        f"a forward of {least} samples does not fit on the devices",
                        why=str(error).splitlines()[0],
                        fix="use larger devices or smaller submodules, which can be on different devices",
                    ) from error
                sizes = [max(least, each // 2) for each in sizes]
            except Exception as error:
                if self._batch.size == 1:  # an error of the user's
                    raise
                self._keep_whole(self._batch.inputs, error)
                least, sizes = 1, [1, 1]

    def _measured(self, placed: Mapping[str, torch.device], sizes: Sequence[int]) -> Profile:
        model, device = self.inner.model, self.output_device
        with Staged(model, placed, device) as stages:
            prepare = functools.partial(self._prepared, stages)
            with self._state.watching():
                found = find_units(model, prepare(sizes[0]), samples=sizes[0])
            if found.units:
                found = measure_units(model, found, prepare, sizes=sizes, device=device)
        return replace(found, samples=self._batch.size)

    def _prepared(self, stages: Staged, size: int) -> Callable[[], Any]:
        """Return a function that runs a forward of some samples."""
        self._state.restore()
        inputs = self._batch.trial(size).inputs

        def run() -> Any:
            with stages.batch(is_counted=False):
                return stages.run(self.inner, inputs)

        return run

    def _choose(self, profile: Profile) -> Plan:
        """Return the plan with its measured time; or leave the model unsplit, if this is not slower."""
        search = Search(profile, self._specs, self.options)
        fits = search.fits(self.output_device)
        if fits and self._batch.size == 1:
            return self._leave_unsplit(self._why or "a batch of one sample, or with microbatches=1, is not split")
        plan = replace(search.best(), why=self._why or "shortest predicted step of all splits")
        self._predicted = dict(zip(plan.devices, plan.memory_bytes, strict=True))
        if fits:
            why = f"{plan.why}; the model fits on one device, where backend='ddp' is normally faster"
            place(self.inner.model, {}, otherwise=self.output_device)
            with (
                contextlib.suppress(torch.OutOfMemoryError),  # it does not fit
                Staged(self.inner.model, {}, self.output_device),  # keeps batch norm's statistics
            ):
                plan = replace(plan, unsplit_s=min(self._step_s(self.inner) for _ in range(2)), why=why)
        is_free = self.options.microbatches == "auto" and plan.unsplit_s is not None
        if is_free and min(len(plan.devices), plan.microbatches) == 1:
            return self._leave_unsplit("no split is predicted to be faster than one device")
        if not is_free and all(each.type == "cpu" for each in self._used):
            return plan
        with self.running(plan) as call:
            call.staged.counts = False
            self._step_s(call)  # warms up
            plan = replace(plan, measured_s=self._step_s(call))
            refusal = call.refusal
        if refusal is not None:
            self._keep_whole(self._batch.inputs, refusal)
            return self._leave_unsplit(self._why) if fits else self._plan()
        if is_free and (plan.speedup or 0.0) < _MIN_SPEEDUP:
            took = [f"{(each or 0.0) * 1000:.1f} ms" for each in (plan.unsplit_s, plan.measured_s)]
            return self._leave_unsplit(f"a step takes {took[0]} on one device, and {took[1]} if split")
        return plan

    def _step_s(self, call: Callable[..., Any]) -> float:
        """Return the seconds of forward and backward of the batch."""
        self._state.restore()
        args, kwargs = self._batch.trial(self._batch.size).inputs
        return seconds_of(lambda: run_backward(self.inner.model, call(*args, **kwargs)), self._used)

    def _leave_unsplit(self, why: str) -> Plan:
        return Plan(
            samples=self._batch.size,
            devices=(str(self.output_device),),
            is_split=False,
            why=f"no gain: {why}; consider backend='ddp'",
        )


def initial_devices(
    model: nn.Module, specs: Sequence[DeviceSpec], options: BalancedBackend, *, output_device: torch.device
) -> dict[str, torch.device]:
    """Return the device of each submodule without submodules of a model that is not profiled; {}: the output device.

    The submodules are placed in the order in which they were added, by their bytes: their call order is not known.

    Raises:
        ConfigError: the parameters alone do not fit.
    """
    names = [name for name, each in model.named_modules() if name and not [*each.children()]]
    if not names:
        return {}
    sizes, trained = parameter_bytes(model, names)
    none = torch.zeros_like(sizes)
    profile = Profile(
        units=tuple(names),
        places=tuple(range(len(names))),
        moved=none,
        parameters=sizes,
        trained=trained,
        costs={"forward": Line(none, sizes), "backward": Line(none, none), "saved": Line(none, none)},
    )
    search = Search(profile, [replace(each, speed=each.cap_bytes) for each in specs], options)
    return {} if search.fits(output_device) else search.best().unit_devices()


class Search:
    """The plans that are possible for a profiled model on given devices.

    Stages follow the order of the devices, but the last one is on the first device, which holds the training loop's
    targets: outputs, targets and loss are then on one device, and only the input is copied.

    Attributes:
        needed: bytes of each stage: of parameters, gradients and optimizer state; and those that autograd saves of the
            batch with those that are moved, or another copy of the parameters, with which optimizers compute.
    """

    def __init__(self, profile: Profile, specs: Sequence[DeviceSpec], options: BalancedBackend) -> None:
        self.profile, self._order = profile, [*specs[1:], specs[0]]
        samples, given = profile.samples, options.microbatches
        # More than 16 micro-batches would be smaller than measured.
        counts = (1, 2, 4, 8, 16) if given == "auto" else (given,)
        self._counts = {min(count, samples) for count in counts}
        every = len(profile.places) // _MOST_PLACES + 1
        self._places = [*profile.places[::every], len(profile.units)]
        moved = profile.moved[self._places[:-1], None] * samples
        held = sums(profile.costs["saved"].at(samples), self._places) + moved
        held[:, -1] += profile.output_bytes * samples  # all outputs are joined there
        weights = profile.parameters + (1 + options.optimizer_state) * profile.trained
        self.needed = sums(weights, self._places) + held.maximum(sums(profile.trained, self._places))
        self._moved_s = moved / _BYTES_PER_S

    def fits(self, device: torch.device) -> bool:
        """Return whether the unsplit model fits on a device, which the pipeline uses."""
        return any(self.needed[0, -1] <= each.cap_bytes for each in self._order if each.device == str(device))

    def best(self) -> Plan:
        """Return the plan with the shortest predicted step.

        Raises:
            ConfigError: no split fits the devices.
        """
        found = [self._plan(m, weight) for m in self._counts for weight in _BACKWARD_WEIGHTS]
        return min(found, key=lambda each: each.predicted_s or 0.0)

    def _plan(self, m: int, weight: float) -> Plan:
        """Return a good plan with m micro-batches."""
        part, moved_s = self.profile.samples / m, self._moved_s / m
        phases = [sums(self.profile.costs[phase].at(part), self._places) for phase in ("forward", "backward")]
        seconds = phases[0] + weight * phases[1]
        bounds = split(
            (seconds / spec.speed + (1 + weight) * moved_s).masked_fill(self.needed > spec.cap_bytes, math.inf)
            for spec in self._order
        )
        if bounds is None:
            bounds = split([self.needed] * len(self._order)) or ()
            size = max(float(self.needed[pair]) for pair in itertools.pairwise(bounds) if pair[0] < pair[1])
            raise ConfigError(
                f"the model does not fit on {', '.join(each.device for each in self._order)}",
                why=f"the best split needs at least {size / 2**20:.1f} MiB ({size:.0f} bytes) on every device",
                fix="use more or larger devices or a smaller batch, raise memory=, or save memory: "
                "torch.utils.checkpoint in the model, the true optimizer_state=",
            )
        pairs = zip(self._order, itertools.pairwise(bounds), strict=True)
        stages = [(spec, *pair) for spec, pair in pairs if pair[0] < pair[1]]
        forward_s, backward_s = (
            tuple(float(phase[begin, end] / spec.speed + moved_s[begin]) for spec, begin, end in stages)
            for phase in phases
        )
        return Plan(
            samples=self.profile.samples,
            units=self.profile.units,
            bounds=(0, *(self._places[end] for *_, end in stages)),
            devices=tuple(spec.device for spec, *_ in stages),
            microbatches=m,
            forward_s=forward_s,
            backward_s=backward_s,
            memory_bytes=tuple(float(self.needed[begin, end]) for _, begin, end in stages),
            predicted_s=step_s(forward_s, backward_s, m),
        )


def step_s(forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int) -> float:
    """Return the predicted seconds of a step, given the seconds of each stage for one micro-batch."""
    phases = (forward_s, backward_s)
    return sum(math.fsum(each) + (microbatches - 1) * max(each) for each in phases)
