"""Random states of the generators that data loading uses: torch's on the CPU, random, numpy.random, and others."""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from parallelize.runtime.rng_state import GeneratorAccess

__all__ = ["IsolatedRNG", "access", "derive_seed", "is_generator"]

T = TypeVar("T")


class IsolatedRNG:
    """A separate stream of random numbers for code that draws from the global generators, in `with` blocks.

    Each block continues the stream from where the last one ended; after it, the generators have their previous states.
    The second Gaussian that `numpy.random.randn` keeps for the next call is dropped.

    `generators` are further ones that the code draws from (see `is_generator`).
    """

    def __init__(self, seed: int, generators: Sequence[Any] = ()) -> None:
        # torch.manual_seed also seeds every accelerator. The module `random` has the methods of random.Random.
        accesses = [access(torch.default_generator), access(random), *_access_numpy_random()]
        self._get, self._set, self._reseed = zip(*accesses, *map(access, generators), strict=True)
        self._seed = seed
        self._states: list[Any] | None = None
        self._outside: list[Any] = []

    def __enter__(self) -> None:
        self._outside = [get() for get in self._get]
        if self._states is None:
            for seed in self._reseed:
                seed(self._seed)
        else:
            for set_state, state in zip(self._set, self._states, strict=True):
                set_state(state)

    def __exit__(self, *_exc: object) -> None:
        self._states = [get() for get in self._get]
        for set_state, state in zip(self._set, self._outside, strict=True):
            set_state(state)

    def begin(self, units: Iterable[T]) -> Iterator[T]:
        """Draw the first unit from the stream now; the others are drawn from the generators as they are."""
        with self:
            iterator = iter(units)
            first = list(itertools.islice(iterator, 1))
        return itertools.chain(first, iterator)

    def draw(
        self, units: Iterable[T], *, size: int = 1, seeds: Iterable[int | None] = itertools.repeat(None)
    ) -> Iterator[T]:
        """Yield units, of which `size` at a time are drawn from the stream; each seed restarts it."""
        iterator: Iterator[T] | None = None
        for seed in seeds:
            if seed is not None:
                self._seed, self._states = seed, None
            with self:
                iterator = iter(units) if iterator is None else iterator
                drawn = list(itertools.islice(iterator, size))
            yield from drawn
            if len(drawn) < size:
                return


def is_generator(value: object) -> bool:
    """Return whether a value is a generator of torch, random or NumPy whose state can be set."""
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *kinds)) and not isinstance(value, random.SystemRandom)


def derive_seed(*parts: object) -> int:
    """Return a seed computed from values by hashing."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def access(generator: Any) -> GeneratorAccess:
    """Return the functions of a generator (see `is_generator`)."""
    if hasattr(generator, "manual_seed"):
        return GeneratorAccess(generator.get_state, generator.set_state, generator.manual_seed)
    if hasattr(generator, "getstate"):
        return GeneratorAccess(generator.getstate, generator.setstate, generator.seed)
    if hasattr(generator, "get_state"):  # numpy.random.RandomState
        return GeneratorAccess(generator.get_state, generator.set_state, lambda seed: generator.seed(seed % 2**32))
    bits = generator.bit_generator
    set_state = functools.partial(setattr, bits, "state")
    return GeneratorAccess(lambda: bits.state, set_state, lambda seed: set_state(type(bits)(seed).state))


def _access_numpy_random() -> Iterator[GeneratorAccess]:
    """Access numpy.random, if NumPy is installed, which torch imports: its state is the bit generator in use."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        bits = functools.cache(lambda: numpy.random.MT19937(0))  # made when it is used, in 50 us

        def seed(value: int) -> None:
            numpy.random.set_bit_generator(bits())
            numpy.random.seed(value % 2**32)

        yield GeneratorAccess(numpy.random.get_bit_generator, numpy.random.set_bit_generator, seed)
