"""The order of the units in an epoch, which every process computes identically without communication."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from parallelize.data.rng import IsolatedRNG, access, derive_seed, is_generator

__all__ = ["MAX_LISTED", "Permutation", "draw_order", "is_exactly", "order_fingerprint", "sampler_seed", "stream_rng"]

MAX_LISTED = 2**24
"""Samplers with more units are drawn while they are iterated, as those without a length."""
_CHUNK = 2**16
_MAX_COMPARED = 256


class Permutation(Sequence[int]):
    """A shuffled range of 4 bytes per index, converted to Python ints a slice at a time."""

    def __init__(self, length: int, seed: int) -> None:
        self._length, self._seed = length, seed
        self._drawn: torch.Tensor | None = None  # until they are read first, and after `release`

    def __repr__(self) -> str:
        return f"Permutation({len(self)}, {self._seed})"

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: Any) -> Any:
        return self.indices[position].tolist()

    @property
    def indices(self) -> torch.Tensor:
        """All indices, in order."""
        if self._drawn is None:
            generator = torch.Generator()
            generator.manual_seed(self._seed)
            dtype = torch.int32 if self._length < 2**31 else torch.int64  # the values are the same
            self._drawn = torch.randperm(self._length, generator=generator, dtype=dtype)
        return self._drawn

    def release(self) -> None:
        """Free the memory of the indices."""
        self._drawn = None


def draw_order(sampler: Any, *, seed: int, epoch: int, max_listed: int = MAX_LISTED) -> Sequence[Any] | None:
    """Return all units that a sampler yields in an epoch; None: they are too many to list, or endless.

    For torch's RandomSampler, the order is that of DistributedSampler. Before any other sampler is iterated, every
    generator that it may use is seeded with `seed + epoch`, so that all processes get the same order.
    """
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    is_random = is_exactly(sampler, RandomSampler) and not sampler.replacement
    if is_random and sampler.num_samples == len(sampler.data_source):  # it yields each index once
        return Permutation(sampler.num_samples, seed + epoch)
    if (length := len(sampler)) > max_listed:
        return None
    listed: Any = []
    with stream_rng(sampler, seed=seed, epoch=epoch):
        units = iter(sampler)
        while chunk := list(itertools.islice(units, _CHUNK)):
            are_small_ints = set(map(type, chunk)) == {int} and min(chunk) >= -(2**31) and max(chunk) < 2**31
            if len(chunk) == _CHUNK and are_small_ints and not listed:
                listed = array("i")
            elif isinstance(listed, array) and not are_small_ints:
                listed = list(listed)
            listed.extend(chunk)
            if len(listed) > 2 * length + _CHUNK:  # a length may be an estimate, and an endless sampler may have one
                return None
    return listed  # type: ignore[no-any-return]  # a list, or an array


def is_exactly(sampler: object, kind: type) -> bool:
    """Return whether a sampler is of a class of torch, or of torchdata's of that name, and not of a subclass."""
    name = (type(sampler).__module__, type(sampler).__name__)
    return type(sampler) is kind or name == ("torchdata.stateful_dataloader.sampler", kind.__name__)


def stream_rng(sampler: Any, *, seed: int, epoch: int) -> IsolatedRNG:
    """Return the RNG with which all processes draw the same units from a sampler or another iterable."""
    return IsolatedRNG(seed + epoch, list(_generators(sampler)))


def sampler_seed(sampler: object, default: int) -> int:
    """Return the seed of a sampler's generator, or the default if it has no generator."""
    generator = next(_generators(sampler), None)
    if isinstance(generator, torch.Generator):
        return generator.initial_seed() % 2**63  # of a negative seed it is too large to add an epoch to it
    # That of a random.Random or of a NumPy generator is unknown.
    return default if generator is None else derive_seed(access(generator).get())


def order_fingerprint(order: Sequence[Any], *, name: Callable[[Any], str] | None = None) -> str:
    """Return a hash of an order, by the first units and a sample of the others, or their names."""
    if not isinstance(order, (range, Permutation)):
        compared = [order[:_MAX_COMPARED], order[:: max(len(order) // _MAX_COMPARED, 1)]]
        order = [len(order), *(units if name is None else list(map(name, units)) for units in compared)]
    return hashlib.blake2b(repr(order).encode(), digest_size=4).hexdigest()


def _generators(sampler: object, depth: int = 3) -> Iterator[Any]:
    """Yield the generators that a sampler holds, its `generator` first, then those of its inner samplers."""
    held = [getattr(sampler, "generator", None), *getattr(sampler, "__dict__", {}).values()]
    yield from {id(each): each for each in held if is_generator(each)}.values()
    for name in ("batch_sampler", "sampler"):
        inner = getattr(sampler, name, None)
        if inner is not None and depth > 0:
            yield from _generators(inner, depth - 1)
