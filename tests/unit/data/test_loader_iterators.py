"""Several iterators of one loader: the position is that of the one that goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from every_sample import OwnRandom
from ranks import as_rank, keep_sigchld_handler
from torch.utils.data import DataLoader

from parallelize import ConfigError, shard_loader


@pytest.fixture(scope="module", autouse=True)
def workers_may_start() -> None:
    keep_sigchld_handler()


def make(**options: Any) -> Any:
    return shard_loader(DataLoader(range(24), batch_size=2, collate_fn=list, shuffle=True, **options))


def full(epoch: int) -> list[list[int]]:
    order = torch.randperm(24, generator=torch.Generator().manual_seed(epoch)).tolist()
    return [order[first : first + 2] for first in range(0, 24, 2)]


def resumed(state: dict[str, Any]) -> list[list[int]]:
    loader = make()
    loader.load_state_dict(state)
    return list(loader)


def look(loader: Any) -> None:
    next(iter(loader))


kept: list[Iterator[Any]] = []


def look_and_keep(loader: Any) -> None:
    kept.append(iter(loader))
    next(kept[-1])


def read_some(loader: Any) -> None:
    for step, _ in enumerate(loader):
        if step == 3:
            break


def read_all(loader: Any) -> None:
    assert len(list(loader)) == 12


WARNED = pytest.warns(UserWarning, match="an iterator over epoch 0 that was begun before")
LOOKS = [look, look_and_keep, read_some, read_all]


@pytest.mark.parametrize("peek", LOOKS)
@pytest.mark.parametrize("at", [1, 2, 7, 12])
def test_a_look_inside_the_loop_does_not_change_the_position(peek: Any, at: int) -> None:
    """The state saved after it resumes the loop, which itself goes on and is followed by the next epoch."""
    loader, seen = make(), []
    for step, batch in enumerate(loader, 1):
        seen.append(batch)
        if step == at:
            peek(loader)
            if at > 1 or peek in (look, look_and_keep):
                with WARNED if peek in (read_some, read_all) else contextlib.nullcontext():
                    state = loader.state_dict()
                assert (state["epoch"], loader.epoch, len(loader)) == (0, 0, 12)
                assert seen + resumed(loader.state_dict()) == full(0)
    assert seen == full(0)
    assert loader.state_dict()["epoch"] == 1
    assert list(loader) == full(1)
    kept.clear()


@pytest.mark.parametrize("peek", [look, look_and_keep])
def test_a_look_before_the_loop_does_not_change_the_position(peek: Any) -> None:
    """It reads the first batch of the epoch that begins next."""
    loader = make()
    for epoch in range(3):
        peek(loader)
        assert list(loader) == full(epoch)
        assert loader.state_dict()["epoch"] == epoch + 1
    kept.clear()


def test_a_look_after_a_loop_that_was_left_does_not_change_the_position() -> None:
    """The state is that of the loop."""
    loader = make()
    read_some(loader)
    look(loader)
    assert resumed(loader.state_dict()) == full(0)[4:]


def test_a_look_before_training_does_not_skip_its_batch() -> None:
    """A state saved after it begins with the batch that it has read."""
    loader = make()
    look(loader)
    assert resumed(loader.state_dict()) == full(0)


def test_an_iterator_that_is_never_continued_does_not_hold_the_position() -> None:
    """Epochs go on after it, and from the second loop on the state is theirs."""
    loader = make()
    left = iter(loader)
    assert [next(left), next(left)] == full(0)[:2]
    for epoch in range(1, 4):
        seen = []
        for batch in loader:
            seen.append(batch)
            if len(seen) > 1:
                assert loader.state_dict()["epoch"] == epoch
        if epoch == 1:
            with WARNED:
                assert loader.state_dict()["epoch"] == 0
        assert seen == full(epoch)
    assert loader.state_dict()["epoch"] == 4
    assert next(left) == full(0)[2]
    assert resumed(loader.state_dict()) == full(0)[3:]


def test_an_old_iterator_that_is_collected_does_not_turn_the_epoch_back() -> None:
    """The next epoch is that after the latest loop."""
    loader = make()
    left = iter(loader)
    assert [next(left), next(left)] == full(0)[:2]
    assert [list(loader), list(loader)] == [full(1), full(2)]
    del left
    assert loader.epoch == 3
    assert list(loader) == full(3)


def test_batches_that_are_taken_again_are_named(recwarn: pytest.WarningsRecorder) -> None:
    """next(iter(loader)) for each step, and two iterators in turn, yield what a shuffled loader would not repeat."""
    loader, sequential = make(), shard_loader(DataLoader(range(24), batch_size=2, collate_fn=list))
    for _ in range(9):
        look(sequential)
        list(zip(sequential, sequential, strict=True))
        for _ in range(3):
            look(loader)
        read_all(loader)
    assert not recwarn.list
    for _ in range(9):
        look(loader)
    read_all(loader)
    for _ in range(2):
        list(zip(loader, loader, strict=True))
    texts = ["the first batch of an epoch was taken 4 times", "two iterators over one epoch of a loader"]
    assert [text in str(each.message) for text, each in zip(texts, recwarn.list, strict=True)] == [True, True]
    assert {each.filename for each in recwarn.list} == {__file__}


def test_results_of_a_loop_are_gathered_after_a_look() -> None:
    """gather takes the rows of the loop."""
    loader = make()
    rows = torch.tensor([index for batch in loader for index in batch])
    look(loader)
    assert loader.gather(rows).tolist() == list(range(24))


def test_an_order_that_is_not_recorded_has_no_state() -> None:
    """With in_order=False and several workers, a state within an epoch is refused."""
    loader = make(num_workers=2, in_order=False)
    for step, _ in enumerate(loader):
        if step == 3:
            with pytest.raises(ConfigError, match=r"state_dict within an epoch on a DataLoader\(in_order=False\)"):
                loader.state_dict()
    assert loader.state_dict()["epoch"] == 1
    loader = make(num_workers=1, in_order=False)
    read_some(loader)
    assert loader.state_dict()["start"] == 8


def test_a_state_of_another_number_of_batches_is_refused_before_a_sample_is_read() -> None:
    """A batch sampler's number of batches may differ between epochs: it is compared when the epoch is drawn."""

    def batches(size: int) -> Any:
        split = list(torch.arange(24).split(size))
        return shard_loader(DataLoader(range(24), batch_sampler=split, collate_fn=pytest.fail if size == 2 else list))

    loader = batches(3)
    read_some(loader)
    other = batches(2)
    other.load_state_dict(loader.state_dict())
    assert other.state_dict() == loader.state_dict()
    with pytest.raises(ConfigError, match="units=8 is loaded with units=12"):
        next(iter(other))


@pytest.mark.parametrize("seed", [1, 2])
def test_the_seed_of_a_samplers_own_generator_is_part_of_the_state(seed: int) -> None:
    """The order of an epoch follows from it, and a state of another one is refused."""

    def begin(own_seed: int) -> Any:
        sampler = OwnRandom()
        sampler.own.seed(own_seed)
        return shard_loader(DataLoader(range(23), batch_size=4, sampler=sampler, collate_fn=list))

    with as_rank(0, 2):
        loader = begin(1)
        epochs = [list(loader) for _ in range(3)]
        assert epochs[0] != epochs[1]
        other = begin(seed)
        state = {**loader.state_dict(), "epoch": 1}
        if seed == 2:
            with pytest.raises(ConfigError, match="a state saved with seed="):
                other.load_state_dict(state)
            return
        other.load_state_dict(state)
        assert [list(other) for _ in range(2)] == epochs[1:]
