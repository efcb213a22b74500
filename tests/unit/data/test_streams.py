"""Iterables: over all processes and workers the samples come as often as `tail` says, or not at all."""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
import types
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from ranks import as_rank, own_generators, values
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

import parallelize as par
from parallelize import ConfigError, shard_loader
from parallelize.torch_patches import loaders

LENGTH = 29


class Stream(IterableDataset):
    """Yields what a function returns, which is called when the first sample is drawn."""

    def __init__(self, make=lambda: range(LENGTH)):
        self.make = make

    def __iter__(self):
        yield from self.make()


class Opened(Stream):
    """Calls its function when it is iterated."""

    def __iter__(self):
        return iter(self.make())


class Sized(Opened):
    def __init__(self, length, claimed=None):
        super().__init__(lambda: range(length))
        self.length = length if claimed is None else claimed

    def __len__(self):
        return self.length


class BeginsAnew:
    """An iterator that `iter` begins anew, as fast loaders of tensors are that people write."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        self.next = 0
        return self

    def __next__(self):
        if self.next == self.length:
            raise StopIteration
        self.next += 1
        return self.next


class StreamThatBeginsAnew(BeginsAnew, IterableDataset):
    pass


def first_items(batches):
    return [torch.as_tensor(each).tolist() for each in itertools.islice(batches, 20)]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_that_begins_anew_is_begun_once(workers):
    """As batches, as a dataset, with workers too, and as a sampler without a length."""
    assert first_items(shard_loader(BeginsAnew(3))) == [1, 2, 3]
    loader = DataLoader(StreamThatBeginsAnew(5), batch_size=2, num_workers=workers)
    assert first_items(shard_loader(loader)) == [[1, 2], [3, 4], [5]]
    loader = DataLoader(range(9), batch_size=2, sampler=BeginsAnew(5), num_workers=workers)
    assert first_items(shard_loader(loader)) == [[1, 2], [3, 4], [5]]


def worker():
    """Return the number of this worker, and how many there are."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def in_blocks():
    """Return a contiguous part for each worker, as in torch's documentation."""
    index, workers = worker()
    size = -(-LENGTH // workers)
    return range(index * size, min((index + 1) * size, LENGTH))


def shuffled_by_random():
    return random.sample(range(LENGTH), LENGTH)


def shuffled_files():
    files, (index, workers) = shuffled_by_random(), worker()
    return files[index::workers]


def by_process(order=range(LENGTH)):
    index, workers = worker()
    return order[par.rank() * workers + index :: par.world_size() * workers]


def shuffled_by_process():
    return by_process(np.random.permutation(shuffled_by_random())[torch.randperm(LENGTH)].tolist())


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
    info.dataset.make = lambda: range(info.id, LENGTH, info.num_workers)


def open_dataset(_worker_id):
    """Read the worker info, and do not shard by it."""
    info = get_worker_info()
    info.dataset.make = lambda: range(LENGTH if info.num_workers else 0)


# Kind -> (dataset, options of shard_loader, arguments of DataLoader).
DATASETS = {
    "not sharded": (Stream, {}, {}),
    "declared as not sharded": (Stream, {"divides": "nothing"}, {}),
    "torch's docs": (lambda: Opened(in_blocks), {}, {}),
    "declared by worker": (lambda: Opened(in_blocks), {"divides": "workers"}, {}),
    "worker_init_fn": (Stream, {}, {"worker_init_fn": init_worker}),
    "wrapped": (lambda: Opened(lambda: Opened(in_blocks)), {}, {}),
    "chained": (lambda: ChainDataset([Stream(lambda: range(9)), Stream(lambda: range(9, LENGTH))]), {}, {}),
    "random": (lambda: Stream(shuffled_by_random), {}, {}),
    "numpy": (lambda: Stream(lambda: np.random.permutation(LENGTH).tolist()), {}, {}),
    "torch": (lambda: Stream(lambda: torch.randperm(LENGTH).tolist()), {}, {}),
    "shuffle buffer": (lambda: Stream(shuffle_buffer), {}, {"collate_fn": drawing_collate}),
    "shuffled files": (lambda: Opened(shuffled_files), {}, {"collate_fn": drawing_collate}),
    "data pipe": (lambda: IterableWrapper(range(LENGTH)).shuffle(), {}, {}),
    "declared by process": (lambda: Opened(by_process), {"divides": "processes"}, {}),
    "shuffled by process": (
        lambda: Opened(shuffled_by_process),
        {"divides": "processes"},
        {"collate_fn": drawing_collate},
    ),
    "opened": (Stream, {"divides": "nothing"}, {"worker_init_fn": open_dataset}),
}


def read_by_all(make, world_size, **options):
    """Iterate every rank, one after the other; the global generators of each have states of their own."""
    ranks = []
    for rank in range(world_size):
        with as_rank(rank, world_size), own_generators(rank) as states:
            batches, before = make(), states()
            ranks.append(list(shard_loader(batches, **options)))
            # Rank 0 has drawn as one process does, and a collate_fn draws from the generators of the loop.
            assert rank == 0 or isinstance(batches, DataLoader) or states() == before
    return ranks


def flat(batches):
    return [int(value) for batch in batches for value in (batch["x"] if isinstance(batch, dict) else batch)]


def check(ranks, tail, shards):
    """Check how often each unit was read: once, with less than one repeat or omission for each shard."""
    counts = Counter(itertools.chain.from_iterable(ranks))
    assert set(counts) <= set(range(LENGTH))
    if tail == "drop":
        assert set(counts.values()) <= {1}
        assert LENGTH - len(counts) < shards
    else:
        assert len(counts) == LENGTH
        assert counts.total() - LENGTH < (shards if tail == "pad" else 1)


QUICK = ("torch's docs", "worker_init_fn")  # with workers
WITH_AND_WITHOUT_WORKERS = [
    *((kind, 0) for kind in DATASETS),
    *(pytest.param(kind, 2, marks=() if kind in QUICK else pytest.mark.slow) for kind in DATASETS),
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
    for rank, full in enumerate(read_by_all(loader, 2, **options)):
        with as_rank(rank, 2), own_generators(rank):
            interrupted, resumed = shard_loader(loader(), **options), shard_loader(loader(), **options)
            batches = iter(interrupted)
            first = [next(batches) for _ in range(random.Random(kind).randrange(len(full)) + 1)]
            resumed.load_state_dict(interrupted.state_dict())
            batches.close()
            assert flat([*first, *resumed]) == flat(full)


_orders = itertools.count()


def own_generator():
    first = next(_orders)  # two random orders may begin alike
    return [(first + number) % LENGTH for number in range(LENGTH)]


def by_torch(workers):
    return lambda: DataLoader(Stream(lambda: torch.randperm(LENGTH).tolist()), batch_size=3, num_workers=workers)


@pytest.mark.parametrize(
    ("make", "world_size", "seed", "is_repeated"),
    [
        (lambda: DataLoader(Stream(shuffled_by_random), batch_size=3), 1, None, True),
        (lambda: DataLoader(Stream(shuffled_by_random), batch_size=3), 1, 4, True),
        (lambda: DataLoader(Stream(shuffled_by_random), batch_size=3), 2, None, True),
        (by_torch(workers=1), 1, None, True),
        (by_torch(workers=1), 1, 4, True),
        (by_torch(workers=2), 1, None, True),
        (lambda: DataLoader(Stream(), batch_size=3), 1, None, True),
        (lambda: DataLoader(Stream(own_generator), batch_size=3), 2, None, False),
        (lambda: (each for each in own_generator()), 2, None, False),
        (shuffle_buffer, 1, None, True),
        (shuffle_buffer, 1, 4, True),
    ],
)
def test_an_order_that_is_not_repeated_after_resuming_is_named(make, world_size, seed, is_repeated):
    """Samples would be lost: a warning says how to repeat it. A state of a state has the same facts."""
    with as_rank(0, world_size), own_generators(1):
        interrupted, resumed = shard_loader(make(), seed=seed), shard_loader(make(), seed=seed)
        batches = iter(interrupted)
        next(batches), next(batches), next(batches)
        if isinstance(interrupted, DataLoader):
            next(iter(interrupted))  # a look, with another order
        resumed.load_state_dict(interrupted.state_dict())
        assert resumed.state_dict() == interrupted.state_dict()
        rest = list(batches)
        named = pytest.warns(UserWarning, match="another order or other samples")
        with contextlib.nullcontext() if is_repeated else named:
            assert (repr(list(resumed)) == repr(rest)) == is_repeated
        list(resumed)  # later epochs are not compared


def augmented():
    return ((np.random.default_rng().random(2), number) for number in range(LENGTH))


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
    assert not [each for each in recwarn if each.category is not DeprecationWarning]  # of a fork beside threads


def test_samples_that_cannot_be_hashed_are_yielded():
    """Their class raises an error when an attribute is looked up."""

    class Opaque:
        def __getattr__(self, name):
            raise KeyError(name)

    with as_rank(0, 2):
        loader = DataLoader(Stream(lambda: (Opaque() for _ in range(6))), batch_size=1, collate_fn=list)
        assert len(list(shard_loader(loader))) == 3


def test_epochs_of_a_shuffling_dataset_differ():
    """With persistent workers, too: all workers draw the order of the same epoch; iterables of batches as well."""
    for arguments in ({}, {"num_workers": 2, "persistent_workers": True}):
        epochs = []
        for rank in range(2):
            loader = DataLoader(Stream(shuffled_by_random), batch_size=4, **arguments)
            with as_rank(rank, 2), shard_loader(loader) as sharded:
                epochs.append([flat(sharded) for _ in range(2)])
        for one, other in zip(*epochs, strict=True):
            check([one, other], "pad", 4)
        assert epochs[0][0] != epochs[0][1]
    with as_rank(0, 2):
        first, second = (list(shard_loader(shuffled_generator())) for _ in range(2))
        assert first != second


def test_the_loop_keeps_its_random_numbers():
    """A dataset that draws between batches does not change the numbers that the loop draws, nor see them."""

    def run(draws):
        loader = DataLoader(Stream(shuffle_buffer), batch_size=3)
        with as_rank(1, 2), own_generators(1):
            return [(batch.tolist(), [random.random() for _ in range(draws)]) for batch in shard_loader(loader)]

    once, twice = run(1), run(2)
    with own_generators(1):
        assert [number for _, numbers in once for number in numbers] == [random.random() for _ in once]
    assert [batch for batch, _ in once] == [batch for batch, _ in twice]


# Iterables of batches


class Epochs:
    """An iterable with the order of an epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from np.random.default_rng(self.epoch).permutation(LENGTH).tolist()


def shuffled_generator():
    for number in shuffled_by_random():
        torch.rand(1)
        yield number


def zipped_shuffled_loader():
    return (int(batch) for batch, _ in zip(DataLoader(range(LENGTH), 1, shuffle=True), range(99)))  # noqa: B905 - ends


def torchdata_nodes():
    nodes = pytest.importorskip("torchdata.nodes")
    return nodes.Loader(nodes.IterableWrapper(range(LENGTH)))


BATCHES = {
    "list": lambda: list(range(LENGTH)),
    "iterator": lambda: iter(range(LENGTH)),
    "shuffled generator": shuffled_generator,
    "zipped": zipped_shuffled_loader,
    "with set_epoch": Epochs,
    "sized": type("Sized", (), {"__len__": lambda _: LENGTH, "__iter__": lambda _: iter(range(LENGTH))}),
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


def test_iterables_may_shuffle_before_they_take_their_share():
    """The order is drawn from the same random numbers on all ranks."""

    def own_share():
        yield from shuffled_by_random()[par.rank() :: par.world_size()]

    check(read_by_all(own_share, 3, divides="processes"), "exact", 1)


@pytest.mark.parametrize("make", [iter, list, lambda share: (each for each in share)])
def test_divides_is_honored_for_iterables_of_batches(make):
    """With "processes" each process reads all batches of its own iterable, limited and resumed, too."""
    own = lambda: make(range(par.rank(), LENGTH, par.world_size()))  # noqa: E731 - a new one
    assert read_by_all(own, 3, divides="processes") == [list(range(rank, LENGTH, 3)) for rank in range(3)]
    assert read_by_all(lambda: list(range(8)), 2, divides="nothing") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    with as_rank(1, 3):
        assert list(shard_loader(own(), divides="processes", limit=2)) == [1, 4]
        loader, resumed = (shard_loader(own(), divides="processes") for _ in range(2))
        batches = iter(loader)
        assert [next(batches) for _ in range(3)] == [1, 4, 7]
        resumed.load_state_dict(loader.state_dict())
        assert list(resumed) == list(range(10, LENGTH, 3))
    with as_rank(0, 2), pytest.raises(ConfigError, match="world_size=3 is loaded with world_size=2"):
        shard_loader(own(), divides="processes").load_state_dict(loader.state_dict())


def test_iterables_are_drawn_lazily():
    """An endless generator is never listed; a rank draws the batches of the others, and one ahead at most."""
    drawn = itertools.count()
    with as_rank(0, 2):
        assert list(itertools.islice(shard_loader(each for each in drawn), 3)) == [0, 2, 4]
    assert next(drawn) <= 6


# What shards itself


def foreign(package, name, base=IterableDataset, **attributes):
    """Return an object of a class with the module and name of another library's."""
    body = {"__module__": package, "__iter__": lambda self: iter(range(LENGTH)), **attributes}
    return types.new_class(name, (base,), exec_body=lambda namespace: namespace.update(body))()


def first(batches):
    return next(iter(batches))


@pytest.mark.parametrize(
    ("dataset", "read", "message"),
    [
        (
            foreign("litdata", "StreamingDataset", distributed_env=types.SimpleNamespace(world_size=1)),
            first,
            "StreamingDataset was sharded over 1 processes, in a world of 2",
        ),
        (
            Opened(lambda: range(getattr(get_worker_info(), "id", 0), LENGTH, 4)),
            first,
            r"Opened reads get_worker_info\(\) only for its id",
        ),
        # One of two chained datasets shards itself by worker: the other's samples would come often, or its own not.
        (
            ChainDataset([Stream(), Opened(in_blocks)]),
            list,
            r"ChainDataset reads get_worker_info.* after its first sample",
        ),
    ],
)
def test_what_may_shard_itself_is_refused_with_the_fix(dataset, read, message):
    """Before a batch, if that is known; tests/worlds/test_data_order.py has what ranks find by comparing samples."""
    with as_rank(0, 2), pytest.raises(ConfigError, match=message) as caught:
        read(shard_loader(DataLoader(dataset)))
    assert caught.value.faults[0].fix


@pytest.mark.parametrize("is_subclass", [False, True])
@pytest.mark.parametrize(
    ("package", "name"),
    [("streaming.base.dataset", "StreamingDataset"), ("litdata.streaming", "CombinedStreamingDataset")],
)
def test_libraries_that_shard_themselves_are_recognized(package, name, is_subclass):
    """Their datasets are not sharded again, nor are those of subclasses."""
    data = foreign(package, name)
    data = type("Mine", (type(data),), {})() if is_subclass else data
    assert [flat(batches) for batches in read_by_all(lambda: DataLoader(data), 2)] == [list(range(LENGTH))] * 2


class LibraryLoader(DataLoader):
    """Asks its dataset, counts its epochs and tells the dataset, as litdata's StreamingDataLoader does."""

    current_epoch = 0

    def __iter__(self):
        assert self.dataset.is_known
        vars(self)["current_epoch"] = self.current_epoch + 1
        self.dataset.next_epoch = self.current_epoch
        return super().__iter__()


def shuffled_by_its_epoch(dataset):
    order = np.random.default_rng(dataset.next_epoch).permutation(LENGTH).tolist()
    dataset.next_epoch += 1
    return iter(order)


@pytest.mark.parametrize("divides", [None, "processes"])
@pytest.mark.parametrize("kind", [DataLoader, LibraryLoader])
def test_epochs_of_libraries_that_count_them_are_resumed(kind, divides):
    """Mosaic's StreamingDataset in the property next_epoch, litdata's loader in its attribute current_epoch."""

    def make():
        epoch = property(lambda self: self.count, lambda self, epoch: setattr(self, "count", epoch))
        attributes = {"count": 0, "__iter__": shuffled_by_its_epoch, "next_epoch": epoch, "is_known": True}
        data = foreign("streaming.base.dataset", "StreamingDataset", **attributes)
        return shard_loader(kind(data, batch_size=4), divides=divides)

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
    loader = lambda workers=0: DataLoader(Opened(in_blocks), num_workers=workers)  # noqa: E731 - a new one
    for make in (loader, lambda: loader(1)):
        check(map(flat, read_by_all(make, 2, divides="nothing", tail="exact")), "exact", 1)
    message = r"Opened reads get_worker_info\(\) after its first sample, or with divides='nothing'"
    with as_rank(0, 2), pytest.raises((ConfigError, RuntimeError), match=message):
        list(shard_loader(loader(2), divides="nothing"))
    both = DataLoader(ChainDataset([Opened(in_blocks), Opened(in_blocks)]))
    with as_rank(0, 2):
        assert len(flat(shard_loader(both))) == 2 * 15


@pytest.mark.parametrize("shards", [1, 4])
def test_streams_of_hugging_face_that_are_split_are_not_split_again(shards):
    """One that is split by node is kept, other ones are split once; one that is split for another world is refused."""
    datasets = pytest.importorskip("datasets")
    split = pytest.importorskip("datasets.distributed").split_dataset_by_node

    def stream():
        data = datasets.Dataset.from_dict({"x": list(range(LENGTH))})
        return data.to_iterable_dataset(num_shards=shards).with_format("torch")

    make = lambda: DataLoader(split(stream(), par.rank(), par.world_size()))  # noqa: E731 - a new one
    check(map(flat, read_by_all(make, 2)), "exact", 1)
    for workers in (0, 2) if shards > 1 else (0,):
        unsplit = lambda number=workers: DataLoader(stream(), num_workers=number)  # noqa: E731 - a new one
        check(map(flat, read_by_all(unsplit, 2)), "exact", 1)
    with as_rank(0, 2), pytest.raises(ConfigError, match="was sharded over 4 processes, in a world of 2"):
        shard_loader(DataLoader(split(stream(), 0, 4)))


# Options, resuming, libraries


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_processes_make_equally_many_steps(workers, tail):
    """Whatever is padded or dropped, of the units of the stream and of the last batch."""
    for length, drop_last in itertools.product((1, 23) if workers else (0, 1, 2, 5, 23), (False, True)):
        make = lambda n=length, d=drop_last: DataLoader(Sized(n), batch_size=2, num_workers=workers, drop_last=d)  # noqa: E731 - a new one
        ranks = read_by_all(make, 2, tail=tail, divides="nothing")
        assert len({len(batches) for batches in ranks}) == 1
        if drop_last:
            assert {len(batch) for batches in ranks for batch in batches} <= {2}


def test_unknown_lengths():
    """Of a dataset without `__len__`; of another one, a process that is alone tells what the DataLoader does."""
    with as_rank(0, 1):
        assert len(shard_loader(DataLoader(Sized(5), batch_size=2))) == 3
    for dataset in (Stream(), Sized(4)):
        with as_rank(0, 2), pytest.raises(TypeError, match="the number of batches of this DataLoader is unknown"):
            len(shard_loader(DataLoader(dataset)))


def test_items_without_batches():
    """batch_size=None gives each process every second item of the user's dataset, which the loader still has."""
    assert read_by_all(lambda: DataLoader(Sized(4), batch_size=None), 2) == [[0, 2], [1, 3]]
    loader = DataLoader(Sized(4))
    assert isinstance(shard_loader(loader), DataLoader)
    assert shard_loader(loader).dataset is loader.dataset


def test_random_numbers_of_training_after_resuming(tmp_path):
    """Under a seed, batches draw from their own states: those that training draws go on where the run was saved."""

    def collate(samples):
        return torch.tensor(samples) + torch.rand(())

    def train(batches):
        return [(batch.tolist(), torch.rand(()).item()) for batch in batches]

    make = lambda: shard_loader(DataLoader(Sized(23), batch_size=2, collate_fn=collate), seed=0)  # noqa: E731 - a new one
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
        sharded = shard_loader(DataLoader(Sized(23), batch_size=2))
        list(zip(range(3), sharded, strict=False))
        resumed = shard_loader(DataLoader(Sized(23), **{"batch_size": 2, **changes}))
        with contextlib.nullcontext() if message is None else pytest.raises(ConfigError, match=message):
            resumed.load_state_dict(sharded.state_dict())
            assert values(resumed) == [12, 14, 16, 18, 20, 22]
        state = sharded.state_dict()
        sharded.set_epoch(1)
        resumed.load_state_dict(sharded.state_dict())  # at the start of an epoch
        assert resumed.epoch == 1
    with as_rank(1, 3), pytest.raises(ConfigError, match="world_size=2 is loaded with world_size=3"):
        shard_loader(DataLoader(Sized(23))).load_state_dict(state)


def test_limits_of_streams():
    """A limit ends an endless stream, and is a number of those batches that come, whatever the dataset's length is."""
    endless = lambda: DataLoader(Stream(itertools.count), batch_size=2)  # noqa: E731 - a new one
    assert [len(batches) for batches in read_by_all(endless, 2, limit=3)] == [3, 3]
    with warnings.catch_warnings(), as_rank(0, 2):
        warnings.simplefilter("ignore")  # torch: the length is wrong
        loader = DataLoader(Sized(40, claimed=20), batch_size=4)
        assert len(list(shard_loader(loader, limit=4, divides="nothing"))) == 4


def test_the_worker_info_is_restored_between_batches():
    """get_worker_info() in the loop returns the same as without shard_loader."""
    with as_rank(0, 2):
        assert [get_worker_info() for _ in shard_loader(DataLoader(Opened(in_blocks), batch_size=8))] == [None, None]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_is_a_data_loader(workers):
    """torchdata's keeps its class; shard_loader saves and restores its position."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    for dataset in (list(range(13)), Sized(13)):
        with as_rank(0, 2):
            sharded, resumed = (shard_loader(stateful(dataset, batch_size=2, num_workers=workers)) for _ in range(2))
            assert isinstance(sharded, stateful)
            full = [batch.tolist() for batch in sharded]
            list(zip(range(2), sharded, strict=False))
            resumed.load_state_dict(sharded.state_dict())
            assert [batch.tolist() for batch in resumed] == full[2:]


def test_a_state_of_the_unsharded_loader_is_refused():
    """torchdata's, loaded before shard_loader or after it, counts global batches: a shard would skip unseen samples."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    loader, other = (stateful(list(range(13)), batch_size=2) for _ in range(2))
    next(iter(loader))
    other.load_state_dict(loader.state_dict())
    message = r"(?s)StatefulDataLoader whose own state was loaded.*\(loader\).load_state_dict\(state\)"
    with as_rank(0, 2):
        sharded = shard_loader(loader)
        assert len(list(sharded)) == 4  # one that was only iterated
        with pytest.raises(ConfigError, match=message):
            shard_loader(other)
        loader.load_state_dict(other.state_dict())
        with pytest.raises(ConfigError, match=message):
            iter(sharded)


def test_optional_packages_are_not_imported():
    """They are imported only for their own datasets; asked in another process, where no other test has run."""
    script = (
        "import sys, torch, parallelize\n"
        "class Numbers(torch.utils.data.IterableDataset):\n    __iter__ = lambda self: iter(range(4))\n"
        "list(parallelize.shard_loader(torch.utils.data.DataLoader(Numbers())))\n"
        "sys.exit(bool({'webdataset', 'datasets', 'torchdata', 'litdata', 'streaming'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("limit", [2, None])
def test_a_dataset_ends_with_the_loop(limit):
    """Its iterator is closed after `limit` batches or a break, before the next epoch begins."""
    is_open = []

    def opened():
        is_open.append(True)
        try:
            yield from range(100)
        finally:
            is_open.pop()

    with as_rank(0, 2):
        loader = shard_loader(DataLoader(Stream(opened), batch_size=4), limit=limit, divides="nothing")
        for _ in range(2):
            for _ in loader:
                if limit is None:
                    break
            assert not is_open


def goes_on():
    """Make a dataset that continues in each epoch where the last one was left."""
    numbers = itertools.count()
    return DataLoader(Opened(lambda: numbers), batch_size=2)


@pytest.mark.parametrize("make", [goes_on, lambda: iter(torch.arange(98).view(-1, 2))])
@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_stream_that_goes_on_is_left_at_the_same_sample_by_all_ranks(make, tail, world_size):
    """After a look at a batch, a loop that is left, and a limit, no sample comes twice and none is missing."""
    seen = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            loader = make()
            seen += values([next(iter(shard_loader(loader, tail=tail)))])
            # zip takes a batch that it does not yield
            seen += values(batch for batch, _ in zip(shard_loader(loader, tail=tail), range(3), strict=False))
            seen += values(shard_loader(loader, tail=tail, limit=2))
    skipped = range(4 * 2 * world_size, 5 * 2 * world_size)
    assert sorted(seen) == [each for each in range(7 * 2 * world_size) if each not in skipped]


def test_a_torch_whose_worker_info_cannot_be_replaced(monkeypatch):
    """A dataset is refused if get_worker_info() does not return what counts the workers of all ranks."""
    loader = shard_loader(DataLoader(Stream(), batch_size=None))
    assert len(list(loader)) == LENGTH
    monkeypatch.setattr(loaders, "get_worker_info", lambda: None)
    with pytest.raises(ConfigError, match="iterable dataset with torch"):
        list(loader)
