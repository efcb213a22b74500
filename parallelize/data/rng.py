"""Random numbers of data loading: one stream for all ranks, apart from those of the program."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from parallelize.runtime.rng import GeneratorAccess, global_generators

__all__ = ["IsolatedRNG", "sampler_seed", "samplers_in", "stream_rng"]


class IsolatedRNG:
    """A separate stream of random numbers for code that draws from the global generators.

    Each `with` block continues the stream from where the last one ended; after it, the generators
    have their previous states.

    Args:
        seed: of the stream.
        generators: further ones that the code draws from.
    """

    def __init__(self, seed: int, generators: Iterable[torch.Generator] = ()) -> None:
        own = (GeneratorAccess(each.get_state, each.set_state, each.manual_seed) for each in generators)
        self._seed, self._all = seed, [*global_generators(()).values(), *own]
        self._inside: list[Any] = []
        self._outside: list[Any] = []

    def __enter__(self) -> None:
        self._outside = [each.get() for each in self._all]
        for each, state in itertools.zip_longest(self._all, self._inside):
            if state is None:
                each.seed(self._seed)
            else:
                each.set(state)

    def __exit__(self, *_exc: object) -> None:
        self._inside = [each.get() for each in self._all]
        for each, state in zip(self._all, self._outside, strict=True):
            each.set(state)

    def begin(self, units: Iterable[Any]) -> Iterator[Any]:
        """Draw the first unit from the stream now; the others from the generators as they are."""
        with self:
            iterator = (each for each in units)  # which calls iter once: an iterator of the user's may begin anew
            first = list(itertools.islice(iterator, 1))
        return itertools.chain(first, iterator)

    def draw(self, units: Iterable[Any], *, size: int = 1) -> Iterator[Any]:
        """Yield units, of which `size` at a time are drawn from the stream."""
        with self:
            iterator = (each for each in units)  # as above
        while True:
            with self:
                drawn = list(itertools.islice(iterator, size))
            yield from drawn
            if len(drawn) < size:
                return


def stream_rng(sampler: Any, seed: int) -> IsolatedRNG:
    """Return the RNG with which all processes draw the same units from a sampler or iterable."""
    return IsolatedRNG(seed, _generators(sampler))


def sampler_seed(sampler: object, default: int) -> int:
    """Return the seed of a sampler's generator, or the default if it has no generator."""
    generator = next(_generators(sampler), None)
    # That of a negative seed leaves no room for epochs.
    return default if generator is None else generator.initial_seed() % 2**63


def samplers_in(sampler: Any, depth: int = 5) -> Iterator[Any]:
    """Yield a sampler, then those that it holds."""
    yield sampler
    for each in (getattr(sampler, "sampler", None), *getattr(sampler, "__dict__", {}).values()):
        if isinstance(each, Sampler) and depth:
            yield from samplers_in(each, depth - 1)


def _generators(sampler: object) -> Iterator[torch.Generator]:
    """Yield torch's generators that a sampler and its inner samplers hold."""
    for holder in samplers_in(sampler):
        for each in (getattr(holder, "generator", None), *getattr(holder, "__dict__", {}).values()):
            if isinstance(each, torch.Generator):
                yield each
