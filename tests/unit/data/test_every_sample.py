"""The samples that all ranks read together, for every kind of loader with indices, tail and number of ranks."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from every_sample import KINDS, STREAMS, NoLength, expected, read, units_of
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import as_rank, own_generators
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler

from parallelize import ConfigError, shard_loader
from parallelize.data.units import EpochSplit

TAILS = ("pad", "drop", "exact", "weighted")
CASES = [(kind, tail) for kind in KINDS for tail in TAILS if tail != "weighted" or kind not in STREAMS]


@pytest.mark.parametrize(("kind", "tail"), CASES)
def test_all_ranks_together_read_what_the_tail_says(kind: str, tail: str) -> None:
    """Each unit once, apart from those that the tail repeats or leaves out, on one to four ranks."""
    units = units_of(kind)
    for world_size in range(1, 5):
        ranks = [read(kind, rank, world_size, tail) for rank in range(world_size)]
        assert sum((each.samples for each in ranks), Counter()) == expected(units, world_size, tail)
        if tail != "exact":
            assert len({each.steps for each in ranks}) == 1


seeds = st.none() | st.integers(0, 9)


@settings(max_examples=60)
@given(
    length=st.integers(16, 40) | st.just(9000),
    size=st.integers(1, 4),
    world_size=st.integers(1, 4),
    tail=st.sampled_from(["pad", "drop"]),
    is_shuffled=st.booleans(),
    drop_last=st.booleans(),
    generator=seeds,
)
def test_ranks_divide_the_order_of_one_process_as_a_distributed_sampler(
    length, size, world_size, tail, is_shuffled, drop_last, generator
) -> None:
    """The order is drawn from the loader's generator, else from the global ones; a second epoch goes on."""

    def loader(batch_size: int) -> DataLoader[Any]:
        own = None if generator is None else torch.Generator().manual_seed(generator)
        options = {"shuffle": is_shuffled, "drop_last": drop_last and batch_size > 1, "generator": own}
        return DataLoader(range(length), batch_size, collate_fn=list, **options)

    with own_generators(0):
        one_process = loader(1)
        orders = [[index for batch in one_process for index in batch] for _ in range(2)]
    for rank in range(world_size):
        with as_rank(rank, world_size), own_generators(rank):
            sharded = shard_loader(loader(size), tail=tail)
            for order in orders:
                sampler = DistributedSampler(order, world_size, rank, shuffle=False, drop_last=tail == "drop")
                expected = [[order[k] for k in batch] for batch in BatchSampler(sampler, size, drop_last)]
                assert (len(sharded), list(sharded)) == (len(expected), expected)


@given(
    total=st.integers(0, 30),
    world_size=st.integers(1, 4),
    more=st.integers(0, 5),
    tail=st.sampled_from(TAILS),
    drop_last=st.booleans(),
    start=st.integers(0, 9),
)
def test_consumed_units_are_those_that_were_taken(
    total: int, world_size: int, more: int, tail: Any, drop_last: bool, start: int
) -> None:
    """After every number of steps, of all processes together, uneven batches and uneven ends included."""
    split = EpochSplit(
        total=total, shares=world_size, group=world_size + more, tail=tail, drop_last=drop_last, start=start
    )
    taken: set[int] = set()
    for step in range(split.steps(0)):
        assert split.start_after(step) == start + len(taken)
        taken.update(*(split.positions(rank, step) for rank in range(world_size)))
        taken &= {*range(split.end)}  # "weighted" repeats units in the last step
    assert split.start_after(split.steps(0)) == start + len(taken)


@given(
    total=st.integers(1, 30),
    world_size=st.integers(1, 4),
    size=st.integers(1, 4),
    tail=st.sampled_from(["pad", "drop", "exact"]),
    drop_last=st.booleans(),
)
def test_one_process_takes_what_several_take(
    total: int, world_size: int, size: int, tail: Any, drop_last: bool
) -> None:
    """In each step, for `compare`: units that they repeat or leave out included."""
    options: dict[str, Any] = {"total": total, "group": world_size * size, "tail": tail, "drop_last": drop_last}
    several = EpochSplit(shares=world_size, **options)
    merged = EpochSplit(shares=1, merged_shares=world_size, **options)
    assert merged.steps(0) == several.steps(0)
    for step in range(merged.steps(0)):
        ranks = (several.positions(rank, step) for rank in range(world_size))
        assert list(merged.positions(0, step)) == sorted(itertools.chain(*ranks))
    batches = list(map(list, merged.batches(range(total), 0)))
    assert batches == [[k % total for k in merged.positions(0, step)] for step in range(merged.steps(0))]


def test_nothing_is_read_from_an_empty_dataset() -> None:
    """By any rank, with any tail that has no weights."""
    for rank, tail in itertools.product(range(2), ("pad", "drop", "exact")):
        with as_rank(rank, 2):
            assert not list(shard_loader(DataLoader([], 2), tail=tail))


@pytest.mark.parametrize(("kind", "tail"), CASES)
def test_a_stopped_epoch_is_read_to_its_end_by_any_number_of_ranks(kind: str, tail: str) -> None:
    """Stopped after any batch and resumed on one to four ranks, each remaining unit is read once."""
    units, choose = units_of(kind), random.Random(f"{kind}/{tail}")
    for world_size in range(1, 5):
        stop = choose.randrange(1, max(len(units) // world_size, 2))
        ranks = [read(kind, rank, world_size, tail, stop=stop) for rank in range(world_size)]
        start = ranks[0].state["start"]
        if any(each.steps < stop for each in ranks) or start >= len(units):
            continue
        assert sum((each.samples for each in ranks), Counter()) == Counter(
            index for unit in units[:start] for index in unit
        )
        other = choose.randrange(1, 5)
        rest = [read(kind, rank, other, tail, state=ranks[0].state) for rank in range(other)]
        assert sum((each.samples for each in rest), Counter()) == expected(units, other, tail, start=start)


@pytest.mark.parametrize(("kind", "tail"), CASES[::3])  # workers do not know the tail
def test_workers_read_the_same_batches(kind: str, tail: str) -> None:
    """With two worker processes the batches, and those after a stop, are those of no workers."""
    _, plain = [read(kind, rank, 2, tail) for rank in range(2)]
    _, workers = [read(kind, rank, 2, tail, workers=2) for rank in range(2)]
    assert workers.batches == plain.batches
    _, stopped = [read(kind, rank, 2, tail, workers=2, stop=2) for rank in range(2)]
    resumed = read(kind, 1, 2, tail, workers=2, state=stopped.state)
    assert stopped.batches + resumed.batches == plain.batches


@pytest.mark.parametrize("kind", STREAMS)
def test_streams_have_no_weights(kind: str) -> None:
    """Without a length, tail="weighted" is refused before a sample is read."""
    with pytest.raises(ConfigError, match="tail='weighted' with"):
        read(kind, 0, 2, "weighted")


def test_a_pre_sharded_loader_is_read_as_its_sampler_says() -> None:
    """For one to four ranks, with and without workers, also after a stop."""
    data = list(range(23))
    for world_size in range(1, 5):
        for rank in range(world_size):
            sampler = DistributedSampler(data, world_size, rank, shuffle=True)
            batches = [[*sampler][first : first + 3] for first in range(0, len(sampler), 3)]
            for workers in (0, 2) if rank == 1 else (0,):
                with as_rank(rank, world_size):
                    make = lambda w=workers, s=sampler: DataLoader(data, 3, sampler=s, num_workers=w, collate_fn=list)  # noqa: E731 - a new one
                    sharded = shard_loader(make())
                    assert list(sharded) == batches
                    sharded.set_epoch(0)
                    list(zip(range(2), sharded, strict=False))
                    resumed = shard_loader(make())
                    resumed.load_state_dict(sharded.state_dict())
                    assert (len(resumed), list(resumed)) == (len(batches) - 2, batches[2:])
                    limited = shard_loader(make(), limit=1)
                    assert (len(limited), list(limited)) == (1, batches[:1])


class Claims(Sampler[int]):
    """Yields `count` indices and says that it has `length`."""

    def __init__(self, count: float, length: int) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        number = 0
        while number < self.count:
            yield number % 100
            number += 1


@pytest.mark.parametrize("length", [50, 2**40])
def test_an_endless_sampler_may_have_a_length(length: int) -> None:
    """It is drawn while it is iterated, and the ranks share its indices; a limit is not cut to its length."""
    ranks = []
    for rank in range(2):
        with as_rank(rank, 2):
            loader = DataLoader(range(100), batch_size=1, sampler=Claims(float("inf"), length), collate_fn=list)
            ranks.append(list(itertools.islice(shard_loader(loader), 60)))
            assert len(list(shard_loader(loader, limit=60))) == 60
    assert [batch for step in zip(*ranks, strict=True) for batch in step] == [[each % 100] for each in range(120)]


def test_a_sampler_that_yields_more_than_its_length_is_read_to_its_end() -> None:
    """As by a DataLoader, and each index is read once."""
    ranks = []
    for rank in range(2):
        with as_rank(rank, 2):
            sharded = shard_loader(DataLoader(range(100), batch_size=4, sampler=Claims(21, 13), collate_fn=list))
            ranks.append([index for batch in sharded for index in batch])
    assert sorted(ranks[0] + ranks[1]) == [0, *range(21)]


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [5, 5]), (False, [5, 5, 2])])
def test_an_incomplete_batch_of_a_stream_is_left_out_if_drop_last_says_so(drop_last: bool, sizes: list[int]) -> None:
    """Of 12 units of each of two processes, in batches of 5."""
    for rank in range(2):
        with as_rank(rank, 2):
            loader = DataLoader(range(23), 5, sampler=NoLength(), drop_last=drop_last, collate_fn=list)
            assert [len(batch) for batch in shard_loader(loader)] == sizes


class Unread(Dataset[int]):
    """Fails if a sample is read."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        pytest.fail(f"sample {index} was read")


ENDLESS = Claims(float("inf"), 50)


@pytest.mark.parametrize(
    ("sampler", "options", "message"),
    [
        (ENDLESS, {"tail": "weighted"}, "tail='weighted' with the endless Claims"),
        (ENDLESS, {"tail": "exact", "batch": "global"}, "batch='global' with the endless Claims"),
        (DistributedSampler(range(100), 3, 0), {}, r"\(num_replicas=3, rank=0\) on rank 0 of 2"),
        (DistributedSampler(range(100), 2, 1), {}, r"\(num_replicas=2, rank=1\) on rank 0 of 2"),
        (DistributedSampler(range(100), 2, 0), {"tail": "drop"}, "tail='drop' with a loader that"),
    ],
)
def test_loaders_are_refused_before_a_sample_is_read(sampler: Sampler[int], options: Any, message: str) -> None:
    """When shard_loader is called, or when the order of the epoch is drawn."""
    size = 3 if "batch" in options else 1
    with as_rank(0, 2), pytest.raises(ConfigError, match=message):
        next(iter(shard_loader(DataLoader(Unread(), size, sampler=sampler), **options)))
