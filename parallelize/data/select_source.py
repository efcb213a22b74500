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
from parallelize.data.map_style import MapStyleSource
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
    is_loader = isinstance(loader, DataLoader)
    if not is_loader:
        _check_is_batch_iterable(loader)
    data, divides = loader.dataset if is_loader else loader, options.divides
    is_indexed = is_loader and not isinstance(data, IterableDataset)
    if is_indexed and divides is not None:
        raise ConfigError(
            f"divides={divides!r} with {type(data).__name__}",
            why="it is not an iterable dataset: shard_loader shards its indices",
            fix="remove divides=; it is for iterable datasets and iterables of batches",
        )
    if not is_indexed and divides is None:
        data, divides = own_sharding(data, run.world)
    if not is_loader:
        return BatchIterableSource(data, divides=divides, options=options, world=run.world, occurrence=occurrence)
    rank, world_size = run.world.rank, run.world.world_size
    has_global_info = not is_indexed and divides in (None, "workers")
    init = WorkerInit(loader.worker_init_fn, rank=rank, world_size=world_size, has_global_info=has_global_info)
    # The run's seed is used for workers only, which are seeded in every epoch: parallel_model seeds this process.
    seed = run.config.seed if options.seed is None and loader.num_workers else options.seed
    copy: LoaderCopy[Any] = LoaderCopy(loader, seed=seed, worker_init=init)
    if options.to_device and loader.num_workers == 0 and run.device.type not in ("cpu", "mps"):
        copy.set_attributes(pin_memory=False)  # move_batches pins, in the same thread
    if is_indexed:
        return MapStyleSource(loader, copy=copy, options=options, world=run.world)
    copy.set_attributes(dataset=data)
    return IterableStyleSource(loader, copy=copy, divides=divides, options=options, run=run)


def _check_is_batch_iterable(loader: Any) -> None:
    kind = type(loader).__name__
    if isinstance(loader, (Dataset, torch.Tensor)) and not is_loader_of_batches(loader):
        raise ConfigError(
            f"shard_loader of a {kind}",
            why="it contains samples, not batches",
            fix="use shard_loader(DataLoader(...))",
        )
    is_sequence = hasattr(loader, "__getitem__") and isinstance(loader, Sized)
    if isinstance(loader, (Mapping, str, bytes)) or not (isinstance(loader, Iterable) or is_sequence):
        raise ConfigError(
            f"shard_loader of a {kind}",
            why="it is not an iterable of batches",
            fix="pass a DataLoader, or a list or another iterable of batches",
        )
