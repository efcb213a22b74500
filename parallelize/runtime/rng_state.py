"""States of the global generators of random numbers: torch's, of each device, and those of `random` and NumPy."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection
from typing import Any

import torch

__all__ = ["RNGState", "default_generator"]


def default_generator(device: torch.device) -> torch.Generator:
    """Return the global generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    generator: torch.Generator = module.default_generators[device.index or 0]
    return generator


class RNGState:
    """States of global generators when the object was created.

    Args:
        devices: devices of torch's generators, besides the CPU; None: none of torch's.
        has_python: whether to include `random` and, if it is imported, NumPy.
    """

    def __init__(self, devices: Collection[torch.device] | None, *, has_python: bool = False) -> None:
        used = () if devices is None else dict.fromkeys([torch.device("cpu"), *devices])
        found: list[Any] = [(each.get_state, each.set_state) for each in map(default_generator, used)]
        numpy: Any = sys.modules.get("numpy")
        if has_python:
            found.append((random.getstate, random.setstate))
        if has_python and numpy is not None:
            found.append((numpy.random.get_state, numpy.random.set_state))
        self._states = [(get, set_, get()) for get, set_ in found]

    def has_changed(self) -> bool:
        """Return whether random numbers were drawn since then."""
        return any(not _is_same(get(), state) for get, _, state in self._states)

    def restore(self) -> None:
        """Restore the states."""
        for _, set_, state in self._states:
            set_(state)


def _is_same(one: Any, other: Any) -> bool:
    # NumPy's state contains an array.
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else str(one) == str(other)
