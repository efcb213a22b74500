"""A copy of the user's DataLoader that reads something else: same class, same attributes, never constructed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from parallelize.data.dataloader_workers import WorkerStart
from parallelize.data.rng import OwnStream, mixed
from parallelize.data.source import Place
from parallelize.errors import ConfigError

__all__ = ["Feed", "LoaderCopy"]

T = TypeVar("T")


class Feed:
    """Stands in a copied loader for its sampler or batch sampler, and yields this process's share instead.

    Everything else asked of it is answered by what it stands for.

    Args:
        replaced: the user's sampler or batch sampler.
    """

    def __init__(self, replaced: Any) -> None:
        self._replaced = replaced
        self._units: Iterable[Any] = ()
        self._length: int | None = None
        self.times_read = 0

    def fill(self, units: Iterable[Any], length: int | None) -> None:
        """Set what the next iterators yield; `units` can be iterated more than once, a `length` of None is unknown."""
        self._units, self._length, self.times_read = units, length, 0

    def __iter__(self) -> Iterator[Any]:
        # torch's iterator over worker processes asks twice: at its making and at its reset.
        self.times_read += 1
        return iter(self._units)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"nobody knows how much {type(self._replaced).__name__} yields")
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask before there is anything to ask
            raise AttributeError(name)
        return getattr(self._replaced, name)


class LoaderCopy(Generic[T]):
    """What one process reads from instead of the user's loader, which stays as it is.

    Args:
        loader: the user's; it is not kept, so that it can go when she lets it go.
        seed: of the streams of random numbers while batches are made. None: that of the loader's generator, or else
            drawn when reading begins, as torch does; and without workers none: the dataset then draws from the
            process's own generators.
        start: what each worker process does first.

    Raises:
        ConfigError: the loader is to go on at a place of its own.
    """

    def __init__(self, loader: DataLoader[T], *, seed: int | None, start: WorkerStart) -> None:
        if getattr(loader, "next_iter_state", None) is not None:  # of torchdata's StatefulDataLoader
            raise ConfigError(
                f"a {type(loader).__name__} whose state was loaded before shard_loader",
                why="it counts the batches of another reading, and each process would skip as many of its own share",
                fix="save shard_loader(loader).state_dict(), and shard_loader(loader).load_state_dict(state)",
            )
        self._seed, self._rank = seed, start.rank
        self.loader: DataLoader[T] = object.__new__(type(loader))
        # Past DataLoader.__setattr__, which refuses: a loader's parts may not change while it is read, but this one is
        # new. Without workers, for those of the user's loader are hers.
        vars(self.loader).update(vars(loader), _iterator=None)
        self._generator = loader.generator
        self._turn = 0
        if loader.num_workers > 0:
            vars(self.loader)["worker_init_fn"] = start

    def feed(self) -> Feed:
        """A feed in the place from which the loader takes its indices."""
        name = "sampler" if self.loader.batch_sampler is None else "batch_sampler"
        feed = Feed(getattr(self.loader, name))
        vars(self.loader)[name] = feed
        return feed

    def replace(self, **attributes: Any) -> None:
        """Set attributes that a loader does not let change."""
        vars(self.loader).update(attributes)

    def iterate(self, place: Place) -> Iterator[T]:
        """The loader's own iterator, with other random numbers on every process, in every worker, at every place."""
        # torch draws the seed of its workers here; drawn in any case, so that what follows in the program draws alike.
        generator = torch.default_generator if self._generator is None else self._generator
        before = generator.get_state()
        drawn = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        if place.start:  # an epoch that is gone on with has drawn when it began
            generator.set_state(before)
        # What a generator of hers has come to nobody saves: streams follow from its seed, also where reading goes on.
        of_loader = drawn if self._generator is None else self._generator.initial_seed()
        seed = mixed("workers", of_loader if self._seed is None else self._seed, self._rank, place.epoch, place.start)
        vars(self.loader)["generator"] = torch.Generator().manual_seed(seed)
        batches = iter(self.loader)
        is_apart = self.loader.num_workers == 0 and self._seed is not None
        try:
            yield from self._in_turn(_drawing_apart(batches, OwnStream(seed)) if is_apart else batches)
        finally:
            if not self.loader.persistent_workers:
                self._end(batches)

    def _in_turn(self, batches: Iterator[T]) -> Iterator[T]:
        self._turn += 1
        turn = self._turn
        for batch in batches:
            yield batch
            if turn != self._turn and self.loader.persistent_workers:
                raise ConfigError(
                    "two iterators at a time over a DataLoader(persistent_workers=True)",
                    why="torch has its workers serve the newer one, and batches of the older one are lost",
                    fix="use persistent_workers=False, or a DataLoader for each of them",
                )

    def fed(self, feed: Feed, place: Place) -> Iterator[T]:
        """The loader's own iterator over what was filled into its feed.

        Raises:
            ConfigError: the loader takes its indices from somewhere else: every process would get everything.
        """
        for batch in self.iterate(place):
            if feed.times_read == 0:
                raise ConfigError(
                    f"{type(self.loader).__name__} does not read its sampler when it is iterated",
                    why="its indices come from somewhere else, so that every process would get all of them",
                    fix="give shard_loader a DataLoader that begins to read at iter(), or its batches' indices",
                )
            yield batch

    def close(self) -> None:
        """End persistent workers."""
        self._end(self.loader._iterator)

    def _end(self, batches: Any) -> None:
        # Now, not when the last reference goes: a traceback may hold one, and torchdata's StatefulDataLoader does.
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()
        vars(self.loader)["_iterator"] = None


def _drawing_apart(batches: Iterator[T], stream: OwnStream) -> Iterator[T]:
    while True:
        with stream.drawing():
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch
