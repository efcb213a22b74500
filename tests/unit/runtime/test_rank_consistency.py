"""What processes announce, compared without waiting."""

from __future__ import annotations

import gc

import pytest
import torch.distributed as dist

from parallelize import SyncError
from parallelize.runtime.rank_consistency import Moments, announce, compare


@pytest.fixture(autouse=True)
def group():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_who_comes_later_is_compared_with_the_first():
    """Equal texts pass, another one is an error that quotes both and says what to do."""
    first = announce("loader", "reads epoch 1", fix="call set_epoch() alike")
    compare("step 1")
    again = announce("loader", "reads epoch 1", fix="")
    compare("step 1")
    other = announce("loader", "reads epoch 2", fix="call set_epoch() alike")
    with pytest.raises(SyncError, match="rank 0 reads epoch 2, where rank 0 reads epoch 1") as caught:
        compare("step 1")
    assert caught.value.faults[0].fix == "call set_epoch() alike"
    assert first is not again is not other


def test_only_what_is_alike_is_compared():
    """Other topics and other moments say nothing; each announcement is compared once; one that is gone never."""
    kept = [announce("a", "reads 1", fix=""), announce("b", "reads 2", fix="")]
    compare("step 1")
    kept.append(announce("a", "reads 3", fix=""))
    compare("step 2")
    compare("step 1")
    kept.clear()
    announce("a", "reads 4", fix="")
    gc.collect()
    compare("step 1")


def test_moments_have_names_of_their_own():
    """The forwards of one model are not those of another, nor its first its second."""
    first, second = Moments(), Moments()
    for number, moments in enumerate([first, second, first]):
        kept = announce("loader", f"reads {number}", fix="")
        moments.reach()
    assert kept.text == "reads 2"


def test_without_a_group_nothing_is_compared():
    """One process alone has nobody to disagree with."""
    dist.destroy_process_group()
    kept = announce("loader", "reads 1", fix="")
    compare("step 1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert kept.text
