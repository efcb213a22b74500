"""A model, and the random generators, as they were before they were tried out."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from parallelize.backends.balanced.microbatch_rng import default_generator

__all__ = ["Before", "changes", "draws_python", "draws_torch", "evaluating", "untouched"]


class Before:
    """The buffers of a model, and the generators, as they are now.

    Args:
        model: whose parameters nobody changes meanwhile.
        devices: whose generators count, besides the CPU's.
    """

    def __init__(self, model: nn.Module, devices: frozenset[torch.device]) -> None:
        self._generators = [default_generator(device) for device in {torch.device("cpu"), *devices}]
        self._states = [generator.get_state() for generator in self._generators]
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def has_drawn(self) -> bool:
        """Whether somebody has drawn random numbers since."""
        pairs = zip(self._generators, self._states, strict=True)
        return any(not torch.equal(generator.get_state(), state) for generator, state in pairs)

    def restore(self) -> None:
        """Go back."""
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                module._buffers[name] = buffer
                buffer.copy_(value)
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)


@contextlib.contextmanager
def untouched(model: nn.Module, devices: frozenset[torch.device]) -> Iterator[None]:
    """Run a model as often as you like; buffers, modes and generators are as before at the end.

    Args:
        model: whose parameters nobody changes meanwhile.
        devices: whose generators count, besides the CPU's.
    """
    before = Before(model, devices)
    try:
        yield
    finally:
        before.restore()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, without gradients; each module's mode is as before at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def draws_torch(call: Callable[[], object], devices: frozenset[torch.device]) -> bool:
    """Whether a call draws from torch's generators."""
    generators = [default_generator(device) for device in {torch.device("cpu"), *devices}]
    before = [generator.get_state() for generator in generators]
    call()
    return any(not torch.equal(a, b.get_state()) for a, b in zip(before, generators, strict=True))


def draws_python(call: Callable[[], object]) -> bool:
    """Whether a call draws from Python's generator, or numpy's."""
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate(), numpy and str(numpy.random.get_state())
    call()
    return before != (random.getstate(), numpy and str(numpy.random.get_state()))


def changes(model: nn.Module, call: Callable[[], object]) -> list[str]:
    """Names of attributes and buffers that a call changes on the modules; batch norm's statistics do not count."""
    before = _state(model)
    call()
    after = _state(model)
    return sorted(name for name in after if name not in before or not _is_same(before[name], after[name]))


def _state(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, value in module.__dict__.items():
            if not name.startswith(
                ("_parameters", "_buffers", "_modules", "_forward", "_backward", "_is_full_backward")
            ):
                found[dot + name] = (value, len(value)) if isinstance(value, (list, dict, set)) else value
        if not isinstance(module, _BatchNorm):
            buffers = {name: each for name, each in module._buffers.items() if each is not None}
            found.update({f"{dot}{name}": (each, each._version) for name, each in buffers.items()})
    return found


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:
        return one[0] is other[0] and one[1] == other[1]
    return one is other or (isinstance(one, (bool, int, float, str)) and type(one) is type(other) and one == other)
