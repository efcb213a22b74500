"""Iterables: over all processes and workers the samples come as often as `tail` says, or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import subprocess
import sys
import threading
import types
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import as_rank, values
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

import parallelize as par
from parallelize import ConfigError, shard_loader

LENGTH = 29


class Stream(IterableDataset):
    """Yields the numbers of a function to every worker."""

    def __init__(self, numbers=lambda: range(LENGTH)):
        self.numbers = numbers

    def __iter__(self):
        yield from self.numbers()


class Wrapped(IterableDataset):
    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)


class Everything(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class Sized(Everything):
    def __len__(self):
        return self.length


class AsInTorchsDocs(IterableDataset):
    """A contiguous part for each worker."""

    def __iter__(self):
        info = get_worker_info()
        if info is None:
            return iter(range(LENGTH))
        size = -(-LENGTH // info.num_workers)
        return iter(range(info.id * size, min((info.id + 1) * size, LENGTH)))


class ShuffledFiles(IterableDataset):
    """Shuffles its files by a global generator, then takes those of its worker."""

    def __iter__(self):
        files = list(range(LENGTH))
        random.shuffle(files)
        info = get_worker_info()
        return iter(files if info is None else files[info.id :: info.num_workers])


class ByProcess(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(par.rank() * workers + worker, LENGTH, par.world_size() * workers))


class ShuffledByProcess(IterableDataset):
    """Shuffles its files by the global generators, then takes those of its process and worker."""

    def __iter__(self):
        files = np.random.permutation(random.sample(range(LENGTH), LENGTH))[torch.randperm(LENGTH)].tolist()
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(files[par.rank() * workers + worker :: par.world_size() * workers])


class Opened(IterableDataset):
    """Is opened by a worker_init_fn."""

    is_open = False

    def __iter__(self):
        assert self.is_open or get_worker_info() is None
        return iter(range(LENGTH))


def open_dataset(_worker_id):
    get_worker_info().dataset.is_open = get_worker_info().num_workers > 0


def shuffled_by_random():
    return random.sample(range(LENGTH), LENGTH)


def shuffled_by_numpy():
    return np.random.permutation(LENGTH).tolist()


def shuffled_by_torch():
    return torch.randperm(LENGTH).tolist()


def shuffle_buffer():
    """Draw for each sample, as a shuffle buffer does."""
    buffer = list(range(5))
    for number in range(5, LENGTH):
        index = random.randrange(5)
        yield buffer[index]
        buffer[index] = number
    yield from buffer


def drawing_collate(samples):
    """Draw as often as there are samples, as a mixup of the batch does."""
    random.random(), np.random.rand(), torch.rand(len(samples))
    return torch.tensor(samples)


def init_worker(worker_id):
    info = get_worker_info()
    info.dataset.numbers = lambda: range(info.id, LENGTH, info.num_workers)


def hugging_face(**options):
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"x": list(range(LENGTH))}).to_iterable_dataset(**options)
    return stream.with_format("torch")


# Kind -> (dataset, options of shard_loader, arguments of DataLoader).
DATASETS = {
    "not sharded": (Stream, {}, {}),
    "declared as not sharded": (Stream, {"divides": "nothing"}, {}),
    "torch's docs": (AsInTorchsDocs, {}, {}),
    "declared by worker": (AsInTorchsDocs, {"divides": "workers"}, {}),
    "worker_init_fn": (Stream, {}, {"worker_init_fn": init_worker}),
    "wrapped": (lambda: Wrapped(AsInTorchsDocs()), {}, {}),
    "chained": (lambda: ChainDataset([Stream(lambda: range(9)), Stream(lambda: range(9, LENGTH))]), {}, {}),
    "random": (lambda: Stream(shuffled_by_random), {}, {}),
    "numpy": (lambda: Stream(shuffled_by_numpy), {}, {}),
    "torch": (lambda: Stream(shuffled_by_torch), {}, {}),
    "shuffle buffer": (lambda: Stream(shuffle_buffer), {}, {"collate_fn": drawing_collate}),
    "shuffled files": (ShuffledFiles, {}, {"collate_fn": drawing_collate}),
    "data pipe": (lambda: IterableWrapper(range(LENGTH)).shuffle(), {}, {}),
    "declared by process": (ByProcess, {"divides": "processes"}, {}),
    "shuffled by process": (ShuffledByProcess, {"divides": "processes"}, {"collate_fn": drawing_collate}),
    "opened": (Opened, {"divides": "nothing"}, {"worker_init_fn": open_dataset}),
}


def batches_of(make, rank, world_size, options):
    """Iterate one rank; its global generators have states of their own, as after parallel_model."""
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    with as_rank(rank, world_size):
        return list(shard_loader(make(), **options))


def read_by_all(make, world_size, **options):
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        return [batches_of(make, rank, world_size, options) for rank in range(world_size)]
    finally:
        random.setstate(state[0]), np.random.set_state(state[1]), torch.set_rng_state(state[2])


def flat(batches):
    return [int(value) for batch in batches for value in (batch["x"] if isinstance(batch, dict) else batch)]


def check(ranks, tail, shards, units=LENGTH):
    """Check how often each unit was read: once, with less than one repeat or omission for each shard."""
    counts = Counter(itertools.chain.from_iterable(ranks))
    assert set(counts) <= set(range(units))
    if tail == "drop":
        assert set(counts.values()) <= {1}
        assert units - len(counts) < shards
    else:
        assert len(counts) == units
        assert counts.total() - units < (shards if tail == "pad" else 1)


WITH_AND_WITHOUT_WORKERS = [
    *((kind, 0) for kind in DATASETS),
    *((kind, 2) for kind in ("torch's docs", "worker_init_fn")),
    *(
        pytest.param(kind, 2, marks=pytest.mark.slow)
        for kind in DATASETS
        if kind not in ("torch's docs", "worker_init_fn")
    ),
]


@pytest.mark.parametrize(("kind", "workers"), WITH_AND_WITHOUT_WORKERS)
def test_samples_of_iterable_datasets(kind, workers):
    """However the dataset shards and shuffles itself, and whatever the generators of the ranks are."""
    make, options, arguments = DATASETS[kind]
    for world_size, tail in itertools.product((1, 3) if workers else (1, 2, 3, 4), ["pad", "drop", "exact"]):
        loader = lambda: DataLoader(make(), batch_size=3, num_workers=workers, **arguments)  # noqa: E731 - used here
        ranks = read_by_all(loader, world_size, tail=tail, **options)
        check(map(flat, ranks), tail, max(workers, 1) * world_size)


@pytest.mark.parametrize(("kind", "workers"), WITH_AND_WITHOUT_WORKERS)
def test_a_resumed_iterable_dataset_yields_the_rest(kind, workers):
    """In the order of the interrupted epoch, although the global generators have other states."""
    make, options, arguments = DATASETS[kind]
    loader = lambda: DataLoader(make(), batch_size=3, num_workers=workers, **arguments)  # noqa: E731 - a new one
    for rank in range(2):
        (full,) = [each for number, each in enumerate(read_by_all(loader, 2, **options)) if number == rank]
        with as_rank(rank, 2):
            interrupted, resumed = shard_loader(loader(), **options), shard_loader(loader(), **options)
            batches = iter(interrupted)
            first = [next(batches) for _ in range(random.Random(kind).randrange(len(full)) + 1)]
            resumed.load_state_dict(interrupted.state_dict())
            batches.close()
            assert flat([*first, *resumed]) == flat(full)


def own_generator():
    return random.Random().sample(range(LENGTH), LENGTH)


def own_generator_of_batches():
    yield from own_generator()


@pytest.mark.parametrize(
    ("make", "world_size", "seed", "is_repeated"),
    [
        (lambda: DataLoader(Stream(shuffled_by_random), batch_size=3), 1, None, True),
        (lambda: DataLoader(Stream(shuffled_by_random), batch_size=3), 1, 4, True),
        (lambda: DataLoader(Stream(shuffled_by_random), batch_size=3), 2, None, True),
        (lambda: DataLoader(Stream(shuffled_by_torch), batch_size=3, num_workers=1), 1, None, True),
        (lambda: DataLoader(Stream(shuffled_by_torch), batch_size=3, num_workers=1), 1, 4, True),
        (lambda: DataLoader(Stream(shuffled_by_torch), batch_size=3, num_workers=2), 1, None, True),
        (lambda: DataLoader(Stream(), batch_size=3), 1, None, True),
        (lambda: DataLoader(Stream(own_generator), batch_size=3), 2, None, False),
        (own_generator_of_batches, 2, None, False),
        (shuffle_buffer, 1, None, True),
        (shuffle_buffer, 1, 4, True),
    ],
)
def test_an_order_that_is_not_repeated_after_resuming_is_named(make, world_size, seed, is_repeated):
    """Samples would be lost: a warning says how to repeat it. A state of a state has the same facts."""
    state = random.getstate()
    with as_rank(0, world_size), torch.random.fork_rng(devices=[]):
        random.seed(1), torch.manual_seed(1)
        interrupted = shard_loader(make(), seed=seed)
        resumed = shard_loader(make(), seed=seed)
        batches = iter(interrupted)
        next(batches), next(batches), next(batches)
        if isinstance(interrupted, DataLoader):
            next(iter(interrupted))  # a look, with another order
        resumed.load_state_dict(interrupted.state_dict())
        assert resumed.state_dict() == interrupted.state_dict()
        rest = list(batches)
        with (
            contextlib.nullcontext()
            if is_repeated
            else pytest.warns(UserWarning, match="another order or other samples")
        ):
            assert (repr(list(resumed)) == repr(rest)) == is_repeated
        list(resumed)  # later epochs are not compared
    random.setstate(state)


def augmented():
    generator = np.random.default_rng()
    yield from ((generator.random(2), number) for number in range(LENGTH))


def noise_added(samples):
    return torch.tensor(samples) + torch.rand(len(samples))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("order", "collate", "divides"),
    [(augmented, None, None), (None, noise_added, None), (None, noise_added, "processes")],
)
def test_augmentation_is_no_other_order(recwarn, order, collate, divides, workers):
    """Labels identify samples, whatever is drawn beside them, and what a collate_fn draws does not count."""
    loader = DataLoader(Stream(order) if order else Stream(), batch_size=3, num_workers=workers, collate_fn=collate)
    interrupted, resumed = (shard_loader(loader, tail=tail, divides=divides) for tail in ("pad", "drop"))
    batches = iter(interrupted)
    next(batches), next(batches)
    resumed.load_state_dict(interrupted.state_dict())
    assert workers or repr(list(resumed)) != repr(list(batches))
    assert not recwarn.list


class Opaque:
    def __getattr__(self, name):
        raise KeyError(name)


@pytest.mark.parametrize("world_size", [1, 2])
def test_samples_that_cannot_be_hashed_are_yielded(world_size):
    """Their class raises an error when an attribute is looked up."""
    with as_rank(0, world_size):
        loader = DataLoader(Stream(lambda: (Opaque() for _ in range(6))), batch_size=1, collate_fn=list)
        assert len(list(shard_loader(loader))) == 6 // world_size


def test_epochs_of_a_shuffling_dataset_differ():
    """With persistent workers, too: all workers draw the order of the same epoch."""
    for arguments in ({}, {"num_workers": 2, "persistent_workers": True}):
        epochs = []
        for rank in range(2):
            loader = DataLoader(Stream(shuffled_by_random), batch_size=4, **arguments)
            with as_rank(rank, 2), shard_loader(loader) as sharded:
                epochs.append([flat(sharded) for _ in range(2)])
        for one, other in zip(*epochs, strict=True):
            check([one, other], "pad", 4)
        assert epochs[0][0] != epochs[0][1]


def test_the_loop_keeps_its_random_numbers():
    """A dataset that draws between batches does not change the numbers that the loop draws, nor see them."""

    def run(draws):
        random.seed(1)
        with as_rank(0, 2):
            return [(batch.tolist(), [random.random() for _ in range(draws)]) for batch in shard_loader(loader())]

    loader = lambda: DataLoader(Stream(shuffle_buffer), batch_size=3)  # noqa: E731 - a new one
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        once, twice = run(1), run(2)
    random.seed(1)
    assert [number for _, numbers in once for number in numbers] == [random.random() for _ in once]
    assert [batch for batch, _ in once] == [batch for batch, _ in twice]
    random.setstate(state)


# Iterables of batches


class Epochs:
    """An iterable with the order of an epoch that it is told."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from np.random.default_rng(self.epoch).permutation(LENGTH).tolist()


class SizedStream:
    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(range(LENGTH))


def shuffled_generator():
    for number in shuffled_by_random():
        torch.rand(1)
        yield number


def torchdata_nodes():
    nodes = pytest.importorskip("torchdata.nodes")
    return nodes.Loader(nodes.IterableWrapper(range(LENGTH)))


BATCHES = {
    "list": lambda: list(range(LENGTH)),
    "range": lambda: range(LENGTH),
    "iterator": lambda: iter(range(LENGTH)),
    "generator": lambda: (each for each in range(LENGTH)),
    "shuffled generator": shuffled_generator,
    "with set_epoch": Epochs,
    "sized": SizedStream,
    "torchdata": torchdata_nodes,
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
def test_batches_of_iterables(kind, tail):
    """Every W-th batch, in an order that is the same on all ranks."""
    for world_size in range(1, 5):
        check(read_by_all(BATCHES[kind], world_size, tail=tail), tail, world_size)


@pytest.mark.parametrize("kind", sorted(set(BATCHES) - {"torchdata"}))
@pytest.mark.parametrize("new_size", [1, 2, 3])
def test_resumed_iterables_yield_the_rest_in_another_world(kind, new_size):
    """With fewer or more processes, each batch is read once before and after the interruption."""
    seen = []
    for rank in range(2):
        with as_rank(rank, 2):
            loader = shard_loader(BATCHES[kind](), tail="exact", seed=5)
            batches = iter(loader)
            seen.append([next(batches) for _ in range(4)])
            state = loader.state_dict()
    for rank in range(new_size):
        with as_rank(rank, new_size):
            loader = shard_loader(BATCHES[kind](), tail="exact", seed=5)
            loader.load_state_dict(state)
            seen.append(list(loader))
    check(seen, "exact", 1)


def own_share():
    return iter(range(par.rank(), LENGTH, par.world_size()))


def own_share_of_shuffled():
    yield from shuffled_by_random()[par.rank() :: par.world_size()]


def test_iterables_may_shuffle_before_they_take_their_share():
    """The order is drawn from the same random numbers on all ranks."""
    check(read_by_all(own_share_of_shuffled, 3, divides="processes"), "exact", 1)


@pytest.mark.parametrize("make", [own_share, lambda: list(own_share()), lambda: (each for each in own_share())])
def test_divides_is_honored_for_iterables_of_batches(make):
    """With "processes" each process reads all batches of its own iterable, limited and resumed, too."""
    ranks = read_by_all(make, 3, divides="processes")
    assert ranks == [list(range(rank, LENGTH, 3)) for rank in range(3)]
    assert read_by_all(lambda: list(range(8)), 2, divides="nothing") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    with as_rank(1, 3):
        assert list(shard_loader(make(), divides="processes", limit=2)) == [1, 4]
        loader, resumed = (shard_loader(make(), divides="processes") for _ in range(2))
        batches = iter(loader)
        assert [next(batches) for _ in range(3)] == [1, 4, 7]
        resumed.load_state_dict(loader.state_dict())
        assert list(resumed) == list(range(10, LENGTH, 3))
    with as_rank(0, 2), pytest.raises(ConfigError, match="world_size=3 is loaded with world_size=2"):
        shard_loader(make(), divides="processes").load_state_dict(loader.state_dict())


def test_iterables_are_drawn_lazily():
    """An endless generator is never listed; a rank draws the batches of the others, and one ahead at most."""
    drawn = []

    def endless():
        for number in itertools.count():
            drawn.append(number)
            yield number

    with as_rank(0, 2):
        assert list(itertools.islice(shard_loader(endless()), 3)) == [0, 2, 4]
    assert len(drawn) <= 6


# What is refused


class ByIndexOnly(IterableDataset):
    """Gives each worker one of four parts."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(0 if info is None else info.id, LENGTH, 4))


def foreign(package, name, base=IterableDataset, **attributes):
    """Return an object of a class with the module and name of another library's."""
    body = {"__module__": package, "__iter__": lambda self: iter(range(LENGTH)), **attributes}
    return types.new_class(name, (base,), exec_body=lambda namespace: namespace.update(body))()


def made_outside():
    return foreign("litdata", "StreamingDataset", distributed_env=types.SimpleNamespace(world_size=1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (made_outside, "StreamingDataset was sharded over 1 processes, in a world of 2"),
        (ByIndexOnly, r"ByIndexOnly reads get_worker_info\(\) only for its id"),
    ],
)
def test_what_may_shard_itself_is_refused_with_the_fix(make, message):
    """Before a batch is yielded; tests/worlds/test_data_order.py has what ranks find by comparing samples."""
    with as_rank(0, 2), pytest.raises(ConfigError, match=message) as caught:
        next(iter(shard_loader(DataLoader(make()))))
    assert caught.value.faults[0].fix


class QueriesForOtherReasons(IterableDataset):
    """Rank 0 downloads, and the number of a rank is in a name."""

    ranks = ("rank", "world")

    def __init__(self):
        self.is_downloader = not dist.is_initialized() or dist.get_rank() == 0
        self.rank = 3

    def __iter__(self):
        return iter(range(LENGTH))


def seed_by_rank(worker_id):
    random.seed(int(os.environ["RANK"]) * 100 + worker_id)


def drawn_from(loader):
    yield from loader


def test_rank_queries_for_other_reasons_are_no_sharding():
    """A download by rank 0 in the constructor, attributes and text with such names, seeds of workers."""
    loader = DataLoader(Stream(), batch_size=2, num_workers=1, worker_init_fn=seed_by_rank)
    with as_rank(0, 2):
        shard_loader(drawn_from(loader))
    check(map(flat, read_by_all(lambda: DataLoader(QueriesForOtherReasons()), 2, tail="exact")), "exact", 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(foreign("streaming.base.dataset", "StreamingDataset")),
        lambda: DataLoader(type("Mine", (type(foreign("litdata.streaming", "CombinedStreamingDataset")),), {})()),
    ],
    ids=["Mosaic Streaming", "a subclass of litdata's"],
)
def test_libraries_that_shard_themselves_are_recognized(make):
    """Their datasets are not sharded again, nor are those of subclasses."""
    assert [flat([[each] for each in rank]) for rank in read_by_all(make, 2)] == [list(range(LENGTH))] * 2


class LibraryLoader(DataLoader):
    """Calls its dataset before it reads it, as litdata's StreamingDataLoader does."""

    def __iter__(self):
        assert self.dataset.current_epoch == 0
        return super().__iter__()


def test_loaders_of_libraries_see_their_datasets():
    """The dataset of a library that shards itself is not wrapped, also if divides= says so."""
    for divides in (None, "processes"):
        dataset = foreign("litdata.streaming", "StreamingDataset", current_epoch=0)
        loader = LibraryLoader(dataset, batch_size=4)
        assert read_by_all(lambda made=loader: made, 2, divides=divides)


class CountingLoader(DataLoader):
    """Counts its epochs and tells its dataset, as litdata's StreamingDataLoader does."""

    current_epoch = 0

    def __iter__(self):
        vars(self)["current_epoch"] = self.current_epoch + 1
        self.dataset.next_epoch = self.current_epoch
        return super().__iter__()


def shuffled_by_its_epoch(dataset):
    order = np.random.default_rng(dataset.next_epoch).permutation(LENGTH).tolist()
    dataset.next_epoch += 1
    return iter(order)


@pytest.mark.parametrize("kind", [DataLoader, CountingLoader])
def test_epochs_of_libraries_that_count_them_are_resumed(kind):
    """Mosaic's StreamingDataset in the property next_epoch, litdata's loader in its attribute current_epoch."""

    def make():
        epoch = property(lambda self: self.count, lambda self, epoch: setattr(self, "count", epoch))
        attributes = {"count": 0, "__iter__": shuffled_by_its_epoch, "next_epoch": epoch}
        return shard_loader(kind(foreign("streaming.base.dataset", "StreamingDataset", **attributes), batch_size=4))

    with as_rank(0, 2):
        loader, resumed = make(), make()
        epochs = [flat(loader) for _ in range(3)]
        assert len(set(map(tuple, epochs))) == 3
        loader.set_epoch(1)
        batches = iter(loader)
        first = flat([next(batches), next(batches)])
        resumed.load_state_dict(loader.state_dict())
        assert [first + flat(resumed), flat(resumed)] == epochs[1:]


def test_a_contradicted_declaration_is_refused():
    """divides='nothing' for a dataset that shards itself over several workers; without workers it does not."""
    loader = lambda workers: DataLoader(AsInTorchsDocs(), num_workers=workers)  # noqa: E731 - a new one
    for workers in (0, 1):
        ranks = read_by_all(lambda number=workers: loader(number), 2, divides="nothing", tail="exact")
        check(map(flat, ranks), "exact", 1)
    message = r"AsInTorchsDocs reads get_worker_info\(\) after its first sample, or with divides='nothing'"
    with as_rank(0, 2), pytest.raises((ConfigError, RuntimeError), match=message):
        list(shard_loader(loader(2), divides="nothing"))


def test_a_dataset_that_shards_itself_later_is_refused():
    """One of two chained datasets shards itself by worker: the other's samples would come often, or its own not."""
    for first, second in ((Stream(), AsInTorchsDocs()), (AsInTorchsDocs(), AsInTorchsDocs())):
        refused = pytest.raises(ConfigError, match=r"ChainDataset reads get_worker_info.* after its first sample")
        with as_rank(0, 2), refused if isinstance(first, Stream) else contextlib.nullcontext():
            assert len(flat(shard_loader(DataLoader(ChainDataset([first, second]))))) == 2 * 15


@pytest.mark.parametrize("shards", [1, 4])
def test_streams_of_hugging_face_that_are_split_are_not_split_again(shards):
    """One that is split by node is kept, other ones are split once; one that is split for another world is refused."""
    split = pytest.importorskip("datasets.distributed").split_dataset_by_node
    make = lambda: DataLoader(split(hugging_face(num_shards=shards), par.rank(), par.world_size()))  # noqa: E731 - a new one
    check(map(flat, read_by_all(make, 2)), "exact", 1)
    for workers in (0, 2) if shards > 1 else (0,):
        unsplit = lambda number=workers: DataLoader(hugging_face(num_shards=shards), num_workers=number)  # noqa: E731 - a new one
        check(map(flat, read_by_all(unsplit, 2)), "exact", 1)
    other = split(hugging_face(num_shards=shards), 0, 4)
    with as_rank(0, 2), pytest.raises(ConfigError, match="was sharded over 4 processes, in a world of 2"):
        shard_loader(DataLoader(other))


# Options, resuming, libraries


def iterate_on_all(dataset, *, world_size=2, workers=0, batch_size=2, options=None, **kwargs):
    ranks = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            loader = DataLoader(dataset, batch_size=batch_size, num_workers=workers, **kwargs)
            sharded = shard_loader(loader, **(options or {}))
            assert isinstance(sharded, DataLoader)
            assert sharded.dataset is dataset
            ranks.append(list(sharded))
    return ranks


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_processes_make_equally_many_steps(workers, tail):
    """Whatever is padded or dropped, of the units of the stream and of the last batch."""
    for length, drop_last in itertools.product((1, 23) if workers else (0, 1, 2, 5, 23), (False, True)):
        options = {"tail": tail, "divides": "nothing"}
        ranks = iterate_on_all(Sized(length), workers=workers, options=options, drop_last=drop_last)
        assert len({len(batches) for batches in ranks}) == 1
        if drop_last:
            assert {len(batch) for batches in ranks for batch in batches} <= {2}


def test_unknown_lengths():
    """Of a dataset without `__len__`; of another one, a process that is alone tells what the DataLoader does."""
    with as_rank(0, 1):
        assert len(shard_loader(DataLoader(Sized(5), batch_size=2))) == 3
    with as_rank(0, 2):
        for dataset in (Everything(4), Sized(4)):
            with pytest.raises(TypeError, match="the number of batches of this DataLoader is unknown"):
                len(shard_loader(DataLoader(dataset)))


def test_items_without_batches():
    """batch_size=None gives each process every second item."""
    assert iterate_on_all(Everything(4), batch_size=None) == [[0, 2], [1, 3]]


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
    """Or by another number of ranks; a position counts batches, of which one worker makes the same as no worker."""
    with as_rank(0, 2):
        sharded = shard_loader(DataLoader(Everything(23), batch_size=2))
        for step, _ in enumerate(sharded):
            if step == 2:
                break
        resumed = shard_loader(DataLoader(Everything(23), **{"batch_size": 2, **changes}))
        with contextlib.nullcontext() if message is None else pytest.raises(ConfigError, match=message):
            resumed.load_state_dict(sharded.state_dict())
            assert values(resumed) == [12, 14, 16, 18, 20, 22]
        state = sharded.state_dict()
        sharded.set_epoch(1)
        resumed.load_state_dict(sharded.state_dict())  # at the start of an epoch
        assert resumed.epoch == 1
    with as_rank(1, 3), pytest.raises(ConfigError, match="world_size=2 is loaded with world_size=3"):
        shard_loader(DataLoader(Everything(23))).load_state_dict(state)


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
        for _ in shard_loader(DataLoader(AsInTorchsDocs(), batch_size=2)):
            assert get_worker_info() is None


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
