"""average=: N processes with unequal losses have the gradients of one process, after every backward pass."""

from __future__ import annotations

import contextlib
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from ranks import Checks
from torch import nn
from torch.autograd import backward as imported_backward
from torch.autograd import grad as imported_grad
from torch.utils.data import DataLoader, TensorDataset

from parallelize import (
    Amp,
    ConfigError,
    all_reduce,
    distributed,
    no_sync,
    parallel_model,
    rank,
    shard_loader,
    world_size,
)
from parallelize.precision.native import NativePrecision

pytestmark = []  # shown by workers

check = Checks(processes=2)

CLASSES, PADDING = 5, -100
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.25, 1.5]).double()


def per_token(loss, y, t):
    return loss(y.flatten(0, 1), t.flatten())


def regression(loss, y, t):
    return loss(y, F.one_hot(t.clamp(min=0), CLASSES).to(y.dtype))


def masked_mean(y, t):
    losses = F.cross_entropy(y.transpose(1, 2), t.clamp(min=0), reduction="none")
    is_target = t != PADDING
    return (losses * is_target).sum() / is_target.sum()


def with_penalty(y, t):
    return per_token(F.cross_entropy, y, t) * 2 + torch.stack([per_token(nn.NLLLoss(), y, t)]).sum()


LOSSES = {
    "cross_entropy": partial(per_token, F.cross_entropy),
    "class weights": partial(per_token, nn.CrossEntropyLoss(weight=WEIGHTS)),
    "smoothing": partial(per_token, partial(F.cross_entropy, label_smoothing=0.1, weight=WEIGHTS)),
    "nll": lambda y, t: per_token(F.nll_loss, y.log_softmax(-1), t),
    "mse": partial(regression, F.mse_loss),
    "bce logits": partial(regression, F.binary_cross_entropy_with_logits),
    "masked mean": masked_mean,
    "mean": lambda y, t: regression(partial(F.mse_loss, reduction="none"), y, t).mean(),
    "several": with_penalty,
}
VAE = partial(regression, nn.MSELoss(reduction="sum"))


class Net(nn.Module):
    """Returns logits per token, or the loss if it gets one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()

    def forward(self, x, t=None, loss=None):
        y = self.layers(x)
        return y if loss is None else loss(y, t)


def micro_batch(r, i, *, length=4):
    """Return the batch of a rank and pass: 1 to 3 sequences with unequal padding."""
    generator = torch.Generator().manual_seed(10 * r + i)
    samples = 1 + (r + 2 * i) % 3
    x = torch.randn(samples, length, 3, generator=generator, dtype=torch.float64)
    t = torch.randint(CLASSES, (samples, length), generator=generator)
    t[torch.arange(length) >= torch.randint(1, length + 1, (samples, 1), generator=generator)] = PADDING
    return x, t


def gradients(net):
    return torch.cat([each.grad.detach().flatten() for each in net.parameters()]).clone()


def batch(i, *, alone=False):
    """Return the batch of this rank in pass `i`; alone: that of one process, with the micro-batches of all ranks."""
    ranks = range(world_size()) if alone else [rank()]
    return map(torch.cat, zip(*[micro_batch(r, i) for r in ranks], strict=True))


def block(*models, alone, **options):
    return contextlib.nullcontext() if alone else parallel_model(*models, **options)


def local(net, is_local):
    return no_sync(net) if is_local else contextlib.nullcontext()


def accumulate(net, loss, *, passes=3, alone=False, inside=False, last_only=False):
    """Run the passes of a step with the user's `/ passes`; return the mean gradients after each of them."""
    found = []
    net.zero_grad()
    for i in range(passes):
        x, t = batch(i, alone=alone)
        with local(net, last_only and i < passes - 1):
            value = net(x, t, loss) if inside else loss(net(x), t)
            (value / passes).backward()
        found.append(gradients(net) * passes / (i + 1))
    return found[-1:] if last_only else found


def compare_all_losses():
    """Compare the gradients of all losses with those of one process."""
    for average, losses in (("tokens", LOSSES), ("sum", {"sum": VAE})):
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with parallel_model(net, average=average):
            for name, loss in losses.items():
                expected = accumulate(Net(), loss, alone=True)
                for how in ({}, {"inside": True}, {"last_only": True}):
                    found = accumulate(net, loss, **how)
                    message = f"{name} {how}"
                    torch.testing.assert_close(found, expected[-len(found) :], rtol=0, atol=1e-12, msg=message)
                    optimizer.step()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_with_unequal_losses_have_the_gradients_of_the_full_batch(ranks):
    """All losses, in one pass and in accumulated ones, also under no_sync."""
    distributed(processes=ranks)(compare_all_losses)()


STEPS = 4


def train(*, passes=1, alone=False, last_only=False, loss=LOSSES["cross_entropy"], clip=0.3, **options):
    """Train on padded batches, with clipping, on all ranks or alone; return the weights."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5 if clip else 0.001)
    with block(net, alone=alone, **{"optimizers": optimizer, "average": "tokens", **options}):
        for step in range(STEPS):
            optimizer.zero_grad()
            for i in range(passes):
                x, t = batch(passes * step + i, alone=alone)
                with local(net, last_only and i < passes - 1):
                    value = loss(net(x), t)
                    (value / passes if passes > 1 else value).backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
    return torch.cat([each.detach().flatten() for each in net.parameters()])


@check
def training_equals_that_of_one_process():
    """Engines, accumulation, no_sync, loss scaling, autocast and clipping; without average= the weights differ."""
    NativePrecision.dtypes = {"cpu": frozenset({torch.bfloat16, torch.float16})}  # fp16 leaves float64 as it is
    engines = {
        "ranks": {"average": "ranks"},
        "ddp": {},
        "no_sync": {"last_only": True},
        "fsdp": {"backend": "fsdp"},
        "fsdp, no_sync": {"backend": "fsdp", "last_only": True},
        "loss scaling": {"amp": Amp(dtype=torch.float16, growth_interval=2), "last_only": True},
        "bf16": {"amp": "bf16"},
    }
    cases = [(f"{name} {passes}", {"passes": passes}, each) for passes in (1, 3) for name, each in engines.items()]
    cases += [(f"sum by {each}", {"loss": VAE, "clip": None}, {"average": each}) for each in ("ranks", "sum")]
    for name, what, options in cases:
        difference = (train(**what, **options) - train(**what, alone=True)).abs().max().item()
        if name in {"ranks 1", "ranks 3", "sum by ranks"}:
            assert difference > 1e-2, name
        else:
            assert difference < (1e-2 if "bf16" in name else 1e-12), name


def train_tail(data_length, *, average, alone=False):
    """Train an epoch with a ragged tail."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(data_length, 4, 3, generator=generator, dtype=torch.float64)
    t = torch.randint(CLASSES, (data_length, 4), generator=generator)
    t[torch.arange(4) >= torch.randint(1, 5, (data_length, 1), generator=generator)] = PADDING
    loader = DataLoader(TensorDataset(x, t), batch_size=4 * (world_size() if alone else 1))
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with block(net, alone=alone, average=average):
        for x, t in loader if alone else shard_loader(loader, tail="weighted"):
            optimizer.zero_grad()
            per_token(F.cross_entropy, net(x), t).backward()
            optimizer.step()
    return torch.cat([each.detach().flatten() for each in net.parameters()])


def test_a_ragged_tail_of_unequal_targets():
    """tail="weighted" weights by samples; with average="tokens", by targets, also where a rank has no sample."""

    @distributed(processes=3)
    def run():
        for length in (17, 13, 24):
            alone = train_tail(length, average=None, alone=True)
            assert (train_tail(length, average="tokens") - alone).abs().max() < 1e-12
            assert (train_tail(length, average="ranks") - alone).abs().max() > 1e-3

    run()


def adversarial(*, alone):
    """Take two steps of two models; return the gradients of both, of which the generator's are accumulated."""
    generator, critic = Net().double(), nn.Sequential(nn.Linear(CLASSES, 1)).double()
    steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, critic)]
    with block(generator, critic, alone=alone, average="tokens"):
        for i in range(2):
            x, _ = batch(i, alone=alone)
            steps[1].zero_grad()
            critic(generator(x).detach()).mean().backward()
            steps[1].step()
            steps[0].zero_grad()
            F.softplus(critic(generator(x))).mean().backward()  # also accumulates in the critic
            steps[0].step()
        return torch.cat([gradients(generator), gradients(critic)])


@check
def two_models_that_take_turns_equal_one_process():
    """A generator's loss also accumulates in the discriminator."""
    assert (adversarial(alone=False) - adversarial(alone=True)).abs().max() < 1e-12


REFUSED = {
    r"a loss that is a sum \(NllLoss\)": {
        "loss": lambda y, t: per_token(partial(F.cross_entropy, reduction="sum"), y, t)
    },
    "a loss that Pow computes": {"loss": lambda y, _: y.mean() ** 2},
    "terms that average over": {"loss": lambda y, t: y.mean() + per_token(F.cross_entropy, y, t)},
    "a wrap= that returns a Sequential": {"wrap": lambda model, _world: nn.Sequential(model)},
}


@check
def losses_without_a_count_are_refused():
    """By the operation that computes them; so are unknown engines."""
    for pattern, options in REFUSED.items():
        with pytest.raises(ConfigError, match=f"(?s)average='tokens' with .*{pattern}"):
            train(**options)


@check
def a_backward_imported_before_the_block_is_refused():
    """A function that bypasses the averaging would leave the gradients of this rank, in silence."""
    run_backward = torch.autograd.Variable._execution_engine.run_backward
    options = {"allow_unreachable": True, "accumulate_grad": True}
    for average in ("sum", "ranks"):
        for bypass in (
            imported_backward,
            lambda loss: run_backward((loss,), (torch.ones(()),), False, False, (), **options),
        ):
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with parallel_model(model, average=average):
                y = model(torch.ones(3, 2))
                imported_grad(y.sum(), [y], retain_graph=True)
                bypass(y.sum())
                with pytest.raises(ConfigError, match=r"did not start at loss.backward\(\)"):
                    optimizer.step()


@check
def masked_targets_count_nothing_although_the_divisor_is_clamped():
    """Rank 1 has no targets: it computes 0 / 1, and has no part in the mean, which is that of rank 0's batch alone."""
    found = []
    for alone in (False, True):
        net, (x, t) = Net(), micro_batch(0 if alone else rank(), 0)
        t = torch.full_like(t, PADDING) if rank() and not alone else t
        with block(net, alone=alone, average="tokens"):
            losses = F.cross_entropy(net(x).transpose(1, 2), t.clamp(min=0), reduction="none") * (t != PADDING)
            (losses.sum() / (t != PADDING).sum().clamp(min=1)).backward()
        found.append(gradients(net))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def detection(y, t, *, count=float):
    """Return a loss over boxes and one over anchors, of unequal numbers, divided by `count` of them."""
    is_box = t != PADDING
    boxes = F.cross_entropy(y.transpose(1, 2), t.clamp(min=0), reduction="none") * is_box
    anchors = F.smooth_l1_loss(y, torch.ones_like(y), reduction="none")
    return boxes.sum() / count(is_box.sum()) + anchors.sum() / count(anchors.numel())


def count_of_all_ranks(count):
    """Return the number by which the warning advises to divide the sum of a term."""
    return all_reduce(float(count), "mean")


@check
def terms_divided_by_the_counts_of_all_ranks_are_those_of_one_process():
    """Each with its own count, by which ranks of equal weight differ; accumulated passes, too."""
    found, expected = Net(), accumulate(Net(), detection, alone=True)
    with parallel_model(found):
        advised = accumulate(found, partial(detection, count=count_of_all_ranks))
        unequal = accumulate(found, detection)
        torch.optim.SGD(found.parameters(), 0.0).step()
    torch.testing.assert_close(advised, expected, rtol=0, atol=1e-12)
    assert (unequal[0] - expected[0]).abs().max() > 1e-3


@check
def the_warning_of_a_loss_of_several_counts_advises_what_works():
    """It names no average that such a loss has none of, and is silent where its advice is followed."""
    batches = [[micro_batch(rank(), 0)]] * 2
    advice = "term.sum() / parallelize.all_reduce(float(count), 'mean')"
    assert number_of_warnings(batches, loss=detection, advice=advice) == (rank() == 0)
    assert number_of_warnings(batches, loss=partial(detection, count=count_of_all_ranks)) == 0
    with pytest.raises(ConfigError, match="terms that average over") as caught:
        train(loss=detection)
    assert advice in caught.value.faults[0].fix


@check
def a_term_of_equal_counts_does_not_hide_another_one():
    """Whichever of the two is the first in the loss."""
    for order in (1, -1):

        def loss(y, t, order=order):
            terms = [y[:1].square().mean(), per_token(F.cross_entropy, y, t)][::order]
            return sum(terms)

        batches = [[micro_batch(rank(), 0)]]
        assert number_of_warnings(batches, loss=loss, advice="all_reduce") == (rank() == 0)


def number_of_warnings(batches, *, loss, advice="average='tokens'"):
    """Train on the batches of each step; return how often this rank is warned of unequal targets."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        with parallel_model(net):
            for passes in batches:
                for x, t in passes:
                    (loss(net(x), t) / len(passes)).backward()
                optimizer.step()
    messages = [str(each.message) for each in caught if "different numbers of targets" in str(each.message)]
    assert all(advice in each for each in messages)
    assert advice == "average='tokens'" or not any("average='tokens'" in each for each in messages)
    return len(messages)


@check
def unequal_counts_are_warned_about_once():
    """Between ranks; not between the backward passes of a step, nor of samples, for which tail="weighted" makes up."""
    for passes in (1, 3):
        for name in ("cross_entropy", "mse"):
            for equal in (False, True):
                of = 0 if equal else rank()
                batches = [[micro_batch(of, passes * step + i) for i in range(passes)] for step in range(STEPS)]
                found = number_of_warnings(batches, loss=LOSSES[name])
                assert found == (rank() == 0 and not equal), (passes, name, equal)
    data = TensorDataset(torch.randn(7, 4, 3, dtype=torch.float64))
    loader = shard_loader(DataLoader(data, batch_size=4), tail="weighted")
    assert number_of_warnings(([(x, None)] for (x,) in loader), loss=lambda y, _: y.square().mean()) == 0


@pytest.mark.parametrize("name", check)
def test_a_check_holds_on_all_ranks(name):
    """What the check's docstring says."""
    check.assert_holds(name)


def test_unknown_averages_are_refused():
    """With the nearest name."""
    with pytest.raises(ConfigError, match="did you mean 'tokens'"), parallel_model(Net(), average="token"):
        pass


def test_a_loss_through_two_blocks_is_refused():
    """Each of them would weight it."""
    first, second = Net(), nn.Linear(CLASSES, 1).double()
    with parallel_model(first, average="tokens"), parallel_model(second, average="tokens"):
        loss = second(first(micro_batch(0, 0)[0])).mean()
        with pytest.raises(ConfigError, match="a loss through models of two parallel_model blocks"):
            loss.backward()
