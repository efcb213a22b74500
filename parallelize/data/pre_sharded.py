"""Source for a DataLoader that is already sharded, by a DistributedSampler or a similar sampler."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from parallelize.cluster.world import World
from parallelize.data.detect_rank_queries import NUM_SHARDS_ATTRIBUTES
from parallelize.data.epoch_shards import LocalBatchesShard, Reiterable
from parallelize.data.loader_copy import LoaderCopy
from parallelize.data.loader_options import LoaderOptions
from parallelize.data.sampler_arithmetic import limit_in_steps
from parallelize.data.source import EpochListeners, EpochShard, Position, Source
from parallelize.errors import ConfigError

__all__ = ["PreShardedSource", "find_distributed_sampler"]

T = TypeVar("T")


def find_distributed_sampler(loader: DataLoader[Any], world: World) -> Any | None:
    """Return the sampler that already shards a loader over the processes, or None.

    Raises:
        ConfigError: the sampler's number of shards is not the world size.
    """
    batches = loader.batch_sampler
    for sampler in (batches, loader.sampler, getattr(batches, "sampler", None)):
        for name in NUM_SHARDS_ATTRIBUTES:
            size = getattr(sampler, name, None)
            if not isinstance(size, int):
                continue
            if size != world.world_size:
                raise ConfigError(
                    f"{type(sampler).__name__}({name}={size}) in a world of {world.world_size}",
                    why="some samples would be repeated, or left out",
                    fix="remove the sampler: shard_loader shards the loader itself",
                )
            return sampler
    return None


class PreShardedSource(Source[T]):
    """Source for a DataLoader whose sampler already shards it; `Position.start` counts this process's batches.

    Args:
        loader: the user's loader.
        copy: the copy of that loader.
        sampler: the sampler that shards the loader.
        options: the options of `shard_loader`.

    Raises:
        ConfigError: an option is set that determines how to shard.
    """

    _copy: LoaderCopy[T]

    def __init__(self, loader: DataLoader[T], *, copy: LoaderCopy[T], sampler: Any, options: LoaderOptions) -> None:
        _check(options, type(sampler).__name__)
        self._copy, self._limit, self._sampler_name = copy, options.limit, type(sampler).__name__
        self._units: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._listeners = EpochListeners([self._units, sampler, loader.dataset])
        self._sampler = copy.replace_sampler()
        self.loader = copy.loader

    def shard(self, position: Position) -> EpochShard[T]:
        """Return this process's shard of an epoch, from a position on."""
        self._listeners.set_epoch(position.epoch)
        return LocalBatchesShard(functools.partial(self._batches, position), start=position.start)

    def steps(self, position: Position) -> int | None:
        """Count this process's batches from a position on; None if the sampler has no length."""
        try:
            total = len(self._units)
        except TypeError:
            return None
        return max((total if self._limit is None else limit_in_steps(self._limit, total)) - position.start, 0)

    def batch_identity(self) -> dict[str, Any]:
        """Return the sampler's batch size, which may be None."""
        return {"batch_size": getattr(self._units, "batch_size", None)}

    def batch_summary(self) -> str:
        """Return text for logs that names the sampler that shards the loader."""
        return f"already sharded by its {self._sampler_name}: left as it is"

    def _batches(self, position: Position) -> Iterator[T]:
        steps = self.steps(position)
        end = None if steps is None else position.start + steps
        units = Reiterable(lambda: itertools.islice(iter(self._units), position.start, end))
        self._sampler.set_units(units, steps)
        return self._copy.iterate_shard(self._sampler, position)


def _check(options: LoaderOptions, sampler_name: str) -> None:
    for option, default in (("tail", "pad"), ("batch", "per_process")):
        value = getattr(options, option)
        if value != default:
            raise ConfigError(
                f"{option}={value!r} with a loader that {sampler_name} already shards",
                why="the loader is left as it is: its sampler decides which samples are repeated or left out",
                fix=f"remove {sampler_name}: shard_loader shards the loader itself",
            )
