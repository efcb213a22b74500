"""An iterable dataset of which each worker of each process yields its own part."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

from torch.utils.data import IterableDataset, IterDataPipe, _utils, get_worker_info

from parallelize.cluster.world import World
from parallelize.data.dataloader_workers import WideInfo
from parallelize.data.detect_rank_queries import asking, known_size, unclear
from parallelize.data.loader_options import Divides
from parallelize.data.sampler_arithmetic import Tail, share

__all__ = ["DividedDataset", "recognised"]

T = TypeVar("T")


class DividedDataset(IterableDataset[T]):
    """Stands in a copied loader for an iterable dataset.

    Where the dataset does not divide itself, every reader reads all of it and keeps every so-manieth sample. Whether it
    does is seen when its first sample comes: one that has asked get_worker_info() for the number of workers divides by
    it, and is shown the workers of all processes as those of one. One that asks for its process has to say.

        readers       process 0              process 1              2 processes with 2 workers each: T = 4 readers
        worker 0      0       4       8        1       5            reader = worker * processes + process, so that
        worker 1          2       6                3       7        what is left over at the end spreads over processes

    Args:
        undivided: the user's dataset.
        divides: what it divides itself over; None: to be seen.
        tail: what happens where the samples do not divide.
        world: this process among the others.
    """

    def __init__(self, undivided: Any, *, divides: Divides | None, tail: Tail, world: World) -> None:
        self.undivided = undivided
        self._divides, self._tail, self._world = divides, tail, world

    def __iter__(self) -> Iterator[T]:
        info: Any = get_worker_info()
        if not isinstance(info, WideInfo):  # this process has no workers, or they see torch's info
            info = WideInfo(info, rank=self._world.rank, world_size=self._world.world_size)
        samples = _informed(self.undivided, info)
        if self._divides is None:
            with asking() as asked:
                ahead = list(itertools.islice(samples, 1))
            if asked and self._world.world_size > 1:
                raise unclear(self.undivided, f"it calls {' and '.join(sorted(asked))} while it is read")
            samples = itertools.chain(ahead, samples)
        if self._divides == "workers" or (self._divides is None and info.was_asked):
            yield from samples
        else:
            yield from share(samples, reader=info.id, readers=info.of_all, tail=self._tail)


def _informed(dataset: Any, info: WideInfo) -> Iterator[Any]:
    """The dataset's samples; while its own code runs, get_worker_info() gives `info`."""
    module: Any = _utils.worker
    samples: Iterator[Any] | None = None
    while True:
        outside = module._worker_info
        module._worker_info = info
        try:
            samples = iter(dataset) if samples is None else samples
            sample = next(samples)
        except StopIteration:
            return
        finally:
            module._worker_info = outside
        yield sample


def recognised(dataset: Any, world: World) -> tuple[Any, Divides | None]:
    """A dataset as it is to be read by a process, and what it divides itself over; None: not known.

    Hugging Face's are asked to divide themselves over the processes; WebDataset's and torch's data pipes do so already.

    Raises:
        ConfigError: another one that knows the number of processes.
    """
    package = type(dataset).__module__.partition(".")[0]
    if package == "datasets":
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(dataset, rank=world.rank, world_size=world.world_size), "processes"
    if package == "webdataset" or isinstance(dataset, IterDataPipe):
        return dataset, "processes"
    name = None if world.world_size == 1 else known_size(dataset, world.world_size)
    if name is not None:
        raise unclear(dataset, f"it has {name}={world.world_size}")
    return dataset, None
