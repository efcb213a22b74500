"""Random numbers that depend on the seed, not on which thread was faster.

Stages run at the same time and would draw from the global generators in an order of chance. While a model that draws at
all runs, each segment (a micro-batch's stay on a stage) therefore has generators of its own, seeded from one number
that the step has drawn from the global generator: the same seed gives the same masks, run after run, and also when a
segment is computed again in backward.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Draws", "Streams", "default_generator", "drawn_seed"]

# Operators that take no generator draw from the global one, which holds the segment's state for that long.
_global_state = threading.Lock()


def drawn_seed() -> int:
    """A number for one step, from the global generator."""
    return int(torch.randint(2**62, (), device="cpu").item())


def default_generator(device: torch.device) -> torch.Generator:
    """The global generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    generator: torch.Generator = module.default_generators[device.index or 0]
    return generator


class Streams:
    """The generators of one segment.

    Args:
        seed: of the segment.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._of: dict[torch.device, torch.Generator] = {}

    def on(self, device: torch.device) -> torch.Generator:
        """The segment's generator on a device."""
        generator = self._of.get(device)
        if generator is None:
            generator = self._of[device] = torch.Generator(device)
            generator.manual_seed(self._seed)
        return generator

    def fork(self) -> Streams:
        """Generators that go on from here on their own: what is drawn from them is drawn again from these."""
        copy = Streams(self._seed)
        for device, generator in self._of.items():
            copy._of[device] = torch.Generator(device)
            copy._of[device].set_state(generator.get_state())
        return copy


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Gives every operator that draws random numbers the generator of the segment that runs.

    Args:
        streams: asked at each draw.
    """

    def __init__(self, streams: Callable[[], Streams]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._streams = streams

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        del types
        kwargs = kwargs or {}
        draws, takes_generator = _draws(func)
        if not draws or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        generator = self._streams().on(_device(args, kwargs))
        if takes_generator:
            return func(*args, **{**kwargs, "generator": generator})
        with _global_state:
            shared = default_generator(generator.device)
            kept = shared.get_state()
            shared.set_state(generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                generator.set_state(shared.get_state())
                shared.set_state(kept)


@functools.cache
def _draws(func: Any) -> tuple[bool, bool]:
    """Whether an operator draws random numbers, and whether it takes the generator to draw from."""
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
