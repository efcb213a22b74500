"""Kinds of loaders with indices, and the samples that ranks read from them, one rank after the other."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ranks import as_rank, own_generators
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)

from parallelize import shard_loader

__all__ = ["KINDS", "STREAMS", "Budget", "NoLength", "OwnRandom", "Reading", "expected", "read", "units_of"]

LENGTH, BATCH = 23, 3


class OwnRandom(Sampler[int]):
    """Draws from its own random.Random, or from a generator of NumPy."""

    def __init__(self, generator: Any = None) -> None:
        self.own = random.Random(5) if generator is None else generator

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        order = list(range(LENGTH))
        self.own.shuffle(order)
        return iter(order)


class Globals(OwnRandom):
    """Draws from the three global generators."""

    def __iter__(self) -> Iterator[int]:
        order = np.random.permutation(LENGTH).tolist()
        random.shuffle(order)
        return iter([order[each] for each in torch.randperm(LENGTH).tolist()])


class Budget(Sampler[list[int]]):
    """Batches of at most 60 tokens, of which index i has i: another number of batches in every epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(1 for _ in self)  # list() would ask for the length

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).tolist():
            if sum(batch) + index > 60:
                yield batch
                batch = []
            batch.append(index)
        yield batch


class UnknownLength(Budget):
    """Raises what the batch sampler of PyTorch Geometric raises."""

    def __len__(self) -> int:
        raise ValueError("The length of UnknownLength is undefined")


class NoLength(OwnRandom):
    def __len__(self) -> int:
        raise NotImplementedError


class Curriculum(Budget):
    """Indices, more of them in each epoch."""

    def __len__(self) -> int:
        return 20 + self.epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(range(len(self)))


class Growing(Dataset[int]):
    """A dataset with more samples in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return LENGTH - 4 + 2 * self.epoch

    def __getitem__(self, index: int) -> int:
        return index


class Rows(list[int]):
    """A dataset that is indexed by a list."""

    def __getitem__(self, indices: Any) -> Any:
        return list(indices)


class Fetched(list[int]):
    """A dataset that is asked for all samples of a batch."""

    def __getitems__(self, indices: Any) -> Any:
        assert type(indices) is list
        return [self[each] for each in indices]


def _loader(workers: int, *, batch_size: int | None = BATCH, data: Any = None, **options: Any) -> DataLoader[Any]:
    sized = {} if "batch_sampler" in options else {"batch_size": batch_size}
    collate = list if batch_size else None
    data = range(LENGTH) if data is None else data
    return DataLoader(data, num_workers=workers, collate_fn=collate, **sized, **options)


KINDS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "sequential": _loader,
    "shuffled": lambda workers: _loader(workers, shuffle=True),
    "shuffled by a generator": lambda workers: _loader(
        workers, shuffle=True, generator=torch.Generator().manual_seed(7)
    ),
    "subset": lambda workers: _loader(workers, data=Subset(range(99), range(3, 90, 4)), shuffle=True),
    "subset sampler": lambda workers: _loader(workers, sampler=SubsetRandomSampler(range(1, LENGTH, 2))),
    "weighted sampler": lambda workers: _loader(workers, sampler=WeightedRandomSampler([1.0, 3.0] * 11, 25)),
    "replacement": lambda workers: _loader(
        workers, sampler=RandomSampler(range(LENGTH), replacement=True, num_samples=31)
    ),
    "fewer samples": lambda workers: _loader(workers, sampler=RandomSampler(range(LENGTH), num_samples=10)),
    "own random.Random": lambda workers: _loader(workers, sampler=OwnRandom()),
    "own NumPy generator": lambda workers: _loader(workers, sampler=OwnRandom(np.random.default_rng(3))),
    "own RandomState": lambda workers: _loader(workers, sampler=OwnRandom(np.random.RandomState(3))),
    "global generators": lambda workers: _loader(workers, sampler=Globals()),
    "fetched at once": lambda workers: _loader(workers, data=Fetched(range(LENGTH))),
    "no length": lambda workers: _loader(workers, sampler=NoLength()),
    "single items": lambda workers: _loader(workers, batch_size=None, sampler=OwnRandom()),
    "concatenated": lambda workers: _loader(workers, data=ConcatDataset([range(9), range(30, 44)]), shuffle=True),
    "grouped by a BatchSampler": lambda workers: _loader(
        workers, batch_sampler=BatchSampler(SequentialSampler(range(LENGTH)), BATCH, False)
    ),
    "list of batches of indices": lambda workers: _loader(workers, batch_sampler=[[0, 5], [7], [1, 2, 3], [9], [4]]),
    "random_split": lambda workers: _loader(
        workers, data=random_split(range(40), [LENGTH, 17], torch.Generator().manual_seed(1))[0], shuffle=True
    ),
    "list of indices": lambda workers: _loader(workers, sampler=[*range(LENGTH - 1, 0, -2), 1]),
    "dataset of the epoch": lambda workers: _loader(workers, data=Growing(), shuffle=True),
    "length of the epoch": lambda workers: _loader(workers, data=range(99), sampler=Curriculum()),
    "sampler of batches": lambda workers: _loader(
        workers, batch_size=None, data=Rows(range(LENGTH)), sampler=BatchSampler(OwnRandom(), BATCH, False)
    ),
    "batch sampler": lambda workers: _loader(workers, batch_sampler=Budget()),
    "batch sampler of unknown length": lambda workers: _loader(workers, batch_sampler=UnknownLength()),
    "subclass of BatchSampler": lambda workers: _loader(
        workers, batch_sampler=type("Own", (BatchSampler,), {})(OwnRandom(), 4, False)
    ),
}
STREAMS = ("no length", "batch sampler of unknown length")
_OF_BATCHES = (
    "single items",
    "list of batches of indices",
    "sampler of batches",
    "batch sampler",
    "batch sampler of unknown length",
    "subclass of BatchSampler",
)


@dataclass(frozen=True)
class Reading:
    """What one rank has read: its batches, except those of weight 0, and the state when it stopped."""

    batches: list[list[int]]
    steps: int
    state: dict[str, Any]

    @property
    def samples(self) -> Counter[int]:
        return Counter(index for batch in self.batches for index in batch)


def read(
    kind: str,
    rank: int,
    world_size: int,
    tail: Any,
    *,
    workers: int = 0,
    state: dict[str, Any] | None = None,
    stop: int | None = None,
) -> Reading:
    """Read the second epoch as one rank of a simulated world, with generators of its own.

    Read it as rank 0 first: other ranks read in its order, and leave their generators as they were.

    Args:
        kind: a key of KINDS.
        rank: the rank.
        world_size: number of ranks.
        tail: the option of shard_loader.
        workers: number of worker processes.
        state: a state from which to resume.
        stop: number of batches after which to stop.
    """
    with as_rank(rank, world_size), own_generators(rank) as states:
        sharded, before = shard_loader(KINDS[kind](workers), tail=tail), states()
        if state is None:
            sharded.set_epoch(1)
        else:
            sharded.load_state_dict(state)
        length = None if kind in STREAMS else len(sharded)
        batches, steps, saved = [], 0, sharded.state_dict()
        for steps, batch in enumerate(sharded, 1):
            if sharded._self_pass.weight(steps - 1):
                batches.append(batch if isinstance(batch, list) else [batch])
            saved = sharded.state_dict()
            if steps == stop:
                break
        assert rank == 0 or states() == before  # rank 0 has drawn as one process does
        assert stop or length in (None, steps)
        return Reading(batches, steps, saved)


def units_of(kind: str) -> list[list[int]]:
    """Return the units of an epoch, each a list of indices, as one process reads them."""
    batches = read(kind, 0, 1, "exact").batches
    return batches if kind in _OF_BATCHES else [[index] for batch in batches for index in batch]


def expected(units: list[list[int]], world_size: int, tail: str, start: int = 0) -> Counter[int]:
    """Return the samples that all ranks together should read from a unit on."""
    stop = len(units)
    if tail == "pad":
        stop = start - (start - stop) // world_size * world_size
    elif tail == "drop":
        stop = start + (stop - start) // world_size * world_size
    return Counter(index for position in range(start, stop) for index in units[position % len(units)])
