"""Loaders that are divided over the processes already: read as they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from parallelize.cluster.world import World
from parallelize.data.detect_rank_queries import SIZES
from parallelize.data.epoch_shards import lazily
from parallelize.data.loader_copy import LoaderCopy
from parallelize.data.loader_options import LoaderOptions
from parallelize.data.sampler_arithmetic import as_steps
from parallelize.data.set_epoch import Epochs
from parallelize.data.source import Place, Reading, Source
from parallelize.errors import ConfigError

__all__ = ["KeptSource", "dividing_sampler"]

T = TypeVar("T")


def dividing_sampler(loader: DataLoader[Any], world: World) -> Any | None:
    """The sampler of a loader that gives each process a part of its own, or None.

    Raises:
        ConfigError: it divides into another number of parts than there are processes.
    """
    batches = loader.batch_sampler
    for sampler in (batches, loader.sampler, getattr(batches, "sampler", None)):
        for name in SIZES:
            size = getattr(sampler, name, None)
            if not isinstance(size, int):
                continue
            if size != world.world_size:
                raise ConfigError(
                    f"{type(sampler).__name__}({name}={size}) in a world of {world.world_size}",
                    why="it would give the processes something twice, or leave something out",
                    fix="leave the sampler away: shard_loader divides the loader by itself",
                )
            return sampler
    return None


class KeptSource(Source[T]):
    """A DataLoader with a sampler that divides.

    Args:
        loader: the user's.
        copy: of it.
        sampler: the one that divides.
        options: as asked.

    Raises:
        ConfigError: options that say how to divide what is divided already.
    """

    def __init__(self, loader: DataLoader[T], *, copy: LoaderCopy[T], sampler: Any, options: LoaderOptions) -> None:
        _check(options, type(sampler).__name__)
        self._copy, self._limit, self._divider = copy, options.limit, type(sampler).__name__
        self._units: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._epochs = Epochs([self._units, sampler, loader.dataset])
        self._feed = copy.feed()
        self.loader = copy.loader

    def read(self, place: Place) -> Reading[T]:
        """Begin to read at a place; `Place.start` counts batches here."""
        self._epochs.tell(place.epoch)
        return _KeptReading(self, place)

    def steps(self, place: Place) -> int | None:
        """How many batches a reading from there gives this process."""
        try:
            total = len(self._units)
        except TypeError:
            return None
        return max((total if self._limit is None else as_steps(self._limit, total)) - place.start, 0)

    def chosen_epoch(self) -> int | None:
        """The epoch that the user has told the sampler or the dataset since the last reading."""
        return self._epochs.chosen()

    def unit(self) -> dict[str, Any]:
        """How many samples a batch has, where that is known."""
        return {"batch_size": getattr(self._units, "batch_size", None)}

    def arithmetic(self) -> str:
        """That the loader is divided already."""
        return f"{self._divider} divides it over the processes already: kept as it is"

    def fetch(self, place: Place) -> Iterator[T]:
        """The batches that the user's sampler gives this process."""
        steps = self.steps(place)
        end = None if steps is None else place.start + steps
        self._feed.fill(lazily(lambda: itertools.islice(iter(self._units), place.start, end)), steps)
        return self._copy.fed(self._feed, place)

    def close(self) -> None:
        """End the loader's persistent workers."""
        self._copy.close()


class _KeptReading(Reading[T]):
    def __init__(self, source: KeptSource[T], place: Place) -> None:
        self._source, self._place = source, place

    def batches(self) -> Iterator[T]:
        return self._source.fetch(self._place)

    def position(self, given: int) -> int:
        return self._place.start + given


def _check(options: LoaderOptions, name: str) -> None:
    for option, default in (("tail", "pad"), ("batch", "per_process")):
        value = getattr(options, option)
        if value != default:
            raise ConfigError(
                f"{option}={value!r} with a loader that {name} divides over the processes already",
                why="it is read as it is: what does not divide was repeated or left out by the sampler",
                fix=f"leave {name} away: shard_loader divides the loader by itself",
            )
