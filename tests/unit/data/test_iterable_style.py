"""Iterable datasets: over all workers every sample comes once, whether the dataset shards itself or not."""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from ranks import as_rank, keep_sigchld_handler, values
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import parallelize as par
from parallelize import ConfigError, shard_loader


@pytest.fixture(scope="module", autouse=True)
def workers_may_start():
    keep_sigchld_handler()


class Everything(IterableDataset):
    """Yields all samples to every worker of every process."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class Sized(Everything):
    def __len__(self):
        return self.length


class ByWorker(Everything):
    """Shards itself by get_worker_info(), as in torch's documentation."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(self.length)) if info is None else iter(range(info.id, self.length, info.num_workers))


class Configured(Everything):
    """Is sharded by a worker_init_fn, as torch's documentation shows, too."""

    first, step = 0, 1

    def __iter__(self):
        return iter(range(self.first, self.length, self.step))


def configure(worker_id):
    info = get_worker_info()
    assert worker_id == info.id
    info.dataset.first, info.dataset.step = info.id, info.num_workers


class ByProcess(Everything):
    """Shards itself by a given rank, as one that reads the variable RANK does."""

    def __init__(self, length, rank, world_size):
        super().__init__(length)
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(self.rank * workers + worker, self.length, self.world_size * workers))


def iterate_on_all(dataset, *, world_size=2, workers=0, batch_size=2, options=None, **kwargs):
    ranks = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            made = dataset(rank) if callable(dataset) and not isinstance(dataset, IterableDataset) else dataset
            loader = DataLoader(made, batch_size=batch_size, num_workers=workers, **kwargs)
            sharded = shard_loader(loader, **(options or {}))
            assert isinstance(sharded, DataLoader)
            assert sharded.dataset is made
            ranks.append(list(sharded))
    return ranks


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("dataset", "kwargs"),
    [
        (Everything(23), {}),
        (Sized(23), {}),
        (ByWorker(23), {}),
        (Configured(23), {"worker_init_fn": configure}),
        (lambda rank: ByProcess(23, rank, 2), {"options": {"divides": "processes"}}),
        (ByWorker(23), {"options": {"divides": "workers"}}),
        (Everything(23), {"options": {"divides": "nothing"}}),
    ],
    ids=["everything", "sized", "by worker", "configured", "by process", "divides workers", "divides nothing"],
)
def test_every_sample_comes_once(dataset, kwargs, workers):
    """Whether the dataset shards itself by worker, by process or not at all."""
    options = {"tail": "exact", **kwargs.pop("options", {})}
    ranks = iterate_on_all(dataset, workers=workers, options=options, **kwargs)
    kwargs["options"] = options
    assert sorted(value for batches in ranks for value in values(batches)) == list(range(23))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("tail", ["pad", "drop"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_processes_make_equally_many_steps(workers, tail, drop_last):
    """Padded or dropped, all processes get equally many batches, and `len` counts them if it is known."""
    num_shards = 2 * max(workers, 1)
    for length in (1, 23) if workers else (0, 1, 2, 5, 23):  # each starts eight workers
        counts = [
            len(batches)
            for batches in iterate_on_all(
                Sized(length), workers=workers, options={"tail": tail, "divides": "nothing"}, drop_last=drop_last
            )
        ]
        assert len(set(counts)) == 1
        with as_rank(0, 2):
            loader = DataLoader(Sized(length), batch_size=2, num_workers=workers, drop_last=drop_last)
            assert len(shard_loader(loader, tail=tail, divides="nothing")) == counts[0]
    seen = [
        value
        for batches in iterate_on_all(Everything(23), workers=workers, options={"tail": tail})
        for value in values(batches)
    ]
    assert abs(len(seen) - 23) < num_shards
    assert len(set(seen)) == (23 if tail == "pad" else len(seen))


class QueriesRankFirst(Everything):
    def __iter__(self):
        return iter(range(par.rank(), self.length, par.world_size()))


class QueriesRankPerSample(Everything):
    def __iter__(self):
        for value in range(self.length):
            if value % par.world_size() == par.rank():
                yield value


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [QueriesRankFirst(8), QueriesRankPerSample(8)])
def test_a_dataset_that_queries_its_rank_needs_divides(dataset, workers):
    """It may shard itself, and would be sharded twice: refused unless `divides` is given or there is one process."""
    with pytest.raises(
        (ConfigError, RuntimeError),
        match=f"{type(dataset).__name__} may shard itself over the processes: its code uses rank and",
    ):
        iterate_on_all(dataset, workers=workers)
    ranks = iterate_on_all(dataset, workers=workers, options={"divides": "processes"})
    assert [values(batches) for batches in ranks] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert values(iterate_on_all(dataset, workers=workers, world_size=1)[0]) == list(range(8))


@pytest.mark.parametrize("name", ["world_size", "world", "num_replicas"])
def test_a_dataset_with_the_world_size_needs_divides(name):
    """One that has it as an attribute is refused before it is iterated; another number is not."""
    for size, is_known in ((2, True), (3, False), (True, False)):
        dataset = Everything(8)
        setattr(dataset, name, size)
        with as_rank(0, 2), pytest.raises(ConfigError) if is_known else contextlib.nullcontext() as caught:
            assert values(shard_loader(DataLoader(dataset, batch_size=2))) == [0, 2, 4, 6]
        if is_known:
            assert f"Everything may shard itself over the processes: it has {name}=2" in str(caught.value)
            assert "divides='processes'" in caught.value.faults[0].fix


def test_unknown_lengths():
    """Of a dataset without `__len__`, and of one without divides='nothing'."""
    with as_rank(0, 2):
        for dataset in (Everything(4), Sized(4)):
            with pytest.raises(TypeError, match="the number of batches of this DataLoader is unknown"):
                len(shard_loader(DataLoader(dataset)))


def test_items_without_batches():
    """batch_size=None gives each process every second item."""
    assert iterate_on_all(Everything(4), batch_size=None) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_yields_the_rest(workers):
    """With workers, too; another world size is refused."""
    with as_rank(1, 2):
        make = lambda: shard_loader(DataLoader(Everything(23), batch_size=2, num_workers=workers))  # noqa: E731 - a new one
        full = [batch.tolist() for batch in make()]
        sharded = make()
        batches = iter(sharded)
        first = [next(batches).tolist() for _ in range(3)]
        state = sharded.state_dict()
        batches.close()
        resumed = make()
        resumed.load_state_dict(state)
        assert first + [batch.tolist() for batch in resumed] == full
        assert [batch.tolist() for batch in resumed] == full
    with as_rank(1, 3), pytest.raises(ConfigError, match="world_size=2 is loaded with world_size=3"):
        shard_loader(DataLoader(Everything(23))).load_state_dict(state)


def test_random_numbers_of_training_after_resuming(tmp_path):
    """Under a seed, batches draw from their own states: those that training draws go on where the run was saved."""

    def collate(samples):
        return torch.tensor(samples) + torch.rand(())

    def train(batches):
        return [(batch.tolist(), torch.rand(()).item()) for batch in batches]

    make = lambda: shard_loader(DataLoader(Everything(23), batch_size=2, collate_fn=collate), seed=0)  # noqa: E731 - a new one
    torch.manual_seed(1)
    uninterrupted = make()
    expected = train(uninterrupted) + train(uninterrupted)
    torch.manual_seed(1)
    first, resumed = make(), make()
    seen = train(itertools.islice(first, 5))
    par.save(tmp_path / "last.pt", loader=first)
    par.load(tmp_path / "last.pt", loader=resumed)
    assert seen + train(resumed) + train(resumed) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 4}, "batch_size=2 is loaded with batch_size=4"),
        ({"num_workers": 2}, "num_workers=1 is loaded with num_workers=2"),
        ({"num_workers": 1}, None),
    ],
)
def test_resuming_with_other_batches_is_refused(changes, message):
    """A position counts batches; one worker makes the same batches as no worker."""
    with as_rank(0, 2):
        sharded = shard_loader(DataLoader(Everything(23), batch_size=2))
        for step, _ in enumerate(sharded):
            if step == 2:
                break
        resumed = shard_loader(DataLoader(Everything(23), **{"batch_size": 2, **changes}))
        with contextlib.nullcontext() if message is None else pytest.raises(ConfigError, match=message):
            resumed.load_state_dict(sharded.state_dict())
            assert values(resumed) == [12, 14, 16, 18, 20, 22]
        sharded.set_epoch(1)
        resumed.load_state_dict(sharded.state_dict())  # at the start of an epoch
        assert resumed.epoch == 1


def test_a_limit_ends_a_stream():
    """Also a stream that does not end by itself."""

    class Endless(IterableDataset):
        def __iter__(self):
            while True:
                yield 1

    assert [len(batches) for batches in iterate_on_all(Endless(), options={"limit": 3})] == [3, 3]


def test_the_worker_info_is_restored_between_batches():
    """get_worker_info() in the loop returns the same as without shard_loader."""
    with as_rank(0, 2):
        for _ in shard_loader(DataLoader(ByWorker(8), batch_size=2)):
            assert get_worker_info() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tail": "weighted"}, "tail='weighted' with the iterable Everything"),
        ({"batch": "global"}, "batch='global' with the iterable Everything"),
        ({"limit": 0.5}, "limit=0.5 with the iterable Everything"),
    ],
)
def test_options_that_need_a_length_are_refused(options, message):
    """The error names the option and the dataset."""
    with as_rank(0, 2), pytest.raises(ConfigError, match=message):
        shard_loader(DataLoader(Everything(4)), **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shards", [1, 4])
def test_hugging_face_streams_are_split_by_node(workers, shards):
    """An IterableDataset of `datasets` distributes its shards, or else its samples."""
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"x": list(range(24))}).to_iterable_dataset(num_shards=shards)
    ranks = iterate_on_all(stream, workers=workers) if shards > 1 or not workers else iterate_on_all(stream)
    assert sorted(value for batches in ranks for batch in batches for value in batch["x"].tolist()) == list(range(24))


def test_hugging_face_datasets_are_sharded_by_index():
    """A map-style one is treated like any other map-style dataset."""
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": list(range(5))}).with_format("torch")
    for rank, expected in enumerate([[0, 2, 4], [1, 3, 0]]):
        with as_rank(rank, 2):
            batches = list(shard_loader(DataLoader(data, batch_size=2)))
            assert [value for batch in batches for value in batch["x"].tolist()] == expected


class Labels:
    """Has the attributes of a dataset of Hugging Face, and items of its own."""

    def __init__(self, rows):
        self.rows = rows

    def __getattr__(self, name):
        if name == "rows" or name.startswith("__"):  # torch looks up __getitems__
            raise AttributeError(name)
        return getattr(self.rows, name)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[int(index)]["x"]


def test_a_dataset_with_the_attributes_of_hugging_face_is_sharded():
    """No slice of it is read: it may have only items."""
    datasets = pytest.importorskip("datasets")
    with as_rank(1, 2):
        loader = DataLoader(Labels(datasets.Dataset.from_dict({"x": list(range(8))})), batch_size=2)
        assert values(shard_loader(loader)) == [1, 3, 5, 7]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_is_a_data_loader(workers):
    """torchdata's keeps its class; shard_loader saves and restores its position."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    for dataset in (list(range(13)), Everything(13)):
        with as_rank(0, 2):
            make = lambda data=dataset: shard_loader(stateful(data, batch_size=2, num_workers=workers))  # noqa: E731 - a new one
            sharded = make()
            assert isinstance(sharded, stateful)
            full = [batch.tolist() for batch in sharded]
            for step, _ in enumerate(sharded):
                if step == 1:
                    break
            state = sharded.state_dict()
            resumed = make()
            resumed.load_state_dict(state)
            assert [batch.tolist() for batch in resumed] == full[2:]


def test_a_state_of_the_unsharded_loader_is_refused():
    """torchdata's, loaded before shard_loader, counts global batches: a shard would skip unseen samples."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    loader = stateful(list(range(13)), batch_size=2)
    next(iter(loader))
    state = loader.state_dict()
    with as_rank(0, 2):
        assert len(list(shard_loader(loader))) == 4  # one that was only iterated
        loader = stateful(list(range(13)), batch_size=2)
        loader.load_state_dict(state)
        with pytest.raises(
            ConfigError, match="StatefulDataLoader whose state was loaded before shard_loader"
        ) as caught:
            shard_loader(loader)
    assert "shard_loader(loader).load_state_dict(state)" in caught.value.faults[0].fix


class ShuffledAnew(Everything):
    """Shuffles the samples of its process without a seed."""

    def __iter__(self):
        own = range(par.rank(), self.length, par.world_size())
        return iter(random.Random().sample(own, len(own)))


@pytest.mark.parametrize("dataset", [ShuffledAnew, Everything])
def test_a_dataset_that_shards_itself_in_another_order_is_named_on_rank_0(dataset, recwarn):
    """When it is resumed with the state of rank 0: samples would be lost."""
    state = None
    for rank in range(2):
        with as_rank(rank, 2):
            make = lambda: shard_loader(DataLoader(dataset(99), batch_size=4), divides="processes")  # noqa: E731 - a new one
            batches = iter(interrupted := make())
            next(batches), next(batches)
            state = state or interrupted.state_dict()
            resumed = make()
            resumed.load_state_dict(state)
            list(resumed)
    assert ["begins with other samples" in str(each.message) for each in recwarn.list] == [True] * (
        dataset is ShuffledAnew
    )


def test_optional_packages_are_not_imported():
    """They are imported only for their own datasets; asked in another process, where no other test has run."""
    script = (
        "import sys, torch, parallelize; data = type('Numbers', (torch.utils.data.IterableDataset,), "
        "{'__iter__': lambda self: iter(range(4))})(); "
        "list(parallelize.shard_loader(torch.utils.data.DataLoader(data))); "
        "sys.exit(bool({'webdataset', 'datasets', 'torchdata', 'litdata', 'streaming'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


class Locked(IterableDataset):
    """Holds a lock while it is iterated over, as one that reads a file or a connection."""

    def __init__(self):
        self.lock = threading.Lock()

    def __iter__(self):
        assert self.lock.acquire(timeout=5), "the last epoch's iterator is still open"
        try:
            yield from range(100)
        finally:
            self.lock.release()


@pytest.mark.parametrize("limit", [2, None])
def test_a_dataset_ends_with_the_loop(limit):
    """Its iterator is closed after `limit` batches or a break, before the next epoch begins."""
    with as_rank(0, 2):
        loader = shard_loader(DataLoader(Locked(), batch_size=4), limit=limit, divides="nothing")
        for _ in range(2):
            for _ in loader:
                if limit is None:
                    break
            assert not loader.dataset.lock.locked()


class Underestimated(Everything):
    def __len__(self):
        return self.length // 2


def test_a_limit_is_not_cut_to_an_estimated_length():
    """An int is a number of batches, of those that come."""
    with warnings.catch_warnings(), as_rank(0, 2):
        warnings.simplefilter("ignore")  # torch: the length is wrong
        loader = shard_loader(DataLoader(Underestimated(40), batch_size=4), limit=4, divides="nothing")
        assert len(list(loader)) == 4


class GoesOn(IterableDataset):
    """Continues in each epoch where the last one was left."""

    def __init__(self):
        self.numbers = itertools.count()

    def __iter__(self):
        return self.numbers


@pytest.mark.parametrize(
    "make", [lambda: DataLoader(GoesOn(), batch_size=2), lambda: iter(torch.arange(98).view(-1, 2))]
)
@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_stream_that_goes_on_is_left_at_the_same_sample_by_all_ranks(make, tail, world_size):
    """After a look at a batch, a loop that is left, and a limit, no sample comes twice and none is missing."""
    ranks = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            loader = make()
            batches = [next(iter(shard_loader(loader, tail=tail)))]
            batches += [batch for batch, _ in zip(shard_loader(loader, tail=tail), range(3), strict=False)]
            batches += shard_loader(loader, tail=tail, limit=2)
            ranks.append(values(batches))
    # zip takes a batch that it does not yield
    seen = sorted(itertools.chain.from_iterable(ranks))
    skipped = range(4 * 2 * world_size, 5 * 2 * world_size)
    assert seen == [each for each in range(7 * 2 * world_size) if each not in skipped]
