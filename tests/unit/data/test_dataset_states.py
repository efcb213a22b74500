"""Resumed epochs of iterable datasets that have a state: they go on from it, and yield what they would have yielded."""

from __future__ import annotations

import itertools
import random
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import as_rank
from torch.utils.data import DataLoader, IterableDataset

import parallelize as par
from parallelize import distributed, shard_loader
from parallelize.data import dataset_states
from parallelize.data.device_prefetch import prefetch_batches
from parallelize.data.sharded_loader import ShardedLoader

LENGTH, BATCH = 101, 2


@pytest.fixture(autouse=True)
def states_are_recorded_on_a_busy_machine(monkeypatch) -> None:
    """Every eighth batch has a state, however long it takes to record."""
    monkeypatch.setattr(dataset_states, "_MIN_SECONDS", 60.0)


class Reads:
    """A number of samples that the copies of a dataset count together."""

    count = 0

    def __deepcopy__(self, _memo: object) -> Reads:
        return self


class Counted(IterableDataset):
    """Yields this process's part of the numbers, counts how many it reads, and has a state, as torchdata's have."""

    def __init__(self) -> None:
        self.reads = Reads()
        self.begins_at = self.position = 0

    def __iter__(self):
        position, self.begins_at = self.begins_at, 0
        for each in range(position * par.world_size() + par.rank(), LENGTH, par.world_size()):
            self.reads.count += 1
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


class Broken(Counted):
    """Raises when a state is loaded."""

    def load_state_dict(self, state):
        raise RuntimeError(state)


class Locked(Counted):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Large(Counted):
    """Has many objects in memory, which would be copied several times."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = list(range(200_000))


class Ended(Counted):
    """Deletes its temporary files at its end."""

    def __del__(self) -> None:
        self.reads.ends = True


class Mapped(Counted):
    """Reads a large file that is mapped read-only."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = np.broadcast_to(np.zeros(1), 2**30)


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


class Naive(Counted):
    """Begins every epoch at the state that was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.order = range(LENGTH)

    def __iter__(self):
        for each in range(self.begins_at, LENGTH):
            self.reads.count += 1
            self.position = each + 1
            yield self.order[each]


class NaiveByEpoch(Naive):
    """Has another order in every epoch, in which it begins at the state that was loaded."""

    epoch = epoch_of_state = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.order = random.Random(epoch).sample(range(LENGTH), LENGTH)


class OfOneEpoch(NaiveByEpoch):
    """Begins at the state that was loaded only in the epoch of that state."""

    def __iter__(self):
        if self.epoch_of_state != self.epoch:
            self.begins_at = 0
        yield from super().__iter__()

    def state_dict(self):
        return {**super().state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.epoch_of_state = state["epoch"]


class Slotted(Naive):
    """Has its state in an attribute that is not in `__dict__`."""

    __slots__ = ("begins_at",)


class NaiveWrapper(IterableDataset):
    """Contains such a dataset, which refers to it."""

    def __init__(self) -> None:
        self.inner = NaiveByEpoch()
        self.inner.outer = self
        self.reads, self.set_epoch, self.state_dict = self.inner.reads, self.inner.set_epoch, self.inner.state_dict
        self.load_state_dict = self.inner.load_state_dict

    def __iter__(self):
        yield from self.inner.outer.inner


class NaiveWithGenerator(Naive):
    """Draws each order from a generator; its state holds that of the beginning of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(3)
        self.began_with = self.generator.getstate()

    def __iter__(self):
        self.began_with = self.generator.getstate()
        self.order = self.generator.sample(range(LENGTH), LENGTH)
        yield from super().__iter__()

    def state_dict(self):
        return {**super().state_dict(), "generator": self.began_with}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.generator.setstate(state["generator"])


class NaiveWithCounter(NaiveWithGenerator):
    """Has a text as its state, which is another one in every epoch."""

    iterators = 0

    def __iter__(self):
        self.iterators += 1
        yield from super().__iter__()

    def state_dict(self):
        state = super().state_dict()
        return {"text": repr((self.iterators, state["position"])), "generator": state["generator"]}

    def load_state_dict(self, state):
        self.iterators, position = eval(state["text"])
        super().load_state_dict({"position": position, "generator": state["generator"]})


class NaiveWithBuffer(Naive):
    """Has a buffer in its state, and begins every epoch at the state, with what is left in the buffer."""

    buffer: tuple[int, ...] = ()

    def __iter__(self):
        for each in super().__iter__():
            self.buffer += (each,)
            if len(self.buffer) == 10:
                number = random.Random(each).randrange(10)
                chosen, self.buffer = self.buffer[number], self.buffer[:number] + self.buffer[number + 1 :]
                yield chosen
        while self.buffer:
            chosen, self.buffer = self.buffer[0], self.buffer[1:]
            yield chosen

    def state_dict(self):
        return {**super().state_dict(), "buffer": self.buffer}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.buffer = state["buffer"]


def loader_of(dataset: IterableDataset) -> DataLoader:
    divides = "processes" if par.world_size() > 1 else None
    return shard_loader(DataLoader(dataset, batch_size=BATCH), divides=divides)


def flat(batches) -> list[int]:
    return [int(each) for batch in batches for each in batch]


def restore(loader, saved):
    """Return the loader, at the position and state of another one."""
    loader.load_state_dict(saved.state_dict())
    if own := saved.rank_state():
        loader.load_rank_state(own)
    return loader


@pytest.mark.parametrize("taken", [0, 2, 8, 9, 17, 24])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_consumed_is_not_read_again(world_size: int, taken: int) -> None:
    """The rest of the epoch is that of an uninterrupted one; of what came before, fewer than 17 batches are read."""
    for rank in range(world_size):
        with as_rank(rank, world_size):
            expected = [flat(loader_of(Counted())) for _ in range(2)]
            first = loader_of(Counted())
            seen = flat(itertools.islice(first, taken))
            state, own = first.state_dict(), first.rank_state()
            assert (own is None) == (taken < 9)
            dataset = Counted()
            resumed = loader_of(dataset)
            resumed.load_state_dict(state)
            if own is not None:
                resumed.load_rank_state(own)
            assert seen + flat(resumed) == expected[0]
            # On copies, eight batches are read: that after the state, and first ones of epochs.
            assert dataset.reads.count <= len(expected[0]) - len(seen) + (17 if taken >= 9 else 8) * BATCH
            assert flat(resumed) == expected[0]


@pytest.mark.parametrize("kind", [Buffered, Silent, Broken, Locked, Slotted, Large, Ended, NaiveWithBuffer])
def test_a_state_that_does_not_continue_the_epoch(kind: type[Counted]) -> None:
    """All samples are read again, and none is lost, twice or in another order."""
    expected = flat(loader_of(kind()))
    first = loader_of(kind())
    seen = flat(itertools.islice(first, 20))
    dataset = kind()
    resumed = restore(loader_of(dataset), first)
    assert seen + flat(resumed) == expected
    assert flat(resumed) == expected
    assert not hasattr(dataset.reads, "ends")


def test_a_file_that_is_mapped_is_not_copied() -> None:
    """Copies of the dataset share arrays that cannot be written, however large they are."""
    first, dataset = loader_of(Mapped()), Mapped()
    flat(itertools.islice(first, 20))
    flat(restore(loader_of(dataset), first))
    assert dataset.reads.count < LENGTH


def test_equal_batches_do_not_tell_where_a_dataset_begins() -> None:
    """If the batch after the state is that of the epoch's beginning, all is read again, also in the same epoch."""

    class Equal(OfOneEpoch):
        def __iter__(self):
            yield from (0 for _ in super().__iter__())

    first = loader_of(Equal())
    flat(itertools.islice(first, 20))
    resumed = restore(loader_of(Equal()), first)
    assert len(flat(resumed)) == LENGTH - 40
    resumed.set_epoch(0)
    assert len(flat(resumed)) == LENGTH


def test_states_that_take_long_are_recorded_rarely(monkeypatch) -> None:
    """Hashing a large batch, or copying a large state, takes at most a fiftieth of the time."""
    monkeypatch.setattr(dataset_states, "_MIN_SECONDS", 0.002)
    seconds = itertools.count()
    now = [0.0]
    clock = types.SimpleNamespace(thread_time=lambda: float(next(seconds)), monotonic=lambda: now[0])
    monkeypatch.setattr(dataset_states, "time", clock)
    batches = iter(first := loader_of(Counted()))
    flat(itertools.islice(batches, 30))
    assert first.rank_state()["batches"] == 8
    now[0] = 100.0  # a second for the state, another one for the hash
    flat(itertools.islice(batches, 4))
    assert first.rank_state()["batches"] == 32


def test_a_look_at_the_first_batch_does_not_disturb() -> None:
    """Another iterator changes the dataset's state: what it recorded is not used."""
    expected = flat(loader_of(Counted()))
    first = loader_of(Counted())
    batches = iter(first)
    seen = flat(itertools.islice(batches, 12))
    next(iter(first))
    seen += flat(itertools.islice(batches, 12))
    resumed = restore(loader_of(Counted()), first)
    assert seen + flat(resumed) == expected


@pytest.mark.parametrize("kind", [Counted, Shuffled, Naive, NaiveByEpoch, NaiveWrapper, OfOneEpoch])
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("use", ["none", "peek before", "peek after", "epoch before", "restore twice"])
def test_the_resumed_epoch_and_later_ones_are_those_of_one_run(
    kind: type[IterableDataset], epoch: int, use: str
) -> None:
    """Whether the dataset carries something over to the next one, or never forgets its state: then it is read again."""
    uninterrupted, first = loader_of(kind()), loader_of(kind())
    expected = [flat(uninterrupted) for _ in range(epoch + 3)][epoch:]
    for _ in range(epoch):
        flat(first)
    seen = flat(itertools.islice(first, 20))
    dataset = kind()
    dataset.used = used = [object()]
    resumed = loader_of(dataset)
    if use in ("peek before", "epoch before"):
        flat(itertools.islice(resumed, 1 if use == "peek before" else None))
    restore(resumed, first)
    if use in ("peek after", "restore twice"):
        assert (
            flat(itertools.islice(resumed, 1 if use == "peek after" else 9))[:BATCH]
            == expected[0][20 * BATCH :][:BATCH]
        )
    if use == "restore twice":
        restore(resumed, first)
    dataset.reads.count = 0
    assert seen + flat(resumed) == expected[0]
    # One that remembers its state for an epoch, and was iterated before, cannot be brought back to its beginning.
    is_loaded = kind in (Counted, Shuffled) or (kind is OfOneEpoch and not use.endswith("before"))
    assert (dataset.reads.count < LENGTH) == is_loaded
    assert [flat(resumed), flat(resumed)] == expected[1:]
    assert dataset.used is used


@pytest.mark.parametrize("kind", [Counted, Shuffled, Naive, NaiveByEpoch])
def test_a_run_that_is_resumed_twice(kind: type[Counted]) -> None:
    """The state from which a run was resumed is good for the next one, until there is a newer one."""
    uninterrupted, run = loader_of(kind()), loader_of(kind())
    expected = [flat(uninterrupted) for _ in range(3)]
    seen = flat(itertools.islice(run, 20))
    for count in (2, 12):
        dataset = kind()
        run = restore(loader_of(dataset), run)
        seen += flat(itertools.islice(run, count))
        assert dataset.reads.count <= (count + 18) * BATCH or kind in (Naive, NaiveByEpoch)
    run = restore(loader_of(kind()), run)
    assert [seen + flat(run), flat(run), flat(run)] == expected


class Ahead:
    """Copies batches as move_batches does, without a device."""

    def start(self, batch):
        return types.SimpleNamespace(batch=batch, is_shared=False)

    def wait(self, copy):
        return copy.batch


@pytest.mark.parametrize("taken", [6, 7, 8, 9, 15, 16, 17])
def test_batches_that_are_read_ahead(taken: int, monkeypatch) -> None:
    """A state of a batch that is prefetched is not that of the batches that were used."""
    monkeypatch.setattr(
        ShardedLoader,
        "_batches",
        lambda _self, progress: prefetch_batches(progress.shard.fetch(progress.shard), Ahead(), prefetch=2),
    )
    expected = flat(loader_of(Counted()))
    first = loader_of(Counted())
    seen = flat(itertools.islice(first, taken))
    resumed = restore(loader_of(Counted()), first)
    assert (first.rank_state() is None) == (taken < 8)
    assert [seen + flat(resumed), flat(resumed)] == [expected, expected]


def test_a_late_beginning_that_was_not_seen_is_warned_about() -> None:
    """If its state is a text, a dataset that draws a new order, and begins late, looks like one that goes on."""
    first = loader_of(NaiveWithCounter())
    seen = flat(itertools.islice(first, 20))
    resumed = restore(loader_of(NaiveWithCounter()), first)
    assert sorted(seen + flat(resumed)) == list(range(LENGTH))
    with pytest.warns(UserWarning, match="epoch 1 of NaiveWithCounter has 16 batches less"):
        flat(resumed)


@pytest.mark.parametrize("kind", [Counted, Buffered, Naive])
@pytest.mark.parametrize("has_generator", [False, True])
def test_random_numbers_are_those_of_reading_again(kind: type[Counted], has_generator: bool) -> None:
    """Iterators that only try a state draw nothing from the global generators and that of the loader."""

    class Drawing(kind):
        def __iter__(self):
            torch.rand(1)
            yield from super().__iter__()

    first = loader_of(Drawing())
    flat(itertools.islice(first, 20))
    states = []
    for own in (None, first.rank_state()):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1) if has_generator else None
        resumed = shard_loader(DataLoader(Drawing(), batch_size=BATCH, generator=generator))
        resumed.load_state_dict(first.state_dict())
        if own is not None:
            resumed.load_rank_state(own)
        for _ in range(3):
            flat(resumed)
        states.append([torch.get_rng_state().tolist(), has_generator and generator.get_state().tolist()])
    assert states[0] == states[1]


class Augmented(Counted):
    """Adds a random number to each sample."""

    def __iter__(self):
        for each in super().__iter__():
            yield each + LENGTH * int(torch.randint(1000, ()))


def test_augmentation_under_a_seed() -> None:
    """Random numbers of a batch follow from its position: the resumed epoch and the next one have the same samples."""

    def loader(dataset):
        return shard_loader(DataLoader(dataset, batch_size=BATCH), seed=5)

    uninterrupted, first, dataset = loader(Augmented()), loader(Augmented()), Augmented()
    expected = [flat(uninterrupted) for _ in range(3)]
    seen = flat(itertools.islice(first, 20))
    resumed = restore(loader(dataset), first)
    assert seen + flat(resumed) == expected[0]
    assert dataset.reads.count < LENGTH
    assert [flat(resumed), flat(resumed)] == expected[1:]


class Closing(Buffered):
    """Sets an attribute when its iterator is closed."""

    closed = 0

    def __iter__(self):
        try:
            yield from super().__iter__()
        finally:
            self.closed += 1


def test_a_failed_trial_leaves_the_dataset_alone() -> None:
    """The attributes are the same objects as before, also if an iterator sets them when it is closed."""
    first = loader_of(Closing())
    flat(itertools.islice(first, 20))
    dataset = Closing()
    dataset.used = used = [object()]
    batches = iter(restore(loader_of(dataset), first))
    next(batches)
    assert dataset.used is used
    assert dataset.closed == 0


class Drawings(Buffered):
    """Yields images that differ in one row."""

    def __iter__(self):
        for each in super().__iter__():
            image = np.zeros((64, 64), np.uint8)
            image[1 + each // 62, 1 + each % 62] = 1
            yield image


class Opaque:
    """An object whose repr does not tell what it contains."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return "Opaque()"


@pytest.mark.parametrize("kind", ["array", "tensor", "sparse", "object"])
def test_batches_that_differ_little(kind: str) -> None:
    """Another batch is known as such if it is large and mostly zeros, sparse, or an object with a short repr."""

    def collate(images):
        if kind == "object":
            return Opaque(int(sum(map(_number_of, images))))
        batch = np.stack(images)
        batches = {"array": batch, "tensor": torch.from_numpy(batch), "sparse": torch.from_numpy(batch).to_sparse()}
        return batches[kind]

    def text(batches):
        shown = [torch.tensor([each.number + 1.0]) if kind == "object" else torch.as_tensor(each) for each in batches]
        return [(each.sum().item(), each.to_dense().nonzero().tolist()) for each in shown]

    expected = text(shard_loader(DataLoader(Drawings(), batch_size=BATCH, collate_fn=collate)))
    first = shard_loader(DataLoader(Drawings(), batch_size=BATCH, collate_fn=collate))
    seen = text(itertools.islice(first, 20))
    resumed = restore(shard_loader(DataLoader(Drawings(), batch_size=BATCH, collate_fn=collate)), first)
    assert seen + text(resumed) == expected


def _number_of(image) -> int:
    return int(image.reshape(-1).nonzero()[0][0])


@distributed(processes=2)
def run(path: Path, *, is_resumed: bool) -> tuple[list[list[int]], int]:
    dataset = Shuffled()
    loader = loader_of(dataset)
    if is_resumed:
        par.load(path, loader=loader)
        return [flat(loader), flat(loader)], dataset.reads.count
    seen = flat(itertools.islice(loader, 20))
    par.save(path, loader=loader)
    return [seen, flat(loader)], dataset.reads.count


@pytest.mark.slow
def test_each_rank_goes_on_from_its_own_state(tmp_path: Path) -> None:
    """save() keeps the states of all ranks, and load() gives each rank its own: epochs are those of one run."""
    saved = run.all_ranks(tmp_path / "last.pt", is_resumed=False)
    resumed = run.all_ranks(tmp_path / "last.pt", is_resumed=True)
    samples = []
    for ((seen, expected), _), ((rest, later), _) in zip(saved, resumed, strict=True):
        samples += seen + rest
        assert later == expected
    assert sorted(samples) == list(range(LENGTH))
    assert all(read < LENGTH // 2 + 40 for _, read in resumed)


@pytest.mark.parametrize("buffer", [0, 10])
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2])
def test_hugging_face_streams(buffer: int, epoch: int, world_size: int, tmp_path: Path) -> None:
    """They go on from their state; if they shuffle by a buffer, which they forget, all samples are read again."""
    datasets = pytest.importorskip("datasets")
    read: list[int] = []

    def note(example):
        read.append(example["x"])
        return example

    def loader():
        stream = datasets.Dataset.from_dict({"x": list(range(2 * LENGTH))}).to_iterable_dataset(num_shards=4).map(note)
        return shard_loader(DataLoader(stream.shuffle(seed=0, buffer_size=buffer) if buffer else stream, batch_size=2))

    def numbers(batches):
        return [int(each) for batch in batches for each in batch["x"]]

    for rank in range(world_size):
        with as_rank(rank, world_size):
            uninterrupted, first = loader(), loader()
            expected = [numbers(uninterrupted) for _ in range(epoch + 3)][epoch:]
            for _ in range(epoch):
                numbers(first)
            seen = numbers(itertools.islice(first, 20))
            resumed = restore(loader(), first)
            assert numbers(itertools.islice(resumed, 1)) == expected[0][40:42]
            read.clear()
            assert seen + numbers(resumed) == expected[0]
            assert (len(read) < len(expected[0])) == (buffer == 0)
            assert [numbers(resumed), numbers(resumed)] == expected[1:]
            resumed.set_epoch(epoch)
            assert numbers(resumed) == expected[0]


def test_a_shuffle_buffer_in_a_part_of_a_stream() -> None:
    """All samples are read again, although the next batch after the state is one of the other part."""
    datasets = pytest.importorskip("datasets")

    def loader():
        parts = [
            datasets.Dataset.from_dict({"x": list(range(first, first + LENGTH))}).to_iterable_dataset()
            for first in (0, 1000)
        ]
        parts[1] = parts[1].shuffle(seed=0, buffer_size=20)
        return shard_loader(DataLoader(datasets.interleave_datasets(parts), batch_size=1))

    def numbers(batches):
        return [int(each) for batch in batches for each in batch["x"]]

    expected, first = numbers(loader()), loader()
    first.set_epoch(0)
    seen = numbers(itertools.islice(first, 40))
    assert seen + numbers(restore(loader(), first)) == expected


def test_a_hugging_face_stream_that_was_saved(tmp_path: Path) -> None:
    """Its state is kept in a checkpoint."""
    datasets = pytest.importorskip("datasets")

    def loader():
        stream = datasets.Dataset.from_dict({"x": list(range(LENGTH))}).to_iterable_dataset(num_shards=4)
        return shard_loader(DataLoader(stream, batch_size=2))

    first = loader()
    for _ in itertools.islice(first, 20):
        pass
    par.save(tmp_path / "last.pt", loader=first)
    resumed = loader()
    par.load(tmp_path / "last.pt", loader=resumed)
    assert first.rank_state() is not None
    assert resumed.rank_state() == first.rank_state()
