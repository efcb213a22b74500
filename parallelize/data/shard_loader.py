"""shard_loader: returns this process's share of a loader, the same object for equal arguments."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from parallelize.data.iterable_style import BatchIterableSource, IterableStyleSource, own_sharding
from parallelize.data.loader import ShardedLoader
from parallelize.data.map_style import MapStyleSource
from parallelize.data.sampling import Tail
from parallelize.data.source import Batch, Divides, LoaderOptions, Source
from parallelize.errors import ConfigError
from parallelize.runtime.context import Runtime, active, current

__all__ = ["shard_loader"]

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

    The user's loader is not modified. Sequential and shuffled loaders are sharded exactly as by
    torch's DistributedSampler; shuffled ones have a new order in every epoch. Any other sampler is
    iterated with the same seed on all processes, and its indices are sharded; a generator of its
    own that is not torch's needs the same seed on all. A loader whose sampler already shards it is
    not sharded again. Pass map-style datasets whole, and in the same order on all processes.
    Iterable datasets and iterables of batches are iterated with the same seed on all processes,
    each of which keeps its share of the samples or batches. Processes compare their orders: what
    differs between them is an error. Batches come in order, also with in_order=False.

    Each `iter()` is the next epoch, as with one process. Another call with the same loader and
    options (`progress` may differ) returns the same object, and a loader that a line of code makes
    anew, as in `shard_loader(make_loader())`, goes on with the epochs of the line, also in the next
    call of a decorated function, unless the function has a `seed=`.

    Args:
        loader: a DataLoader, or an iterable of batches.
        tail: how to shard samples that do not divide evenly. "pad": repeat some samples, so that
            all processes make equally many steps; "drop": leave out the last samples; "exact": use
            each sample once, so that processes may differ by a batch (for evaluation); "weighted":
            make equally many steps, and weight gradients by the true number of samples (for
            training). None: "exact" if gradients are disabled at `iter()`, else "pad"; under fsdp,
            where all processes have to run each forward, "pad".
        batch: whether the loader's batch size is for each process ("per_process") or for all
            together ("global").
        seed: seed of the order, if the loader's sampler has no generator; None: 0, as in
            DistributedSampler. It also seeds the random numbers that workers draw, separately for
            each process, worker and epoch.
        limit: the maximum number of batches per process and epoch (an int), or a fraction of them
            (a float), at least one.
        progress: whether rank 0 shows a progress bar of its batches; a string is the bar's label.
        to_device: whether to move batches to `device()`. Under dp and ddp2, DataParallel then
            scatters them.
        prefetch: number of batches to copy to an accelerator ahead of the loop.
        divides: how the loader's iterable dataset, or the iterable of batches, shards itself: not
            at all ("nothing"), over the "workers" that get_worker_info() returns, or over the
            "processes". None: "processes" for what is known to do so (Hugging Face's streams,
            WebDataset with split_by_node, Mosaic Streaming, litdata), "workers" if it reads
            get_worker_info().num_workers, else "nothing", also for data pipes: every process runs
            all of a pipe, unless you pass "processes". A sampler that shards itself is known by
            attributes as DistributedSampler's, or by "processes". A dataset that shards itself
            decides how many samples each process gets, whatever `tail` is: if the numbers may
            differ, train with a `limit=` that all processes reach.

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
    run, of_run = active(), _outside
    if run is not None:
        of_run = run.states.setdefault(__name__, None) or _RunLoaders(run)
        run.states[__name__] = of_run
    by_options = of_run.sharded(loader)
    key = dataclasses.replace(options, progress=False)  # a label does not restart the epochs
    found: ShardedLoader[T] | None = by_options.get(key)
    if found is None:
        code, run = sys._getframe(1), current()
        line = f"{Path(code.f_code.co_filename).name}:{code.f_lineno}"
        made = of_run.made[line]
        of_run.made[line] += 1
        source = _source_of(loader, options, run)
        if (summary := source.batch_summary()) and run.world.is_main:
            _log.info("%s: %s", line, summary)
        name = f"{line} ({made + 1})" if made else line
        found = by_options[key] = ShardedLoader(source, options, name, of_run.epochs)
    found._options = options
    return found


class _RunLoaders:
    """The loaders of a run."""

    def __init__(self, run: Runtime | None) -> None:
        # Calls with a seed are repeatable; others go on with the epochs of the calls before.
        goes_on = run is not None and run.config.seed is None
        self.epochs: MutableMapping[str, int] = run.layout.epochs if run and goes_on else {}
        self.made = Counter[str]()
        # User's loader (by identity) -> its sharded loaders. An entry is freed with the user's.
        self._sharded: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def sharded(self, loader: object) -> dict[LoaderOptions, Any]:
        """Return the sharded loaders of a user's loader, by their options."""
        # Those of iterables go on by their line of code.
        return self._sharded.setdefault(loader, {}) if isinstance(loader, DataLoader) else {}


_outside = _RunLoaders(None)  # of a script that has no run


def _source_of(loader: Any, options: LoaderOptions, run: Runtime) -> Source:
    is_loader, divides = isinstance(loader, DataLoader), options.divides
    if not is_loader:
        _check_is_loader(loader)
    data = loader.dataset if is_loader else loader
    is_indexed = is_loader and not isinstance(data, IterableDataset)
    if not is_indexed and divides is None:
        data, divides = own_sharding(data, run.world)
    if not is_loader:
        return BatchIterableSource(data, options, run, divides)
    source: Source
    if is_indexed:
        source = MapStyleSource(loader, options, run)
    else:
        source = IterableStyleSource(loader, data, options, run, divides)
    if options.to_device and loader.num_workers == 0 and run.device.type not in ("cpu", "mps"):
        vars(source.copy)["pin_memory"] = False  # move_batches pins, in the same thread
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
