"""The order of the units in an epoch, which every process computes identically without communication."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from parallelize.data.rng import IsolatedRNG

__all__ = ["Permutation", "draw_order", "sampler_seed", "stream_order"]


class Permutation(Sequence[int]):
    """A shuffled range that converts only a slice at a time to Python ints: a list of 10^8 takes seconds and 4 GB."""

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


def draw_order(sampler: Any, *, seed: int, epoch: int) -> Sequence[Any]:
    """Return all units that a sampler yields in an epoch.

    For torch's RandomSampler, the order is that of DistributedSampler. Before any other sampler is iterated, every
    generator that it may use is seeded, so that all processes get the same order.

    Args:
        sampler: the loader's sampler or batch sampler, of finite length.
        seed: seed of epoch 0; epoch `e` uses `seed + e`.
        epoch: number of the epoch, from 0.
    """
    # Only these exact types: a subclass may have another order.
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return Permutation(sampler.num_samples, seed + epoch)
    with IsolatedRNG(seed + epoch, list(_generators(sampler))).use():
        return list(sampler)


def stream_order(sampler: Any, *, seed: int, epoch: int, chunk_size: int) -> Iterator[Any]:
    """Yield the same units as `draw_order` returns, for a sampler or another iterable of unknown length.

    Args:
        sampler: the loader's sampler or batch sampler, or another iterable.
        seed: see `draw_order`.
        epoch: see `draw_order`.
        chunk_size: number of units to draw at a time; between chunks, the global generators have the caller's state.
    """
    rng = IsolatedRNG(seed + epoch, list(_generators(sampler)))
    units: Iterator[Any] | None = None
    while True:
        with rng.use():
            units = iter(sampler) if units is None else units
            chunk = list(itertools.islice(units, chunk_size))
        yield from chunk
        if len(chunk) < chunk_size:
            return


def sampler_seed(sampler: object, default: int) -> int:
    """Return the initial seed of a sampler's generator, or the default if it has no generator."""
    for generator in _generators(sampler):
        return generator.initial_seed()
    return default


def _generators(sampler: object, depth: int = 3) -> Iterator[torch.Generator]:
    """Yield the generator of a sampler, then those of its inner samplers."""
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        yield generator
    for name in ("batch_sampler", "sampler"):
        inner = getattr(sampler, name, None)
        if inner is not None and depth > 0:
            yield from _generators(inner, depth - 1)
