"""Dividing an epoch over processes: what holds for every size of data, batch and world."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler

from parallelize import ConfigError
from parallelize.data.epoch_order import Permutation
from parallelize.data.sampler_arithmetic import TAILS, Split, as_steps, reader_steps, share

# How long an example takes says something about the machine and who else uses it.

splits = st.builds(
    lambda total, world_size, batch, tail, drop_last: Split(
        total=total, world_size=world_size, group=world_size * batch, tail=tail, drop_last=drop_last
    ),
    st.integers(0, 60),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from(TAILS),
    st.booleans(),
)


def ordered(split: Split) -> list[int]:
    return list(range(100, 100 + split.total))


def shares(split: Split) -> list[list[list[int]]]:
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
        split = Split(
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
    """`steps` equals the number of batches, none is empty, and only "exact" lets ranks differ, by one batch."""
    lengths = [len(batches) for batches in shares(split)]
    assert lengths == [split.steps(rank) for rank in range(split.world_size)]
    assert all(batch for batches in shares(split) for batch in batches)
    if split.tail == "exact" and not split.drop_last:
        assert max(lengths) - min(lengths) <= 1
    else:
        assert len(set(lengths)) == 1


@given(splits.filter(lambda split: not split.drop_last))
def test_every_unit_is_taken_as_often_as_its_tail_says(split):
    """Exact: once; pad: at most world - 1 repeats; drop: at most world - 1 are left out, none is repeated."""
    seen = Counter(unit for batches in shares(split) for unit in flat(batches))
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
    """Units that are no repeats are, over all ranks of a step, exactly those that are due in it."""
    for step in range(split.steps(0)):
        own = [position for rank in range(split.world_size) for position in split.own(rank, step)]
        assert sorted(own) == list(split.taken(step))
        for rank in range(split.world_size):
            assert list(split.own(rank, step)) == list(split.positions(rank, step)) or not split.own(rank, step)


@given(splits, st.integers(0, 20), st.integers(1, 20))
def test_resuming_equals_never_having_stopped(split, at, limit):
    """What a rank gets from any step on is what it gets when it starts there, under a limit too."""
    limited = as_steps(limit, split.steps(0)) * split.group
    whole = Split(**{**vars(split), "limit": limited})
    at = min(at, whole.steps(split.world_size - 1))
    rest = Split(**{**vars(whole), "start": whole.after(at)})
    for rank in range(split.world_size):
        order = ordered(split)
        assert list(rest.batches(order, rank)) == list(whole.batches(order, rank))[at:]


@given(splits.filter(lambda split: not split.drop_last), st.integers(0, 20), st.integers(1, 5), st.integers(1, 4))
def test_another_world_takes_up_what_is_left(split, at, world_size, batch):
    """After any step a world of another size takes exactly the units nobody has seen, in the same order."""
    at = min(at, split.steps(split.world_size - 1))
    start = split.after(at)
    other = Split(total=split.total, world_size=world_size, group=world_size * batch, tail="exact", start=start)
    left = [position for step in range(other.steps(0)) for position in other.taken(step)]
    assert left == list(range(start, split.total))
    assert sorted(unit for batches in shares(other) for unit in flat(batches)) == ordered(split)[start:]


@given(st.integers(1, 60), st.integers(2, 12), st.integers(1, 5), st.sampled_from(["exact", "weighted"]))
def test_a_global_batch_that_does_not_divide_is_shared_out(total, batch, world_size, tail):
    """Each step's batch is that of one process, divided with shares that differ by at most one."""
    world_size = min(world_size, batch)
    split = Split(total=total, world_size=world_size, group=batch, tail=tail)
    for step in range(split.steps(0)):
        own = [split.own(rank, step) for rank in range(world_size)]
        assert sorted(itertools.chain(*own)) == list(range(step * batch, min((step + 1) * batch, total)))
        assert max(map(len, own)) - min(map(len, own)) <= 1


@given(st.integers(1, 100), st.floats(0.01, 1.0), st.integers(1, 200))
def test_limits_count_or_share(steps, fraction, count):
    """An int is at most so many steps, a float that part of them, and none is no part."""
    assert as_steps(count, steps) == min(count, steps)
    if fraction * steps >= 1:
        assert as_steps(fraction, steps) == int(fraction * steps)
    else:
        with pytest.raises(ConfigError, match=rf"of {steps} batches"):
            as_steps(fraction, steps)
    assert as_steps(fraction, 0) == 0
    assert as_steps(1.0, steps) == steps


@given(st.integers(0, 50), st.integers(0, 2**40))
def test_a_permutation_is_deterministic_and_complete(length, seed):
    """Equal length and seed give one order, of every number once."""
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
def test_a_stream_is_shared_as_if_its_end_were_known(total, readers, tail, start, limit):
    """Every reader gets the units that `Split` gives it, from any start and up to any limit."""
    start = min(start, total)
    split = Split(total=total, world_size=readers, group=readers, tail=tail, start=start, limit=limit)
    for reader in range(readers):
        shared = list(share(iter(range(total)), reader=reader, readers=readers, tail=tail, start=start, limit=limit))
        if limit is None or limit >= total or tail != "pad":
            assert shared == flat([list(batch) for batch in split.batches(range(total), reader)])
        else:  # what pads is the beginning of the units that are read at all
            assert len(shared) == split.steps(reader)


@given(
    st.integers(0, 40),
    st.integers(1, 3),
    st.integers(1, 3),
    st.none() | st.integers(1, 4),
    st.booleans(),
    st.sampled_from(["pad", "drop", "exact"]),
)
def test_batches_of_a_reader_are_counted_before_they_are_made(total, world, workers, batch_size, drop_last, tail):
    """`reader_steps` is what grouping a reader's units gives; padded or dropped, all readers make as many."""
    readers = world * workers
    drop_last = drop_last and batch_size is not None
    counts = []
    for reader in range(readers):
        units = len(list(share(range(total), reader=reader, readers=readers, tail=tail)))
        size = batch_size or 1
        expected = units // size if drop_last else -(-units // size)
        steps = reader_steps(
            total, readers=readers, reader=reader, batch_size=batch_size, drop_last=drop_last, tail=tail
        )
        assert steps == expected
        counts.append(steps)
    assert tail == "exact" or len(set(counts)) == 1
