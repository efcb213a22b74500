"""Random states of the generators that data loading uses: torch's on the CPU, random, numpy.random, and others."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

__all__ = ["IsolatedRNG", "derive_seed", "get_state", "is_generator"]

T = TypeVar("T")


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
        accesses = map(_Access.to, (torch.default_generator, random, *generators))
        self._get, self._set, self._reseed = zip(*accesses, strict=True)
        self._states: list[Any] | None = None
        self._numpy_bits: Any = None

    @contextlib.contextmanager
    def use(self, seed: int | None = None) -> Iterator[None]:
        """Use the stream in the block, from where the last block ended; then restore the generators' previous state.

        Args:
            seed: a seed with which the stream starts anew in this block; None: continue it.
        """
        numpy, outside, is_new = _numpy(), [get() for get in self._get], seed is not None or self._states is None
        numpy_bits = None if numpy is None else numpy.random.get_bit_generator()
        try:
            if numpy is not None:
                is_new_to_numpy = is_new or self._numpy_bits is None
                self._numpy_bits = self._numpy_bits or numpy.random.MT19937(0)
                numpy.random.set_bit_generator(self._numpy_bits)
                if is_new_to_numpy:
                    numpy.random.seed((self._seed if seed is None else seed) % 2**32)
            starts = itertools.repeat(self._seed if seed is None else seed) if is_new else self._states or ()
            for start, state in zip(self._reseed if is_new else self._set, starts, strict=False):
                start(state)
            yield
            if seed is None:
                self._states = [get() for get in self._get]
        finally:
            for set_state, state in zip(self._set, outside, strict=True):
                set_state(state)
            if numpy_bits is not None:
                numpy.random.set_bit_generator(numpy_bits)

    def begin(self, units: Iterable[T]) -> Iterator[T]:
        """Draw the first unit from the stream now; the others are drawn from the generators as they are."""
        with self.use():
            iterator = iter(units)
            first = list(itertools.islice(iterator, 1))
        return itertools.chain(first, iterator)

    def draw(
        self, units: Iterable[T], *, size: int = 1, seeds: Iterable[int | None] = itertools.repeat(None)
    ) -> Iterator[T]:
        """Yield units, of which `size` at a time are drawn from the stream; each seed restarts it (see `use`)."""
        iterator: Iterator[T] | None = None
        for seed in seeds:
            with self.use(seed):
                iterator = iter(units) if iterator is None else iterator
                drawn = list(itertools.islice(iterator, size))
            yield from drawn
            if len(drawn) < size:
                return


class _Access(NamedTuple):
    """The functions that read, set and seed the state of a generator."""

    get_state: Callable[[], Any]
    set_state: Callable[[Any], object]
    seed: Callable[[int], object]

    @classmethod
    def to(cls, generator: Any) -> _Access:
        if hasattr(generator, "manual_seed"):
            return cls(generator.get_state, generator.set_state, generator.manual_seed)
        if hasattr(generator, "getstate"):
            return cls(generator.getstate, generator.setstate, generator.seed)
        if hasattr(generator, "get_state"):  # numpy.random.RandomState
            return cls(generator.get_state, generator.set_state, lambda seed: generator.seed(seed % 2**32))
        bits = generator.bit_generator
        set_state = functools.partial(setattr, bits, "state")
        return cls(lambda: bits.state, set_state, lambda seed: set_state(type(bits)(seed).state))


def is_generator(value: object) -> bool:
    """Return whether a value is a generator of torch, random or NumPy whose state can be set."""
    numpy = _numpy()
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *kinds)) and not isinstance(value, random.SystemRandom)


def get_state(generator: Any) -> Any:
    """Return the state of a generator (see `is_generator`)."""
    return _Access.to(generator).get_state()


def derive_seed(*parts: object) -> int:
    """Return a seed computed from values by hashing."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _numpy() -> Any:
    return sys.modules.get("numpy")
