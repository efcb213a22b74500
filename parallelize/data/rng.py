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

__all__ = ["IsolatedRNG", "RNGState", "derive_seed", "get_state", "is_generator"]


@dataclass(frozen=True)
class RNGState:
    """RNG state of the global generators on the CPU.

    Args:
        torch_state: state of torch's global CPU generator.
        python_state: state of `random`.
        numpy_state: state of `numpy.random`; None: NumPy was not imported.
    """

    torch_state: torch.Tensor
    python_state: Any
    numpy_state: Any

    @classmethod
    def capture(cls) -> RNGState:
        """Return the current state of the global generators."""
        numpy = _numpy()
        return cls(torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state())

    def restore(self) -> None:
        """Set the global generators to this state."""
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        if self.numpy_state is not None:
            _numpy().random.set_state(self.numpy_state)


class IsolatedRNG:
    """A separate stream of random numbers for code that draws from the global generators.

    Meanwhile numpy.random draws from another bit generator, as copying a state takes 50 us. Each change of it drops the
    second Gaussian that `numpy.random.randn` keeps for the next call.

    Args:
        seed: seed of the stream.
        generators: further generators that the code draws from (see `is_generator`).
    """

    def __init__(self, seed: int, generators: Sequence[Any] = ()) -> None:
        self._seed = seed
        # The module `random` has the methods of random.Random. torch.manual_seed also seeds every accelerator.
        self._generators: list[Any] = [torch.default_generator, random, *generators]
        self._states: list[Any] | None = None
        self._numpy_bits: Any = None

    @contextlib.contextmanager
    def use(self, seed: int | None = None) -> Iterator[None]:
        """Use the stream in the block, from where the last block ended; then restore the generators' previous state.

        Args:
            seed: a seed with which the stream starts anew in this block; None: continue it.
        """
        numpy, outside = _numpy(), [get_state(each) for each in self._generators]
        numpy_bits = None if numpy is None else numpy.random.get_bit_generator()
        is_new = seed is not None or self._states is None
        try:
            self._start(self._seed if seed is None else seed, is_new=is_new)
            yield
            if seed is None:
                self._states = [get_state(each) for each in self._generators]
        finally:
            for each, state in zip(self._generators, outside, strict=True):
                _set_state(each, state)
            if numpy_bits is not None:
                numpy.random.set_bit_generator(numpy_bits)

    def _start(self, seed: int, *, is_new: bool) -> None:
        numpy = _numpy()
        if numpy is not None:
            is_new_to_numpy = is_new or self._numpy_bits is None
            self._numpy_bits = self._numpy_bits or numpy.random.MT19937(0)
            numpy.random.set_bit_generator(self._numpy_bits)
            if is_new_to_numpy:
                numpy.random.seed(seed % 2**32)
        if is_new:
            for each in self._generators:
                _seed(each, seed)
            return
        for each, state in zip(self._generators, self._states or (), strict=True):
            _set_state(each, state)


def is_generator(value: object) -> bool:
    """Return whether a value is a generator of torch, random or NumPy whose state can be set."""
    numpy = _numpy()
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *kinds)) and not isinstance(value, random.SystemRandom)


def get_state(generator: Any) -> Any:
    """Return the state of a generator (see `is_generator`)."""
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _seed(generator: Any, seed: int) -> None:
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif hasattr(generator, "manual_seed"):
        generator.manual_seed(seed)
    else:
        generator.seed(seed if hasattr(generator, "getstate") else seed % 2**32)


def derive_seed(*parts: object) -> int:
    """Return a seed computed from values by hashing."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _numpy() -> Any:
    return sys.modules.get("numpy")
