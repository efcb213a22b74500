"""Micro-batches through the unmodified model: hooks move the arguments of units to their devices.

    model.forward    a ──── b ──── c ──── d        ordinary Python, in the caller's thread
    device           0 │      1      │   0         of the unit (a submodule) that is about to run

Autograd records one ordinary graph, in which copies between devices are differentiable. The devices
run at the same time because each has its own queue. A module that an activation checkpoint calls
again in backward runs there, too.

Between module calls, an operation may get operands of two stages (`x + second(first(x))`). A
context moves the operands of each operation. It slows operations down, and torch.compile compiles
nothing in it, so that a model without such an operation runs without the context:

    a forward that may run again     torch's error shows such an operation; the forward begins
                                     again, in the context
    the first forward of a kind      runs in the context, which shows such an operation
    that may change state
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from parallelize.backends.balanced.batchnorm import BatchNorms
from parallelize.backends.balanced.transfer import Copies
from parallelize.run.generators import RNGState

OTHER_DEVICE = re.compile("same device|different devices|two devices")
"""In torch's errors of operations with operands on several devices."""


class _Forward(Enum):
    """What runs now.

    NONE ──┬──> UNITS_MOVED ──────┬──> NONE
           └──> OPERANDS_MOVED ───┘
    """

    NONE = auto()
    """No forward; an activation checkpoint may call modules again, in backward."""
    UNITS_MOVED = auto()
    """A forward in which the arguments of a stage's first unit are moved."""
    OPERANDS_MOVED = auto()
    """A forward in which the arguments of each unit and each operation are moved."""


class _Hook(functools.partial[Any]):
    """Hook of a module of the user's model; in copies and pickles of the module it does nothing."""

    def __reduce__(self) -> Any:
        # A function that takes any arguments, and that is loaded without this package.
        return getattr, (contextlib.nullcontext, "__exit__")


class Staged(contextlib.ExitStack):
    """A model whose units are on devices; a context, whose end removes the hooks from the model.

    Args:
        model: has its parameters there.
        unit_devices: name of a unit -> the device to which its arguments are moved.
        output_device: where the inputs come from, and where the outputs are needed.

    Attributes:
        norms: the model's batch norms.
        input_device: device of the first unit.
        output_device: as given.
        devices: all of these.
    """

    def __init__(
        self,
        model: nn.Module,
        unit_devices: Mapping[str, torch.device],
        output_device: torch.device,
    ) -> None:
        super().__init__()
        self.devices = {output_device, *unit_devices.values()}
        self.output_device = output_device
        self.input_device = next(iter(unit_devices.values()), output_device)
        self.norms = BatchNorms(model)
        self._copies = Copies(self.devices, output_device)
        self._forward = _Forward.NONE
        if len(self.devices) > 1:
            for name, device in unit_devices.items():
                hook = _Hook(self._before_unit, device)
                unit = model.get_submodule(name)
                handle = unit.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
                self.callback(handle.remove)
        for norm in self.norms.modules:
            before = _Hook(self.norms.before)
            after = _Hook(self.norms.after)
            self.callback(norm.register_forward_pre_hook(before).remove)
            handle = norm.register_forward_hook(
                after, prepend=True, always_call=True, with_kwargs=True
            )
            self.callback(handle.remove)

    @contextlib.contextmanager
    def batch(self, *, is_counted: bool = True) -> Iterator[None]:
        """Run the micro-batches of one batch inside.

        Args:
            is_counted: whether the batch updates batch norm's statistics, if it succeeds.
        """
        has_succeeded = False
        try:
            yield
            has_succeeded = True
        finally:
            self._copies.forget()
            self.norms.update(is_counted=is_counted and has_succeeded)

    def run(self, call: Callable[..., Any], inputs: Any) -> Any:
        """Return the output of a model's forward for one micro-batch.

        Forward may begin again, with the same random numbers: it changes no state, or the caller
        restores what it changes.

        Args:
            call: the forward.
            inputs: its args and kwargs.
        """
        if len(self.devices) == 1 or self._copies.meets_other_devices:
            return self.run_once(call, inputs)
        random_numbers = RNGState(self.devices)
        try:
            return self.run_once(call, inputs)
        except RuntimeError as error:
            if not OTHER_DEVICE.search(str(error)):
                raise
        self._copies.meets_other_devices = True
        self.norms.forget_microbatch()
        random_numbers.restore()
        return self.run_once(call, inputs)

    def run_once(self, call: Callable[..., Any], inputs: Any, *, is_first: bool = False) -> Any:
        """As `run`, for a forward that may change state, and never begins again.

        Args:
            call: the forward.
            inputs: its args and kwargs.
            is_first: whether no forward like this one has run, which would have shown whether
                operations have operands on several devices.
        """
        self.norms.begin_microbatch()
        self._copies.device = self.input_device
        moving: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self._forward = _Forward.UNITS_MOVED
        if len(self.devices) > 1 and (is_first or self._copies.meets_other_devices):
            moving = self._copies.moving_operands()
            self._forward = _Forward.OPERANDS_MOVED
        current_device = None
        if len(self.devices) > 1 and torch.accelerator.is_available():
            # Units set other devices as the current one.
            current_device = torch.accelerator.current_device_index()
        try:
            with moving:
                args, kwargs = self._copies.moved(inputs, self.input_device)
                return call(*args, **kwargs)
        finally:
            self._forward = _Forward.NONE
            if current_device is not None:
                torch.accelerator.set_device_index(current_device)

    def _before_unit(self, device: torch.device, _unit: nn.Module, args: Any, kwargs: Any) -> Any:
        """Move the arguments of a unit that is about to run to its device; a hook.

        Returns:
            (args, kwargs), or None: they stay as they are.
        """
        if torch.compiler.is_compiling():
            return None
        if self._forward is _Forward.NONE:
            moved = self._copies.moved((args, kwargs), device)
            # No batch will end, which would free the copies.
            self._copies.forget()
            return moved
        is_same_stage = device == self._copies.device
        if is_same_stage and self._forward is _Forward.UNITS_MOVED:
            # The arguments are there: units of the stage have computed them.
            return None
        if not is_same_stage:
            self._copies.device = device
            if device.type != "cpu":
                # Some kernels run on the current device, and not on that of their operands.
                torch.accelerator.set_device_index(device.index)
        return self._copies.moved((args, kwargs), device)
