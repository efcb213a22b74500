"""shard_loader on every rank of a world, simulated one rank after the other in this process."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import random
import time
import weakref

import numpy as np
import pytest
import torch
from ranks import as_rank, own_generators, values
from torch.optim.swa_utils import update_bn
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    random_split,
)

from parallelize import ConfigError, distributed, shard_loader


def on_all(world_size, make, epochs=1, **kwargs):
    """Return, for each rank, a list of batches per epoch; each rank makes its own loader."""
    results = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            loader = make()
            results.append([list(shard_loader(loader, **kwargs)) for _ in range(epochs)])
    return results


def numbers(length):
    return list(range(length))


def loader_of(length, **kwargs):
    return DataLoader(numbers(length), **kwargs)


# Attributes and identity of the loader


class CustomLoader(DataLoader):
    """A subclass with other constructor arguments and another __iter__."""

    def __init__(self, secret, /, *, dataset, size):
        super().__init__(dataset, batch_size=size)
        self._secret = secret

    def __iter__(self):
        for batch in super().__iter__():
            yield self._secret, batch

    @property
    def secret(self):
        return self._secret

    @secret.setter
    def secret(self, value):
        self._secret = value

    @secret.deleter
    def secret(self):
        del self._secret


def test_the_loader_is_not_reconstructed():
    """A subclass with another constructor keeps its class, attributes and __iter__."""
    with as_rank(1, 2):
        loader = CustomLoader("sesame", dataset=numbers(6), size=2)
        sharded = shard_loader(loader)
        assert isinstance(sharded, CustomLoader)
        assert isinstance(sharded, DataLoader)
        assert (sharded.secret, sharded.batch_size, len(sharded)) == ("sesame", 2, 2)
        assert sharded.dataset is loader.dataset
        assert [(secret, batch.tolist()) for secret, batch in sharded] == [("sesame", [1, 3]), ("sesame", [5])]
        assert [batch.tolist() for _, batch in loader] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("sets_sharded", [False, True])
def test_what_is_set_between_epochs_is_followed(sets_sharded):
    """Another collate_fn, batch size, drop_last and attribute, set on either loader, are those of the next epoch."""
    with as_rank(1, 2):
        loader = CustomLoader("sesame", dataset=numbers(10), size=2)
        sharded = shard_loader(loader)
        assert [batch.tolist() for _, batch in sharded] == [[1, 3], [5, 7], [9]]
        target = sharded if sets_sharded else loader
        target.collate_fn, target.secret = tuple, "poppy"
        target.batch_sampler.batch_size = 4
        assert len(sharded) == 2
        assert list(sharded) == [("poppy", (1, 3, 5, 7)), ("poppy", (9,))]
        target.batch_sampler.drop_last = True
        assert list(sharded) == [("poppy", (1, 3, 5, 7))]
        assert loader.secret == sharded.secret == "poppy"
        del target.secret
        assert not hasattr(loader, "secret")
        with pytest.raises(AttributeError, match="_secret"):
            list(sharded)
        with pytest.raises(ValueError, match="batch_size attribute should not be set"):
            target.batch_size = 3


def test_a_global_batch_that_is_set_is_checked():
    """A size that does not divide over the processes is refused as that of a new loader."""
    with as_rank(0, 2):
        loader = loader_of(8, batch_size=4)
        sharded = shard_loader(loader, batch="global", tail="pad")
        loader.batch_sampler.batch_size = 3
        with pytest.raises(ConfigError, match=r"batch='global' with batch_size=3 on 2 processes"):
            iter(sharded)


class OfFour(IterableDataset):
    """A stream of four numbers."""

    def __iter__(self):
        return iter(range(4))


def test_a_collate_fn_of_a_stream_is_followed():
    """Also the loader of an iterable dataset."""
    with as_rank(0, 2):
        loader = DataLoader(OfFour(), batch_size=2)
        sharded = shard_loader(loader)
        assert [each.tolist() for each in sharded] == [[0, 2]]
        loader.collate_fn = tuple
        assert list(sharded) == [(0, 2)]


def test_arguments_reach_the_workers():
    """collate_fn, worker_init_fn, multiprocessing_context and persistent_workers work as without shard_loader."""
    context = torch.multiprocessing.get_context("fork")
    for persistent in (False, True):
        with as_rank(0, 2):
            loader = DataLoader(
                numbers(9),
                batch_size=2,
                num_workers=2,
                collate_fn=tuple,
                worker_init_fn=_in_worker,
                persistent_workers=persistent,
                multiprocessing_context=context,
            )
            with shard_loader(loader) as sharded:
                for _ in range(2):
                    assert list(sharded) == [(0, 2), (4, 6), (8,)]


def _in_worker(_worker_id):
    assert torch.utils.data.get_worker_info() is not None


def test_persistent_workers_serve_one_iterator():
    """A new iterator may be started before the end of the older one, which ends with it, as in torch."""
    with as_rank(0, 2), shard_loader(loader_of(16, batch_size=2, num_workers=1, persistent_workers=True)) as sharded:
        left = iter(sharded)
        first = [next(left).tolist(), next(left).tolist()]
        sharded.set_epoch(0)
        assert [batch.tolist() for batch in sharded][:2] == first
        assert not list(left)
        assert len(multiprocessing.active_children()) == 1
    assert not multiprocessing.active_children()  # with the block, and not when `sharded` is collected
    sharded = shard_loader(loader_of(16, batch_size=2))
    assert [one.tolist() == other.tolist() for one, other in zip(sharded, sharded, strict=True)] == [True] * 8


class SlowFirst(list):
    def __getitem__(self, index):
        time.sleep(0.2 * (index == 0))
        return super().__getitem__(index)


def test_batches_come_in_order():
    """With in_order=False, too: states and gather() count the batches of the sampler."""
    loader = DataLoader(SlowFirst(range(8)), batch_size=2, num_workers=2, in_order=False)
    with as_rank(0, 1):
        assert values(shard_loader(loader)) == list(range(8))


def test_a_loader_that_ignores_its_sampler_is_refused():
    """Its batches come from elsewhere, so that every process would get all of them."""

    class Elsewhere(DataLoader):
        def __iter__(self):
            return iter([torch.tensor([0])])

    with as_rank(0, 2), pytest.raises(ConfigError, match="Elsewhere does not use its sampler when it is iterated"):
        list(shard_loader(Elsewhere(numbers(4))))


class FromTheSystem(SequentialSampler):
    """Holds the operating system's generator of random numbers."""

    def __init__(self, data):
        super().__init__(data)
        self.generator = random.SystemRandom()


class Repeated:
    """A sampler that repeats another one without end, as in loaders that keep their workers over all epochs."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class KeepsItsIterator(DataLoader):
    """Keeps one iterator over all epochs, and counts the batches of each by its sampler."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


class ReadsItsSampler(DataLoader):
    """Looks at the sampler of batches that it has."""

    def __iter__(self):
        batches = self.batch_sampler
        assert (batches.batch_size, batches.drop_last, type(batches.sampler)) == (4, False, RandomSampler)
        return super().__iter__()


def test_a_loader_that_keeps_its_iterator_starts_at_no_other_epoch():
    """Its workers have read the first batches of the next epoch already, in another order."""
    with as_rank(0, 2), own_generators(0):
        loader = KeepsItsIterator(numbers(16), batch_size=4, num_workers=1, persistent_workers=True)
        with shard_loader(loader) as sharded:
            assert len(values(sharded)) == 8
            sharded.set_epoch(5)
            for _ in range(2):
                with pytest.raises(ConfigError, match="keeps one iterator over all epochs"):
                    iter(sharded)
        loader.iterator._shutdown_workers()


def test_an_iterator_that_is_not_read_does_not_disturb_a_loop():
    """It is made inside of a loop over the same loader."""
    with as_rank(0, 2):
        sharded = shard_loader(loader_of(8, batch_size=2))
        read = []
        for batch in sharded:
            iter(sharded)
            read += batch.tolist()
        assert read == [0, 2, 4, 6]


def test_a_sampler_may_draw_from_the_operating_system():
    """Its generator has no state; what it draws differs between ranks, which compare their orders."""
    sampler = FromTheSystem(numbers(8))
    assert sorted(values(shard_loader(loader_of(8, sampler=sampler)))) == numbers(8)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [KeepsItsIterator, ReadsItsSampler])
def test_subclasses_that_read_their_sampler(kind, workers):
    """Each epoch has each sample once, in another order, on the ranks together."""
    ranks = []
    for rank in range(2):
        with as_rank(rank, 2), own_generators(rank):
            options = {"persistent_workers": True} if workers else {}
            loader = kind(numbers(16), batch_size=4, shuffle=True, num_workers=workers, **options)
            with shard_loader(loader) as sharded:
                ranks.append([values(sharded) for _ in range(3)])
            if kind is KeepsItsIterator and workers:
                loader.iterator._shutdown_workers()
    epochs = [one + other for one, other in zip(*ranks, strict=True)]
    assert [sorted(epoch) for epoch in epochs] == [numbers(16)] * 3
    assert len({*map(tuple, epochs)}) == 3


def test_a_sharded_loader_is_not_sharded_again():
    """shard_loader of its own result returns that result; with other options it is refused."""
    with as_rank(0, 2):
        sharded = shard_loader(loader_of(4), tail="exact")
        assert shard_loader(sharded) is shard_loader(sharded, tail="exact") is sharded
        with pytest.raises(ConfigError, match="on a loader that it returned, with other options"):
            shard_loader(sharded, tail="drop")


def test_a_sharded_loader_is_not_pickled():
    """As an argument of a decorated function it would be this process's shard on every rank."""
    match = r"argument 'obj' \(first\) cannot be pickled(.|\n)*one process's shard of a DataLoader: "
    with pytest.raises(ConfigError, match=match):
        distributed(processes=2)(len)(shard_loader(loader_of(4)))


def test_missing_attributes_raise_the_loaders_error():
    """It names the class of the user's loader."""
    with pytest.raises(AttributeError, match="'DataLoader' object has no attribute 'nothing'"):
        shard_loader(loader_of(2)).nothing  # noqa: B018 - the lookup is the test


class Batches:
    def __iter__(self):
        yield from (torch.arange(2), torch.arange(2), torch.arange(2))


@pytest.mark.parametrize(
    "make", [lambda: loader_of(4), Batches, lambda: iter(Batches())], ids=["loader", "iterable", "iterator"]
)
def test_a_loader_is_freed_with_its_last_reference(make):
    """The cache of sharded loaders does not keep it alive, exhausted or not."""
    loader = make()
    for _ in shard_loader(loader):
        break
    alive = weakref.ref(loader)
    del loader
    gc.collect()
    assert alive() is None


# Orders


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield int(torch.randint(100, ()))


def test_a_generator_may_have_a_negative_seed():
    """torch counts it modulo 2**64, which leaves no room to add an epoch."""
    generator = torch.Generator().manual_seed(-1)
    ranks = on_all(2, lambda: loader_of(10, shuffle=True, generator=generator, batch_size=10), epochs=2)
    assert [sorted(values(one + other)) for one, other in zip(*ranks, strict=True)] == [numbers(10)] * 2


@pytest.mark.parametrize("convert", [list, torch.tensor, np.array])
def test_batches_of_a_batch_sampler_are_not_split(convert):
    """pad repeats a batch, and weighted uses the sizes of batches, of tensors and arrays, too."""

    def make():
        return DataLoader(np.arange(6), batch_sampler=[convert(each) for each in ([0], [1, 2], [3, 4, 5])])

    ranks = on_all(2, make)
    assert [[batch.tolist() for batch in rank[0]] for rank in ranks] == [[[0], [3, 4, 5]], [[1, 2], [0]]]
    for rank, weights in enumerate([[2 * 1 / 3, 2.0], [2 * 2 / 3, 0.0]]):
        with as_rank(rank, 2):
            sharded = shard_loader(make(), tail="weighted")
            list(sharded)
            assert [sharded._self_pass.weight(step) for step in range(2)] == weights


@pytest.mark.parametrize("sampler", [torch.arange(4), np.arange(4)])
def test_single_indices_may_be_tensors(sampler):
    """A zero-dimensional unit is one sample."""
    with as_rank(0, 2):
        assert list(shard_loader(DataLoader(np.arange(4), batch_size=None, sampler=sampler), tail="weighted")) == [0, 2]


# Loaders that are already sharded


def test_a_pre_sharded_loader_is_logged(caplog):
    """One line on rank 0 names its sampler."""
    with caplog.at_level("INFO", logger="parallelize"), as_rank(0, 2):
        shard_loader(DataLoader(numbers(9), sampler=DistributedSampler(numbers(9), 2, 0)))
    assert "already sharded by its DistributedSampler" in caplog.text


class BatchesOf(Sampler):
    """Makes batches of a sampler in an attribute of its own name."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        indices = iter(self.inner)
        while batch := list(itertools.islice(indices, 2)):
            yield batch


class Through(BatchesOf):
    def __iter__(self):
        return iter(self.inner)


class Strided(Sampler):
    """Shards by itself, with the names of Megatron, or of WebDataset and TorchData."""

    def __init__(self, **names):
        vars(self).update(names)

    def __iter__(self):
        return iter(range(1, 8, 2))


@pytest.mark.parametrize(
    "inner",
    [
        DistributedSampler(numbers(8), 2, 1, shuffle=False),
        Strided(data_parallel_rank=1, data_parallel_size=2),
        Strided(cur_shard=1, num_shards=2),
    ],
)
def test_a_sampler_inside_of_a_sampler_shards_the_loader(inner):
    """It is found in any attribute, and not sharded again."""
    with as_rank(1, 2):
        assert values(shard_loader(DataLoader(numbers(8), sampler=inner))) == [1, 3, 5, 7]
        for sampler in (BatchesOf(inner), BatchesOf(Through(inner))):
            assert values(shard_loader(DataLoader(numbers(8), batch_sampler=sampler))) == [1, 3, 5, 7]


# Options


def test_a_limit_is_a_count_or_a_fraction():
    """`len` counts the limited batches, and the next iterator starts another epoch."""
    with as_rank(0, 2):
        for limit, expected in ((2, 2), (100, 5), (0.1, 1), (0.5, 2), (1.0, 5)):
            sharded = shard_loader(loader_of(20, batch_size=2), limit=limit)
            assert len(sharded) == len(list(sharded)) == expected
            assert sharded.epoch == 1


@pytest.mark.parametrize("tail", ["exact", "weighted"])
def test_an_uneven_global_batch_is_sharded(tail):
    """Each step takes the batch that one process would, in shards whose sizes differ by at most one."""
    for batch, world_size in itertools.product(range(3, 8), (1, 2, 3)):
        ranks = on_all(world_size, lambda size=batch: loader_of(20, batch_size=size), batch="global", tail=tail)
        for step, parts in enumerate(itertools.zip_longest(*[rank[0] for rank in ranks], fillvalue=torch.tensor([]))):
            taken = [int(index) for part in parts for index in part]
            assert {*range(step * batch, min(step * batch + batch, 20))} <= {*taken}  # "weighted" fills the last step
            assert tail == "weighted" or len(taken) == len({*taken})
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("batch", ["per_process", "global"])
def test_the_global_batch_size_is_logged(caplog, batch):
    """One line on rank 0 states the batch size per process and in all."""
    with caplog.at_level("INFO", logger="parallelize"):
        for rank in range(4):
            with as_rank(rank, 4):
                shard_loader(loader_of(200, batch_size=32 if batch == "per_process" else 128), batch=batch)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == ["32 x 4 processes = 128 global"]


ENDLESS = {"sampler": Endless()}
PRE_SHARDED = {"sampler": DistributedSampler(numbers(9), 2, 0)}


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (
            lambda: loader_of(9, batch_size=3),
            {"batch": "global", "tail": "pad"},
            "batch='global' with batch_size=3 on 2 processes",
        ),
        (lambda: loader_of(9), {"batch": "global", "tail": "exact"}, "batch='global' with batch_size=1 on 2"),
        (
            lambda: loader_of(9, batch_sampler=[[1, 2], [3]]),
            {"batch": "global", "tail": "pad"},
            "batch='global' of a sampler's batches with tail='pad'",
        ),
        (lambda: loader_of(9, batch_size=None), {"batch": "global"}, "batch='global' with a loader that has no batch"),
        (lambda: loader_of(9, batch_size=2, drop_last=True), {"tail": "exact"}, "tail='exact' with .*drop_last=True"),
        (
            lambda: DataLoader(OfUnknownLength(), batch_size=2, drop_last=True),
            {"tail": "exact"},
            "tail='exact' with .*drop_last=True",
        ),
        (lambda: loader_of(9, **ENDLESS), {"limit": 0.5}, "limit=0.5 with Endless, which has no length"),
        (
            lambda: loader_of(9, **PRE_SHARDED),
            {"batch": "global"},
            "batch='global' with a loader that DistributedSampler",
        ),
        (lambda: [1, 2], {"tail": "weighted"}, "tail='weighted' with a list of batches"),
        (lambda: [1, 2], {"batch": "global"}, "batch='global' with a list of batches"),
        (lambda: iter([1, 2]), {"limit": 0.5}, "limit=0.5 with a list_iterator of batches, which has no length"),
        (lambda: {"a": 1}, {}, "shard_loader of a dict"),
        (lambda: 3, {}, "shard_loader of a int"),
        (lambda: [loader_of(4), loader_of(4)], {}, "shard_loader of a list"),
        (lambda: TensorDataset(torch.zeros(3)), {}, "shard_loader of a TensorDataset"),
        (lambda: OfUnknownLength(), {}, "shard_loader of a OfUnknownLength"),  # noqa: PLW0108 - defined below
        (lambda: DataLoader(OfUnknownLength()), {"tail": "weighted"}, "tail='weighted' with the iterable OfUnknown"),
        (lambda: DataLoader(OfUnknownLength()), {"batch": "global"}, "batch='global' with the iterable OfUnknown"),
        (lambda: DataLoader(OfUnknownLength()), {"limit": 0.5}, "limit=0.5 with the iterable OfUnknownLength"),
        (lambda: torch.zeros(3), {}, "shard_loader of a Tensor"),
    ],
)
def test_unsupported_loaders_and_options_are_refused(loader, options, message):
    """The error has the value, the reason and a fix."""
    with as_rank(0, 2), pytest.raises(ConfigError, match=message) as caught:
        shard_loader(loader(), **options)
    assert caught.value.faults[0].why
    assert caught.value.faults[0].fix


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"tail": "padd"}, ["tail='padd'", "did you mean 'pad'"]),
        ({"batch": "globally"}, ["batch='globally'"]),
        ({"divides": "rank"}, ["divides='rank'"]),
        ({"seed": -1, "limit": 0}, ["2 faults", "seed=-1", "limit=0"]),
        ({"seed": True, "limit": True, "prefetch": -1}, ["3 faults", "seed=True", "limit=True", "prefetch=-1"]),
        ({"limit": 1.5}, ["limit=1.5"]),
        ({"limit": "half", "tail": 1}, ["limit='half'", "tail=1"]),
    ],
)
def test_every_invalid_option_is_named(options, names):
    """One error lists all of them."""
    with pytest.raises(ConfigError) as caught:
        shard_loader([1], **options)
    assert all(name in str(caught.value) for name in names)


# Epochs


def test_each_iterator_is_the_next_epoch():
    """Read to its end, or left after a batch or two, with any progress=, as with the user's loader itself."""
    plain, loader = (loader_of(12, batch_size=3, shuffle=True) for _ in range(2))

    def read(loader):
        """Read five epochs, some only in part."""
        epochs = [[next(iter(loader)).tolist()] for _ in range(2)]
        epochs.append([])
        for step, batch in enumerate(loader):
            epochs[-1].append(batch.tolist())
            if step == 1:
                break
        epochs.append([batch.tolist() for batch in loader])
        return epochs, next((one.tolist(), other.tolist()) for one, other in zip(loader, loader, strict=True))

    with own_generators(0):
        expected = read(plain)
    with own_generators(0):
        sharded = shard_loader(loader, progress="epoch 3")
        assert read(sharded) == expected
        assert sharded is shard_loader(loader)
        assert sharded.epoch == 4
        sharded.set_epoch(8)
        assert sharded.epoch == 8


def test_a_seed_and_the_epoch_give_the_order():
    """Whatever the generators and the number of processes are, also after set_epoch; generators stay as they are."""
    orders = []
    for world_size in (1, 2):
        ranks = []
        for rank in range(world_size):
            with as_rank(rank, world_size), own_generators(rank + 5) as states:
                before = states()
                sharded = shard_loader(loader_of(12, shuffle=True), seed=3)
                ranks.append([values(sharded) for _ in range(2)])
                sharded.set_epoch(0)
                assert values(sharded) == ranks[-1][0]
                assert states() == before
        for epoch in range(2):
            steps = zip(*[read[epoch] for read in ranks], strict=True)
            orders += [[index for step in steps for index in step]]
    assert orders[:2] == orders[2:]
    assert orders[0] != orders[1]


def test_a_look_inside_of_a_loop_does_not_change_what_is_saved():
    """The state is that of the loop, which goes on."""
    sharded = shard_loader(loader_of(12, batch_size=3, shuffle=True))
    for step, _ in enumerate(sharded):
        if step == 1:
            next(iter(sharded))
            assert (sharded.epoch, sharded.state_dict()["start"]) == (0, 6)
    assert (sharded.epoch, sharded.state_dict()["start"]) == (2, 0)


def test_a_loader_made_anew_draws_from_where_the_generators_are():
    """As in one process: another order at the same line, and the same one if its own generator is seeded anew."""

    def order(loader):
        return values(loader)

    with own_generators(0):
        plain = [order(loader_of(12, batch_size=3, shuffle=True)) for _ in range(3)]
    with own_generators(0), as_rank(0, 2):
        sharded = [order(shard_loader(loader_of(12, batch_size=3, shuffle=True), batch="global")) for _ in range(3)]
    assert [{*epoch} <= {*whole} for epoch, whole in zip(sharded, plain, strict=True)] == [True] * 3
    seeded = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(3)
        seeded.append(order(shard_loader(loader_of(12, batch_size=3, shuffle=True, generator=generator))))
    assert seeded[0] == seeded[1]


class OfUnknownLength(IterableDataset):
    """__len__ raises, as that of torch's ChainDataset over streams."""

    def __iter__(self):
        return iter(range(8))

    def __len__(self):
        raise NotImplementedError("unknown length")


@pytest.mark.parametrize("data", [OfUnknownLength(), ChainDataset([OfUnknownLength()])])
def test_a_dataset_whose_length_raises(data):
    """It is a stream of unknown length, as for DataLoader."""
    parts = []
    for rank in range(2):
        with as_rank(rank, 2):
            parts += values(shard_loader(DataLoader(data, batch_size=2)))
    assert sorted(parts) == [*range(8)]


def test_set_epoch_reaches_samplers_and_datasets():
    """Also a sampler inside of a batch sampler. Iterating tells none of them, as in one process."""

    class Listening(SequentialSampler):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    class Data(list):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    data = Data(range(6))
    sampler = Listening(data)

    class Batches(BatchSampler):
        pass

    sharded = shard_loader(DataLoader(data, batch_sampler=Batches(sampler, 2, drop_last=False)))
    list(sharded)
    assert (sampler.epoch, data.epoch) == (None, None)
    sharded.set_epoch(5)
    list(sharded)
    assert (sampler.epoch, data.epoch, sharded.epoch) == (5, 5, 6)


def test_an_epoch_that_is_set_before_the_loader_is_sharded_stays():
    """As with the DataLoader itself, until another one is set."""
    sampler, expected = (DistributedSampler(numbers(12), 2, 1) for _ in range(2))
    sampler.set_epoch(5)
    with as_rank(1, 2):
        sharded = shard_loader(loader_of(12, sampler=sampler))
        for epoch in (5, 5, 6):
            if epoch == 6:
                sampler.set_epoch(6)
            expected.set_epoch(epoch)
            assert values(sharded) == list(expected)


@pytest.mark.parametrize("epochs", [[None, None, None], [0, 1, 2], [0, 0, 0], [4, 4, 2]])
def test_a_distributed_sampler_has_the_epoch_that_the_user_sets(epochs):
    """0 included; if the user sets none, each `iter()` is the next one."""
    sampler = DistributedSampler(numbers(12), 2, 1)
    expected = DistributedSampler(numbers(12), 2, 1)
    with as_rank(1, 2):
        sharded = shard_loader(loader_of(12, sampler=sampler))
        for position, epoch in enumerate(epochs):
            if epoch is not None:
                sampler.set_epoch(epoch)
            expected.set_epoch(position if epoch is None else epoch)
            assert values(sharded) == list(expected)


# Resuming


class CountsItsEpochs(Sampler):
    """Draws another order at each iteration, and has no set_epoch."""

    count = 0

    def __iter__(self):
        self.count += 1
        return iter(torch.randperm(12, generator=torch.Generator().manual_seed(self.count)).tolist())

    def __len__(self):
        return 12


def unseeded_split():
    return DataLoader(random_split(numbers(24), [12, 12])[0], 2, shuffle=True)


def shuffled_list():
    return [torch.tensor([number]) for number in random.sample(range(2**20), 6)]


@pytest.mark.parametrize(
    "make", [lambda: loader_of(12, batch_size=2, sampler=CountsItsEpochs()), unseeded_split, shuffled_list]
)
def test_a_resumed_epoch_of_another_order_is_named(make):
    """Its sampler begins anew with another epoch, or the data is split or shuffled without a seed."""
    interrupted, resumed = shard_loader(make()), shard_loader(make())
    list(interrupted)
    batches = iter(interrupted)
    next(batches), next(batches)
    state = interrupted.state_dict()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    with pytest.warns(UserWarning, match=r"the resumed epoch \d of .* has another order or other samples"):
        list(resumed)
    list(resumed)  # later epochs are not compared


class ShuffledByEpoch(Sampler):
    """Draws its order from the epoch of set_epoch."""

    epoch = 0

    def __len__(self):
        return 12

    def __iter__(self):
        return iter(torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.parametrize("make", [lambda: DistributedSampler(numbers(12), 2, 1), ShuffledByEpoch])
@pytest.mark.parametrize("calls_set_epoch", [False, True])
def test_set_epoch_of_the_resumed_epoch_does_not_restart_it(make, calls_set_epoch):
    """The usual sampler.set_epoch(epoch) repeats no sample of the resumed epoch; that of the loader begins anew."""
    with as_rank(1, 2):

        def begin():
            sampler = make()
            with as_rank(1, 2):  # a new run
                return sampler, shard_loader(loader_of(12, batch_size=1, sampler=sampler))

        def epochs_from(first, sampler, sharded):
            epochs = []
            for epoch in range(first, 3):
                if calls_set_epoch:
                    sampler.set_epoch(epoch)
                assert sharded.epoch == epoch
                epochs.append(values(sharded))
            return epochs

        epochs = epochs_from(0, *begin())
        sampler, sharded = begin()
        for epoch in range(2):
            if calls_set_epoch:
                sampler.set_epoch(epoch)
            for step, _ in enumerate(sharded):
                state = sharded.state_dict()
                if epoch and step == 1:
                    break
        sampler, resumed = begin()
        resumed.load_state_dict(state)
        assert epochs_from(1, sampler, resumed) == [epochs[1][2:], epochs[2]]
        if calls_set_epoch:
            sampler, resumed = begin()
            resumed.load_state_dict(state)
            resumed.set_epoch(2)
            assert values(resumed) == epochs[2]


def test_the_length_after_a_resumed_epoch_is_that_of_the_next():
    """The rest of an epoch has its own length only while it is iterated."""
    sharded = shard_loader(loader_of(10, batch_size=1))
    sharded.load_state_dict({**sharded.state_dict(), "start": 6})
    for step, _ in enumerate(sharded):
        assert len(sharded) == 4
        if step == 2:
            break
    assert len(sharded) == len(list(sharded)) == 10


def test_a_state_between_epochs_is_of_the_next_one():
    """Saved after an epoch, it starts the next; saved in the last step's body, the rest of the epoch is empty."""
    sharded = shard_loader(loader_of(4, batch_size=2))
    for _ in sharded:
        state = sharded.state_dict()
    assert {**sharded.state_dict(), "order": state["order"]} == {**state, "epoch": 1, "start": 0}
    resumed = shard_loader(loader_of(4, batch_size=2))
    resumed.load_state_dict(state)
    assert [list(resumed), len(list(resumed))] == [[], 2]


@pytest.mark.parametrize(
    ("loader", "changes", "message"),
    [
        (lambda: loader_of(8, shuffle=True), {"states": "x"}, "cannot go on from states='x'"),
        (
            lambda: DataLoader(numbers(8), sampler=DistributedSampler(numbers(8), 1, 0)),
            {"world_size": 2},
            "world_size=2 is loaded with world_size=1",
        ),
        (
            lambda: DataLoader(numbers(8), batch_size=4, sampler=DistributedSampler(numbers(8), 1, 0)),
            {"batch_size": 2, "start": 1},
            "batch_size=2 is loaded with batch_size=4",
        ),
    ],
)
def test_a_state_of_other_data_is_refused(loader, changes, message):
    """The data, its order and, for some loaders, the world size must match the saved ones."""
    sharded = shard_loader(loader())
    with pytest.raises(ConfigError, match=message):
        sharded.load_state_dict({**sharded.state_dict(), **changes})


# Iterables of batches


def test_lengths_of_iterables():
    """`len` counts this process's batches if the iterable has a length, else it raises a TypeError."""
    with as_rank(1, 2):
        assert len(shard_loader([1, 2, 3], tail="exact")) == 1
        assert len(shard_loader([1, 2, 3, 4, 5], limit=2)) == 2
        with pytest.raises(TypeError, match="the number of batches of this list_iterator is unknown"):
            len(shard_loader(iter([1, 2])))


# Random numbers, failures


class Draws(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


@pytest.mark.parametrize("seed", [None, 3])
def test_workers_draw_from_separate_streams(seed):
    """Random numbers differ by rank, worker and epoch, though all ranks have one seed, and repeat in another run."""

    def run():
        drawn = []
        for rank in range(2):
            with as_rank(rank, 2):
                torch.manual_seed(0)
                sharded = shard_loader(DataLoader(Draws(), batch_size=2, num_workers=2), seed=seed)
                drawn += [batch for _ in range(2) for batch in sharded]
        return torch.cat(drawn)

    with torch.random.fork_rng(devices=[]):
        first, second = run(), run()
    assert torch.equal(first, second)
    for column in first.T:
        assert len(set(column.tolist())) == len(column)


def test_a_generator_gives_the_same_streams_after_resuming():
    """Epochs after a resumed one draw as if it had not been interrupted, and each epoch draws other numbers."""

    def begin():
        generator = torch.Generator().manual_seed(1)
        return shard_loader(DataLoader(Draws(), batch_size=2, num_workers=2, generator=generator))

    with as_rank(0, 2):
        full, resumed = begin(), begin()
        epochs = []
        for _ in range(3):
            epochs.append([])
            for batch in full:
                epochs[-1].append(batch[:, 0].tolist())
                if len(epochs) == len(epochs[-1]) == 1:
                    state = full.state_dict()
        resumed.load_state_dict(state)
        list(resumed)
        assert [[batch[:, 0].tolist() for batch in resumed] for _ in range(2)] == epochs[1:]
    assert len({number for epoch in epochs for batch in epoch for number in batch}) == 12


# Progress


def test_only_rank_0_has_a_progress_bar(capsys):
    """It counts this process's batches."""
    for rank in range(2):
        with as_rank(rank, 2):
            list(shard_loader(loader_of(9, batch_size=2), progress="train"))
            bar = capsys.readouterr().err
            assert ("train: 100%" in bar and "3/3" in bar) == (rank == 0)
            assert bool(bar) == (rank == 0)


def test_a_mean_before_the_first_batch_is_refused():
    """Nothing belongs to it."""
    loader = shard_loader(DataLoader(torch.arange(10), batch_size=4))
    iter(loader)
    with pytest.raises(ConfigError, match="mean on a loader that was not iterated"):
        loader.mean(1.0)


def test_a_mean_of_neither_all_samples_nor_each_batch_is_refused():
    """Values of some of the batches have no weight."""
    loader = shard_loader(DataLoader(torch.arange(10), batch_size=4), tail="exact")
    batches = list(loader)
    assert loader.mean([batch.double().mean() for batch in batches]) == 4.5
    assert loader.mean(torch.cat(batches)) == 4.5
    with pytest.raises(ConfigError, match="mean of 2 values"):
        loader.mean([1.0, 2.0])


def shown(loader):
    """Iterate a loader as a progress bar does."""
    yield from loader


@pytest.mark.parametrize("through", [lambda loader: loader, shown])
def test_update_bn_of_a_part_of_the_data_is_warned_about(through):
    """Its batch norm statistics would differ between the processes; those of the loader itself are of all data."""
    loader, model = DataLoader(torch.arange(8.0)[:, None], batch_size=2), torch.nn.BatchNorm1d(1)
    with as_rank(0, 2):
        with pytest.warns(UserWarning, match=r"DataLoader itself: update_bn\(loader, model, device\(\)\)") as caught:
            update_bn(through(shard_loader(loader)), model)
        update_bn(loader, model)  # without a warning
    assert model.running_mean.item() == 3.5
    assert [each.filename for each in caught] == [__file__]
