"""Side effects of forward: detects random numbers and state stored on the model, restores RNG states and buffers."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from parallelize.runtime.containers import map_leaves
from parallelize.runtime.gradients import gradient_version

__all__ = [
    "ModelState",
    "RNGState",
    "changed_attributes",
    "changed_gradients",
    "clone_inference_tensors",
    "default_generator",
    "python_rng_state",
]


def default_generator(device: torch.device) -> torch.Generator:
    """Return the global generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    generator: torch.Generator = module.default_generators[device.index or 0]
    return generator


_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "forward"})
"""Attributes that torch sets on every module, such as its hooks, and the forward that a block replaces."""


class RNGState:
    """States of the global generators of the CPU and of `devices`."""

    def __init__(self, devices: Collection[torch.device]) -> None:
        self._generators = [default_generator(device) for device in {torch.device("cpu"), *devices}]
        self._states = [generator.get_state() for generator in self._generators]

    def has_changed(self) -> bool:
        """Return whether random numbers were drawn since then."""
        pairs = zip(self._generators, self._states, strict=True)
        return any(not torch.equal(generator.get_state(), state) for generator, state in pairs)

    def restore(self) -> None:
        """Restore the states."""
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)


class ModelState:
    """Copy of a model's buffers, its modules' modes and other numbers, its gradients, and RNG states of `devices`."""

    def __init__(self, model: nn.Module, devices: Collection[torch.device]) -> None:
        self.rng = RNGState(devices)
        self._gradients = [(each, each.grad) for each in model.parameters() if each.is_leaf]
        self._numbers = [
            (module, {name: value for name, value in vars(module).items() if type(value) in {bool, int, float}})
            for module in model.modules()
        ]
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def restore(self) -> None:
        """Restore buffers, numbers, gradients that were replaced, and RNG states."""
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
                buffer.copy_(value)
        for parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for module, numbers in self._numbers:
            vars(module).update(numbers)
        self.rng.restore()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state on exit."""
        try:
            yield
        finally:
            self.restore()


def clone_inference_tensors(inputs: Any) -> Any:
    """Return the inputs, with clones of tensors made in inference mode: autograd cannot save these."""
    return map_leaves(lambda x: x.clone() if isinstance(x, torch.Tensor) and x.is_inference() else x, inputs)


def python_rng_state() -> Any:
    """Return the states of the global generators of Python's `random` and of NumPy."""
    numpy: Any = sys.modules.get("numpy")
    return random.getstate(), numpy and str(numpy.random.get_state())


@contextlib.contextmanager
def changed_attributes(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list that on exit has the names of the attributes and buffers that changed, except batch norm's."""
    changed: list[str] = []
    before = _state(model)
    yield changed
    after = _state(model)
    changed += sorted(name for name in after if name not in before or not _is_same(before[name], after[name]))


@contextlib.contextmanager
def changed_gradients(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list that on exit has the names of the parameters whose gradients changed."""
    changed: list[str] = []
    before = {name: _gradient_version(each) for name, each in model.named_parameters()}
    yield changed
    changed += [name for name, each in model.named_parameters() if _gradient_version(each) != before.get(name)]


def _gradient_version(parameter: torch.Tensor) -> tuple[int, int] | None:
    # Not of a leaf: torch.func.functional_call has replaced the parameter.
    return None if not parameter.is_leaf or parameter.grad is None else gradient_version(parameter.grad)


def _state(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, value in module.__dict__.items():
            if name not in _OF_EVERY_MODULE:
                found[dot + name] = (value, len(value)) if isinstance(value, (list, dict, set)) else value
        if not isinstance(module, _BatchNorm):
            named = module.named_buffers(recurse=False)
            found.update({f"{dot}{name}": (each, each._version) for name, each in named})
    return found


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:
        return one[0] is other[0] and one[1] == other[1]
    return one is other or (isinstance(one, (bool, int, float, str)) and type(one) is type(other) and one == other)
