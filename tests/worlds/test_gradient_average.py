"""average=: N processes with unequal losses have the gradients of one process, after every backward pass."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import backward as imported_backward
from torch.autograd import grad as imported_grad
from torch.utils.data import DataLoader, TensorDataset

from parallelize import (
    Amp,
    ConfigError,
    distributed,
    no_sync,
    parallel_model,
    rank,
    shard_loader,
    world_size,
)
from parallelize.precision.native import NativePrecision

pytestmark = []  # shown by workers

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


def batch(ranks, i):
    """Return the batch of one process that has the micro-batches of all ranks in pass `i`."""
    return map(torch.cat, zip(*[micro_batch(r, i) for r in range(ranks)], strict=True))


def of_one_process(loss, *, ranks, passes):
    """Return the mean over the passes of the gradients of the batches of all ranks."""
    net = Net()
    for i in range(passes):
        x, t = batch(ranks, i)
        (loss(net(x), t) / passes).backward()
    return gradients(net)


def accumulate(net, loss, *, passes, inside=False, syncs_last_only=False):
    """Run the passes of a step with the user's `/ passes`; yield the gradients after each of them."""
    net.zero_grad()
    for i in range(passes):
        x, t = micro_batch(rank(), i)
        with no_sync(net) if syncs_last_only and i < passes - 1 else contextlib.nullcontext():
            value = net(x, t, loss) if inside else loss(net(x), t)
            (value / passes).backward()
        yield gradients(net) * passes / (i + 1)


def compare_all_losses():
    """Compare the gradients of all losses with those of one process."""
    for average, losses in (("tokens", LOSSES), ("sum", {"sum": partial(regression, nn.MSELoss(reduction="sum"))})):
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with parallel_model(net, average=average):
            for name, loss in losses.items():
                for inside in (False, True):
                    for i, found in enumerate(accumulate(net, loss, passes=3, inside=inside)):
                        expected = of_one_process(loss, ranks=world_size(), passes=i + 1)
                        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, msg=f"{name} {i} {inside}")
                    optimizer.step()
                *_, found = accumulate(net, loss, passes=3, syncs_last_only=True)
                expected = of_one_process(loss, ranks=world_size(), passes=3)
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, msg=f"{name} no_sync")
                optimizer.step()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_with_unequal_losses_have_the_gradients_of_the_full_batch(ranks):
    """All losses, in one pass and in accumulated ones, also under no_sync."""
    distributed(processes=ranks)(compare_all_losses)()


STEPS = 4


def fp16():
    """Return the request for fp16, which this process then accepts on the CPU; it leaves float64 as it is."""
    NativePrecision.dtypes = {"cpu": frozenset({torch.bfloat16, torch.float16})}
    return Amp(dtype=torch.float16, growth_interval=2)


def train(
    *,
    passes=1,
    average="tokens",
    last_only=False,
    loss=LOSSES["cross_entropy"],
    clip=0.3,
    **options,
):
    """Train on this rank's padded batches, with clipping; return the weights."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5 if clip else 0.001)
    with parallel_model(net, optimizers=optimizer, average=average, **options):
        for step in range(STEPS):
            optimizer.zero_grad()
            for i in range(passes):
                x, t = micro_batch(rank(), passes * step + i)
                with no_sync(net) if last_only and i < passes - 1 else contextlib.nullcontext():
                    value = loss(net(x), t)
                    (value / passes if passes > 1 else value).backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
    return torch.cat([each.detach().flatten() for each in net.parameters()])


def train_in_one_process(*, ranks, passes=1, loss=LOSSES["cross_entropy"], clip=0.3):
    """Train on the batches of all ranks at once."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5 if clip else 0.001)
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(passes):
            x, t = batch(ranks, passes * step + i)
            (loss(net(x), t) / passes).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in net.parameters()])


def compare_engines():
    """Return the greatest difference of a weight from one process, by what was trained."""
    found = {}
    for passes in (1, 3):
        expected = train_in_one_process(ranks=world_size(), passes=passes)

        def compare(name, expected=expected, passes=passes, **options):
            found[f"{name} {passes}"] = (train(passes=passes, **options) - expected).abs().max().item()

        compare("ranks", average="ranks")
        compare("ddp")
        compare("no_sync", last_only=True)
        compare("fsdp", backend="fsdp")
        compare("fsdp, no_sync", backend="fsdp", last_only=True)
        compare("loss scaling", amp=fp16(), last_only=True)
        compare("bf16", amp="bf16")
    vae = partial(regression, nn.MSELoss(reduction="sum"))
    expected = train_in_one_process(ranks=world_size(), loss=vae, clip=None)
    for average in ("ranks", "sum"):
        found[f"sum by {average}"] = (train(loss=vae, average=average, clip=None) - expected).abs().max().item()
    return found


def test_training_equals_that_of_one_process():
    """Engines, accumulation, no_sync, loss scaling, autocast and clipping; without average= the weights differ."""
    found = found_by_two_ranks()["engines"]
    wrong = {"ranks 1", "ranks 3", "sum by ranks"}
    assert {name for name, difference in found.items() if difference > 1e-2} == wrong
    precise = {name: each for name, each in found.items() if name not in wrong and "bf16" not in name}
    assert max(precise.values()) < 1e-12, found


def train_tail(data_length, *, average, world=None):
    """Train an epoch with a ragged tail; `world`: the number of ranks of which one process takes the batches."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(data_length, 4, 3, generator=generator, dtype=torch.float64)
    t = torch.randint(CLASSES, (data_length, 4), generator=generator)
    t[torch.arange(4) >= torch.randint(1, 5, (data_length, 1), generator=generator)] = PADDING
    loader = DataLoader(TensorDataset(x, t), batch_size=4 * (world or 1))
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with parallel_model(net, average=average) if world is None else contextlib.nullcontext():
        for x, t in shard_loader(loader, tail="weighted") if world is None else loader:
            optimizer.zero_grad()
            per_token(F.cross_entropy, net(x), t).backward()
            optimizer.step()
    return torch.cat([each.detach().flatten() for each in net.parameters()])


def compare_tails():
    return [
        (train_tail(length, average=average) - train_tail(length, average=average, world=3)).abs().max().item()
        for average in ("tokens", "ranks")
        for length in (17, 13, 24)
    ]


def test_a_ragged_tail_of_unequal_targets():
    """tail="weighted" weights by samples; with average="tokens", by targets, also where a rank has no sample."""
    differences = distributed(processes=3)(compare_tails)()
    assert max(differences[:3]) < 1e-12
    assert min(differences[3:]) > 1e-3


def adversarial(batch_of):
    """Take two steps of two models; return the gradients of both, of which the generator's are accumulated."""
    generator, critic = Net().double(), nn.Sequential(nn.Linear(CLASSES, 1)).double()
    steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, critic)]
    with parallel_model(generator, critic, average="tokens") if batch_of is micro_batch else contextlib.nullcontext():
        for i in range(2):
            x, _ = batch_of(rank(), i)
            steps[1].zero_grad()
            critic(generator(x).detach()).mean().backward()
            steps[1].step()
            steps[0].zero_grad()
            F.softplus(critic(generator(x))).mean().backward()  # also accumulates in the critic
            steps[0].step()
        return torch.cat([gradients(generator), gradients(critic)])


def compare_adversarial():
    def all_batches(_rank, i):
        return torch.cat([micro_batch(r, i)[0] for r in range(world_size())]), None

    return (adversarial(micro_batch) - adversarial(all_batches)).abs().max().item()


REFUSED = {
    r"a loss that is a sum \(NllLoss\)": lambda y, t: per_token(partial(F.cross_entropy, reduction="sum"), y, t),
    "a loss that Pow computes": lambda y, t: y.mean() ** 2,
    r"terms that average over": lambda y, t: y.mean() + per_token(F.cross_entropy, y, t),
}


def refusals():
    messages = []
    for loss in REFUSED.values():
        try:
            train(loss=loss)
        except ConfigError as error:
            messages.append(str(error))
    try:
        train(wrap=lambda model, _world: nn.Sequential(model))
    except ConfigError as error:
        messages.append(str(error))
    return messages


def test_losses_without_a_count_are_refused():
    """By the operation that computes them; so are unknown engines."""
    messages = found_by_two_ranks()["refusals"]
    for message, pattern in zip(messages[: len(REFUSED)], REFUSED, strict=True):
        assert re.search(rf"average='tokens' with .*{pattern}", message), message
    assert "average='tokens' with a wrap= that returns a Sequential" in messages[-1]


def test_two_models_that_take_turns_equal_one_process():
    """A generator's loss also accumulates in the discriminator."""
    assert found_by_two_ranks()["adversarial"] < 1e-12


def test_a_backward_imported_before_the_block_is_refused():
    """A function that bypasses the averaging would leave the gradients of this rank, in silence."""

    @distributed(processes=2)
    def run():
        for average in ("sum", "ranks"):
            for run_backward in (imported_backward, torch.autograd.Variable._execution_engine.run_backward):
                model = nn.Linear(2, 1)
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                with parallel_model(model, average=average):
                    y = model(torch.ones(3, 2))
                    imported_grad(y.sum(), [y], retain_graph=True)
                    if run_backward is imported_backward:
                        run_backward(y.sum())
                    else:
                        options = {"allow_unreachable": True, "accumulate_grad": True}
                        run_backward((y.sum(),), (torch.ones(()),), False, False, (), **options)
                    with pytest.raises(ConfigError, match=r"did not start at loss.backward\(\)"):
                        optimizer.step()

    run()


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


def compare_masked():
    """Return the gradients of both ranks, of which rank 1 has no targets, and those of rank 0's batch alone."""
    found = []
    for r in (rank(), 0):
        net, (x, t) = Net(), micro_batch(0, 0)
        t = torch.full_like(t, PADDING) if r else t
        with parallel_model(net, average="tokens") if r == rank() and not found else contextlib.nullcontext():
            losses = F.cross_entropy(net(x).transpose(1, 2), t.clamp(min=0), reduction="none") * (t != PADDING)
            (losses.sum() / (t != PADDING).sum().clamp(min=1)).backward()
        found.append(gradients(net))
    return found


def test_masked_targets_count_nothing_although_the_divisor_is_clamped():
    """A rank without targets computes 0 / 1, and has no part in the mean."""
    torch.testing.assert_close(*found_by_two_ranks()["masked"], rtol=0, atol=1e-12)


def warned(*, passes, loss, equal):
    """Return the warnings of rank 0's training; `equal`: all ranks have the same numbers of targets."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        with parallel_model(net):
            for step in range(STEPS):
                for i in range(passes):
                    x, t = micro_batch(0 if equal else rank(), passes * step + i)
                    (loss(net(x), t) / passes).backward()
                optimizer.step()
    return [str(each.message) for each in caught if "different numbers of targets" in str(each.message)]


def warned_tail():
    """Return the warnings of rank 0's training on unequal samples, which tail="weighted" makes up for."""
    data, net = TensorDataset(torch.randn(7, 4, 3, dtype=torch.float64)), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with warnings.catch_warnings(record=True) as caught, parallel_model(net):
        warnings.simplefilter("always")
        for (x,) in shard_loader(DataLoader(data, batch_size=4), tail="weighted"):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    return [str(each.message) for each in caught if "different numbers of targets" in str(each.message)]


def all_warnings():
    return {(1, "tail", True): warned_tail()} | {
        (passes, name, equal): warned(passes=passes, loss=LOSSES[name], equal=equal)
        for passes in (1, 3)
        for name in ("cross_entropy", "mse")
        for equal in (False, True)
    }


@functools.cache
def found_by_two_ranks():
    """Return what rank 0 finds in one launch."""

    @distributed(processes=2)
    def find():
        return {
            "warnings": all_warnings(),
            "engines": compare_engines(),
            "refusals": refusals(),
            "adversarial": compare_adversarial(),
            "masked": compare_masked(),
        }

    return find()


def test_unequal_counts_are_warned_about_once():
    """Between ranks; not between the backward passes of a step, which add up as in one process."""
    for (passes, _, equal), messages in found_by_two_ranks()["warnings"].items():
        assert len(messages) == (not equal), (passes, equal, messages)
        assert not messages or "average='tokens'" in messages[0]
