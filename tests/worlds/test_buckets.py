"""Buckets of gradients are sent while backward runs, and received while it runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallelize import DDPBackend, SyncError, all_reduce, distributed, no_sync, parallel_model, rank

WIDTH = 128
TWO_LAYERS = DDPBackend(bucket_cap_mb=2 * WIDTH * WIDTH * 4 / 2**20)
STEPS = 4


class Net(nn.Module):
    """Twelve layers and a head.

    Args:
        registers_head_first: before the layers; it is used last.
        is_reversed: whether the layers are used in the reverse of the order of their registration.
        pooler: which ranks use a layer that is registered last.
        repeats: whether the first layer is used twice, under reentrant checkpoints.
    """

    def __init__(
        self,
        *,
        registers_head_first: bool = False,
        is_reversed: bool = False,
        pooler: tuple[int, ...] | None = None,
        repeats: bool = False,
    ) -> None:
        super().__init__()
        if registers_head_first:
            self.head = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
        if not registers_head_first:
            self.head = nn.Linear(WIDTH, WIDTH)
        if pooler is not None:
            self.pooler = nn.Linear(WIDTH, WIDTH)
        self.is_reversed, self.users_of_pooler, self.repeats = is_reversed, pooler or (), repeats

    def blocks_in_order(self) -> list[nn.Module]:
        """Return the layers in the order in which they are used."""
        return list(self.blocks)[:: -1 if self.is_reversed else 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = self.blocks_in_order()
        if self.repeats:
            for _ in range(2):
                x = checkpoint(blocks[0], x.requires_grad_(), use_reentrant=True)
        for block in blocks[self.repeats :]:
            x = block(x).relu()
        y = self.head(x)
        if rank() in self.users_of_pooler:
            y = y + self.pooler(x)
        return y


def inputs(step: int = 0) -> torch.Tensor:
    """Return this rank's inputs of a step."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank()))


@contextlib.contextmanager
def collectives() -> Iterator[list[tuple[torch.Tensor, Any]]]:
    """Collect the tensors and works of the all-reduces that begin and are not waited for."""
    begun: list[tuple[torch.Tensor, Any]] = []
    all_reduce = dist.all_reduce

    def noted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        work = all_reduce(tensor, *args, **options)
        if options.get("async_op"):
            begun.append((tensor, work))
        return work

    dist.all_reduce = noted
    try:
        yield begun
    finally:
        dist.all_reduce = all_reduce


def sent(model: Net) -> tuple[int, int]:
    """Run a step; return how many buckets are sent before the last layers have gradients, and how many later."""
    first = model.blocks_in_order()[model.repeats]
    early: list[int] = []
    with collectives() as begun:
        handle = first.weight.register_hook(lambda _: early.append(len(begun)))
        model(inputs()).sum().backward()
        handle.remove()
    model.zero_grad()
    return early[0], len(begun) - early[0]


@distributed(processes=2)
def sent_in_a_steady_step(options: dict[str, Any], prepare: Callable[[Net], None] | None) -> tuple[int, int]:
    model = Net(**options)
    with parallel_model(model, backend=TWO_LAYERS):
        for step in range(STEPS):
            if prepare is not None and step == 0:
                prepare(model)
            if step == STEPS - 2:
                model.requires_grad_(True)
            counts = sent(model)
    return counts


def freeze_half(model: Net) -> None:
    for block in list(model.blocks)[3:9]:
        block.requires_grad_(False)


@pytest.mark.parametrize(
    ("options", "prepare", "most_late"),
    [
        pytest.param({}, None, 1, id="plain"),
        pytest.param({"pooler": ()}, None, 2, id="unused"),
        pytest.param({"pooler": (1,)}, None, 2, id="used by rank 1"),
        pytest.param({"pooler": (0,)}, None, 2, id="used by rank 0"),
        pytest.param({"registers_head_first": True}, None, 1, id="head first"),
        pytest.param({"is_reversed": True}, None, 1, id="reversed"),
        pytest.param({"repeats": True, "is_reversed": True}, None, 2, id="arrives twice"),
        pytest.param({}, freeze_half, 1, id="trained later"),
        pytest.param({"is_reversed": True, "pooler": ()}, freeze_half, 2, id="all of these"),
    ],
)
def test_buckets_are_sent_while_backward_runs(
    options: dict[str, Any], prepare: Callable[[Net], None] | None, most_late: int
) -> None:
    """In the order in which gradients arrive: late are the last one, and one of gradients that may be missing."""
    for early, late in sent_in_a_steady_step.all_ranks(options, prepare):
        assert early >= 5
        assert late <= most_late


@distributed(processes=2)
def trained(options: dict[str, Any], backend: DDPBackend) -> list[torch.Tensor]:
    """Train with an average, and return the weights."""
    torch.manual_seed(0)
    model = Net(**options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with parallel_model(model, backend=backend):
        for step in range(STEPS):
            optimizer.zero_grad()
            model(inputs(step)).square().mean().backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("options", [{"is_reversed": True}, {"pooler": (1,)}, {"repeats": True}], ids=str)
def test_the_order_of_buckets_does_not_change_the_bits(options: dict[str, Any]) -> None:
    """Of two ranks: those of one bucket with all gradients, which is sent at the end."""
    expected = trained(options, DDPBackend(bucket_cap_mb=1000))
    for weight, other in zip(trained(options, TWO_LAYERS), expected, strict=True):
        assert torch.equal(weight, other)


@distributed(processes=2)
def received_in_backward() -> tuple[list[bool], list[int]]:
    """Return whether gradients are the means, and how many flat tensors there are, while backward runs."""
    model = Net()
    are_means, alive = [], []
    with parallel_model(model, backend=TWO_LAYERS), collectives() as begun:

        def wait_for_all(_: torch.Tensor) -> None:
            while not all(work.is_completed() for _, work in begun):
                time.sleep(0.001)

        def look(_: torch.Tensor) -> None:
            gradient = model.head.weight.grad
            are_means.append(torch.equal(gradient, all_reduce(gradient, "mean")))
            flats = [ref(tensor) for tensor, _ in begun]
            begun.clear()
            alive.append(sum(flat() is not None for flat in flats))

        for step in range(STEPS):
            if step == STEPS - 1:
                model.blocks[3].weight.register_hook(wait_for_all)
                model.blocks[0].weight.register_hook(look)
            begun.clear()
            model(inputs(step)).square().mean().backward()
            model.zero_grad()
    return are_means, alive


def test_buckets_are_received_while_backward_runs() -> None:
    """Those that are averaged: `.grad` are the means, and all but the last flat tensors are gone."""
    for are_means, alive in received_in_backward.all_ranks():
        assert are_means == [True]
        assert alive[0] <= 2


@distributed(processes=2)
def after_a_pass_that_raises() -> bool:
    torch.manual_seed(0)
    model = Net()
    with parallel_model(model, backend=TWO_LAYERS):
        for step in range(2):
            model(inputs(step)).square().mean().backward()
            model.zero_grad()

        def fail(_: torch.Tensor) -> None:
            raise ArithmeticError

        handle = model.blocks[1].weight.register_hook(fail)
        with contextlib.suppress(ArithmeticError):
            model(inputs()).square().mean().backward()
        handle.remove()
        model.zero_grad()
        model(inputs()).square().mean().backward()
        gradient = model.blocks[0].weight.grad
        return torch.equal(gradient, all_reduce(gradient, "mean"))


def test_a_pass_after_one_that_has_raised() -> None:
    """It is averaged, though buckets of the other one were sent."""
    assert after_a_pass_that_raises.all_ranks() == [True, True]


class Alternating(nn.Module):
    """A layer that a step uses once or, under reentrant checkpoints, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.last, x, use_reentrant=True)
        return x


@distributed(processes=2)
def use_twice_later() -> None:
    model = Alternating()
    with parallel_model(model, backend=DDPBackend(bucket_cap_mb=0.00001)):
        for times in (1, 1, 2):
            model(inputs()[:, :4], times).sum().backward()


def test_a_gradient_that_accumulates_after_it_was_sent() -> None:
    """Its name is in the error."""
    with pytest.raises(SyncError, match=r"last\.\w+ of Alternating accumulated after it was sent"):
        use_twice_later()


@distributed(processes=2)
def accumulate_under_no_sync() -> tuple[int, int]:
    model = Net(pooler=())
    with parallel_model(model, backend=TWO_LAYERS):
        for _ in range(STEPS):
            with no_sync(model):
                model(inputs()).sum().backward()
            counts = sent(model)
    return counts


def test_the_order_is_learned_outside_of_no_sync() -> None:
    """Steps that begin with a pass under no_sync send as others do."""
    for early, late in accumulate_under_no_sync.all_ranks():
        assert early >= 5
        assert late <= 2
