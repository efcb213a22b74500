"""Whether the ranks hold the same map-style data, as small summaries of it tell.

A rank may have loaded its part alone, as by `files[rank::world_size]`. To shard such parts again
would leave most samples out. Each rank makes a summary of its dataset, and a rank that has those of
other ranks compares them.

    summary       length of the dataset, and the hashes of its first and its last sample
    comparable    a sample whose hash is the same in two reads that begin with equal random numbers
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from parallelize.data.copied_loader import copy_of
from parallelize.data.draws import access_of, is_generator, seeded_drawing
from parallelize.data.source import length_of
from parallelize.errors import SyncError
from parallelize.run.containers import leaves
from parallelize.run.context import current
from parallelize.run.generators import global_generators

_SEED = 0
"""Seed of the global generators at the beginning of each compared read."""

_READS = 3
"""The first one may open files, and begins with the numbers of a new worker."""

_MAX_ELEMENTS = 64
"""Elements of an array that are hashed, evenly spaced."""

_MAX_OBJECTS = 1000
"""Objects of a dataset that are searched for generators."""

_MAX_ITEMS = 8
"""Items of a container that are searched, at its beginning and at its end."""


@dataclass(frozen=True)
class DataSummary:
    """What identifies the map-style dataset of one rank.

    Args:
        length: number of samples; None: not known, or the dataset cannot be read.
        samples: hashes of the first and the last sample; "": not comparable.
    """

    length: int | None = None
    samples: tuple[str, ...] = ()

    @property
    def is_comparable(self) -> bool:
        """Whether at least one sample can be compared."""
        return any(self.samples)

    def to_text(self) -> str:
        """Return the summary as text, which a store or a collective of plain values carries."""
        return json.dumps([self.length, *self.samples])

    @classmethod
    def from_text(cls, text: str) -> DataSummary:
        """Return the summary that `to_text` wrote."""
        length, *samples = json.loads(text)
        return cls(length, tuple(samples))


def summary_of(loader: DataLoader[Any]) -> DataSummary:
    """Return a summary of a loader's dataset; it is empty if the dataset cannot be read.

    The first and the last sample are read three times, in a worker process if the loader has any:
    some datasets open their files in `worker_init_fn`. It runs no collective.

    Args:
        loader: is neither iterated nor changed.
    """
    dataset = loader.dataset
    length = None if isinstance(dataset, IterableDataset) else length_of(dataset)
    if length is None or length < 1:
        return DataSummary(length)
    try:
        reads = _hashes_of_reads(loader, [0, length - 1])
    except Exception:  # noqa: BLE001 - the dataset raises it: it may take other keys
        return DataSummary()
    _, second, third = reads
    samples = []
    for sample, again in zip(second, third, strict=True):
        samples.append(sample if sample == again else "")
    return DataSummary(length, tuple(samples))


def hold_different_data(summaries: Sequence[DataSummary]) -> bool:
    """Return whether some ranks certainly hold other data than others.

    Args:
        summaries: of all ranks, in rank order. What is not comparable differs from nothing.
    """
    return _difference(summaries) is not None


def different_data_error(name: str, summaries: Sequence[DataSummary]) -> SyncError:
    """Return the error for ranks that hold different data.

    Args:
        name: of the loader, such as "train.py:12".
        summaries: of all ranks, in rank order, which `hold_different_data`.
    """
    return SyncError(
        f"{name}: the ranks hold different data: {_difference(summaries)}",
        why="shard_loader gives each rank its share of a dataset that all ranks hold; of parts, "
        "each rank would read a part of its part, and the other samples would be left out",
        fix="use shard_loader(loader, divides='processes') if each process has its part already; "
        "else pass the same dataset on all ranks; divides='nothing' skips the comparison",
    )


def _difference(summaries: Sequence[DataSummary]) -> str | None:
    """Return in words what differs first; None: nothing that is comparable."""
    lengths = [summary.length for summary in summaries]
    differing = _first_difference(lengths, unknown=None)
    if differing is not None:
        rank, other = differing
        return f"rank {rank} has {lengths[rank]} samples, rank {other} has {lengths[other]}"
    columns = itertools.zip_longest(*(summary.samples for summary in summaries), fillvalue="")
    for place, hashes in zip(("first", "last"), columns, strict=False):
        differing = _first_difference(hashes, unknown="")
        if differing is not None:
            rank, other = differing
            return f"the {place} sample of rank {rank} is another one than that of rank {other}"
    return None


def _first_difference(values: Sequence[Any], *, unknown: Any) -> tuple[int, int] | None:
    """Return the first two ranks with different known values."""
    ranks = [rank for rank, value in enumerate(values) if value != unknown]
    for rank in ranks:
        if values[rank] != values[ranks[0]]:
            return ranks[0], rank
    return None


def _hashes_of_reads(loader: DataLoader[Any], indices: list[int]) -> list[list[str]]:
    """Read samples several times with the loader's own machinery; return their hashes by read."""
    copy = copy_of(
        loader,
        batch_sampler=[indices] * _READS,
        collate_fn=_HashSamples(),
        # Draws the seed of the worker.
        generator=torch.Generator().manual_seed(_SEED),
        num_workers=min(loader.num_workers, 1),
        persistent_workers=False,
        pin_memory=False,
    )
    with current().loaders.unwatched, _unchanged_generators(loader.dataset):
        # A class of the user may change the batches in its own __iter__.
        batches: Any = DataLoader.__iter__(copy)
        try:
            return list(batches)
        finally:
            # Garbage collection may be late, because a traceback may hold the iterator.
            if hasattr(batches, "_shutdown_workers"):
                batches._shutdown_workers()


class _HashSamples:
    """The collate_fn of the copied loader: it runs after each read, in the process of the read.

    It seeds the global generators there, so that the next read draws the same numbers on all ranks.
    Samples with augmentation by these generators are then comparable.
    """

    def __call__(self, samples: list[Any]) -> list[str]:
        hashes = [_hash_of(sample) for sample in samples]
        for generator in global_generators(()).values():
            generator.seed(_SEED)
        return hashes


def _hash_of(sample: Any) -> str:
    """Return a hash of a sample's values; "" if none of them can be read."""
    try:
        texts = list(map(_text_of, leaves(sample)))
    except Exception:  # noqa: BLE001 - of a class of the user, or a nested or sparse tensor
        return ""
    if not any(texts):
        return ""
    return hashlib.blake2b("/".join(texts).encode(), digest_size=8).hexdigest()


def _text_of(leaf: Any) -> str:
    """Return a text of a leaf's values; "" for an object of another type.

    Floats are rounded, and few elements are taken: the processors of two nodes may compute the last
    bits of a sample differently, which must not count as other data. An element changes by rounding
    if its last bits lie at a border of bfloat16, as one in thousands does.

    Raises:
        Exception: a tensor has no elements in a row, as a sparse or a nested one.
    """
    if isinstance(leaf, (str, bytes, bool, int)):
        return repr(leaf)
    if isinstance(leaf, float):
        return str(torch.tensor(leaf).bfloat16().item())
    # NumPy's arrays and numbers, and PIL's images.
    if not isinstance(leaf, torch.Tensor) and hasattr(leaf, "__array_interface__"):
        array = np.asarray(leaf)
        if array.dtype.kind not in "biuf":
            return repr([array.shape, array.reshape(-1)[:_MAX_ELEMENTS].tolist()])
        leaf = torch.from_numpy(np.array(array, order="C"))
    if not isinstance(leaf, torch.Tensor):
        return ""
    flat = leaf.detach().reshape(-1)
    flat = flat[:: max(len(flat) // _MAX_ELEMENTS, 1)]
    if flat.is_floating_point():
        flat = flat.bfloat16()
    return repr([tuple(leaf.shape), flat.tolist()])


@contextlib.contextmanager
def _unchanged_generators(dataset: Any) -> Iterator[None]:
    """Restore the generators that a dataset holds, and the global ones, at the end of the context.

    In the context, the global ones draw equal numbers on all ranks.
    """
    with contextlib.ExitStack() as restored:
        for generator in _generators_in(dataset):
            access = access_of(generator)
            restored.callback(access.set, access.get())
        # It seeds the global generators, and restores them at its end.
        restored.enter_context(seeded_drawing([], _SEED).block())
        yield


def _generators_in(dataset: Any) -> list[Any]:
    """Return the generators of random numbers that a dataset holds, as in its transform.

    Those near to the dataset are found first. One that is not found goes on from another state: its
    dataset draws other numbers than without the summary.
    """
    generators, seen, queue = [], set[int](), deque([dataset])
    while queue and len(seen) < _MAX_OBJECTS:
        value = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_generator(value):
            generators.append(value)
        else:
            queue.extend(_held_by(value))
    return generators


def _held_by(value: Any) -> Iterable[Any]:
    """Return what an object or a container holds: of long containers a few items."""
    if isinstance(value, (list, tuple)):
        # The last sample of a concatenated dataset is in the last one.
        return [*value[:_MAX_ITEMS], *value[-_MAX_ITEMS:]]
    if isinstance(value, dict):
        return itertools.islice(value.values(), _MAX_ITEMS)
    if isinstance(value, (torch.Tensor, type, ModuleType)):
        return ()
    attributes: Iterable[Any] = getattr(value, "__dict__", {}).values()
    return attributes
