"""Source for a DataLoader over an iterable dataset: each worker of each process yields its shard of the samples."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from parallelize.cluster.world import World
from parallelize.data.epoch_shards import LocalBatchesShard
from parallelize.data.loader_copy import LoaderCopy
from parallelize.data.loader_options import Divides, LoaderOptions, fraction_without_length_error
from parallelize.data.sampler_arithmetic import limit_in_steps, stream_steps
from parallelize.data.sharded_iterable_dataset import ShardedIterableDataset
from parallelize.data.source import EpochListeners, EpochShard, Position, Source
from parallelize.errors import ConfigError

__all__ = ["IterableStyleSource"]

T = TypeVar("T")


class IterableStyleSource(Source[T]):
    """Source for a DataLoader over an iterable dataset; `Position.start` counts this process's batches.

    Args:
        copy: a copy of the user's loader; its dataset is replaced.
        shown: another copy, with the user's dataset, for attribute lookups.
        dataset: the user's dataset, or this process's shard of it.
        divides: how `dataset` shards itself; None: infer it while the dataset is iterated.
        options: the options of `shard_loader`.
        world: rank and world size of this process.

    Raises:
        ConfigError: an option is set that iterable datasets do not support.
    """

    def __init__(
        self,
        *,
        copy: LoaderCopy[T],
        shown: DataLoader[T],
        dataset: Any,
        divides: Divides | None,
        options: LoaderOptions,
        world: World,
    ) -> None:
        _check(options, type(shown.dataset).__name__)
        self._copy, self._options, self._world, self._divides = copy, options, world, divides
        self._listeners = EpochListeners([dataset])
        if divides != "processes":
            dataset = ShardedIterableDataset(dataset, divides=divides, tail=options.tail, world=world)
        copy.set_attributes(dataset=dataset)
        self.loader = shown

    def shard(self, position: Position) -> EpochShard[T]:
        """Return this process's shard of an epoch, from a position on."""
        self._listeners.set_epoch(position.epoch)
        return LocalBatchesShard(functools.partial(self._batches, position), start=position.start)

    def steps(self, position: Position) -> int | None:
        """Count this process's batches from a position on; None if the dataset has no length or shards itself."""
        loader: Any = self.loader
        if self._divides != "nothing" or not hasattr(loader.dataset, "__len__"):
            return None
        workers = max(loader.num_workers, 1)
        total = sum(
            stream_steps(
                len(loader.dataset),
                num_shards=workers * self._world.world_size,
                shard_index=worker * self._world.world_size + self._world.rank,
                batch_size=loader.batch_size,
                drop_last=loader.drop_last,
                tail=self._options.tail,
            )
            for worker in range(workers)
        )
        limit = self._options.limit
        return max((total if limit is None else limit_in_steps(limit, total)) - position.start, 0)

    def batch_identity(self) -> dict[str, Any]:
        """Return the batch size and the number of workers, which determine the samples of each batch."""
        return {"batch_size": self.loader.batch_size, "num_workers": max(self.loader.num_workers, 1)}

    def _batches(self, position: Position) -> Iterator[T]:
        # The dataset cannot seek: batches before the position are made and discarded.
        limit = self._options.limit
        end = None if limit is None else int(limit)
        return itertools.islice(self._copy.iterate(Position(epoch=position.epoch)), position.start, end)


def _check(options: LoaderOptions, name: str) -> None:
    if options.tail == "weighted":
        raise ConfigError(
            f"tail='weighted' with the iterable {name}",
            why="the weight of a process's last batch depends on the number of samples, which is unknown",
            fix="use tail='pad' or 'drop', or a map-style dataset",
        )
    if options.batch == "global":
        raise ConfigError(
            f"batch='global' with the iterable {name}",
            why="each worker process makes batches from its own samples",
            fix="use batch='per_process' and DataLoader(batch_size=...) for one process",
        )
    if isinstance(options.limit, float):
        raise fraction_without_length_error(options.limit, f"the iterable {name}")
