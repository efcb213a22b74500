"""RNG of micro-batches: random numbers depend on the seed, not on the timing of threads.

Stages run at the same time and would draw from the global generators in unpredictable order. In a model that draws
random numbers, each segment (a micro-batch's work on one stage) therefore has its own generators. They are seeded from
one number per step, which is drawn from the global generator. So the user's seed determines the dropout masks, and a
segment that is recomputed in backward draws the same masks again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Generators", "SegmentRNGMode", "default_generator"]

# Held while a global generator has a segment's state: an operator without a generator argument draws from it.
_global_generator_lock = threading.Lock()


def default_generator(device: torch.device) -> torch.Generator:
    """Return the global generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    generator: torch.Generator = module.default_generators[device.index or 0]
    return generator


class Generators:
    """Random number generators of one segment, one per device, all with the segment's seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._by_device: dict[torch.device, torch.Generator] = {}

    def on(self, device: torch.device) -> torch.Generator:
        """Return the segment's generator for a device, created on first use."""
        generator = self._by_device.get(device)
        if generator is None:
            generator = self._by_device[device] = torch.Generator(device)
            generator.manual_seed(self._seed)
        return generator

    def fork(self) -> Generators:
        """Return an independent copy of the generators, in their current states."""
        copy = Generators(self._seed)
        for device, generator in self._by_device.items():
            copy._by_device[device] = torch.Generator(device)
            copy._by_device[device].set_state(generator.get_state())
        return copy


class SegmentRNGMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Dispatch mode in which random operators draw from the current segment's generators, `generators()`."""

    def __init__(self, generators: Callable[[], Generators]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._generators = generators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator; if it draws random numbers, with the segment's generator."""
        del types
        kwargs = kwargs or {}
        is_random, takes_generator = _random_traits(func)
        if not is_random or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        generator = self._generators().on(_device(args, kwargs))
        if takes_generator:
            return func(*args, **{**kwargs, "generator": generator})
        with _global_generator_lock:
            global_generator = default_generator(generator.device)
            saved_state = global_generator.get_state()
            global_generator.set_state(generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                generator.set_state(global_generator.get_state())
                global_generator.set_state(saved_state)


@functools.cache
def _random_traits(func: Any) -> tuple[bool, bool]:
    """Return whether an operator draws random numbers, and whether it has a generator argument."""
    takes_generator = any(argument.name == "generator" for argument in func._schema.arguments)
    return takes_generator or torch.Tag.nondeterministic_seeded in func.tags, takes_generator


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
        if isinstance(value, torch.device):
            is_complete = value.type == "cpu" or value.index is not None
            return value if is_complete else torch.device(value.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
