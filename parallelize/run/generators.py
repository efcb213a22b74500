"""The global generators of random numbers: torch's, those of `random` and those of NumPy."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import torch

_MERSENNE_WORDS = 624
"""Size of the state of the Mersenne Twister, in words of 32 bits."""


class GeneratorAccess(NamedTuple):
    """Functions of one generator.

    Args:
        get: returns the state.
        set: sets the generator to a state.
        seed: seeds the generator.
        check: raises if a value, such as one of a file, is not a state that `set` takes; changes
            nothing.
    """

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    seed: Callable[[int], Any]
    check: Callable[[Any], Any] = lambda _state: None


def global_generators(devices: Collection[torch.device] | None) -> dict[str, GeneratorAccess]:
    """Return global generators by name, such as "torch", "torch.cuda" and "random".

    Args:
        devices: devices whose generators of torch are returned, besides the one of the CPU; None:
            no generator of torch is returned.
    """
    generators = {}
    if devices is not None:
        generators.update(_generators_of_torch(devices))
    generators["random"] = GeneratorAccess(
        get=random.getstate,
        set=random.setstate,
        seed=random.seed,
        check=_check_random,
    )
    generators["numpy.random"] = GeneratorAccess(
        get=functools.partial(np.random.get_state, legacy=False),
        set=np.random.set_state,
        seed=_seed_numpy,
        check=_check_numpy,
    )
    return generators


def _generators_of_torch(devices: Collection[torch.device]) -> dict[str, GeneratorAccess]:
    """Return torch's generators by name: "torch" of the CPU, "torch.cuda", "torch.cuda 2", ...

    The names count the devices of this process, and do not have their indices: ranks on other
    devices have the same names, by which they compare states.
    """
    cpu = torch.device("cpu")
    generators = {"torch": _generator_of_torch(torch.default_generator, cpu)}
    accelerators = [device for device in dict.fromkeys(devices) if device != cpu]
    for number, device in enumerate(accelerators, start=1):
        name = f"torch.{device.type}"
        if number > 1:
            name += f" {number}"
        module: Any = torch.get_device_module(device)
        generator = module.default_generators[device.index or 0]
        generators[name] = _generator_of_torch(generator, device)
    return generators


def _generator_of_torch(generator: torch.Generator, device: torch.device) -> GeneratorAccess:
    return GeneratorAccess(
        get=generator.get_state,
        set=generator.set_state,
        seed=generator.manual_seed,
        check=functools.partial(_check_torch, device),
    )


def _check_torch(device: torch.device, state: Any) -> None:
    """Raise if a new generator on the device refuses the state."""
    torch.Generator(device).set_state(state)


def _check_random(state: Any) -> None:
    """Raise if a value is no state of Python's global generator."""
    random.Random().setstate(state)  # noqa: S311 - it draws nothing


def _seed_numpy(seed: int) -> None:
    # NumPy refuses seeds of more than 32 bits.
    np.random.seed(seed % 2**32)


def _check_numpy(state: Any) -> None:
    """Raise if a value is no state of NumPy's global generator."""
    np.random.RandomState().set_state(state)
    # NumPy takes any position, and would read the memory behind its 624 words.
    position = state["state"]["pos"]
    if not 0 <= position <= _MERSENNE_WORDS:
        raise ValueError(f"the position {position} is not one of {_MERSENNE_WORDS} words")


class RNGState:
    """The states that the global generators had when this object was created.

    Args:
        devices: as for `global_generators`.
    """

    def __init__(self, devices: Collection[torch.device] | None) -> None:
        self._states: list[tuple[GeneratorAccess, Any]] = []
        for generator in global_generators(devices).values():
            self._states.append((generator, generator.get()))

    def has_changed(self) -> bool:
        """Return whether random numbers were drawn since the object was created."""
        return any(_was_drawn_from(generator, state) for generator, state in self._states)

    def restore(self) -> None:
        """Set the generators to the states that they had when the object was created."""
        for generator, state in self._states:
            generator.set(state)


def _was_drawn_from(generator: GeneratorAccess, state: Any) -> bool:
    return state_hash(generator.get()) != state_hash(state)


def seed_generators(seed: int) -> None:
    """Seed the global generators of this process: of random, NumPy, and torch on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed)


def derive_seed(*parts: object) -> int:
    """Return a seed of 56 bits, computed from values by hashing.

    The values are hashed as texts. `hash()` would give another seed in each process.
    """
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def state_hash(value: object) -> str:
    """Return a hash of a generator's state, or of another value's text: 16 hexadecimal digits."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return hashlib.blake2b(str(value).encode(), digest_size=8).hexdigest()
