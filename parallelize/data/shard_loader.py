"""shard_loader: from a user's loader to this process's share of it."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections import Counter
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch.utils.data import DataLoader

from parallelize.data.loader_options import Batch, Divides, LoaderOptions
from parallelize.data.sampler_arithmetic import Tail
from parallelize.data.select_source import source_of
from parallelize.data.sharded_loader import ShardedLoader
from parallelize.errors import ConfigError
from parallelize.runtime.context import Runtime, active, current

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
    report: bool = False,
    to_device: bool = True,
    prefetch: int = 2,
    divides: Divides | None = None,
) -> ShardedLoader[T]:
    """This process's share of a loader, on this process's device, each epoch in a new order by itself.

    The loader stays as it is, and stays usable. Sequential and shuffled loaders are divided exactly as torch's
    DistributedSampler does; other samplers are drawn alike on all processes and then divided. A loader that is divided
    over the processes already is read as it is. Called again for the same loader with the same options, `progress`
    aside, it returns the same object, so that epochs go on in
    `for epoch in range(n): for batch in shard_loader(loader)`.

    Args:
        loader: a DataLoader, or an iterable of batches.
        tail: what happens where the data does not divide. "pad": some samples twice, so that all processes make as
            many steps; "drop": the last ones never; "exact": each once, and processes may differ by a batch (for
            evaluation); "weighted": equal steps, with gradients weighted by the true number of samples (for training).
        batch: whether the loader's batch size is that of each process, or of all together.
        seed: of the order, where the loader's sampler has no generator of its own; None: 0, as DistributedSampler. Also
            of the random numbers that the dataset draws: a stream for each process, worker and epoch. Without it worker
            processes still have streams of their own, seeded by what torch.manual_seed was told.
        limit: at most so many batches per process and epoch (an int), or this fraction of them (a float).
        progress: a bar on rank 0, or the label of one.
        report: after each epoch a line on rank 0: each process's mean step time, the share of it spent waiting for
            data, and the process that the others waited for. It costs a tenth of a second, or a second where a process
            is not through by then. Clocks of several hosts are compared as they are.
        to_device: whether batches arrive on `device()`; whole under dp and ddp2, for DataParallel to scatter.
        prefetch: batches that are copied to an accelerator ahead of the loop.
        divides: what an iterable dataset divides its data over by itself: "nothing", the "workers" that
            get_worker_info() tells of, or "processes"; None: seen from what it asks for, and refused where it asks for
            its process or knows how many there are. Only "nothing" lets the length be known. One that divides by itself
            decides how much each process gets, whatever `tail` says: where it may not be as much, train with a `limit=`
            that all of them reach.

    Raises:
        ConfigError: options without a meaning, or a loader that cannot be divided.
    """
    options = LoaderOptions(
        tail=tail,
        batch=batch,
        seed=seed,
        limit=limit,
        progress=progress,
        report=report,
        to_device=to_device,
        prefetch=prefetch,
        divides=divides,
    )
    if issubclass(type(loader), ShardedLoader):  # not isinstance, which it answers for the user's loader
        return _sharded_already(cast("Any", loader), options)
    sharded = _remembered(loader)
    read = dataclasses.replace(options, progress=False)  # a label that names the epoch begins nothing anew
    found = sharded.get(read)
    if found is None:
        frame = sys._getframe(1)
        site = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        found = sharded[read] = _made(loader, options, site)
    found._options = options
    return found


def _sharded_already(loader: ShardedLoader[T], options: LoaderOptions) -> ShardedLoader[T]:
    if options not in (loader._options, LoaderOptions()):
        raise ConfigError(
            "shard_loader of what shard_loader has made, with other options",
            why="it would be divided twice, and some of the data read by nobody",
            fix="give each shard_loader the DataLoader itself",
        )
    return loader


def _made(loader: Iterable[T], options: LoaderOptions, site: str) -> ShardedLoader[T]:
    run = current()
    source = source_of(loader, options=options, run=run, turn=_turns.next(site))
    said = source.arithmetic()
    if said and run.world.is_main:
        _log.info("%s: %s", site, said)
    _made_at[site] += 1
    own = site if _made_at[site] == 1 else f"{site} ({_made_at[site]})"
    return ShardedLoader(source, options=options, run=run, site=own)


# Loaders by the line that makes them: one that makes two would take each for the other's share.
_made_at: Counter[str] = Counter()


class _Turns:
    """Counts what each line makes in a run: a stream that is made anew for an epoch knows nothing of its number."""

    def __init__(self) -> None:
        self._run: Runtime | None = None
        self._made: Counter[str] = Counter()

    def next(self, site: str) -> int:
        """How many this line has made before."""
        if self._run is not active():
            self._run, self._made = active(), Counter()
        self._made[site] += 1
        return self._made[site] - 1


_turns = _Turns()

_Shares = MutableMapping[LoaderOptions, ShardedLoader[Any]]

# How far a loader was read in a run: kept for the loader itself (not for an equal one), gone with it.
_MEMORY: WeakKeyDictionary[Any, tuple[Runtime | None, _Shares]] = WeakKeyDictionary()


def _remembered(loader: object) -> _Shares:
    try:
        of_run, sharded = _MEMORY.get(loader, (None, _shares(loader)))
        if of_run is not active():  # another call of a decorated function begins with epoch 0
            sharded = _shares(loader)
        _MEMORY[loader] = (active(), sharded)
    except TypeError:  # a list has no identity to remember, and no order that changes with the epoch
        return {}
    return sharded


def _shares(loader: object) -> _Shares:
    # The share of a plain iterable keeps that iterable, and kept here it would for ever; it has epochs only to tell.
    return {} if isinstance(loader, DataLoader) or hasattr(loader, "set_epoch") else WeakValueDictionary()
