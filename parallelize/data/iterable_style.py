"""Sources of data without indices: DataLoaders over iterable datasets, and iterables of ready-made batches."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from parallelize.cluster.world import World
from parallelize.data.dataset_states import DatasetStates
from parallelize.data.epoch_order import stream_rng
from parallelize.data.epoch_shard import EpochShard
from parallelize.data.loader_copy import GlobalWorkerInfo, LoaderCopy, copy_of, set_worker_info
from parallelize.data.loader_options import Divides, LoaderOptions, check_drop_last, check_length_options
from parallelize.data.rng import IsolatedRNG, derive_seed
from parallelize.data.sample_fingerprint import sample_fingerprint
from parallelize.data.sampler_arithmetic import EpochSplit, Tail
from parallelize.data.self_sharding import shards_itself, shuffle_fingerprint
from parallelize.data.source import EpochListeners, Source
from parallelize.errors import ConfigError
from parallelize.runtime.context import Runtime

__all__ = ["BatchIterableSource", "IterableStyleSource", "ShardedIterableDataset"]

T = TypeVar("T")

_MAX_COMPARED = 16


class IterableStyleSource(Source[T]):
    """Source for a DataLoader over an iterable dataset; its units are this process's batches."""

    def __init__(
        self,
        loader: DataLoader[T],
        *,
        copy: LoaderCopy,
        divides: Divides | None,
        options: LoaderOptions,
        run: Runtime,
    ) -> None:
        _check_options(options, f"the iterable {type(loader.dataset).__name__}", has_length=False)
        check_drop_last(options, drop_last=loader.drop_last)
        super().__init__(options, run.world, is_own=True)
        self.copy, self.loader = copy, copy_of(loader)  # one with the user's dataset, on which attributes are looked up
        dataset: Any = copy.loader.dataset
        self.listeners = EpochListeners([dataset])
        self._sharded: ShardedIterableDataset[Any] = ShardedIterableDataset(
            dataset,
            divides=divides,
            tail=options.tail,
            world=run.world,
            batch_size=loader.batch_size or 1,
            seed=(run.config.seed or 0) if options.seed is None else options.seed,
            has_workers=loader.num_workers > 0,
        )
        has_state = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
        # In this process, a dataset that yields this process's samples only reads as many as there are in its batches.
        if has_state and loader.num_workers == 0 and (divides == "processes" or run.world.world_size == 1):
            self.states = DatasetStates(dataset, loader=copy, read_from=self._read_from, generator=loader.generator)
        if divides != "processes" or not shards_itself(dataset):  # the library's loaders know their datasets
            copy.set_attributes(dataset=self._sharded)

    def units(self, epoch: int) -> dict[str, Any]:
        """Return how its batches are made; their order is not known in advance."""
        if hasattr(self.copy.loader, "current_epoch"):  # litdata's loader counts its epochs itself
            self.copy.set_attributes(current_epoch=epoch)
        return {"fetch": self._batches}

    def identity(self, *, is_within_epoch: bool) -> dict[str, Any]:
        """Return the world size, the seed of the samples, and what determines the samples of each batch."""
        loader, seed = self.loader, {} if self._sharded.divides == "processes" else {"seed": self._sharded.seed}
        batches = {"batch_size": loader.batch_size, "num_workers": max(loader.num_workers, 1)}
        return {"world_size": self.world.world_size, **seed, **(batches if is_within_epoch else {})}

    @property
    def length(self) -> int | None:
        """The number of batches, if it is known: the dataset has a length, and does not shard itself."""
        loader: Any = self.loader
        if self._sharded.divides != "nothing" or not hasattr(loader.dataset, "__len__"):
            return None
        workers, size, world = max(loader.num_workers, 1), loader.batch_size or 1, self.world
        shards = workers * world.world_size
        samples = EpochSplit(total=len(loader.dataset), world_size=shards, group=shards, tail=self.options.tail)
        counts = [samples.steps(worker * world.world_size + world.rank) for worker in range(workers)]
        return sum(each // size if loader.drop_last else -(-each // size) for each in counts)

    def _read_from(self, dataset: Any) -> None:
        """Let the loader read a dataset, the user's or a copy of it."""
        is_sharded = self.copy.loader.dataset is self._sharded
        self._sharded.unsharded = dataset
        if not is_sharded:
            self.copy.set_attributes(dataset=dataset)

    def _batches(self, shard: EpochShard[T]) -> Iterator[T]:
        sharded, number, limit = self._sharded, 0, shard.split.limit
        sharded.start_epoch(shard.position.epoch)
        batches: Iterator[T]
        if self.states is None:
            batches = self.copy.iterate(shard.position, first=0)
        else:
            number, batches = self.states.batches(shard)
        batches = itertools.islice(batches, None if limit is None else max(limit - number, 0))
        for batch in itertools.islice(batches, 1):
            saved = shard.position.facts.get("first", [0, ""])[1] if number else None  # it is not the epoch's first
            if sharded.divides == "processes":
                shard.first = shuffle_fingerprint(sharded.unsharded)
            else:
                shard.first = sharded.fingerprint() if saved is None else saved
            if self.world.is_main and not shard.first:  # the batch's, whose floats a collate_fn may have drawn
                shard.own_first = sample_fingerprint([batch], has_floats=False) if saved is None else saved
            batches = itertools.chain([batch], batches)
        # Unless the dataset goes on from a state, batches before the position are made and discarded.
        yield from itertools.islice(batches, shard.position.start - number, None)


class BatchIterableSource(Source[T]):
    """Source for an iterable of batches; if it is a sequence, only this process's batches are accessed.

    `occurrence`, the number of loaders that the same line of code has made before in this run, is added to the seed.
    """

    def __init__(
        self, batches: Iterable[T], *, divides: Divides | None, options: LoaderOptions, world: World, occurrence: int
    ) -> None:
        super().__init__(options, world, is_own=divides == "processes")
        self.loader: Any = batches
        name = f"a {type(batches).__name__} of batches"
        _check_options(options, name, has_length=hasattr(batches, "__len__"))
        if divides == "workers":
            raise ConfigError(
                f"divides='workers' with {name}",
                why="it is iterated in this process, which has no workers",
                fix="use divides='processes' if it shards its batches over the processes, or divides='nothing'",
            )
        self._is_sequence = hasattr(batches, "__getitem__") and hasattr(batches, "__len__")
        self._seed = (options.seed or 0) + occurrence
        self.listeners = EpochListeners([batches])

    def units(self, epoch: int) -> dict[str, Any]:
        """Return the batches as a stream, or their indices."""
        loader = self.loader
        if self.is_own:
            return {"fetch": IsolatedRNG(self._seed + epoch).begin, "stream": loader}
        if not self._is_sequence:
            return {"fetch": stream_rng(loader, seed=self._seed, epoch=epoch).draw, "stream": loader}
        # Lists are compared, as each rank may shuffle its own. Other sequences may make a new batch at each access.
        first = loader[:_MAX_COMPARED] if isinstance(loader, (list, tuple)) else ()
        fetch, data = (lambda indices: (loader[index] for index in indices)), sample_fingerprint(first)
        return {"fetch": fetch, "order": range(len(loader)), "data": data}

    def identity(self, *, is_within_epoch: bool) -> dict[str, Any]:  # noqa: ARG002 - the same for both
        """Return the seed that is set while a stream is iterated, or the world size if the iterable shards itself."""
        if self.is_own:
            return {"world_size": self.world.world_size}
        return {} if self._is_sequence else {"seed": self._seed}

    @property
    def length(self) -> int | None:
        """The iterable's length."""
        return len(self.loader) if hasattr(self.loader, "__len__") else None


def _check_options(options: LoaderOptions, name: str, *, has_length: bool) -> None:
    """Raise a ConfigError for options that need the indices, or the length of data that has none."""
    if options.batch == "global":
        raise ConfigError(
            f"batch='global' with {name}",
            why="batches are not split between processes: each process, or worker, makes its own",
            fix="use batch='per_process', and the batch size of one process",
        )
    check_length_options(options, name if has_length else f"{name}, which has no length", needs_limit=not has_length)


@dataclass(eq=False, repr=False)
class ShardedIterableDataset(IterableDataset[T]):
    """Replacement for the iterable dataset of a copied loader; yields the shard of one worker.

    If the dataset does not shard itself, every worker iterates all of it and yields only the samples of its shard. The
    global generators are seeded equally while the dataset draws from them, so that all workers see the same order.
    A dataset that reads num_workers of get_worker_info() shards itself by that number, which counts the workers of all
    processes. The generators of one that shards itself are seeded equally until its first sample, for an order of files
    that it shuffles before it takes its own.

        shards        process 0              process 1              2 processes with 2 workers each: 4 shards
        worker 0      0       4       8        1       5            shard = worker * processes + process, so that
        worker 1          2       6                3       7        uneven ends are distributed over the processes

    Args:
        unsharded: the user's dataset.
        divides: how the dataset shards itself; None: infer it.
        batch_size: number of samples that are drawn between other uses of the generators.
        seed: seed of epoch 0, the same on all processes.
        has_workers: whether worker processes iterate the dataset.
    """

    unsharded: Any
    _: KW_ONLY
    divides: Divides | None
    tail: Tail
    world: World
    batch_size: int = 1
    seed: int = 0
    has_workers: bool = False

    def __post_init__(self) -> None:
        # The epoch, and the hash of the first samples: memory that persistent workers share with this process.
        shared: Any = torch.zeros(2, dtype=torch.int64)
        self._shared: torch.Tensor = shared.share_memory_() if self.has_workers else shared

    def start_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iterators, and forget the fingerprint of the last one."""
        self._shared[0], self._shared[1] = epoch, 0

    def fingerprint(self) -> str:
        """Return a hash of the first samples, for processes to compare; "" if the dataset shards itself."""
        return f"{int(self._shared[1]):08x}" if self._shared[1] else ""

    def __iter__(self) -> Iterator[T]:
        return itertools.chain.from_iterable(self._chunks())

    def _chunks(self) -> Iterator[Iterable[T]]:
        """Yield the samples of this worker's shard, in lists of those that are drawn together."""
        found: Any = get_worker_info()
        is_counted = self.divides in (None, "workers")
        # In a worker process that info has recorded what the worker_init_fn has read.
        is_known = is_counted and isinstance(found, GlobalWorkerInfo)
        info: Any = found if is_known else GlobalWorkerInfo(found, self.world)
        shown: Any = info if is_counted else None if found is None else GlobalWorkerInfo(found, World())
        if info.num_shards == 1:  # the dataset draws from the global generators, whose states may not repeat
            samples = iter(self.unsharded)
            yield self._hashed(list(itertools.islice(samples, min(self.batch_size, _MAX_COMPARED))))
            yield samples
            return
        rng = IsolatedRNG(derive_seed("iterable", self.seed, int(self._shared[0])))
        with _worker_info(shown):
            stream: Iterator[Any] = rng.begin(self.unsharded)
        is_own = self._shards_itself(shown)
        if not is_own:
            if info.shard_index < self.world.world_size:
                # The number that rank 0 draws for its first batch; other ranks draw more.
                count = min(info.num_shards * (self.batch_size - 1) + 1, _MAX_COMPARED)
                with rng, _worker_info(shown):
                    first = self._hashed(list(itertools.islice(stream, count)))
                stream = itertools.chain(first, stream)
            split = EpochSplit(world_size=info.num_shards, group=info.num_shards, tail=self.tail)
            stream = split.units_of_stream(stream, info.shard_index)
        while True:
            # Not while batches are used: collate_fn, and in this process the training loop, draw from other states.
            with contextlib.nullcontext() if is_own else rng, _worker_info(shown):
                drawn = list(itertools.islice(stream, self.batch_size))
            if not is_own and shown is not None and shown.num_shards > 1 and "num_workers" in shown.read:
                when = "after its first sample" if self.divides is None else f"with divides={self.divides!r}"
                raise ConfigError(
                    f"the iterable {type(self.unsharded).__name__} reads num_workers of get_worker_info() {when}",
                    why="it shards itself over the workers: sharding it again would skip samples",
                    fix="use divides='workers' if all of its samples are sharded so",
                )
            yield drawn
            if len(drawn) < self.batch_size:
                return

    def _shards_itself(self, shown: GlobalWorkerInfo) -> bool:
        """Return whether the dataset has sharded itself, after its first sample."""
        if self.divides is not None:
            return self.divides != "nothing"
        if shown.read == {"id"} and self.world.world_size > 1:
            raise ConfigError(
                f"the iterable {type(self.unsharded).__name__} reads id of get_worker_info(), and not num_workers",
                why="it may give each worker a part of the data that depends on the number of workers",
                fix="read num_workers, too, as in files[info.id :: info.num_workers], or use "
                "shard_loader(loader, divides='nothing') if every worker iterates all samples",
            )
        return bool(shown.read)

    def _hashed(self, first: list[Any]) -> list[Any]:
        is_alone = self.world.world_size == 1
        has_floats = self.divides is None or is_alone
        self._shared[1] = int(sample_fingerprint(first, has_floats=has_floats, are_samples=is_alone) or "0", 16)
        return first


@contextlib.contextmanager
def _worker_info(info: Any) -> Iterator[None]:
    """Let get_worker_info() return `info` in the block."""
    previous = set_worker_info(info)
    try:
        yield
    finally:
        set_worker_info(previous)
