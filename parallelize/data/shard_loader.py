"""shard_loader: returns this process's shard of a loader, the same object for equal arguments."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections import defaultdict
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch.utils.data import DataLoader

from parallelize.data.loader_iterators import LineOfCode
from parallelize.data.loader_options import Batch, Divides, LoaderOptions
from parallelize.data.sampler_arithmetic import Tail
from parallelize.data.select_source import source_for
from parallelize.data.sharded_loader import ShardedLoader
from parallelize.errors import ConfigError
from parallelize.runtime.context import active, current

__all__ = ["shard_loader"]

T = TypeVar("T")

_log = logging.getLogger("parallelize")


def shard_loader(
    loader: Iterable[T],
    *,
    tail: Tail = "pad",
    batch: Batch = "per_process",
    seed: int | None = None,
    limit: float | None = None,
    progress: bool | str = False,
    to_device: bool = True,
    prefetch: int = 2,
    divides: Divides | None = None,
) -> ShardedLoader[T]:
    """Return this process's shard of a loader, with its batches moved to this process's device.

    The user's loader is not modified. Sequential and shuffled loaders are sharded exactly as by torch's
    DistributedSampler; shuffled ones get a new order in every epoch. Any other sampler is iterated with the same seed
    on all processes, and its indices are sharded. A loader whose sampler already shards it is not sharded again.
    Pass map-style datasets whole: of one that is sharded by hand, ranks compare only the names of files in its lists,
    the indices of a Subset, and the first rows of Hugging Face's.
    Iterable datasets and iterables of batches are iterated with the same seed on all processes, each of which keeps its
    share of the samples or batches.
    Another call with the same loader and options (`progress` may differ) returns the same object, so that
    `for epoch in range(n): for batch in shard_loader(loader)` advances the epoch. In a decorated function so does
    `shard_loader(make_loader())`, with a new loader of such a dataset for each epoch. Each call of a decorated function
    begins with epoch 0; a function that trains one epoch per call sets its number with `set_epoch`.

    Args:
        loader: a DataLoader, or an iterable of batches.
        tail: how to shard samples that do not divide evenly. "pad": repeat some samples, so that all processes make
            equally many steps; "drop": leave out the last samples; "exact": use each sample once, so that processes may
            differ by a batch (for evaluation); "weighted": make equally many steps, and weight gradients by the true
            number of samples (for training).
        batch: whether the loader's batch size is for each process ("per_process") or for all together ("global").
        seed: seed of the order, if the loader's sampler has no generator; None: 0, as in DistributedSampler. It also
            seeds the random numbers that the dataset draws, separately for each process, worker and epoch, and without
            workers for each batch. With None, worker processes are still seeded separately, from torch's global seed.
        limit: the maximum number of batches per process and epoch (an int), or a fraction of them (a float).
        progress: whether rank 0 shows a progress bar; a string is the bar's label.
        to_device: whether to move batches to `device()`. Under dp and ddp2, DataParallel then scatters them.
        prefetch: number of batches to copy to an accelerator ahead of the loop.
        divides: how an iterable dataset, or an iterable of batches, shards itself: not at all ("nothing", also of a
            sampler whose code uses the rank and the world size), over the "workers" that get_worker_info() returns, or
            over the "processes". None: "processes" for datasets of libraries that shard themselves (Hugging Face,
            WebDataset with split_by_node, Mosaic Streaming, litdata, FFCV), else "workers" if the dataset reads
            get_worker_info().num_workers, else "nothing"; raise if its code uses the rank or the world size, or if it
            holds the world size. len() of an iterable dataset works only with "nothing". A dataset that shards itself
            decides how many samples each process gets, whatever `tail` is: if the numbers may differ, train with a
            `limit=` that all processes reach. Until its first sample, random numbers are the same on all processes, for
            files that it shuffles before it takes its own.

    Raises:
        ConfigError: options are invalid, or the loader cannot be sharded.
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
        if options in (sharded._options, LoaderOptions()):
            return sharded
        raise ConfigError(
            "shard_loader was called on a loader that it returned, with other options",
            why="the data would be sharded twice, and part of it skipped",
            fix="pass the DataLoader itself to each shard_loader",
        )
    run = active()
    of_run = _outside_of_runs if run is None else run.states.setdefault(__name__, _RunLoaders())
    by_options = of_run.sharded(loader)
    key = dataclasses.replace(options, progress=False)  # a new progress label does not restart the epochs
    found = by_options.get(key)
    if found is None:
        frame = sys._getframe(1)
        call_site = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        found = by_options[key] = _make(loader, options, call_site, of_run.lines[call_site])
    found._options = options
    return found


def _make(loader: Iterable[T], options: LoaderOptions, call_site: str, line: LineOfCode) -> ShardedLoader[T]:
    run = current()
    source = source_for(loader, options=options, run=run, occurrence=line.made)
    line.made += 1
    summary = source.batch_summary()
    if summary and run.world.is_main:
        _log.info("%s: %s", call_site, summary)
    name = f"{call_site} ({line.made})" if line.made > 1 else call_site
    return ShardedLoader(source, options=options, run=run, name=name, line=line)


_ByOptions = MutableMapping[LoaderOptions, ShardedLoader[Any]]


class _RunLoaders:
    """The loaders of a run. A line names its loaders, of which each stream has a seed, and one per epoch an order."""

    def __init__(self) -> None:
        self.lines: defaultdict[str, LineOfCode] = defaultdict(LineOfCode)
        # User's loader (by identity) -> its sharded loaders. An entry is freed with the user's loader.
        self._sharded: WeakKeyDictionary[Any, _ByOptions] = WeakKeyDictionary()

    def sharded(self, loader: object) -> _ByOptions:
        """Return the sharded loaders of a user's loader."""
        # The sharded loader of an iterable references the iterable: a strong reference here keeps both alive. That is
        # accepted only for an iterable with `set_epoch`, whose epochs have to be counted.
        is_kept = isinstance(loader, DataLoader) or hasattr(loader, "set_epoch")
        try:
            return self._sharded.setdefault(loader, {} if is_kept else WeakValueDictionary())
        except TypeError:  # a list cannot be weakly referenced, and its order does not depend on the epoch
            return {}


_outside_of_runs = _RunLoaders()  # each call of a decorated function has others, and begins with epoch 0
