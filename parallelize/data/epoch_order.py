"""The order of an epoch's units, the same on every process without a word between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from parallelize.data.rng import OwnStream

__all__ = ["Permutation", "draw", "draw_lazily", "seed_of"]


class Permutation(Sequence[int]):
    """A shuffled range that becomes Python numbers a slice at a time: a list of 10^8 takes seconds and 4 GB."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator()
        generator.manual_seed(seed)
        self._indices = torch.randperm(length, generator=generator)
        self._seed = seed

    def __repr__(self) -> str:
        return f"Permutation({len(self)}, {self._seed})"

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> list[int]: ...
    def __getitem__(self, position: int | slice) -> int | list[int]:
        picked: int | list[int] = self._indices[position].tolist()
        return picked


def draw(sampler: Any, *, seed: int, epoch: int) -> Sequence[Any]:
    """Everything a sampler yields in an epoch.

    torch's own shuffle becomes that of DistributedSampler; any other sampler runs with all its sources of chance
    seeded, so that every process draws the same.

    Args:
        sampler: the loader's sampler or batch sampler; ends.
        seed: that of the first epoch; epoch `e` is drawn with `seed + e`.
        epoch: number of the epoch, from 0; told to the sampler if it has `set_epoch`.
    """
    # Exactly these: a subclass may have an order of its own.
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return Permutation(sampler.num_samples, seed + epoch)
    with OwnStream(seed + epoch, list(_generators(sampler))).drawing():
        return list(sampler)


def seed_of(sampler: object, default: int) -> int:
    """The seed of a sampler's generator, or the default if it has none."""
    for generator in _generators(sampler):
        return generator.initial_seed()
    return default


def draw_lazily(sampler: Any, *, seed: int, epoch: int, chunk: int) -> Iterator[Any]:
    """What `draw` gives, of a sampler that does not say when it ends: so many units at a time.

    Also of any other iterable. Between chunks all sources of chance are as the rest of the program knows them.
    """
    stream = OwnStream(seed + epoch, list(_generators(sampler)))
    units: Iterator[Any] | None = None
    while True:
        with stream.drawing():
            units = iter(sampler) if units is None else units
            drawn = list(itertools.islice(units, chunk))
        yield from drawn
        if len(drawn) < chunk:
            return


def _generators(sampler: object, depth: int = 3) -> Iterator[torch.Generator]:
    """Generators of a sampler, its own first, then those of samplers inside."""
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        yield generator
    for name in ("batch_sampler", "sampler"):
        inner = getattr(sampler, name, None)
        if inner is not None and depth > 0:
            yield from _generators(inner, depth - 1)
