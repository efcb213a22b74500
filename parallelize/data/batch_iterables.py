"""Lists and other iterables of ready-made batches: each process takes every so-manieth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from parallelize.cluster.world import World
from parallelize.data.epoch_order import draw_lazily
from parallelize.data.epoch_shards import CountedReading, Fetch, StreamReading
from parallelize.data.loader_options import LoaderOptions, no_fraction
from parallelize.data.sample_fingerprint import likeness
from parallelize.data.sampler_arithmetic import Split
from parallelize.data.set_epoch import Epochs
from parallelize.data.source import Place, Reading, Source
from parallelize.errors import ConfigError

__all__ = ["PlainSource"]

T = TypeVar("T")

_COMPARED = 16  # of the batches that all processes hold


class PlainSource(Source[T]):
    """An iterable of batches; of a sequence only this process's own are made.

    Args:
        batches: the user's.
        options: as asked.
        world: this process among the others.
        turn: number of this one among those that its line has made in this run, from 0: each draws another order.

    Raises:
        ConfigError: options that only a loader can have.
    """

    is_resumable_anywhere = True

    def __init__(self, batches: Iterable[T], *, options: LoaderOptions, world: World, turn: int) -> None:
        _check(batches, options)
        self.loader = batches
        self._options, self._world = options, world
        self._is_sequence = hasattr(batches, "__getitem__") and hasattr(batches, "__len__")
        self._seed = (options.seed or 0) + turn
        self._epochs = Epochs([batches])

    def read(self, place: Place) -> Reading[T]:
        """Begin to read at a place."""
        self._epochs.tell(place.epoch)
        split, rank = self._split(place.start), self._world.rank
        if not self._is_sequence:
            stream = draw_lazily(self.loader, seed=self._seed, epoch=place.epoch, chunk=1)
            return StreamReading(_as_they_come, split=split, stream=stream, rank=rank, is_grouped=False)
        order = range(len(self.loader))
        return _SequenceReading(self._fetch, split=split, order=order, rank=rank, batches=self.loader)

    def steps(self, place: Place) -> int | None:
        """How many batches a reading from there gives this process; None: the iterable has no length."""
        return self._split(place.start).steps(self._world.rank) if hasattr(self.loader, "__len__") else None

    def chosen_epoch(self) -> int | None:
        """The epoch that the user has told the iterable since the last reading."""
        return self._epochs.chosen()

    def identity(self) -> dict[str, Any]:
        """The seed of what is drawn while a stream is read; a sequence is as it is."""
        return {} if self._is_sequence else {"seed": self._seed}

    def close(self) -> None:
        """Nothing is kept running."""

    def _split(self, start: int) -> Split:
        total = len(self.loader) if hasattr(self.loader, "__len__") else None
        size, options = self._world.world_size, self._options
        return Split.limited(total, limit=options.limit, start=start, world_size=size, group=size, tail=options.tail)

    def _fetch(self, indices: Iterable[Any], _steps: int | None) -> Iterator[T]:
        sequence: Sequence[T] = self.loader
        return (sequence[index] for index in indices)


class _SequenceReading(CountedReading[T]):
    def __init__(self, fetch: Fetch[T], *, split: Split, order: range, rank: int, batches: Sequence[T]) -> None:
        super().__init__(fetch, split=split, order=order, rank=rank, is_grouped=False)
        self._batches = batches

    def fingerprint(self) -> str:
        # Of a list that was shuffled before. Of other sequences only this process's own are made.
        first = self._batches[:_COMPARED] if isinstance(self._batches, (list, tuple)) else ()
        return likeness([super().fingerprint(), likeness(first)])


def _as_they_come(batches: Iterable[Any], _steps: int | None) -> Iterator[Any]:
    return iter(batches)


def _check(batches: Iterable[Any], options: LoaderOptions) -> None:
    name = type(batches).__name__
    if options.tail == "weighted":
        raise ConfigError(
            f"tail='weighted' with a {name} of batches",
            why="how many samples a batch has is not known before it is there",
            fix="use a DataLoader, or tail='pad'",
        )
    if options.batch == "global":
        raise ConfigError(
            f"batch='global' with a {name} of batches",
            why="they are made already",
            fix="use batch='per_process': each process takes whole batches",
        )
    if isinstance(options.limit, float) and not hasattr(batches, "__len__"):
        raise no_fraction(options.limit, name)
