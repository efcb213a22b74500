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
from parallelize.data.loader_options import Divides, LoaderOptions
from parallelize.data.map_style import MapStyleSource, PreShardedSource, find_distributed_sampler
from parallelize.data.self_sharding import is_loader_of_batches, own_sharding
from parallelize.data.source import Source
from parallelize.errors import ConfigError
from parallelize.runtime.context import Runtime

__all__ = ["select_source"]


def select_source(loader: Any, *, options: LoaderOptions, run: Runtime, occurrence: int) -> Source[Any]:
    """Return the `Source` for a loader; `occurrence` counts those that its line of code has made before in this run.

    Raises:
        ConfigError: the object is not a loader, cannot be sharded, or does not support the options.
    """
    if not isinstance(loader, DataLoader):
        _check_is_batch_iterable(loader)
        batches, divides = _sharding(loader, options=options, run=run)
        return BatchIterableSource(batches, divides=divides, options=options, world=run.world, occurrence=occurrence)
    if isinstance(loader.dataset, IterableDataset):
        dataset, divides = _sharding(loader.dataset, options=options, run=run)
        copy = _copy(loader, options=options, run=run, has_global_info=divides in (None, "workers"))
        shown = _copy(loader, options=options, run=run, has_global_info=False).loader
        return IterableStyleSource(copy=copy, shown=shown, dataset=dataset, divides=divides, options=options, run=run)
    if options.divides is not None:
        raise ConfigError(
            f"divides={options.divides!r} with {type(loader.dataset).__name__}",
            why="it is not an iterable dataset: shard_loader shards its indices",
            fix="remove divides=; it is for iterable datasets and iterables of batches",
        )
    copy = _copy(loader, options=options, run=run, has_global_info=False)
    sampler = find_distributed_sampler(loader, run.world)
    if sampler is not None:
        return PreShardedSource(loader, copy=copy, sampler=sampler, options=options)
    return MapStyleSource(loader, copy=copy, options=options, world=run.world)


def _sharding(data: Any, *, options: LoaderOptions, run: Runtime) -> tuple[Any, Divides | None]:
    """Return an iterable dataset or an iterable of batches, and how it shards itself (None: unknown)."""
    return own_sharding(data, run.world) if options.divides is None else (data, options.divides)


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
    if isinstance(loader, (Dataset, torch.Tensor)) and not is_loader_of_batches(loader):
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
