"""States of the global generators of random numbers: torch's, of each device, and those of `random` and NumPy."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["GeneratorAccess", "RNGState", "default_generator", "global_generators"]


def default_generator(device: torch.device) -> torch.Generator:
    """Return the global generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    generator: torch.Generator = module.default_generators[device.index or 0]
    return generator


class GeneratorAccess(NamedTuple):
    """Functions of a generator: they return its state, set it to a state, and seed it."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    seed: Callable[[int], Any]


def global_generators(
    devices: Collection[torch.device] | None, *, has_python: bool = True
) -> dict[str, GeneratorAccess]:
    """Return global generators by name, such as "torch", "torch.cuda" and "random".

    Args:
        devices: devices of torch's generators, besides the CPU; None: none of torch's.
        has_python: whether to include `random` and NumPy.
    """
    found = {}
    used = () if devices is None else dict.fromkeys([torch.device("cpu"), *devices])
    for number, device in enumerate(used):
        each = default_generator(device)
        name = f"torch.{device.type}{f' {number}' if number > 1 else ''}" if number else "torch"
        found[name] = GeneratorAccess(each.get_state, each.set_state, each.manual_seed)
    if has_python:
        found["random"] = GeneratorAccess(random.getstate, random.setstate, random.seed)
        get = functools.partial(np.random.get_state, legacy=False)
        found["numpy.random"] = GeneratorAccess(get, np.random.set_state, lambda seed: np.random.seed(seed % 2**32))
    return found


class RNGState:
    """States of global generators when the object was created.

    Args:
        devices: as for `global_generators`.
        has_python: as for `global_generators`.
    """

    def __init__(self, devices: Collection[torch.device] | None, *, has_python: bool = False) -> None:
        generators = global_generators(devices, has_python=has_python).values()
        self._states = [(each, each.get()) for each in generators]

    def has_changed(self) -> bool:
        """Return whether random numbers were drawn since then."""
        return any(not _is_same(each.get(), state) for each, state in self._states)

    def restore(self) -> None:
        """Restore the states."""
        for each, state in self._states:
            each.set(state)


def _is_same(one: Any, other: Any) -> bool:
    # NumPy's state contains an array.
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else str(one) == str(other)
