"""Selection of the `Source` class for a user's loader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from parallelize.data.batch_iterables import BatchIterableSource
from parallelize.data.dataloader_workers import WorkerInit
from parallelize.data.iterable_style import IterableStyleSource
from parallelize.data.loader_copy import LoaderCopy
from parallelize.data.loader_options import LoaderOptions
from parallelize.data.map_style import MapStyleSource, PreShardedSource, find_distributed_sampler
from parallelize.data.sharded_iterable_dataset import with_own_sharding
from parallelize.data.source import Source
from parallelize.errors import ConfigError
from parallelize.runtime.context import Runtime

__all__ = ["select_source"]


def select_source(loader: Any, *, options: LoaderOptions, run: Runtime, occurrence: int) -> Source[Any]:
    """Return the `Source` for a loader.

    Args:
        loader: the user's loader.
        options: the options of `shard_loader`.
        run: the run in which the loader is iterated.
        occurrence: number of loaders that the same line of code has made before in this run.

    Raises:
        ConfigError: the object is not a loader, cannot be sharded, or does not support the options.
    """
    if not isinstance(loader, DataLoader):
        _check_is_batch_iterable(loader)
        return BatchIterableSource(loader, options=options, world=run.world, occurrence=occurrence)
    dataset, divides = loader.dataset, None
    is_iterable = isinstance(loader.dataset, IterableDataset)
    if is_iterable and options.divides is None:
        dataset, divides = with_own_sharding(loader.dataset, run.world)
    elif is_iterable:
        divides = options.divides
    elif options.divides is not None:
        raise ConfigError(
            f"divides={options.divides!r} with {type(loader.dataset).__name__}",
            why="it is not an iterable dataset: shard_loader shards its indices",
            fix="remove divides=; it is for iterable datasets",
        )
    copy = _copy(loader, options=options, run=run, has_global_info=is_iterable and divides != "processes")
    if is_iterable:
        shown = _copy(loader, options=options, run=run, has_global_info=False).loader
        return IterableStyleSource(
            copy=copy, shown=shown, dataset=dataset, divides=divides, options=options, world=run.world
        )
    sampler = find_distributed_sampler(loader, run.world)
    if sampler is not None:
        return PreShardedSource(loader, copy=copy, sampler=sampler, options=options)
    return MapStyleSource(loader, copy=copy, options=options, world=run.world)


def _copy(loader: DataLoader[Any], *, options: LoaderOptions, run: Runtime, has_global_info: bool) -> LoaderCopy[Any]:
    rank, world_size = run.world.rank, run.world.world_size
    init = WorkerInit(loader.worker_init_fn, rank=rank, world_size=world_size, has_global_info=has_global_info)
    # The run's seed is used for workers only, which are seeded in every epoch: parallel_model seeds this process.
    run_seed = run.config.seed if loader.num_workers else None
    seed = run_seed if options.seed is None else options.seed
    copy: LoaderCopy[Any] = LoaderCopy(loader, seed=seed, worker_init=init)
    if options.to_device and loader.num_workers == 0 and run.device.type not in ("cpu", "mps"):
        copy.set_attributes(pin_memory=False)  # move_batches pins, in the same thread
    return copy


def _check_is_batch_iterable(loader: Any) -> None:
    kind = type(loader).__name__
    if isinstance(loader, (Dataset, torch.Tensor)):
        raise ConfigError(
            f"shard_loader of a {kind}",
            why="it contains samples, not batches",
            fix="use shard_loader(DataLoader(...))",
        )
    if isinstance(loader, (Mapping, str, bytes)) or not (isinstance(loader, Iterable) or _is_sequence(loader)):
        raise ConfigError(
            f"shard_loader of a {kind}",
            why="it is not an iterable of batches",
            fix="pass a DataLoader, or a list or another iterable of batches",
        )


def _is_sequence(loader: Any) -> bool:
    return hasattr(loader, "__getitem__") and isinstance(loader, Sized)
