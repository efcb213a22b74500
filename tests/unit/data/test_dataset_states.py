"""Resumed epochs of iterable datasets that have a state, by torchdata's protocol."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from ranks import as_rank
from torch.utils.data import DataLoader, IterableDataset

import parallelize as par
from parallelize import distributed, shard_loader

LENGTH, BATCH = 101, 2


class Counted(IterableDataset):
    """Yields this process's part of the numbers, counts how many it reads, and has a state."""

    def __init__(self) -> None:
        self.reads = self.begins_at = self.position = 0

    def __iter__(self):
        position, self.begins_at = self.begins_at, 0
        for each in range(position * par.world_size() + par.rank(), LENGTH, par.world_size()):
            self.reads += 1
            self.position = position = position + 1
            yield each

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.begins_at = self.position = state["position"]


class Buffered(Counted):
    """Draws from a buffer of ten samples, which its state does not contain."""

    def __iter__(self):
        generator, buffer = random.Random(3), []
        for each in super().__iter__():
            buffer.append(each)
            if len(buffer) == 10:
                yield buffer.pop(generator.randrange(10))
        yield from buffer


class Silent(Counted):
    """Has a state that says nothing."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


class Shuffled(Counted):
    """Shuffles each epoch by a generator that goes on over the epochs; its state holds the order, too."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.order = random.Random(3), []

    def __iter__(self):
        if not self.begins_at:
            self.order = self.generator.sample(range(LENGTH), LENGTH)
        yield from (self.order[each] for each in super().__iter__())

    def state_dict(self):
        return {**super().state_dict(), "order": self.order, "generator": self.generator.getstate()}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.order = state["order"]
        self.generator.setstate(state["generator"])


def sharded(kind, limit=None):
    return shard_loader(DataLoader(kind(), batch_size=BATCH), divides="processes", limit=limit)


def resumed_after(kind, steps, limit=None):
    """Return all batches of two epochs, the rest of the first one after an interruption, and the resumed loader."""
    full = sharded(kind, limit)
    epochs = [[batch.tolist() for batch in full] for _ in range(2)]
    loader = sharded(kind, limit)
    batches = iter(loader)
    first = [next(batches).tolist() for _ in range(steps)]
    state, of_rank = loader.state_dict(), loader.rank_state()
    resumed = sharded(kind, limit)
    resumed.load_state_dict(state)
    if of_rank is not None:
        resumed.load_rank_state(of_rank)
    return epochs, first, resumed


@pytest.mark.parametrize("kind", [Counted, Shuffled])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2)])
@pytest.mark.parametrize(("steps", "limit"), [(1, None), (2, None), (9, None), (20, 22)])
def test_a_dataset_goes_on_from_its_state(kind, rank, world_size, steps, limit):
    """The rest of the epoch follows, up to a limit, and the next epoch; at most a batch is read again."""
    with as_rank(rank, world_size):
        epochs, first, resumed = resumed_after(kind, steps, limit)
        batches = iter(resumed)
        rest = [next(batches).tolist()]
        assert resumed.dataset.reads <= (BATCH * 3 if steps > 1 else BATCH * 2)
        rest += [batch.tolist() for batch in batches]
        assert first + rest == epochs[0]
        assert [batch.tolist() for batch in resumed] == epochs[1]


@pytest.mark.parametrize("kind", [Buffered, Silent])
def test_where_another_batch_follows_the_position_is_read_again(kind):
    """It is said, and the rest of the epoch is as without a state."""
    with as_rank(0, 2):
        epochs, first, resumed = resumed_after(kind, 9)
        with pytest.warns(UserWarning, match=f"{kind.__name__} does not go on from its state_dict"):
            rest = [batch.tolist() for batch in resumed]
        assert first + rest == epochs[0]
        assert [batch.tolist() for batch in resumed] == epochs[1]


@pytest.mark.parametrize("options", [{"num_workers": 1}, {}])
def test_what_other_processes_read_has_no_state(options):
    """Workers, or ranks that all read the whole stream."""
    with as_rank(0, 2):
        loader = shard_loader(DataLoader(Counted(), batch_size=BATCH, **options), divides="nothing")
        for _ in itertools.islice(loader, 5):
            assert loader.rank_state() is None


def test_a_checkpoint_holds_the_state_of_every_rank(tmp_path: Path):
    """Saved and loaded by two processes, each goes on from its own."""

    @distributed(processes=2)
    def run(path, is_resumed):
        loader = sharded(Counted)
        if is_resumed:
            par.load(path, loader=loader)
            return [batch.tolist() for batch in loader], loader.dataset.reads
        batches = [batch.tolist() for batch in itertools.islice(loader, 9)]
        par.save(path, loader=loader)
        return batches, loader.dataset.reads

    first, rest = run.all_ranks(tmp_path / "a.pt", False), run.all_ranks(tmp_path / "a.pt", True)
    for rank in range(2):
        assert [*itertools.chain(*first[rank][0], *rest[rank][0])] == list(range(rank, LENGTH, 2))
        assert rest[rank][1] <= len(range(rank, LENGTH, 2)) - 16
