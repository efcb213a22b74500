"""Sharding of an iterable dataset: each of the N workers of all processes yields every N-th sample."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

from torch.utils.data import IterableDataset, IterDataPipe, _utils, get_worker_info

from parallelize.cluster.world import World
from parallelize.data.dataloader_workers import GlobalWorkerInfo
from parallelize.data.detect_rank_queries import ambiguous_sharding_error, detect_rank_queries, world_size_attribute
from parallelize.data.loader_options import Divides
from parallelize.data.sampler_arithmetic import Tail, shard_stream
from parallelize.torch_private import unsupported

__all__ = ["ShardedIterableDataset", "with_own_sharding"]

T = TypeVar("T")


class ShardedIterableDataset(IterableDataset[T]):
    """Replacement for the iterable dataset of a copied loader; yields the shard of one worker.

    If the dataset does not shard itself, every worker iterates all of it and yields only the samples of its shard.
    Whether the dataset shards itself is inferred while it makes its first sample. If it reads num_workers of
    get_worker_info(), it is assumed to shard itself by that number, which counts the workers of all processes. If it
    queries its rank, `divides` is required.

        shards        process 0              process 1              2 processes with 2 workers each: 4 shards
        worker 0      0       4       8        1       5            shard = worker * processes + process, so that
        worker 1          2       6                3       7        uneven ends are distributed over the processes

    Args:
        unsharded: the user's dataset.
        divides: how the dataset shards itself; None: infer it.
        tail: how to shard samples that do not divide evenly.
        world: rank and world size of this process.
    """

    def __init__(self, unsharded: Any, *, divides: Divides | None, tail: Tail, world: World) -> None:
        self.unsharded = unsharded
        self._divides, self._tail, self._world = divides, tail, world

    def __iter__(self) -> Iterator[T]:
        info: Any = get_worker_info()
        if not isinstance(info, GlobalWorkerInfo):  # this is no worker process, or it has torch's info
            info = GlobalWorkerInfo(info, rank=self._world.rank, world_size=self._world.world_size)
        samples = _with_worker_info(self.unsharded, info)
        if self._divides is None:
            with detect_rank_queries() as queries:
                first = list(itertools.islice(samples, 1))
            if queries and self._world.world_size > 1:
                evidence = f"it calls {' and '.join(sorted(queries))} while it is iterated"
                raise ambiguous_sharding_error(self.unsharded, evidence)
            samples = itertools.chain(first, samples)
        if self._divides == "workers" or (self._divides is None and info.is_num_workers_used):
            yield from samples
        else:
            yield from shard_stream(samples, shard_index=info.id, num_shards=info.total_workers, tail=self._tail)


def _with_worker_info(dataset: Any, info: GlobalWorkerInfo) -> Iterator[Any]:
    """Yield the dataset's samples; while its code runs, get_worker_info() returns `info`."""
    module: Any = _utils.worker
    samples: Iterator[Any] | None = None
    while True:
        previous = module._worker_info
        module._worker_info = info
        if id(get_worker_info()) != id(info):
            raise unsupported("shard_loader of an iterable dataset", instead="use a dataset with __getitem__")
        try:
            samples = iter(dataset) if samples is None else samples
            sample = next(samples)
        except StopIteration:
            return
        finally:
            module._worker_info = previous
        yield sample


def with_own_sharding(dataset: Any, world: World) -> tuple[Any, Divides | None]:
    """Return a dataset, sharded by its own library if possible, and how it shards itself (None: unknown).

    Hugging Face's datasets are split by split_dataset_by_node; WebDataset's and torch's data pipes shard themselves.

    Raises:
        ConfigError: a dataset of another library may shard itself: it has an attribute equal to the world size.
    """
    package = type(dataset).__module__.partition(".")[0]
    if package == "datasets":
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(dataset, rank=world.rank, world_size=world.world_size), "processes"
    if package == "webdataset" or isinstance(dataset, IterDataPipe):
        return dataset, "processes"
    name = None if world.world_size == 1 else world_size_attribute(dataset, world.world_size)
    if name is not None:
        raise ambiguous_sharding_error(dataset, f"it has {name}={world.world_size}")
    return dataset, None
