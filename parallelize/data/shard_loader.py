"""shard_loader: returns this process's share of a loader, the same object for equal arguments.

The room is read in this order:

    units           which units of a pass each process takes; the words of this room
    draws           the random numbers from which the order is drawn: those of one process
    copied_loader   how torch's DataLoader is made to read them: what is shared, what replaced
    source          what one kind of loader reads in a pass
    indexed         ... of a dataset with __getitem__; `divided`: whose sampler divides it already
    streams         ... of an iterable dataset, or an iterable of batches
    loader          what the user holds; `results`: mean and gather; `prefetch`: to the device
    same_data       do the ranks hold the same dataset; `forgotten`: loaders that nobody divides

The life of a pass on a shuffled loader of two ranks:

    the user's iter()    ShardedLoader.__iter__ makes a Pass, and the iterator of the copied loader,
                         which draws its workers' seed
    the first batch      the copy asks for units; with workers it does so in iter()
                         rank 0 tells the states of its generators
                         both ranks run the user's sampler from these states
                         each takes its share of the units, and the copy makes the batches
    the model's step     what both ranks iterate is compared
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from parallelize.data.indexed import IndexedSource
from parallelize.data.loader import ShardedLoader
from parallelize.data.options import Batch, Divides, LoaderOptions
from parallelize.data.prefetch import pins_memory
from parallelize.data.source import Source
from parallelize.data.streams import BatchIterableSource, IterableStyleSource, own_sharding
from parallelize.data.units import Tail
from parallelize.errors import ConfigError
from parallelize.run.context import Runtime, active, current
from parallelize.run.surroundings import surroundings

T = TypeVar("T")

_log = logging.getLogger("parallelize")


def shard_loader(
    loader: Iterable[T],
    *,
    tail: Tail | None = None,
    batch: Batch = "per_process",
    seed: int | None = None,
    limit: float | None = None,
    progress: bool | str = False,
    to_device: bool = True,
    prefetch: int = 1,
    divides: Divides | None = None,
) -> ShardedLoader[T]:
    """Return this process's share of a loader, with its batches moved to this process's device.

    The user's loader is not modified. Its own sampler runs as in one process: rank 0 draws the
    order, from the generators of the loader and the sampler, else from the global ones, and the
    processes divide it. So all processes together read what one process would have read, in each
    epoch. Ranks other than 0 wait for rank 0 before the first batch of an epoch, but not for data
    that needs no random numbers (torch's SequentialSampler, lists). A loader whose sampler already
    divides the data, such as DistributedSampler, is not divided again. Pass map-style datasets
    whole, and in the same order on all processes. Iterable datasets and iterables of batches are
    iterated by every process, each of which keeps its share of the samples or batches. Processes
    compare their data and orders: what differs between them is an error. Batches come in order,
    also with in_order=False.

    Each `iter()` is the next epoch, as with one process. Another call with the same loader and
    options (`progress` may differ) returns the same object.

    Args:
        loader: a DataLoader, or an iterable of batches.
        tail: how to shard samples that do not divide evenly. "pad": repeat some samples, so that
            all processes make equally many steps; "drop": leave out the last samples; "exact": use
            each sample once, so that processes may differ by a batch (for evaluation); "weighted":
            make equally many steps, and weight gradients by the true number of samples. None, in
            training: "weighted" with batch="global", so that gradients are those of one process,
            else "pad"; without gradients at `iter()`: each sample once ("exact", or "weighted"
            under fsdp, where all processes have to run each forward).
        batch: whether the loader's batch size is for each process ("per_process", as under torch's
            DistributedDataParallel: a step is that of one process with as many times the batch) or
            for all together ("global": a step is that of one process, whatever the size is; batches
            of a batch sampler of your own are divided, too).
        seed: seed of each epoch's order, with the epoch's number, in place of the states of the
            random generators; also of the workers, which differ on each process. With it, ranks
            do not wait for rank 0.
        limit: the maximum number of batches per process and epoch (an int), or a fraction of them
            (a float), at least one.
        progress: whether rank 0 shows a progress bar of its batches; a string is the bar's label.
        to_device: whether to move batches to `device()`. Under dp and ddp2, DataParallel then
            scatters them.
        prefetch: number of batches to copy to an accelerator ahead of the loop.
        divides: how the loader's data divides itself: not at all ("nothing"), over the "workers"
            that get_worker_info() returns, or over the "processes". None: "processes" for what is
            known to do so (samplers with attributes as DistributedSampler's, Hugging Face's
            streams, WebDataset with split_by_node, Mosaic Streaming, litdata), "workers" for an
            iterable dataset that reads get_worker_info().num_workers, else "nothing", also for data
            pipes: every process runs all of a pipe, unless you pass "processes". Data that divides
            itself decides how many samples each process gets, whatever `tail` is: if the numbers
            may differ, train with a `limit=` that all processes reach.

    Raises:
        ConfigError: options are invalid, or the loader cannot be sharded.
        SyncError: while it is iterated: the ranks iterate different data, or different loaders.
    """
    options = LoaderOptions(
        tail=tail,
        batch=batch,
        seed=seed,
        limit=limit,
        progress=progress,
        to_device=to_device,
        prefetch=prefetch,
        divides=divides,
    )
    if issubclass(type(loader), ShardedLoader):  # isinstance checks the class of the user's loader
        sharded = cast("ShardedLoader[T]", loader)
        if options in (sharded._self_options, LoaderOptions()):
            return sharded
        raise ConfigError(
            "shard_loader was called on a loader that it returned, with other options",
            why="the data would be sharded twice, and part of it skipped",
            fix="pass the DataLoader itself to each shard_loader",
        )
    run = active()
    loaders = surroundings().script.loaders if run is None else run.loaders
    by_options: dict[LoaderOptions, Any] = {}
    if isinstance(loader, DataLoader):  # other iterables may be used up
        by_options = loaders.sharded.setdefault(loader, {})
    key = dataclasses.replace(options, progress=False)  # a label does not begin anew
    known: ShardedLoader[T] | None = by_options.get(key)
    if known is not None:
        known._self_options = options
        return known
    code, run = sys._getframe(1), current()
    line = f"{Path(code.f_code.co_filename).name}:{code.f_lineno}"
    loaders.made[line] += 1
    number = loaders.made[line]
    name = line if number == 1 else f"{line} ({number})"
    source = _source_of(loader, options, run, f"loader at {name}")
    summary = source.batch_summary()
    if summary and run.world.is_main:
        _log.info("%s: %s", line, summary)
    sharded = by_options[key] = ShardedLoader(source, options, name)
    return sharded


def _source_of(loader: Any, options: LoaderOptions, run: Runtime, topic: str) -> Source:
    is_loader, divides = isinstance(loader, DataLoader), options.divides
    if not is_loader:
        _check_is_loader(loader)
    data = loader.dataset if is_loader else loader
    is_indexed = is_loader and not isinstance(data, IterableDataset)
    if not is_indexed and divides is None:
        data, divides = own_sharding(data, run.data_ranks)
    if not is_loader:
        return BatchIterableSource(data, options, run, topic, divides=divides)
    source: IndexedSource | IterableStyleSource
    if is_indexed:
        source = IndexedSource(loader, options, run, topic)
    else:
        source = IterableStyleSource(loader, data, options, run, topic, divides=divides)
    if options.to_device and run.device.type not in ("cpu", "mps"):
        assert source.copied is not None
        if loader.num_workers == 0:  # move_batches pins, in the same thread
            source.copied.set("pin_memory", value=False)
        elif pins_memory(loader, run.device):
            source.copied.set("pin_memory", value=True)
    return source


def _check_is_loader(loader: Any) -> None:
    """Raise a ConfigError for what is not an iterable of batches."""
    # WebDataset's pipelines are Datasets, whose last stages may make batches, as WebLoader does.
    is_data = isinstance(loader, (Dataset, torch.Tensor)) and not hasattr(loader, "pipeline")
    are_loaders = isinstance(loader, list) and DataLoader in map(type, loader)
    is_iterable = isinstance(loader, Iterable) or hasattr(loader, "__getitem__")
    if is_data or are_loaders or isinstance(loader, (Mapping, str)) or not is_iterable:
        raise ConfigError(
            f"shard_loader of a {type(loader).__name__}",
            why="it is not an iterable of batches",
            fix="use shard_loader(DataLoader(...)), and one call for each DataLoader",
        )
