"""Micro-batches through the unmodified model: hooks bring the arguments of each unit to the unit's device.

    model.forward    a ──── b ──── c ──── d        ordinary Python, in the caller's thread
    device           0 │      1      │   0         of the unit (a submodule) that is about to run

Autograd records one ordinary graph, in which copies between devices are differentiable. The devices run at the same
time because each has its own queue. A module that an activation checkpoint calls again in backward runs there, too.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from parallelize.backends.balanced.batchnorm import BatchNorms
from parallelize.backends.balanced.transfer import Copies
from parallelize.backends.model_state import named_tensors

__all__ = ["OTHER_DEVICE", "Staged"]

OTHER_DEVICE = re.compile("same device|different devices|two devices")
"""In torch's errors of operations with operands on several devices."""


class _Hook(functools.partial[Any]):
    """Hook of a module of the user's model; copies and pickles of the module have a function that does nothing."""

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext, "__exit__")  # takes any arguments, and loads without this package


class Staged(contextlib.ExitStack):
    """A model whose units are on devices; a context, whose end removes the hooks from the model.

    Args:
        model: has its parameters there.
        unit_devices: name of a unit -> the device to which its arguments are moved.
        output_device: device of the inputs and of the outputs.

    Attributes:
        tensors: the model's parameters and buffers.
        counts: whether batches update batch norm's statistics.
        inside: its submodules, by name.
        input_device: that of the first unit.
        output_device: as given.
        devices: all of these.
    """

    def __init__(self, model: nn.Module, unit_devices: Mapping[str, torch.device], output_device: torch.device) -> None:
        super().__init__()
        self.devices, self.output_device = {output_device, *unit_devices.values()}, output_device
        self.input_device = next(iter(unit_devices.values()), output_device)
        self.norms, (_, *self.inside) = BatchNorms(model), model.named_modules()
        self.tensors, self.counts = named_tensors(model), True
        self._is_running = False
        self._copies = Copies(self.devices, output_device)
        self._moves_operands = False  # whether an operation between module calls has had operands on several devices
        for name, device in unit_devices.items() if len(self.devices) > 1 else ():
            hook = _Hook(self._before, device)
            unit = model.get_submodule(name)
            self.callback(unit.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove)
        for norm in self.norms.modules:
            self.callback(norm.register_forward_pre_hook(_Hook(self.norms.before)).remove)
            after = norm.register_forward_hook(_Hook(self.norms.after), prepend=True, always_call=True)
            self.callback(after.remove)

    @contextlib.contextmanager
    def batch(self, *, is_counted: bool = True) -> Iterator[None]:
        """Run the micro-batches of one batch inside; update batch norm's statistics if it is counted and succeeds."""
        is_done = False
        try:
            yield
            is_done = is_counted and self.counts
        finally:
            self._copies.known.clear()
            self.norms.update(is_counted=is_done)

    def run(self, call: Callable[..., Any], inputs: Any) -> Any:
        """Return the output of a model's forward for one micro-batch."""
        current = None
        if len(self.devices) > 1 and torch.accelerator.is_available():
            current = torch.accelerator.current_device_index()
        self.norms.moments.append({})
        self._copies.device, self._is_running = self.input_device, True
        try:
            with self._copies.moving_operands() if self._moves_operands else contextlib.nullcontext():
                args, kwargs = self._copies.moved(inputs, self.input_device)
                return call(*args, **kwargs)
        except RuntimeError as error:
            if self._moves_operands or not OTHER_DEVICE.search(str(error)):
                raise
            self._moves_operands = True
        finally:
            self._is_running = False
            if current is not None:
                torch.accelerator.set_device_index(current)
        self.norms.moments.pop()
        return self.run(call, inputs)

    def _before(self, device: torch.device, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        is_same_stage = self._is_running and device == self._copies.device
        if is_same_stage and not self._moves_operands:
            return None  # its operands are there
        if self._is_running and not is_same_stage:
            self._copies.device = device
            if device.type != "cpu":  # for kernels that do not choose the device of their operands
                torch.accelerator.set_device_index(device.index)
        moved = self._copies.moved((args, kwargs), device)
        if not self._is_running:
            self._copies.known.clear()
        return moved
