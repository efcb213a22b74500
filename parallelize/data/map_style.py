"""Loaders that fetch by index: the indices are divided before anything is fetched."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader

from parallelize.cluster.world import World
from parallelize.data.epoch_order import draw, draw_lazily, seed_of
from parallelize.data.epoch_shards import CountedReading, StreamReading
from parallelize.data.loader_copy import LoaderCopy
from parallelize.data.loader_options import LoaderOptions, no_fraction
from parallelize.data.sampler_arithmetic import Split
from parallelize.data.set_epoch import Epochs
from parallelize.data.source import Place, Reading, Source
from parallelize.errors import ConfigError

__all__ = ["IndexedSource", "Units"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Units:
    """What a loader's sampler yields, one at a time.

    Args:
        sampler: yields them; drawn alike on every process.
        batch_size: how many the loader puts into a batch; None: one is a batch, or an item of its own.
        drop_last: whether the loader leaves a smaller last batch out.
    """

    sampler: Any
    batch_size: int | None
    drop_last: bool = False

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Units:
        """Those of a loader: indices where torch groups them into batches, else whatever its sampler yields."""
        batches = loader.batch_sampler
        if type(batches) is BatchSampler:
            return cls(sampler=batches.sampler, batch_size=batches.batch_size, drop_last=batches.drop_last)
        return cls(sampler=loader.sampler if batches is None else batches, batch_size=None)

    @property
    def length(self) -> int | None:
        """How many there are in an epoch; None: the sampler does not say."""
        try:
            return len(self.sampler)
        except TypeError:
            return None


class IndexedSource(Source[T]):
    """A DataLoader over a dataset with indices.

    Args:
        loader: the user's.
        copy: of it.
        options: as asked.
        world: this process among the others.

    Raises:
        ConfigError: options that do not go with this loader.
    """

    is_resumable_anywhere = True

    def __init__(self, loader: DataLoader[T], *, copy: LoaderCopy[T], options: LoaderOptions, world: World) -> None:
        self._copy, self._options, self._world = copy, options, world
        self._units = Units.of(loader)
        _check(self._units, options)
        self._seed = seed_of(self._units.sampler, options.seed or 0)
        self._group = _group_size(self._units, options, processes=world.world_size)
        self._epochs = Epochs([self._units.sampler, getattr(self._units.sampler, "sampler", None), loader.dataset])
        self._feed = copy.feed()
        self.loader = copy.loader

    def read(self, place: Place) -> Reading[T]:
        """Begin to read at a place."""
        sampler, fetch = self._units.sampler, functools.partial(self._fetch, place)
        rank, is_grouped = self._world.rank, self._units.batch_size is not None
        self._epochs.tell(place.epoch)
        if self._units.length is None:
            split = self._split(None, place.start)
            stream = draw_lazily(sampler, seed=self._seed, epoch=place.epoch, chunk=split.group)
            return StreamReading(fetch, split=split, stream=stream, rank=rank, is_grouped=is_grouped)
        order = draw(sampler, seed=self._seed, epoch=place.epoch)
        split = self._split(len(order), place.start)
        return CountedReading(fetch, split=split, order=order, rank=rank, is_grouped=is_grouped)

    def steps(self, place: Place) -> int | None:
        """How many batches a reading from there gives this process."""
        length = self._units.length
        return None if length is None else self._split(length, place.start).steps(self._world.rank)

    def chosen_epoch(self) -> int | None:
        """The epoch that the user has told the sampler or the dataset since the last reading."""
        return self._epochs.chosen()

    def identity(self) -> dict[str, Any]:
        """The number of units and the seed of their order."""
        return {"units": self._units.length, "seed": self._seed}

    def arithmetic(self) -> str:
        """The batch size of a process and of all of them."""
        each = self._group / self._world.world_size
        unit = "" if self._units.batch_size is not None else " of the sampler's batches"
        return f"{each:g} x {self._world.world_size} processes = {self._group} global{unit}"

    def close(self) -> None:
        """End the loader's persistent workers."""
        self._copy.close()

    def _split(self, total: int | None, start: int) -> Split:
        return Split.limited(
            total,
            limit=self._options.limit,
            start=start,
            world_size=self._world.world_size,
            group=self._group,
            tail=self._options.tail,
            drop_last=self._units.drop_last,
        )

    def _fetch(self, place: Place, units: Iterable[Any], steps: int | None) -> Iterator[T]:
        self._feed.fill(units, steps)
        return self._copy.fed(self._feed, place)


def _check(units: Units, options: LoaderOptions) -> None:
    """Refuse options that do not go with what a sampler yields."""
    if units.drop_last and options.tail == "exact":
        raise ConfigError(
            "tail='exact' with DataLoader(drop_last=True)",
            why="one says that each sample comes once, the other that the last ones never come",
            fix="use DataLoader(drop_last=False), or tail='drop'",
        )
    if units.length is not None:
        return
    name = type(units.sampler).__name__
    if options.tail == "weighted":
        raise ConfigError(
            f"tail='weighted' with {name}, which has no length",
            why="what a process's last batch weighs depends on how many samples there are",
            fix=f"give {name} a __len__, or use tail='pad'",
        )
    if isinstance(options.limit, float):
        raise no_fraction(options.limit, name)


def _group_size(units: Units, options: LoaderOptions, *, processes: int) -> int:
    """Units that all processes together take in a step."""
    size = units.batch_size
    if options.batch == "per_process":
        return (size or 1) * processes
    if size is None:
        raise ConfigError(
            "batch='global' with a loader that has no batch size",
            why="its sampler makes the batches, so that only whole ones can be given to processes",
            fix="use batch='per_process', or DataLoader(batch_size=...)",
        )
    may_be_uneven = options.tail in ("exact", "weighted") and units.length is not None
    if size < processes or (size % processes and not may_be_uneven):
        near = max(size // processes, 1) * processes
        raise ConfigError(
            f"batch='global' with batch_size={size} on {processes} processes",
            why="it does not divide: gradients of unequal batches would be averaged as if they were equal",
            fix=f"use batch_size={near}, or tail='weighted' to weigh unequal shares by their samples",
        )
    return size
