"""Source for a DataLoader over a map-style dataset: its indices are sharded before any sample is fetched."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset

from parallelize.cluster.world import World
from parallelize.data.epoch_order import MAX_LISTED, draw_order, is_exactly, order_fingerprint, sampler_seed, stream_rng
from parallelize.data.loader_copy import LoaderCopy
from parallelize.data.loader_options import LoaderOptions, check_drop_last, check_length_options
from parallelize.data.sample_fingerprint import sample_fingerprint
from parallelize.data.self_sharding import number_of_shards, samplers_in, sharding_queries
from parallelize.data.source import EpochListeners, Source, length_of
from parallelize.errors import ConfigError

__all__ = ["MapStyleSource", "find_querying_sampler"]


class MapStyleSource(Source[Any]):
    """Source for a DataLoader over a map-style dataset; its units are indices, or batches that its sampler makes.

    If the loader's sampler already shards it, the units are this process's batches, which are kept.
    """

    def __init__(self, loader: DataLoader[Any], *, copy: LoaderCopy, options: LoaderOptions, world: World) -> None:
        self.copy, self.loader = copy, copy.loader
        batches: Any = loader.batch_sampler
        self._sharder = None if options.divides == "nothing" else _find_distributed_sampler(loader, world)
        super().__init__(options, world, is_own=self._sharder is not None)
        # Indices if torch's BatchSampler groups them; without a batch size, each unit is a batch, or a single item.
        is_grouped = self._sharder is None and is_exactly(batches, BatchSampler)
        sampler = loader.sampler if batches is None else batches.sampler if is_grouped else batches
        self._sampler: Any = sampler
        self._batch_size: int | None = batches.batch_size if is_grouped else None
        self.drop_last = is_grouped and batches.drop_last
        # torchdata gives its RandomSampler a generator with a random seed, another one on each process.
        has_random_seed = loader.generator is None and is_exactly(sampler, RandomSampler)
        self._seed = (options.seed or 0) if has_random_seed else sampler_seed(sampler, options.seed or 0)
        self.group = self._group_size()  # raises for options that the sampler does not support
        self.listeners = EpochListeners([sampler, getattr(sampler, "sampler", None), self._sharder, loader.dataset])
        self._data = _dataset_text(loader.dataset)

    def units(self, epoch: int) -> dict[str, Any]:
        """Return the order of the units, or a stream of them."""
        sampler, order, fetch = self._sampler, None, self.copy.iterate_shard
        if self.is_own:  # each process has other batches
            return {"fetch": fetch, "stream": sampler}
        if self.length is not None:
            max_listed = MAX_LISTED if self.options.tail in ("pad", "drop") else 2**31
            order = draw_order(sampler, seed=self._seed, epoch=epoch, max_listed=max_listed)
        if order is None:
            check_length_options(self.options, f"the endless {type(sampler).__name__}", needs_limit=False)
            if self.group % self.shards:
                raise _uneven_batch_error(self.group, self.shards)
        stream = stream_rng(sampler, seed=self._seed, epoch=epoch).draw(sampler, size=self.group)
        is_grouped = self._batch_size is not None
        return {"fetch": fetch, "order": order, "stream": stream, "is_grouped": is_grouped, "data": self._data}

    @property
    def length(self) -> int | None:
        """The sampler's length."""
        return length_of(self._sampler)

    def identity(self, *, is_within_epoch: bool) -> dict[str, Any]:
        """Return the seed and, unless it may be that of another epoch, the number of indices."""
        if self.is_own:
            batch_size = {"batch_size": getattr(self._sampler, "batch_size", None)} if is_within_epoch else {}
            return {"world_size": self.world.world_size, **batch_size}
        is_of_batches = self._batch_size is None and self.loader.batch_sampler is not None  # their number may vary
        has_units = not is_of_batches and (is_within_epoch or not self.listeners)
        return {**({"units": self.length} if has_units else {}), "seed": self._seed}

    def batch_summary(self) -> str:
        """Return the batch size per process and the global one, or the name of the sampler that shards the loader."""
        if self.is_own:
            return f"already sharded by its {type(self._sharder).__name__}: left as it is"
        unit = "" if self._batch_size is not None else " of the sampler's batches"
        return f"{self.group / self.shards:g} x {self.shards} processes = {self.group} global{unit}"

    def _group_size(self) -> int:
        """Return the number of units that all processes together take in a step."""
        size, options, processes = self._batch_size, self.options, self.shards
        if self.is_own and (options.tail, options.batch) != ("pad", "per_process"):
            option = f"tail={options.tail!r}" if options.tail != "pad" else f"batch={options.batch!r}"
            raise ConfigError(
                f"{option} with a loader that {type(self._sharder).__name__} already shards",
                why="the loader is left as it is: its sampler decides which samples are repeated or left out",
                fix=f"remove {type(self._sharder).__name__}: shard_loader shards the loader itself",
            )
        check_drop_last(options, drop_last=self.drop_last)
        if self.length is None:
            check_length_options(options, f"{type(self._sampler).__name__}, which has no length")
        if options.batch == "per_process":
            return (size or 1) * processes
        if size is None:
            raise ConfigError(
                "batch='global' with a loader that has no batch size",
                why="its sampler makes the batches, which are not split between processes",
                fix="use batch='per_process', or DataLoader(batch_size=...)",
            )
        may_be_uneven = options.tail in ("exact", "weighted") and self.length is not None
        if size < processes or (size % processes and not may_be_uneven):
            raise _uneven_batch_error(size, processes)
        return size


def _uneven_batch_error(size: int, processes: int) -> ConfigError:
    near = max(size // processes, 1) * processes
    return ConfigError(
        f"batch='global' with batch_size={size} on {processes} processes",
        why="it does not divide evenly: gradients of unequal batches would be averaged as if they were equal",
        fix=f"use batch_size={near}, or tail='weighted' to weight gradients by the number of samples",
    )


def find_querying_sampler(loader: DataLoader[Any]) -> tuple[Any, list[str]] | None:
    """Return a sampler of a loader whose code uses the rank and the world size, and the names of these, or None."""
    found = ((each, sharding_queries(each)) for each in _samplers(loader))
    return next(((each, used) for each, used in found if used), None)


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    return [each for held in (loader.batch_sampler, loader.sampler) for each in samplers_in(held)]


def _find_distributed_sampler(loader: DataLoader[Any], world: World) -> Any | None:
    """Return the sampler that already shards a loader over the processes, or None; raise if it does so otherwise."""
    for sampler in _samplers(loader):
        number, rank, fault = number_of_shards(sampler), getattr(sampler, "rank", world.rank), ""
        if number is None:
            continue
        if number[1] != world.world_size:
            fault = f"({number[0]}={number[1]}) in a world of {world.world_size}"
        elif isinstance(rank, int) and rank != world.rank:  # as the local rank of a process on another node
            fault = f"(rank={rank}) on rank {world.rank}"
        if fault:
            raise ConfigError(
                f"{type(sampler).__name__}{fault}",
                why="some samples would be repeated, or left out",
                fix="remove the sampler: shard_loader shards the loader itself",
            )
        return sampler
    if world.world_size > 1 and (found := find_querying_sampler(loader)):
        raise ConfigError(
            f"the sampler {type(found[0]).__name__} may shard the loader over the processes: its code uses "
            f"{' and '.join(found[1])}",
            why="if it does, sharding the loader again would skip samples",
            fix="remove its sharding: shard_loader shards the loader itself; or keep it, and tell so by the sampler's "
            "attributes rank and num_replicas, as DistributedSampler does; or use divides='nothing' if it yields the "
            "indices of all processes",
        )
    return None


def _dataset_text(dataset: Any) -> str:
    """Return hashes of the indices of Subsets, the names of a dataset's files, and the first rows of `datasets`."""
    text = ""
    while isinstance(dataset, Subset):
        text += f" of the subset {order_fingerprint(dataset.indices)}"
        dataset = dataset.dataset
    if hasattr(type(dataset), "formatted_as"):  # without the user's transforms, which may draw random numbers
        with dataset.formatted_as("arrow"):
            return f"{text} of the dataset {sample_fingerprint(dataset[:4].to_pylist())}"
    length = length_of(dataset)
    for items in getattr(dataset, "__dict__", {}).values():
        if isinstance(items, (list, tuple)) and length == len(items) > 0 and _file_name(items[0]):
            text += f" of the files {order_fingerprint(items, name=_file_name)}"
    return text


def _file_name(item: Any) -> str:
    """Return the name of a file, or of the first one of a tuple, without its folder, which may differ between nodes."""
    item = item[0] if isinstance(item, tuple) and item else item
    return str(item).rpartition("/")[2] if isinstance(item, (str, PurePath)) else ""
