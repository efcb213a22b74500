"""Training and evaluation with shard_loader: all processes together compute what one would."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from ranks import TORCHRUN, Checks
from torch import nn
from torch.utils.data import DataLoader, Sampler, Subset, SubsetRandomSampler, TensorDataset

from parallelize import SyncError, distributed, parallel_model, rank, shard_loader

check = Checks(processes=2, timeout=20)


def data(length):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(length, 3, generator=generator), torch.randn(length, 1, generator=generator))


def model():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss_of(net, x, y):
    return nn.functional.mse_loss(net(x.double()), y.double()) + 0.01 * sum(
        each.pow(2).sum() for each in net.parameters()
    )


def shuffled(length, batch_size):
    return DataLoader(data(length), batch_size, shuffle=True, generator=torch.Generator().manual_seed(0))


def train_in_one_process(length, batch_size, epochs):
    """Train in one process, on the batches of all processes together."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    loader = shuffled(length, batch_size)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(net, x, y).backward()
            optimizer.step()
    return torch.cat([each.detach().flatten() for each in net.parameters()])


def test_weighted_steps_equal_those_of_one_process():
    """On three ranks with uneven or missing last batches, to 1e-12; with tail="pad" they do not."""
    cases = [(length, "weighted", {}) for length in (23, 17, 9, 13)]
    cases += [(17, "weighted", {"backend": "fsdp"}), (17, "weighted", {"amp": "bf16"}), (17, "pad", {})]

    def train(length, tail, options):
        loader, net = shard_loader(shuffled(length, 4), tail=tail), model()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
        with parallel_model(net, **options):
            for _ in range(3):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss_of(net, x, y).backward()
                    optimizer.step()
        return torch.cat([each.detach().flatten() for each in net.parameters()])

    @distributed(processes=3)
    def run():
        return [train(*case) for case in cases]

    for found in run.all_ranks():
        for (length, tail, options), weights in zip(cases, found, strict=True):
            off = (weights - train_in_one_process(length, 12, 3)).abs().max()
            assert off < 1e-12 if tail == "weighted" else off > 1e-6, (length, options)


def grouped(batches):
    """Fetch groups of three batches, then yield them."""
    while group := list(itertools.islice(batches, 3)):
        yield from group


def test_weights_of_prefetched_batches_are_refused():
    """A wrong weight would give a wrong gradient; an epoch with equal weights is accepted."""

    @distributed(processes=2, timeout=20)
    def train(length):
        net = model()
        with parallel_model(net):
            for x, y in grouped(iter(shard_loader(DataLoader(data(length), batch_size=2), tail="weighted"))):
                loss_of(net, x, y).backward()

    train(12)
    with pytest.raises(SyncError, match="tail='weighted': a batch was taken before the backward pass of the previous"):
        train(9)


@pytest.mark.parametrize("options", [{}, {"verify_every": 100}], ids=["", "options"])
@pytest.mark.parametrize("batches", [None, 2])
def test_losses_that_are_collected_in_a_loop_are_refused(batches, options):
    """One backward pass after the loop has no weight, also if the loop is left early; one in the next loop has."""

    @distributed(processes=2, timeout=20)
    def train(collects):
        net, loader = model(), shard_loader(DataLoader(data(9), batch_size=3), batch="global", tail="weighted")
        with parallel_model(net, **options):
            losses = [loss_of(net, x, y) for x, y in itertools.islice(loader, batches)]  # no_grad was forgotten
            for x, y in loader:
                loss_of(net, x, y).backward()
            if collects:
                losses = [loss_of(net, x, y) for x, y in itertools.islice(loader, batches)]
                sum(losses).backward()

    train(False)
    with pytest.raises(SyncError, match="the loop over a loader ended before the backward pass of its batches"):
        train(True)


COLLECTS_BEFORE_THE_BLOCK = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from parallelize import parallel_model, shard_loader

data = TensorDataset(torch.ones(9, 1))
batches = list(shard_loader(DataLoader(data, batch_size=3), batch="global", tail="weighted"))
net = nn.Linear(1, 1)
with parallel_model(net):
    for (x,) in batches:
        net(x).mean().backward()
"""


def test_batches_that_a_script_collects_before_its_block_are_refused(run_script):
    """Under torchrun, without a decorator: their weights are gone when the block begins."""
    printed = run_script(COLLECTS_BEFORE_THE_BLOCK, launcher=TORCHRUN, check=False).stderr
    assert "the loop over a loader ended before the backward pass of its batches" in printed


class Batches(Sampler):
    """A batch sampler over a list of batches."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


ODD = torch.arange(1, 16, 2)
GATHERED = {
    "pad": ({"tail": "pad", "batch_size": 4}, range(16)),
    "exact, shuffled": ({"tail": "exact", "batch_size": 4, "shuffle": True}, range(16)),
    "weighted, shuffled": ({"tail": "weighted", "batch_size": 4, "shuffle": True}, range(16)),
    "tensors": ({"sampler": SubsetRandomSampler(ODD), "batch_size": 2}, ODD),
    "lists of tensors": ({"batch_sampler": Batches([list(each) for each in ODD.flip(0).split(3)])}, ODD),
    "a rank without samples": ({"length": 2, "batch_size": 4}, range(2)),
}


def gathered_rows(length=16, tail="exact", **options):
    loader = shard_loader(DataLoader(TensorDataset(torch.arange(length)), **options), tail=tail)
    seen = torch.cat([torch.zeros(0, dtype=torch.int64), *(x for (x,) in loader)])
    return loader.gather({"value": seen * 10, "rows": seen[:, None].expand(-1, 2)})


def test_results_come_back_in_dataset_order():
    """gather returns one row per sample on every rank, without repetitions, in any container, for any kind of index."""

    @distributed(processes=3)
    def evaluate():
        return {name: gathered_rows(**options) for name, (options, _) in GATHERED.items()}

    for found in evaluate.all_ranks():
        for name, (_, expected) in GATHERED.items():
            assert found[name]["value"].tolist() == [10 * int(each) for each in expected], name
            assert found[name]["rows"].shape == (len(expected), 2)


@distributed(processes=2)
def evaluate(way):
    loader, net = shard_loader(DataLoader(data(101), batch_size=7)), model()
    losses, sums = [], 0.0
    with parallel_model(net), torch.set_grad_enabled(way == "training"):
        for x, y in loader:
            losses.append((net(x.double()) - y.double()).square().mean())
            sums += losses[-1].item() * len(x)
    return {"exact": lambda: loader.mean(losses), "all": lambda: [sums], "none": lambda: None}.get(way, lambda: sums)()


def test_a_value_of_half_of_the_samples_is_named():
    """A number that rank 0 returns of an evaluation, while rank 1 returns another; not one of all, nor a list."""
    with pytest.warns(UserWarning, match=r"rank 0 returned [\d.]+, and rank 1 [\d.]+: each evaluated its own samples"):
        evaluate("half")
    assert evaluate("exact") == pytest.approx(evaluate.options(processes=1)("exact"), rel=1e-12)
    for way in ("all", "none", "training"):
        evaluate(way)
    assert len({*evaluate.all_ranks("half")}) == 2


@check
def results_of_an_unfinished_loop_are_gathered():
    """Also if the last iterated batch is the last one on some processes only."""
    loader = shard_loader(DataLoader(TensorDataset(torch.arange(9)), batch_size=2), tail="exact")
    seen = [x for _, (x,) in zip(range(2), loader)]  # noqa: B905 - the shorter ends
    assert (len(loader), loader.gather(torch.cat(seen)).tolist()) == (3 - rank(), list(range(8)))


@pytest.mark.parametrize("tail", ["exact", "pad"])
def test_a_value_for_each_sample_is_averaged_without_repeats(tail):
    """Also in a process whose only batch has one sample: its value could be the mean of a batch, too."""

    @distributed(processes=2, timeout=20)
    def evaluate():
        loader = shard_loader(DataLoader(TensorDataset(torch.arange(3.0)), batch_size=2), tail=tail)
        return loader.mean(torch.cat([x for (x,) in loader]))

    assert evaluate.all_ranks() == [1.0, 1.0]


def test_means_of_samples_on_one_process_alone_are_refused():
    """The other process passes the mean of its batches."""

    @distributed(processes=2, timeout=20)
    def evaluate():
        loader = shard_loader(DataLoader(TensorDataset(torch.arange(16.0)), batch_size=4), tail="exact")
        values = [x for (x,) in loader]
        return loader.mean(torch.cat(values) if rank() == 0 else [x.mean() for x in values])

    with pytest.raises(SyncError, match="a value for each sample on some processes"):
        evaluate()


@pytest.mark.parametrize("difference", ["epoch", "sampler"])
def test_results_of_different_orders_are_not_gathered(difference):
    """As after a loop on rank 0 alone, or of a sampler with its own random numbers: rows would be those of others."""

    @distributed(processes=2, timeout=20)
    def evaluate():
        torch.manual_seed(rank())
        sampler = SubsetRandomSampler(torch.randperm(16)[:12]) if difference == "sampler" else None
        loader = DataLoader(TensorDataset(torch.arange(16)), batch_size=4, sampler=sampler, shuffle=sampler is None)
        sharded = shard_loader(loader, tail="exact")
        if rank() == 0 and difference == "epoch":
            list(sharded)
        return sharded.gather(torch.cat([x for (x,) in sharded]))

    with pytest.raises(SyncError, match=r"different epochs or orders: \[1\] and 0|rank \d iterates epoch 0, "):
        evaluate()


DIFFERENCES = {
    "epoch": ({}, lambda loader: loader.set_epoch(rank()), "iterates epoch"),
    "length": ({}, lambda _loader: None, "8 samples"),
    "subset": ({}, lambda _loader: None, "order .* of the subset"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_loaders_that_differ_between_processes_are_refused_at_the_first_step(difference):
    """A different epoch, length or subset on one rank is an error before the first collective of the epoch."""
    options, change, message = DIFFERENCES[difference]

    @distributed(processes=2, timeout=20)
    def train():
        length = 8 + 4 * rank() if difference == "length" else 8
        chosen = torch.randperm(8, generator=torch.Generator().manual_seed(rank())).tolist()
        dataset = Subset(data(8), chosen) if difference == "subset" else data(length)
        loader = shard_loader(DataLoader(dataset, batch_size=2, **options))
        change(loader)
        net = model()
        with parallel_model(net):
            for x, y in loader:
                loss_of(net, x, y).backward()

    with pytest.raises(
        SyncError, match=rf"rank \d {message}|rank \d iterates epoch .*, where rank \d iterates|hold different data"
    ) as caught:
        train()
    assert "same data" in caught.value.faults[0].fix


@check
def loaders_that_one_process_iterates_alone_are_not_compared():
    """Rank 0 iterates another loader before the first step, and ranks evaluate between epochs."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader, validation = DataLoader(data(9), batch_size=2, shuffle=True), DataLoader(data(5), batch_size=2)
    steps = 0
    with parallel_model(net):
        for _ in range(2):
            for step, (x, y) in enumerate(shard_loader(loader)):
                if rank() == 0 and step == 0:
                    next(iter(shard_loader(DataLoader(data(3)))))
                optimizer.zero_grad()
                loss_of(net, x, y).backward()
                optimizer.step()
                steps += 1
            with torch.no_grad():
                for x, y in shard_loader(validation, tail="exact"):
                    loss_of(net, x, y)
                left_early = shard_loader(DataLoader(data(5)), tail="exact")
                for x, y in left_early:
                    loss_of(net, x, y)
                    break
    assert steps == 6


@check
def two_loaders_in_one_line_are_not_compared_with_each_other():
    """Two different loaders, made and iterated in one line, are no difference between the processes."""
    net, steps = model(), 0
    labelled, unlabelled = DataLoader(data(9), batch_size=2), DataLoader(data(13), batch_size=2, shuffle=True)
    with parallel_model(net):
        for (x, y), (u, _) in zip(shard_loader(labelled), shard_loader(unlabelled)):  # noqa: B905 - the shorter ends
            (loss_of(net, x, y) + net(u.double()).mean()).backward()
            steps += 1
    assert steps == 3


@check
def a_batch_keeps_its_weight_after_a_loop_over_another_loader():
    """The last batch of the outer loop, of unequal sizes, is weighted before and after the inner loop."""

    def train(loader, inner, block):
        torch.manual_seed(0)
        net = nn.Linear(3, 1).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with block(net):
            for (x,) in loader:
                for batches in ([(x,)], inner, [(x,)]):
                    for (each,) in batches:
                        optimizer.zero_grad()
                        net(each).square().mean().backward()
                        optimizer.step()
        return net.weight.detach()

    generator = torch.Generator().manual_seed(0)
    first, second = (TensorDataset(torch.randn(n, 3, generator=generator).double()) for n in (13, 11))

    loaders = [shard_loader(DataLoader(each, batch_size=4), tail="weighted") for each in (first, second)]
    found = train(*loaders, parallel_model)
    loaders = [DataLoader(each, batch_size=8) for each in (first, second)]
    torch.testing.assert_close(found, train(*loaders, contextlib.nullcontext))


@pytest.mark.parametrize("name", check)
def test_a_check_holds_on_all_ranks(name):
    """What the check's docstring says."""
    check.assert_holds(name)
