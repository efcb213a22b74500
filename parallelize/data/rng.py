"""RNG state of the generators that data loading uses: torch's on the CPU, random, numpy.random, and samplers' own."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["IsolatedRNG", "RNGState", "derive_seed"]


@dataclass(frozen=True)
class RNGState:
    """RNG state of the global generators on the CPU, and of given generators.

    Args:
        generators: the given generators, such as those of samplers.
        generator_states: the states of `generators`, in the same order.
        torch_state: state of torch's global CPU generator.
        python_state: state of `random`.
        numpy_state: state of `numpy.random`; None: NumPy was not imported.
    """

    generators: tuple[torch.Generator, ...]
    generator_states: tuple[torch.Tensor, ...]
    torch_state: torch.Tensor
    python_state: Any
    numpy_state: Any

    @classmethod
    def capture(cls, generators: Sequence[torch.Generator] = ()) -> RNGState:
        """Return the current state of the global generators and of the given ones."""
        numpy = _numpy()
        return cls(
            generators=tuple(generators),
            generator_states=tuple(each.get_state() for each in generators),
            torch_state=torch.get_rng_state(),
            python_state=random.getstate(),
            numpy_state=None if numpy is None else numpy.random.get_state(),
        )

    def restore(self) -> None:
        """Set all generators to this state."""
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        if self.numpy_state is not None:
            _numpy().random.set_state(self.numpy_state)
        for generator, state in zip(self.generators, self.generator_states, strict=True):
            generator.set_state(state)


class IsolatedRNG:
    """A separate stream of random numbers for code that draws from the global generators.

    Args:
        seed: seed of the stream.
        generators: further generators that the code draws from.
    """

    def __init__(self, seed: int, generators: Sequence[torch.Generator] = ()) -> None:
        self._seed, self._generators = seed, generators
        self._state: RNGState | None = None

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Use the stream in the block, from where the last block ended; then restore the generators' previous state."""
        outside = RNGState.capture(self._generators)
        try:
            if self._state is None:
                _seed_all(self._generators, self._seed)
            else:
                self._state.restore()
            yield
            self._state = RNGState.capture(self._generators)
        finally:
            outside.restore()


def _seed_all(generators: Sequence[torch.Generator], seed: int) -> None:
    """Seed the global generators on the CPU and the given ones."""
    # Not torch.manual_seed, which also seeds every accelerator.
    for generator in (torch.default_generator, *generators):
        generator.manual_seed(seed)
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def derive_seed(*parts: object) -> int:
    """Return a seed computed from values by hashing."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _numpy() -> Any:
    return sys.modules.get("numpy")
