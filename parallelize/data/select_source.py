"""From a user's loader to the source that reads its kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from parallelize.data.batch_iterables import PlainSource
from parallelize.data.dataloader_workers import WorkerStart
from parallelize.data.iterable_style import IterableSource
from parallelize.data.loader_copy import LoaderCopy
from parallelize.data.loader_options import LoaderOptions
from parallelize.data.map_style import IndexedSource
from parallelize.data.pre_sharded import KeptSource, dividing_sampler
from parallelize.data.sharded_iterable_dataset import recognised
from parallelize.data.source import Source
from parallelize.errors import ConfigError
from parallelize.runtime.context import Runtime

__all__ = ["source_of"]


def source_of(loader: Any, *, options: LoaderOptions, run: Runtime, turn: int) -> Source[Any]:
    """What reads a loader of this kind.

    Args:
        loader: the user's.
        options: as asked.
        run: the run it is read in.
        turn: number of this loader among those that its line has made in this run, from 0.

    Raises:
        ConfigError: it is no loader, or none that can be divided, or not with these options.
    """
    if not isinstance(loader, DataLoader):
        _refuse_what_is_no_loader(loader)
        return PlainSource(loader, options=options, world=run.world, turn=turn)
    part, divides = loader.dataset, None
    is_iterable = isinstance(loader.dataset, IterableDataset)
    if is_iterable and options.divides is None:
        part, divides = recognised(loader.dataset, run.world)
    elif is_iterable:
        divides = options.divides
    elif options.divides is not None:
        raise ConfigError(
            f"divides={options.divides!r} with {type(loader.dataset).__name__}",
            why="it has indices, which shard_loader divides",
            fix="leave divides= away; it is for iterable datasets",
        )
    copy = _copy(loader, options=options, run=run, is_wide=is_iterable and divides != "processes")
    if is_iterable:
        shown = _copy(loader, options=options, run=run, is_wide=False).loader
        return IterableSource(copy=copy, shown=shown, part=part, divides=divides, options=options, world=run.world)
    sampler = dividing_sampler(loader, run.world)
    if sampler is not None:
        return KeptSource(loader, copy=copy, sampler=sampler, options=options)
    return IndexedSource(loader, copy=copy, options=options, world=run.world)


def _copy(loader: DataLoader[Any], *, options: LoaderOptions, run: Runtime, is_wide: bool) -> LoaderCopy[Any]:
    world = run.world
    start = WorkerStart(loader.worker_init_fn, rank=world.rank, world_size=world.world_size, is_wide=is_wide)
    # In a run with a seed parallel_model gives each process a stream of its own; only workers start anew every epoch.
    of_run = run.config.seed if loader.num_workers else None
    copy: LoaderCopy[Any] = LoaderCopy(loader, seed=of_run if options.seed is None else options.seed, start=start)
    if options.to_device and run.device.type not in ("cpu", "mps"):
        # Only from pinned memory does a copy run beside the device's work; a loader with workers pins in a thread.
        copy.replace(pin_memory=True)
    return copy


def _refuse_what_is_no_loader(loader: Any) -> None:
    kind = type(loader).__name__
    if isinstance(loader, (Dataset, torch.Tensor)):
        raise ConfigError(
            f"shard_loader of a {kind}",
            why="it has samples, and no batches of them",
            fix="use shard_loader(DataLoader(...))",
        )
    if isinstance(loader, (Mapping, str, bytes)) or not (isinstance(loader, Iterable) or _is_old_sequence(loader)):
        raise ConfigError(
            f"shard_loader of a {kind}",
            why="it is no iterable of batches",
            fix="give it a DataLoader, or a list or another iterable of batches",
        )


def _is_old_sequence(loader: Any) -> bool:
    return hasattr(loader, "__getitem__") and isinstance(loader, Sized)
