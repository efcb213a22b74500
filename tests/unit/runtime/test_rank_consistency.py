"""Consistency checks across ranks, compared at sync points without waiting."""

from __future__ import annotations

import gc

import pytest
import torch.distributed as dist

from parallelize import SyncError
from parallelize.runtime.rank_consistency import ConsistencyCheck, run_checks


@pytest.fixture(autouse=True)
def group():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_later_texts_are_compared_with_the_first():
    """Equal texts pass; a different one is an error that quotes both, with the fix."""
    first = ConsistencyCheck("loader", "reads epoch 1", fix="call set_epoch() alike")
    run_checks("step 1")
    again = ConsistencyCheck("loader", "reads epoch 1", fix="")
    run_checks("step 1")
    other = ConsistencyCheck("loader", "reads epoch 2", fix="call set_epoch() alike")
    with pytest.raises(SyncError, match="rank 0 reads epoch 2, where rank 0 reads epoch 1") as caught:
        run_checks("step 1")
    assert caught.value.faults[0].fix == "call set_epoch() alike"
    assert first is not again is not other


def test_only_the_same_topic_and_sync_point_are_compared():
    """Each check runs once, and a check that was deleted does not run."""
    kept = [ConsistencyCheck("a", "reads 1", fix=""), ConsistencyCheck("b", "reads 2", fix="")]
    run_checks("step 1")
    kept.append(ConsistencyCheck("a", "reads 3", fix=""))
    run_checks("step 2")
    run_checks("step 1")
    kept.clear()
    ConsistencyCheck("a", "reads 4", fix="")
    gc.collect()
    run_checks("step 1")


def test_without_a_group_nothing_is_compared():
    """A single process has no other rank to differ from."""
    dist.destroy_process_group()
    kept = ConsistencyCheck("loader", "reads 1", fix="")
    run_checks("step 1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert kept.text
