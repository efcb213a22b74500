"""The global generators of random numbers: torch's, of each device, and those of `random` and NumPy."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = [
    "GeneratorAccess",
    "RNGState",
    "derive_seed",
    "global_generators",
    "seed_generators",
    "state_hash",
]

_MERSENNE_WORDS = 624


class GeneratorAccess(NamedTuple):
    """Functions of a generator: they return its state, set it to a state, and seed it.

    `check` raises if a value is no state of such a generator, and changes nothing.
    """

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    seed: Callable[[int], Any]
    check: Callable[[Any], Any] = lambda _state: None


def global_generators(devices: Collection[torch.device] | None) -> dict[str, GeneratorAccess]:
    """Return global generators by name, such as "torch", "torch.cuda" and "random".

    Args:
        devices: devices of torch's generators, besides the CPU; None: none of torch's.
    """
    found = {}
    used = () if devices is None else dict.fromkeys([torch.device("cpu"), *devices])
    for number, device in enumerate(used):
        name = f"torch.{device.type}{f' {number}' if number > 1 else ''}" if number else "torch"
        module: Any = torch.get_device_module(device)
        each = module.default_generators[device.index or 0] if number else torch.default_generator
        found[name] = GeneratorAccess(
            each.get_state, each.set_state, each.manual_seed, functools.partial(_check_torch, device)
        )
    check = random.Random().setstate  # noqa: S311 - it draws nothing
    found["random"] = GeneratorAccess(random.getstate, random.setstate, random.seed, check)
    get = functools.partial(np.random.get_state, legacy=False)
    found["numpy.random"] = GeneratorAccess(
        get, np.random.set_state, lambda seed: np.random.seed(seed % 2**32), _check_numpy
    )
    return found


def _check_torch(device: torch.device, state: Any) -> None:
    torch.Generator(device).set_state(state)


def _check_numpy(state: Any) -> None:
    np.random.RandomState().set_state(state)
    # NumPy takes any position, and would read the memory behind its 624 words.
    position = state["state"]["pos"]
    if not 0 <= position <= _MERSENNE_WORDS:
        raise ValueError(f"the position {position} is not one of {_MERSENNE_WORDS} words")


class RNGState:
    """States of global generators when the object was created.

    Args:
        devices: as for `global_generators`.
    """

    def __init__(self, devices: Collection[torch.device] | None) -> None:
        self._states = [(each, each.get()) for each in global_generators(devices).values()]

    def has_changed(self) -> bool:
        """Return whether random numbers were drawn since then."""
        return any(state_hash(each.get()) != state_hash(state) for each, state in self._states)

    def restore(self) -> None:
        """Restore the states."""
        for each, state in self._states:
            each.set(state)


def seed_generators(seed: int) -> None:
    """Seed the global generators of this process: of random, NumPy, and torch on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed)


def derive_seed(*parts: object) -> int:
    """Return a seed computed from values by hashing."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def state_hash(value: object) -> str:
    """Return a hash of the value's text, as 16 hexadecimal digits."""
    text = str(value.tolist() if isinstance(value, torch.Tensor) else value)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
