"""Sources of data without indices: DataLoaders over iterable datasets, and iterables of batches."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, _utils, get_worker_info

from parallelize.cluster.world import World
from parallelize.data.rng import IsolatedRNG, stream_rng
from parallelize.data.sampling import EpochSplit, Tail, sample_fingerprint
from parallelize.data.source import (
    Divides,
    EpochShard,
    LoaderOptions,
    Source,
    copy_of,
    length_of,
    view_of,
)
from parallelize.errors import ConfigError
from parallelize.runtime.context import Runtime
from parallelize.runtime.rng import RNGState, derive_seed
from parallelize.torch_patches.private import unsupported

__all__ = ["BatchIterableSource", "IterableStyleSource", "own_sharding"]

_MAX_COMPARED = 16
# Of the libraries whose datasets shard themselves: the ends of their classes' names, and what holds
# the world size that they have seen.
_LIBRARIES = {
    "datasets": ("IterableDataset", "_distributed", "world_size"),
    "litdata": ("StreamingDataset", "distributed_env", "world_size"),
    "streaming": ("StreamingDataset", "_unique_rank_world", "num_ranks"),
    "webdataset": ("DataPipeline", "", ""),
}
_SPLITTERS = {"split_by_node", "ResampledShards", "ResampledShardList"}  # of WebDataset


def own_sharding(data: Any, world: World) -> tuple[Any, Divides | None]:
    """Return the data, split by its library if that can, and how it shards itself, if known.

    Raises:
        ConfigError: its library has split it for another number of processes.
    """
    library = _library(data)
    if library == "datasets" and data._distributed is None:
        from datasets.distributed import split_dataset_by_node

        data = split_dataset_by_node(data, rank=world.rank, world_size=world.world_size)
    _, holder, name = _LIBRARIES.get(library, ("", "", ""))
    size = getattr(getattr(data, holder, None), name, world.world_size)
    if size != world.world_size:
        raise ConfigError(
            f"{type(data).__name__} was sharded over {size} processes, in a world of {world.world_size}",
            why="some samples would be repeated, or left out",
            fix="make the dataset inside the decorated function, in the processes that iterate it",
        )
    return data, "processes" if library else None


def _library(data: Any) -> str:
    """Return the library that shards this data over the processes; "" if none is known to."""
    for kind in type(data).__mro__:
        library = kind.__module__.partition(".")[0]
        if kind.__name__.endswith(_LIBRARIES.get(library, ("/",))[0]):
            # WebDataset's pipelines have stages, and a WebLoader's begin with the loader of another.
            first = next(iter(getattr(data, "pipeline", ())), None)
            stages = getattr(getattr(first, "dataset", data), "pipeline", ())
            names = {getattr(each, "__name__", type(each).__name__) for each in stages}
            return "" if library == "webdataset" and names.isdisjoint(_SPLITTERS) else library
    return ""


class IterableStyleSource(Source):
    """Source for a DataLoader over an iterable dataset; its units are this process's batches."""

    not_followed = *Source.not_followed, "num_workers", "worker_init_fn"

    def __init__(
        self,
        loader: DataLoader[Any],
        dataset: Any,
        options: LoaderOptions,
        run: Runtime,
        divides: Divides | None,
    ) -> None:
        # On the view with the user's dataset, attributes are looked up.
        super().__init__(view_of(loader), options, run, is_own=True, tells=[dataset])
        name = f"the iterable {type(dataset).__name__}"
        self.check(name, None, drop_last=loader.drop_last)
        workers = loader.num_workers
        self.identity_within = {"batch_size": loader.batch_size, "num_workers": max(workers, 1)}
        self._dataset, self._sharded = dataset, _ShardedDataset(dataset, divides, self)
        self.copy = copy_of(loader, dataset=dataset)
        # A library's loader knows its dataset, and torch's shards data pipes.
        if divides != "processes" or not (_library(dataset) or isinstance(dataset, IterDataPipe)):
            vars(self.copy)["dataset"] = self._sharded
        if workers:
            counted = run.world if divides in (None, "workers") else World()
            vars(self.copy)["worker_init_fn"] = functools.partial(_init_worker, loader.worker_init_fn, counted)
        if divides != "processes":
            self.identity["seed"] = self._sharded.seed
        # What yields this process's samples only reads as many as there are in its batches.
        is_read_alone = divides == "processes" or run.world.world_size == 1
        is_protocol = hasattr(dataset, "load_state_dict") and _library(dataset) in ("", "datasets")
        self._has_states = is_read_alone and not workers and is_protocol
        self.follow()

    def length(self) -> int | None:
        """Return the number of batches, as torch's DataLoader tells it, in one process only."""
        return length_of(self.loader) if self.run.world.world_size == 1 else None

    def units(self, epoch: int, tail: Tail) -> tuple[Any, Any]:
        """Return nothing: the order is not known in advance."""
        if hasattr(self.copy, "current_epoch"):  # litdata's loader counts its epochs itself
            vars(self.copy)["current_epoch"] = epoch
        self._sharded.start_epoch(epoch, tail)
        return None, ()

    def batches(self, shard: EpochShard) -> Iterator[Any]:
        """Yield the batches from the shard's position on; those before it are read, too.

        If the dataset has states, it goes on from the one before the position, which was recorded
        with the hash of the batch after it. Where another batch follows, as from a shuffle buffer
        that is refilled, the epoch is read again from its beginning.
        """
        position, saved, dataset = shard.position, self.saved, self._dataset
        rng = RNGState(())
        number, self.saved, first = 0, None, list[Any]()
        if saved and saved["epoch"] == position.epoch and saved["batches"] <= position.start:
            initial = copy.deepcopy(dataset.state_dict())
            dataset.load_state_dict(copy.deepcopy(saved["state"]))
            batches = self.iterate(position, saved["batches"])
            first += itertools.islice(batches, 1)
            if sample_fingerprint(first) == saved["next"]:
                number = saved["batches"]
            else:
                dataset.load_state_dict(initial)
                warnings.warn(
                    f"{type(dataset).__name__} does not go on from its state_dict() with the batch that "
                    f"followed: epoch {position.epoch} is read again up to its position",
                    stacklevel=5,
                )
        if not number:
            batches = self.iterate(position, 0)
            first = list(itertools.islice(batches, 1))
            shard.first = self._sharded.fingerprint()
        batches = itertools.chain(first, batches)
        if self._has_states:
            batches = self._recorded(batches, number, position.epoch)
        batches = itertools.islice(batches, shard.split.limit - number)
        if sum(1 for _ in itertools.islice(batches, position.start - number)):
            rng.restore()  # what is drawn for batches that were yielded before was drawn before
        yield from batches

    def _recorded(self, batches: Iterator[Any], number: int, epoch: int) -> Iterator[Any]:
        state = self.recorded = None
        for batch in batches:
            if number and state is not None:
                facts = {"epoch": epoch, "batches": number, "state": state}
                self.recorded = {**facts, "next": sample_fingerprint([batch])}
            yield batch
            number, state = number + 1, copy.deepcopy(self._dataset.state_dict())


class BatchIterableSource(Source):
    """Source for an iterable of batches, all of which every process makes and takes its share of."""

    def __init__(self, data: Iterable[Any], options: LoaderOptions, run: Runtime, divides: Divides | None) -> None:
        super().__init__(data, options, run, is_own=divides == "processes", tells=[data])
        name = f"a {type(data).__name__} of batches"
        self._length = length_of(data)
        self.check(name if self._length is not None else f"{name}, which has no length", self._length)
        self._seed = options.seed or 0
        if not self.is_own:
            self.identity["seed"] = self._seed

    def length(self) -> int | None:
        """Return the iterable's length."""
        return self._length

    def units(self, epoch: int, tail: Tail) -> tuple[Any, Any]:  # noqa: ARG002 - the same for all
        """Return the batches as a stream."""
        rng = stream_rng(self.loader, self._seed + epoch)
        return None, rng.begin(self.loader) if self.is_own else rng.draw(self.loader)

    def batches(self, shard: EpochShard) -> Iterator[Any]:
        """Yield the batches of a shard."""
        return iter(shard)


class _ShardedDataset(IterableDataset[Any]):
    """Replacement for the iterable dataset of a copied loader; yields the shard of one worker.

    If the dataset does not shard itself, every worker iterates all of it and yields only its share.
    The global generators are seeded equally while the dataset draws from them, so that all workers
    see the same order. A dataset that reads num_workers of get_worker_info() shards itself by that
    number, which counts the workers of all processes. The generators of one that shards itself are
    seeded equally until its first sample, for files that it shuffles before it takes its own.

        shards        process 0              process 1              2 processes with 2 workers each
        worker 0      0       4       8        1       5            shard = worker * processes +
        worker 1          2       6                3       7        process: uneven ends are spread
    """

    def __init__(self, unsharded: Any, divides: Divides | None, source: Source) -> None:
        seed, loader = source.options.seed, source.loader
        self.unsharded, self.divides, self._world = unsharded, divides, source.run.world
        self.seed = source.run.config.seed or 0 if seed is None else seed
        self._size = loader.batch_size or 1
        # Epoch, tail, hash of the first samples: persistent workers share them with this process.
        shared: Any = torch.zeros(3, dtype=torch.int64)
        self._shared: Any = shared.share_memory_() if loader.num_workers else shared

    def start_epoch(self, epoch: int, tail: Tail) -> None:
        """Set the epoch of the next iterators, and forget the fingerprint of the last one."""
        self._shared[:] = torch.tensor([epoch, get_args(Tail).index(tail), 0])

    def fingerprint(self) -> str:
        """Return a hash of the first samples; "" if the dataset shards itself."""
        return f"{int(self._shared[2]):08x}" if self._shared[2] else ""

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self._chunks())

    def _chunks(self) -> Iterator[Iterable[Any]]:
        """Yield the samples of this worker's shard, in lists of those that are drawn together."""
        found: Any = get_worker_info()
        info: Any = found
        is_counted = self.divides in (None, "workers")
        # In a worker process that info has recorded what the worker_init_fn has read.
        if not (is_counted and isinstance(found, _GlobalWorkerInfo)):
            info = _GlobalWorkerInfo(found, self._world)
        shown = info if is_counted else found and _GlobalWorkerInfo(found, World())
        shards, (epoch, tail, _) = info.num_shards, self._shared.tolist()
        rng: Any = IsolatedRNG(derive_seed("iterable", self.seed, epoch))
        with _worker_info(shown):
            stream = rng.begin(self.unsharded)
        is_own = self._shards_itself(shown)
        if is_own:
            rng = contextlib.nullcontext()
        else:
            if info.shard_index < self._world.world_size:
                # As many samples as rank 0 draws for its first batch.
                count = min(shards * (self._size - 1) + 1, _MAX_COMPARED)
                with rng, _worker_info(shown):
                    first = list(itertools.islice(stream, count))
                self._shared[2] = int(sample_fingerprint(first, are_samples=True) or "0", 16)
                stream = itertools.chain(first, stream)
            split = EpochSplit(world_size=shards, group=shards, tail=get_args(Tail)[tail])
            stream = split.units_of_stream(stream, info.shard_index)
        drawn: list[Any] = [None] * self._size
        while len(drawn) == self._size:
            # Not while batches are used: collate_fn and the loop draw from other states.
            with rng, _worker_info(shown):
                drawn = list(itertools.islice(stream, self._size))
            if not is_own and shown and shown.num_shards > 1 and "num_workers" in shown.read:
                raise self._divided_error("after its first sample, or with divides='nothing'")
            yield drawn

    def _shards_itself(self, shown: _GlobalWorkerInfo) -> bool:
        """Whether the dataset has sharded itself, as what it has read until its first sample tells."""
        if self.divides is not None:
            return self.divides != "nothing"
        if "id" in shown.read and "num_workers" not in shown.read and shown.num_shards > 1:
            raise self._divided_error("only for its id")
        return "num_workers" in shown.read

    def _divided_error(self, how: str) -> ConfigError:
        return ConfigError(
            f"the iterable {type(self.unsharded).__name__} reads get_worker_info() {how}",
            why="it may shard itself over the workers: sharding it again would skip samples",
            fix="use divides='workers' if all of its samples are sharded by id and num_workers of "
            "get_worker_info(), divides='nothing' if none are",
        )


@contextlib.contextmanager
def _worker_info(info: Any) -> Iterator[None]:
    """Let get_worker_info() return `info` in the block."""
    previous = _set_worker_info(info)
    try:
        yield
    finally:
        _set_worker_info(previous)


def _init_worker(user_init: Callable[[int], None] | None, counted: World, _worker_id: int) -> None:
    """Call the user's worker_init_fn where get_worker_info() counts the workers of a world."""
    info = _GlobalWorkerInfo(get_worker_info(), counted)
    _set_worker_info(info)
    if user_init is not None:
        user_init(info.shard_index)


class _GlobalWorkerInfo:
    """Replaces torch's worker info, and counts the workers of all processes as if of one.

    A dataset that shards itself by get_worker_info() then shards over all processes, where a
    process without workers counts as one. What it reads is recorded: that tells how it shards.
    """

    def __init__(self, info: Any, world: World) -> None:
        self._info: Any = getattr(info, "_info", info)
        local_id, workers = getattr(self._info, "id", 0), getattr(self._info, "num_workers", 1)
        self.shard_index = local_id * world.world_size + world.rank
        self.num_shards = workers * world.world_size
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self.read.add(name)
        found = {"id": self.shard_index, "num_workers": self.num_shards, "seed": torch.initial_seed()}
        value = found[name] if name in found else getattr(self._info, name, None)
        return getattr(value, "unsharded", value)  # the user's dataset


def _set_worker_info(info: Any) -> Any:
    """Make get_worker_info() return `info`, and return what it returned before."""
    torch_worker: Any = _utils.worker
    previous, torch_worker._worker_info = torch_worker._worker_info, info
    if get_worker_info() is not info:
        torch_worker._worker_info = previous
        raise unsupported("shard_loader of an iterable dataset", instead="use a dataset with __getitem__")
    return previous
