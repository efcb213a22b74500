"""Loaders over iterable datasets: what cannot be divided by index is divided where it is read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from parallelize.cluster.world import World
from parallelize.data.loader_copy import LoaderCopy
from parallelize.data.loader_options import Divides, LoaderOptions, no_fraction
from parallelize.data.sampler_arithmetic import as_steps, reader_steps
from parallelize.data.set_epoch import Epochs
from parallelize.data.sharded_iterable_dataset import DividedDataset
from parallelize.data.source import Place, Reading, Source
from parallelize.errors import ConfigError

__all__ = ["IterableSource"]

T = TypeVar("T")


class IterableSource(Source[T]):
    """A DataLoader over an iterable dataset.

    Args:
        copy: of it; its dataset is replaced.
        shown: another copy, which answers what is asked of the loader.
        part: this process's part of the dataset, or the dataset if it has to be divided where it is read.
        divides: what `part` divides itself over; None: to be seen.
        options: as asked.
        world: this process among the others.

    Raises:
        ConfigError: options that do not go with data of which nobody knows the end.
    """

    def __init__(
        self,
        *,
        copy: LoaderCopy[T],
        shown: DataLoader[T],
        part: Any,
        divides: Divides | None,
        options: LoaderOptions,
        world: World,
    ) -> None:
        _check(options, type(shown.dataset).__name__)
        self._copy, self._options, self._world, self._divides = copy, options, world, divides
        self._epochs = Epochs([part])
        if divides != "processes":
            part = DividedDataset(part, divides=divides, tail=options.tail, world=world)
        copy.replace(dataset=part)
        self.loader = shown

    def read(self, place: Place) -> Reading[T]:
        """Begin to read at a place; `Place.start` counts batches of this process here."""
        self._epochs.tell(place.epoch)
        return _IterableReading(self, place)

    def steps(self, place: Place) -> int | None:
        """How many batches a reading from there gives this process; None unless all is known about the dataset."""
        loader: Any = self.loader
        if self._divides != "nothing" or not hasattr(loader.dataset, "__len__"):
            return None
        workers = max(loader.num_workers, 1)
        total = sum(
            reader_steps(
                len(loader.dataset),
                readers=workers * self._world.world_size,
                reader=worker * self._world.world_size + self._world.rank,
                batch_size=loader.batch_size,
                drop_last=loader.drop_last,
                tail=self._options.tail,
            )
            for worker in range(workers)
        )
        return max((total if self._options.limit is None else as_steps(self._options.limit, total)) - place.start, 0)

    def chosen_epoch(self) -> int | None:
        """The epoch that the user has told the dataset since the last reading."""
        return self._epochs.chosen()

    def unit(self) -> dict[str, Any]:
        """How many samples a batch has, and from how many workers batches come in turn."""
        return {"batch_size": self.loader.batch_size, "num_workers": max(self.loader.num_workers, 1)}

    def fetch(self, place: Place) -> Iterator[T]:
        """The batches from a place on; there is no way there but to read what comes before it, and throw it away."""
        limit = self._options.limit
        end = None if limit is None else int(limit)
        return itertools.islice(self._copy.iterate(Place(epoch=place.epoch)), place.start, end)

    def close(self) -> None:
        """End the loader's persistent workers."""
        self._copy.close()


class _IterableReading(Reading[T]):
    def __init__(self, source: IterableSource[T], place: Place) -> None:
        self._source, self._place = source, place

    def batches(self) -> Iterator[T]:
        return self._source.fetch(self._place)

    def position(self, given: int) -> int:
        return self._place.start + given


def _check(options: LoaderOptions, name: str) -> None:
    if options.tail == "weighted":
        raise ConfigError(
            f"tail='weighted' with the iterable {name}",
            why="what a process's last batch weighs depends on how many samples there are, which nobody knows",
            fix="use tail='pad' or 'drop', or a dataset with indices",
        )
    if options.batch == "global":
        raise ConfigError(
            f"batch='global' with the iterable {name}",
            why="its batches are made in worker processes, each from samples of its own",
            fix="use batch='per_process' and DataLoader(batch_size=...) for one process",
        )
    if isinstance(options.limit, float):
        raise no_fraction(options.limit, f"the iterable {name}")
