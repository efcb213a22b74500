"""Sampler arithmetic: properties of the sharding of an epoch, for all sizes of data, batch and world."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler

from parallelize import ConfigError
from parallelize.data import sampler_arithmetic
from parallelize.data.epoch_order import Permutation
from parallelize.data.sampler_arithmetic import TAILS, EpochSplit, Tail

splits = st.builds(
    lambda total, world_size, batch, tail, drop_last: EpochSplit(
        total=total, world_size=world_size, group=world_size * batch, tail=tail, drop_last=drop_last
    ),
    st.integers(0, 60),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from(TAILS),
    st.booleans(),
)


def ordered(split: EpochSplit) -> list[int]:
    return list(range(100, 100 + split.total))


def shards(split: EpochSplit) -> list[list[list[int]]]:
    return [[list(batch) for batch in split.batches(ordered(split), rank)] for rank in range(split.world_size)]


def flat(batches: list[list[int]]) -> list[int]:
    return [unit for batch in batches for unit in batch]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True], ids=["keep_last", "drop_last"])
@pytest.mark.parametrize("sampler_drops", [False, True], ids=["pad", "drop"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_pad_and_drop_are_torchs_distributed_sampler(world_size, sampler_drops, drop_last, shuffle):
    """For N 0..24 and batches of 1..4, every rank and epoch: the batches DistributedSampler and BatchSampler give."""
    for total, batch_size, rank, epoch in itertools.product(range(25), range(1, 5), range(world_size), (0, 3)):
        sampler = DistributedSampler(range(total), world_size, rank, shuffle=shuffle, seed=7, drop_last=sampler_drops)
        sampler.set_epoch(epoch)
        expected = list(BatchSampler(sampler, batch_size, drop_last))
        split = EpochSplit(
            total=total,
            world_size=world_size,
            group=world_size * batch_size,
            tail="drop" if sampler_drops else "pad",
            drop_last=drop_last,
        )
        order = Permutation(total, 7 + epoch) if shuffle else range(total)
        assert [list(batch) for batch in split.batches(order, rank)] == expected
        assert split.steps(rank) == len(expected)


@given(splits)
def test_lengths_are_what_is_yielded(split):
    """`steps` equals the number of batches, no batch is empty, and only with "exact" ranks differ, by one batch."""
    lengths = [len(batches) for batches in shards(split)]
    assert lengths == [split.steps(rank) for rank in range(split.world_size)]
    assert all(batch for batches in shards(split) for batch in batches)
    if split.tail == "exact" and not split.drop_last:
        assert max(lengths) - min(lengths) <= 1
    else:
        assert len(set(lengths)) == 1


@given(splits.filter(lambda split: not split.drop_last))
def test_the_tail_sets_how_often_a_unit_is_taken(split):
    """Exact: once; pad: at most world_size - 1 repeats; drop: at most world_size - 1 left out, none repeated."""
    seen = Counter(unit for batches in shards(split) for unit in flat(batches))
    if split.tail == "exact":
        assert seen == Counter(ordered(split))
    elif split.tail == "drop":
        assert set(seen.values()) <= {1}
        assert split.total - seen.total() <= split.world_size - 1
    elif split.tail == "pad" and split.total:
        assert set(seen) == set(ordered(split))
        assert seen.total() - split.total <= split.world_size - 1


@given(splits.filter(lambda split: split.tail == "weighted"))
def test_weighted_counts_every_sample_once(split):
    """The unique positions of all ranks in a step are together its global positions."""
    for step in range(split.steps(0)):
        unique = [position for rank in range(split.world_size) for position in split.unique_positions(rank, step)]
        assert sorted(unique) == list(split.global_positions(step))
        for rank in range(split.world_size):
            of_rank = list(split.unique_positions(rank, step))
            assert of_rank == list(split.positions(rank, step)) or not of_rank


@given(splits, st.integers(0, 20), st.integers(1, 20))
def test_resuming_equals_an_uninterrupted_epoch(split, at, limit):
    """From any step on, a rank gets the same batches as when it starts there, also with a limit."""
    full = split.limited(limit)
    at = min(at, full.steps(split.world_size - 1))
    rest = EpochSplit(**{**vars(full), "start": full.start_after(at)})
    for rank in range(split.world_size):
        order = ordered(split)
        assert list(rest.batches(order, rank)) == list(full.batches(order, rank))[at:]


@given(splits.filter(lambda split: not split.drop_last), st.integers(0, 20), st.integers(1, 5), st.integers(1, 4))
def test_another_world_size_resumes_with_the_remaining_units(split, at, world_size, batch):
    """After any step, a world of another size takes exactly the units not yet taken, in the same order."""
    at = min(at, split.steps(split.world_size - 1))
    start = split.start_after(at)
    other = EpochSplit(total=split.total, world_size=world_size, group=world_size * batch, tail="exact", start=start)
    left = [position for step in range(other.steps(0)) for position in other.global_positions(step)]
    assert left == list(range(start, split.total))
    assert sorted(unit for batches in shards(other) for unit in flat(batches)) == ordered(split)[start:]


@given(st.integers(1, 60), st.integers(2, 12), st.integers(1, 5), st.sampled_from(["exact", "weighted"]))
def test_an_uneven_global_batch_is_sharded(total, batch, world_size, tail):
    """Each step takes the batch that one process would, in shards whose sizes differ by at most one."""
    world_size = min(world_size, batch)
    split = EpochSplit(total=total, world_size=world_size, group=batch, tail=tail)
    for step in range(split.steps(0)):
        unique = [split.unique_positions(rank, step) for rank in range(world_size)]
        assert sorted(itertools.chain(*unique)) == list(range(step * batch, min((step + 1) * batch, total)))
        assert max(map(len, unique)) - min(map(len, unique)) <= 1


@given(st.integers(1, 100), st.floats(0.01, 1.0), st.integers(1, 200))
def test_a_limit_is_a_count_or_a_fraction(steps, fraction, count):
    """An int is the most steps, a float a fraction of them; less than one step is refused."""
    split = EpochSplit(total=steps, world_size=1, group=1)
    assert split.limited(count).steps(0) == min(count, steps)
    if fraction * steps >= 1:
        assert split.limited(fraction).limit == int(fraction * steps)
    else:
        with pytest.raises(ConfigError, match=rf"of {steps} batches"):
            split.limited(fraction)
    assert dataclasses.replace(split, total=0).limited(fraction).limit == 0
    assert split.limited(1.0).limit == steps


@given(st.integers(1, 60), st.integers(1, 4), st.floats(0.5, 1.0), st.sampled_from(TAILS))
def test_a_fraction_needs_the_length_of_the_epoch(steps, batch, fraction, tail):
    """A fraction limits an epoch of known length in whole steps; one of unknown length is limited by a count only."""
    total = (steps + 1) * batch  # at least two steps: half of them are at least one
    split = EpochSplit(total=total, world_size=1, group=batch, tail=tail)
    assert split.limited(fraction).limit == int(fraction * (steps + 1)) * batch
    unknown = EpochSplit(start=5, world_size=1, group=batch)
    assert unknown.limited(3) == dataclasses.replace(unknown, limit=3 * batch)
    assert split.limited(None).limit is None


@given(st.integers(0, 50), st.integers(0, 2**40))
def test_a_permutation_is_deterministic_and_complete(length, seed):
    """Equal length and seed give the same order, with every number once."""
    order = list(Permutation(length, seed)[:])
    assert sorted(order) == list(range(length))
    assert order == [Permutation(length, seed)[position] for position in range(length)]


@given(
    st.integers(0, 40),
    st.integers(1, 5),
    st.sampled_from(["pad", "drop", "exact"]),
    st.integers(0, 40),
    st.integers(0, 40) | st.none(),
)
def test_a_stream_is_sharded_as_if_its_length_were_known(total, num_shards, tail, start, limit):
    """Every process has the same units, from any start and up to any limit."""
    start = min(start, total)
    split = EpochSplit(total=total, world_size=num_shards, group=num_shards, tail=tail, start=start, limit=limit)
    for shard_index in range(num_shards):
        units = list(split.units_of_stream(iter(range(total)), shard_index))
        if limit is None or limit >= total or tail != "pad":
            assert units == flat([list(batch) for batch in split.batches(range(total), shard_index)])
        else:  # padding repeats the first units below the limit, not those of the epoch
            assert len(units) == split.steps(shard_index)


@given(splits.filter(lambda split: split.tail != "weighted"))
def test_batches_of_a_stream_have_the_size_of_a_ranks_batches(split):
    """All batches but a last one, which drop_last leaves out, are full."""
    size = split.group // split.world_size
    for rank in range(split.world_size):
        units = list(split.units_of_stream(ordered(split), rank))
        batches = [units[start : start + size] for start in range(0, len(units), size)]
        expected = [batch for batch in batches if len(batch) == size] if split.drop_last else batches
        assert list(split.batches_of_stream(ordered(split), rank)) == expected


def test_the_length_of_an_epoch_may_be_unknown():
    """Only a known one gives a number of steps."""
    assert EpochSplit(world_size=2, group=4).known_steps(0) is None
    assert EpochSplit(total=9, world_size=2, group=4).known_steps(0) == 3


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("group", "world_size"), [(2, 1), (6, 2), (9, 3), (7, 3), (40, 2)])
def test_batches_are_those_of_their_positions(
    tail: Tail, group: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units are read for several steps at once, which changes no batch, wherever an epoch starts and ends."""
    monkeypatch.setattr(sampler_arithmetic, "_CHUNK", 8)
    for total, start, rank in itertools.product((1, 30, 42), (0, 12), range(world_size)):
        split = EpochSplit(total=total, world_size=world_size, group=group, tail=tail, start=min(start, total - 1))
        order = list(range(100, 100 + total))
        expected = [[order[each % total] for each in split.positions(rank, step)] for step in range(split.steps(rank))]
        assert [list(each) for each in split.batches(order, rank)] == expected
