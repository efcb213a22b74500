"""Planner: makes the plan from a model and its first batch.

1  place      put the model on the output device; if it does not fit there, split it by the bytes of
              its parameters
2  profile    find the units, and time each of them once, at the size of a micro-batch
3  split      choose the stages of which the slowest one is fastest, under every device's memory
              limit; if the plan is not predicted to be faster than one device, do not split

The user's loop computes the loss of the full batch, so all forward passes run before all backward
passes, which begin with the last micro-batch. Each phase fills and drains the pipeline. With k = 3
stages and m = 4 micro-batches:

    stage 0   0 1 2 3                         3 2 1 0
    stage 1     0 1 2 3          loss       3 2 1 0
    stage 2       0 1 2 3                 3 2 1 0
              ───────────── time ──────────────────────>

    step = sum of all stages' forward times  + (m - 1) * the slowest stage's forward time
         + sum of all stages' backward times + (m - 1) * the slowest stage's backward time

The time in which tensors are moved to a stage counts as time of this stage. With k equal stages,
and nothing to move, the pipeline is at best k * m / (m + k - 1) times as fast as one device: with
m = 4 * k micro-batches, which is the default, at least 0.8 * k times. Starting backward passes
before all forward passes have ended (1F1B) would need the loss inside the pipeline, and save memory
but not time.

Glossary:

    unit, chain, place   see `profiling`: what is not split, all of it, where it may be split
    stage                the units from one place to another, which run on one device
    step                 forward and backward of a batch
    whole                a batch runs whole if it is not divided into micro-batches
    unsplit              a model that runs on one device, as without the library
    output device        has the inputs of the model, its outputs, and the user's targets

The model's forward hooks run during planning. Buffers and RNG states are restored at the end;
gradients do not change.

Source: GPipe, https://arxiv.org/abs/1811.06965; torchgpipe, https://arxiv.org/abs/2004.09910
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import operator
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parallelize.backends.balanced.microbatch import Staged
from parallelize.backends.balanced.partition import split, sums
from parallelize.backends.balanced.plan import Plan
from parallelize.backends.balanced.profiling import (
    Chain,
    DeviceSpec,
    Measurement,
    Profile,
    UnitMeter,
    device_specs,
    find_chain,
    parameter_bytes,
    profile_of,
    seconds_of_adding_a_byte,
)
from parallelize.backends.balanced.transfer import place
from parallelize.backends.batches import Batch, WholeReason
from parallelize.backends.model_state import ModelState
from parallelize.errors import ConfigError
from parallelize.plugins.base import Arguments, Inner
from parallelize.torch_patches.compile import run_uncompiled

if TYPE_CHECKING:
    from parallelize.backends.balanced.plugin import BalancedBackend

_log = logging.getLogger(__name__)

_MIN_SPEEDUP = 1.05
"""A model that fits on one device is split only if the predicted speedup is at least this."""
_MICROBATCHES_PER_STAGE = 4
_REPEATS = 3
"""Timed forwards; the median of each unit's times counts."""
_BYTES_PER_S = 2e10
"""Rate at which tensors are taken to move between devices: that of PCIe."""
_MOST_PLACES = 1000
"""In longer chains, only every other unit may begin a stage, or every third one, ..."""


@dataclass(kw_only=True)
class Planner:
    """Makes the plan of one model.

    Args:
        inner: holds the model.
        devices: in the user's order.
        output_device: device of the inputs and of the outputs.
        options: the user's options.
    """

    inner: Inner
    devices: Sequence[torch.device]
    output_device: torch.device
    options: BalancedBackend

    def plan(self, inputs: Arguments) -> Plan:
        """Return the plan, made from one batch, given by the arguments of the model.

        Raises:
            ConfigError: the model does not fit on the devices.
        """
        model = self.inner.model
        state = ModelState(model, dict.fromkeys([self.output_device, *self.devices]))
        with (
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            warnings.catch_warnings(),
        ):
            # The step itself gives forward's warnings.
            warnings.simplefilter("ignore")
            try:
                plan = run_uncompiled(lambda: self._plan(inputs, state))
            finally:
                state.restore()
        plan = replace(plan, model=type(model).__name__)
        level = logging.INFO if plan.is_split else logging.WARNING
        _log.log(level, "%s", plan)
        return plan

    def _plan(self, inputs: Arguments, state: ModelState) -> Plan:
        """Profile the model on a batch, and choose."""
        model = self.inner.model
        specs = device_specs(self.devices, memory=self.options.memory, model=model)
        placed = initial_devices(model, specs, self.options, output_device=self.output_device)
        place(model, placed, otherwise=self.output_device)
        why = ""
        with Staged(model, placed, self.output_device) as stages:
            trial = _Trial(inner=self.inner, stages=stages, state=state)
            profile = self._profile_of_parts(trial, inputs)
            if isinstance(profile, str):
                why = f"the first batch runs whole: {profile}"
                profile = trial.profile(Batch.whole(inputs), 1)
                # One sample has no parts, on which forward could fail.
                assert isinstance(profile, Profile)
        return self._choose(profile, specs, why)

    def _profile_of_parts(self, trial: _Trial, inputs: Arguments) -> Profile | str:
        """Return the costs of micro-batches, or why the batch runs whole."""
        microbatches = self.options.microbatches
        if microbatches == 1:
            return trial.profile(Batch.whole(inputs), 1)
        batch = Batch.of(inputs, self.options.batch_dim)
        if isinstance(batch, WholeReason):
            return _first_line(batch)
        if batch.size == 0:
            return "it has no samples"
        if microbatches == "auto":
            microbatches = _MICROBATCHES_PER_STAGE * len(self.devices)
        return trial.profile(batch, microbatches)

    def _choose(self, profile: Profile, specs: Sequence[DeviceSpec], why: str) -> Plan:
        """Return the plan that is predicted to be fastest: to split the model, or not to.

        Args:
            profile: of the model.
            specs: the devices.
            why: why the batch runs whole; "": it does not.
        """
        if not profile.chain.units:
            return self._leave_unsplit(
                profile, "forward calls no submodules, so there is nowhere to split it"
            )
        search = Search(profile, specs, self.options, self.output_device)
        unsplit_s = search.unsplit_s()
        if unsplit_s is None:
            return replace(search.best(), why=why or "the fastest split that fits")
        if profile.microbatches == 1:
            return self._leave_unsplit(
                profile, why or "a batch of one micro-batch is no faster on several devices"
            )
        plan = search.best()
        # The host issues the micro-batches one after another, whatever the devices do.
        split_s = max(plan.predicted_s or 0.0, profile.host_share * unsplit_s)
        if self.options.microbatches == "auto" and unsplit_s < _MIN_SPEEDUP * split_s:
            return self._leave_unsplit(
                profile,
                f"a step is predicted to take {1000 * unsplit_s:.1f} ms on one device, and "
                f"{1000 * split_s:.1f} ms if split",
            )
        return replace(
            plan,
            unsplit_s=unsplit_s,
            predicted_s=split_s,
            why="the fastest split; the model fits on one device, where backend='ddp' is normally "
            "faster",
        )

    def _leave_unsplit(self, profile: Profile, why: str) -> Plan:
        return Plan(
            samples=profile.samples,
            devices=(str(self.output_device),),
            why=f"no gain: {why}; consider backend='ddp'",
        )


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """Forwards of a model before it is split.

    Args:
        inner: holds the model.
        stages: the model, on as many devices as its parameters need.
        state: of the model, with which each trial begins.
    """

    inner: Inner
    stages: Staged
    state: ModelState

    def profile(self, batch: Batch, microbatches: int) -> Profile | str:
        """Return the costs of micro-batches, or of smaller ones if these do not fit.

        If forward fails on a part of the batch, the error is returned as text.

        Args:
            batch: the first one.
            microbatches: how many it has, if it has as many samples.

        Raises:
            ConfigError: the smallest micro-batch does not fit.
        """
        least = min(batch.size, self.stages.norms.least_samples)
        microbatches = min(microbatches, batch.size // least)
        size = max(least, round(batch.size / microbatches))
        while True:
            try:
                return self._measured(batch, microbatches, size)
            except torch.OutOfMemoryError as error:
                if size <= least:
                    raise ConfigError(
                        f"a forward of {size} samples does not fit on the devices",
                        why=_first_line(error),
                        fix="use larger devices or smaller submodules, which can be on different "
                        "devices",
                    ) from error
            except Exception as error:
                # Without the library, forward would fail on all samples, too.
                if size == batch.size:
                    raise
                text = _first_line(error)
                return f"in a trial with {size} of {batch.size} samples: {text}"
            size = max(least, size // 2)

    def _measured(self, batch: Batch, microbatches: int, size: int) -> Profile:
        """Run some forwards of a micro-batch, and return what they cost."""
        model, output_device = self.inner.model, self.stages.output_device
        forwards = batch.size / size

        def forward() -> Any:
            with self.stages.batch(is_counted=False):
                return self.stages.run(self.inner, batch.trial(size).inputs)

        self.state.restore()
        with self.state.watching():
            chain = find_chain(model, forward, forwards=forwards)
        meter = UnitMeter(model, chain.units, output_device)
        return profile_of(
            chain,
            self._measure(meter, batch.trial(size).inputs),
            forwards=forwards,
            samples=batch.size,
            microbatches=microbatches,
            adding_s=seconds_of_adding_a_byte(output_device),
        )

    def _measure(self, meter: UnitMeter, inputs: Arguments) -> list[Measurement]:
        """Run micro-batches of one batch, the first of which warms up.

        To the session they are one forward: mixed precision casts parameters once for all of them.
        """
        self.state.restore()
        # What is cast once for all micro-batches is to be cast again in the first one.
        torch.clear_autocast_cache()
        call = self.inner.bind_method(self.inner.method, self.inner.model)

        def run(_model: nn.Module, *args: Any, **kwargs: Any) -> list[Measurement]:
            forwards: list[Callable[[], Any]] = []
            for _ in range(1 + _REPEATS):
                # A forward may change its inputs in place.
                copies = Batch.whole((args, kwargs)).trial(1).inputs
                forwards.append(functools.partial(self.stages.run, call, copies))
            return meter.measure(forwards)

        args, kwargs = inputs
        method = types.MethodType(run, self.inner.model)
        with self.stages.batch(is_counted=False):
            measurements: list[Measurement] = self.inner.session.forward(method, *args, **kwargs)
        return measurements


def _first_line(value: object) -> str:
    """Return the first line of an error or a reason; the class of an error without a text."""
    return str(value).partition("\n")[0] or type(value).__name__


def initial_devices(
    model: nn.Module,
    specs: Sequence[DeviceSpec],
    options: BalancedBackend,
    *,
    output_device: torch.device,
) -> dict[str, torch.device]:
    """Return the device of each submodule without submodules of a model that is not profiled.

    The submodules are placed in the order in which they were added, by their bytes: their call
    order is not known. If the model fits on the output device, the result is {}.

    Raises:
        ConfigError: the parameters alone do not fit.
    """
    names: list[str] = []
    for name, module in model.named_modules():
        is_leaf = next(module.children(), None) is None
        if name and is_leaf:
            names.append(name)
    if not names:
        return {}
    parameters, trained = parameter_bytes(model, names)
    none = torch.zeros_like(parameters)
    chain = Chain(
        units=tuple(names),
        places=tuple(range(len(names))),
        moved=none,
        parameters=parameters,
        trained=trained,
    )
    # A device is to get as many bytes as it has: bytes for seconds, and limits for speeds.
    profile = Profile(
        chain=chain,
        samples=1,
        microbatches=1,
        forward_s=parameters,
        backward_s=none,
        saved=none,
    )
    by_bytes = [replace(spec, speed=spec.cap_bytes) for spec in specs]
    search = Search(profile, by_bytes, options, output_device)
    if search.unsplit_s() is not None:
        return {}
    return search.best().unit_devices()


class Search:
    """The plans that are possible for a profiled model on given devices.

    Stages follow the order of the devices. Two orders are tried. In the first one, the last stage
    is on the first device, which holds the training loop's targets, so that only the inputs are
    copied; in the other one, the first stage is there, and only the outputs are copied:

        devices    1  2  3  0         the inputs go from device 0 to 1
                   0  1  2  3         the outputs go from device 3 to 0

    Matrices are those of stages in `partition`. With n places, [begin, end] is a stage from place
    `begin` to just before place `end`:

                 end  0    1    2    3
        begin 0       -    0    01   012
              1       -    -    1    12        the units of each stage, with n = 3 places
              2       -    -    -    2

    Args:
        profile: of the model.
        specs: the devices, in the user's order.
        options: the user's options.
        output_device: device of the inputs and of the joined outputs.
    """

    def __init__(
        self,
        profile: Profile,
        specs: Sequence[DeviceSpec],
        options: BalancedBackend,
        output_device: torch.device,
    ) -> None:
        chain = profile.chain
        self._profile = profile
        self._specs = specs
        self._output_device = str(output_device)
        # The places, and the end of the chain. Length n + 1.
        every = len(chain.places) // _MOST_PLACES + 1
        self._places = [*chain.places[::every], len(chain.units)]
        # Bytes to move to the stage that begins at a place. Shape (n, 1).
        self._moved = chain.moved[self._places[:-1], None]
        # All others are matrices of stages. Shape (n, n + 1).
        self._forward_s = sums(profile.forward_s, self._places)
        self._backward_s = sums(profile.backward_s, self._places)
        self._held = sums(profile.saved, self._places) + self._moved
        self._trained = sums(chain.trained, self._places)
        # Parameters, their gradients, and the state of the optimizer.
        weights = chain.parameters + (1 + options.optimizer_state) * chain.trained
        self._weights = sums(weights, self._places)

    def needed(self, spec: DeviceSpec) -> torch.Tensor:
        """Return the bytes that each stage needs on a device. Shape (n, n + 1).

        A stage holds its parameters, gradients and optimizer state. Beside them, it holds what
        autograd saves of the batch, and what is moved to it; or, in the step of the optimizer,
        another copy of the parameters.
        """
        held = self._held.clone()
        if spec.device == self._output_device:
            # All outputs are joined there, and the inputs are there.
            held += self._profile.chain.loss_bytes
            held[0] -= self._moved[0]
        else:
            # The outputs of the last stage, and their gradients.
            held[:, -1] += 2 * self._profile.chain.output_bytes
        return self._weights + held.maximum(self._trained)

    def unsplit_s(self) -> float | None:
        """Return the predicted seconds of a step on the output device; None: it does not fit."""
        for spec in self._specs:
            is_output_device = spec.device == self._output_device
            if is_output_device and self.needed(spec)[0, -1] <= spec.cap_bytes:
                step_of_microbatch_s = float(self._forward_s[0, -1] + self._backward_s[0, -1])
                return step_of_microbatch_s * self._profile.microbatches / spec.speed
        return None

    def best(self) -> Plan:
        """Return the plan with the shortest predicted step.

        Raises:
            ConfigError: no split fits the devices.
        """
        first, *rest = self._specs
        plans: list[Plan] = []
        for order in ([*rest, first], [first, *rest]):
            plan = self._best_in(order)
            if plan is not None:
                plans.append(plan)
        if not plans:
            raise self._does_not_fit()
        # If both take as long, it is the first order.
        return min(plans, key=operator.attrgetter("predicted_s"))

    def _best_in(self, order: Sequence[DeviceSpec]) -> Plan | None:
        """Return the plan whose slowest stage is the fastest; None: no split fits."""
        profile = self._profile
        # Shape (n, 1). The inputs of the batch, at place 0, are moved at once.
        moved_s = self._moved / profile.microbatches / _BYTES_PER_S
        moved_s[0] = 0.0
        slowest_s, bounds = split(self._costs(spec, moved_s) for spec in order)
        if math.isinf(slowest_s):
            return None
        # Of each stage.
        devices: list[str] = []
        ends: list[int] = []
        forward_s: list[float] = []
        backward_s: list[float] = []
        memory_bytes: list[float] = []
        for spec, (begin, end) in zip(order, itertools.pairwise(bounds), strict=True):
            if begin < end:
                moving_s = float(moved_s[begin])
                devices.append(spec.device)
                ends.append(self._places[end])
                forward_s.append(float(self._forward_s[begin, end]) / spec.speed + moving_s)
                backward_s.append(float(self._backward_s[begin, end]) / spec.speed + moving_s)
                memory_bytes.append(float(self.needed(spec)[begin, end]))
        predicted_s = step_s(forward_s, backward_s, profile.microbatches)
        return Plan(
            samples=profile.samples,
            units=profile.chain.units,
            bounds=(0, *ends),
            devices=tuple(devices),
            microbatches=profile.microbatches,
            forward_s=tuple(forward_s),
            backward_s=tuple(backward_s),
            memory_bytes=tuple(memory_bytes),
            predicted_s=predicted_s + self._copying_s(devices[0], devices[-1]),
        )

    def _costs(self, spec: DeviceSpec, moved_s: torch.Tensor) -> torch.Tensor:
        """Return the seconds of each stage on a device, infinite if it does not fit.

        Args:
            spec: the device.
            moved_s: seconds to move the arguments of a micro-batch to a stage. Shape (n, 1).

        Returns:
            a matrix of stages. Shape (n, n + 1).
        """
        seconds = (self._forward_s + self._backward_s) / spec.speed + 2 * moved_s
        return seconds.masked_fill(self.needed(spec) > spec.cap_bytes, math.inf)

    def _copying_s(self, first_device: str, last_device: str) -> float:
        """Return the seconds to copy a batch to the first stage, and its outputs from the last.

        The gradient of the outputs is copied, too.
        """
        copied = 0.0
        if first_device != self._output_device:
            copied += float(self._moved[0])
        if last_device != self._output_device:
            copied += 2 * self._profile.chain.output_bytes
        return copied / _BYTES_PER_S

    def _does_not_fit(self) -> ConfigError:
        """Return the error that says how many bytes every device would need."""
        size, _ = split(self.needed(spec) for spec in self._specs)
        return ConfigError(
            f"the model does not fit on {', '.join(spec.device for spec in self._specs)}",
            why=f"the best split needs at least {size / 2**20:.1f} MiB ({size:.0f} bytes) on every "
            "device",
            fix="use more or larger devices or a smaller batch, raise memory=, or save memory: "
            "torch.utils.checkpoint in the model, the true optimizer_state=",
        )


def step_s(forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int) -> float:
    """Return the predicted seconds of a step, given the seconds of each stage for one micro-batch.

    See the drawing at the top of this file.
    """
    slowest_s = max(forward_s) + max(backward_s)
    return math.fsum((*forward_s, *backward_s)) + (microbatches - 1) * slowest_s
