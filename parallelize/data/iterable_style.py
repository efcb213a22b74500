"""Source for a DataLoader over an iterable dataset: each worker of each process yields its shard of the samples."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, _utils, get_worker_info

from parallelize.cluster.world import World
from parallelize.data.dataloader_workers import GlobalWorkerInfo
from parallelize.data.epoch_shard import EpochShard, Position
from parallelize.data.loader_copy import LoaderCopy
from parallelize.data.loader_options import Divides, LoaderOptions, check_iterable_options
from parallelize.data.rng import IsolatedRNG, derive_seed
from parallelize.data.sample_fingerprint import sample_fingerprint
from parallelize.data.sampler_arithmetic import EpochSplit, Tail, shard_stream
from parallelize.data.self_sharding import shuffle_fingerprint
from parallelize.data.source import EpochListeners, Source
from parallelize.errors import ConfigError
from parallelize.runtime.context import Runtime
from parallelize.torch_private import unsupported

__all__ = ["IterableStyleSource", "ShardedIterableDataset"]

T = TypeVar("T")

_MAX_COMPARED_SAMPLES = 16


class IterableStyleSource(Source[T]):
    """Source for a DataLoader over an iterable dataset; its units are this process's batches.

    Raises:
        ConfigError: an option is set that iterable datasets do not support.
    """

    def __init__(
        self,
        loader: DataLoader[T],
        *,
        copy: LoaderCopy[T],
        divides: Divides | None,
        options: LoaderOptions,
        run: Runtime,
    ) -> None:
        check_iterable_options(options, f"the iterable {type(loader.dataset).__name__}", has_length=False)
        self.copy, self._options, self._world, self._divides = copy, options, run.world, divides
        dataset: Any = copy.loader.dataset
        self.listeners = EpochListeners([dataset])
        self.loader = copy.with_user_dataset(loader)
        self._sharded: ShardedIterableDataset[Any] | None = None
        if divides != "processes":
            self._sharded = ShardedIterableDataset(
                dataset,
                divides=divides,
                tail=options.tail,
                world=run.world,
                batch_size=loader.batch_size or 1,
                seed=(run.config.seed or 0) if options.seed is None else options.seed,
                has_workers=loader.num_workers > 0,
            )
            copy.set_attributes(dataset=self._sharded)

    def shard(self, position: Position) -> EpochShard[T]:
        """Return this process's shard of an epoch, from a position on."""
        dataset, sharded = self.copy.loader.dataset, self._sharded
        self.listeners.set_epoch(position.epoch)
        split = self._split(position)
        fingerprint = functools.partial(shuffle_fingerprint, dataset) if sharded is None else sharded.fingerprint
        first: list[str] = []
        if self._world.world_size == 1:  # the dataset draws from the global generators, whose states may not repeat
            fingerprint = functools.partial(sample_fingerprint, first)
        return EpochShard(
            # Made here and not held by the shard, so that a dataset and its workers end with the loop.
            fetch=lambda _shard: itertools.islice(self._batches(position.epoch, first), split.start, split.limit),
            split=split,
            own_fingerprint=fingerprint,
        )

    def steps(self, position: Position) -> int | None:
        """Count this process's batches from a position on; None if the dataset has no length or shards itself."""
        return self._split(position).known_steps(0)

    def identity(self, *, is_within_epoch: bool) -> dict[str, Any]:
        """Return the world size, the seed of the samples, and what determines the samples of each batch."""
        loader, seed = self.loader, {} if self._sharded is None else {"seed": self._sharded.seed}
        batches = {"batch_size": loader.batch_size, "num_workers": max(loader.num_workers, 1)}
        return {"world_size": self._world.world_size, **seed, **(batches if is_within_epoch else {})}

    def _split(self, position: Position) -> EpochSplit:
        limit: Any = self._options.limit  # an int; the length of a dataset may be an estimate
        split = EpochSplit(start=position.start, world_size=1, group=1, limit=limit)
        loader: Any = self.loader
        if self._divides == "nothing" and hasattr(loader.dataset, "__len__"):
            workers, size, world = max(loader.num_workers, 1), loader.batch_size or 1, self._world
            shards = workers * world.world_size
            samples = EpochSplit(total=len(loader.dataset), world_size=shards, group=shards, tail=self._options.tail)
            counts = [samples.steps(worker * world.world_size + world.rank) for worker in range(workers)]
            total = sum(each // size if loader.drop_last else -(-each // size) for each in counts)
            split = dataclasses.replace(split, total=total)
        return split

    def _batches(self, epoch: int, first: list[str]) -> Iterator[T]:
        # The dataset cannot seek: batches before the position are made and discarded.
        if self._sharded is not None:
            self._sharded.start_epoch(epoch)
        batches = self.copy.iterate(Position(epoch=epoch))
        for batch in itertools.islice(batches, 1):
            first[:] = [sample_fingerprint([batch])]
            yield batch
        yield from batches


@dataclass(eq=False, repr=False)
class ShardedIterableDataset(IterableDataset[T]):
    """Replacement for the iterable dataset of a copied loader; yields the shard of one worker.

    If the dataset does not shard itself, every worker iterates all of it and yields only the samples of its shard. The
    global generators are seeded equally while the dataset draws from them, so that all workers see the same order.
    A dataset that reads num_workers of get_worker_info() shards itself by that number, which counts the workers of all
    processes; its generators are seeded equally until its first sample, for an order of files that it shuffles itself.

        shards        process 0              process 1              2 processes with 2 workers each: 4 shards
        worker 0      0       4       8        1       5            shard = worker * processes + process, so that
        worker 1          2       6                3       7        uneven ends are distributed over the processes

    Args:
        unsharded: the user's dataset.
        divides: how the dataset shards itself: not at all ("nothing"), by "workers", or None: infer it.
        tail: how to shard samples that do not divide evenly.
        world: rank and world size of this process.
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
        info: Any = get_worker_info()
        if not isinstance(info, GlobalWorkerInfo):  # this is no worker process, or it has torch's info
            info = GlobalWorkerInfo(info, rank=self.world.rank, world_size=self.world.world_size)
        if info.num_shards == 1:
            yield from self.unsharded
            return
        shown = info.of_this_process() if self.divides == "nothing" else info
        rng = IsolatedRNG(derive_seed("iterable", self.seed, int(self._shared[0])))
        with contextlib.ExitStack() as drawing:
            drawing.enter_context(rng.use())
            drawing.enter_context(_worker_info(shown))
            samples = iter(self.unsharded)
            stream: Iterator[Any] = itertools.chain(list(itertools.islice(samples, 1)), samples)
            is_own = self._is_sharded_by_workers(shown)
            if not is_own:
                stream = shard_stream(
                    self._compared(stream, info, shown),
                    shard_index=info.shard_index,
                    num_shards=info.num_shards,
                    tail=self.tail,
                )
            else:
                drawing.close()
                drawing.enter_context(_worker_info(shown))
            for number, sample in enumerate(stream, start=1):
                if number % self.batch_size:
                    yield sample
                    continue
                drawing.close()  # collate_fn, and in this process the training loop, draw from other states
                yield sample
                drawing.enter_context(contextlib.nullcontext() if is_own else rng.use())
                drawing.enter_context(_worker_info(shown))

    def _is_sharded_by_workers(self, shown: GlobalWorkerInfo | None) -> bool:
        """Return whether the dataset has sharded itself by get_worker_info(), after its first sample.

        Raises:
            ConfigError: it reads only its worker's index.
        """
        if self.divides is not None or shown is None:
            return self.divides == "workers"
        if shown.read == {"id"} and self.world.world_size > 1:
            raise ConfigError(
                f"the iterable {type(self.unsharded).__name__} reads id of get_worker_info(), and not num_workers",
                why="it may give each worker a part of the data that depends on the number of workers",
                fix="read num_workers, too, as in files[info.id :: info.num_workers], or use "
                "shard_loader(loader, divides='nothing') if every worker iterates all samples",
            )
        return bool(shown.read)

    def _compared(self, stream: Iterator[Any], info: GlobalWorkerInfo, shown: GlobalWorkerInfo | None) -> Iterator[Any]:
        """Yield the samples, and write the hash of the first ones.

        Raises:
            ConfigError: the dataset shards itself by num_workers from a later sample on, or though `divides` denies it.
        """
        is_first_worker = info.shard_index < self.world.world_size
        # The number that rank 0 draws for its first batch; other ranks draw more.
        count = min(info.num_shards * (self.batch_size - 1) + 1, _MAX_COMPARED_SAMPLES)
        hashes: list[str] = []
        for sample in stream:
            if shown is not None and shown.num_shards > 1 and "num_workers" in shown.read:
                when = "after its first sample" if self.divides is None else f"with divides={self.divides!r}"
                raise ConfigError(
                    f"the iterable {type(self.unsharded).__name__} reads num_workers of get_worker_info() {when}",
                    why="it shards itself over the workers: sharding it again would skip samples",
                    fix="use divides='workers' if all of its samples are sharded so",
                )
            if is_first_worker and len(hashes) < count:
                hashes.append(sample_fingerprint([sample], has_floats=self.divides is None))
                if len(hashes) == count:
                    self._shared[1] = int(sample_fingerprint(hashes), 16)
            yield sample
        if is_first_worker and len(hashes) < count:
            self._shared[1] = int(sample_fingerprint(hashes), 16)


@contextlib.contextmanager
def _worker_info(info: Any) -> Iterator[None]:
    """Let get_worker_info() return `info` in the block."""
    module: Any = _utils.worker
    previous, module._worker_info = module._worker_info, info
    try:
        if get_worker_info() is not info:
            raise unsupported("shard_loader of an iterable dataset", instead="use a dataset with __getitem__")
        yield
    finally:
        module._worker_info = previous
