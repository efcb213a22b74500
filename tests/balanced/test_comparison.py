"""Batches of a new kind are compared with their micro-batches once, which leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import pytest
import torch
from balanced.models import Chain, not_split_once, pipelined, rows, seeded
from torch import Tensor, nn

from parallelize import parallel_model
from parallelize.backends.balanced.plugin import BalancedBackend

SIZES: list[int] = []
"""Numbers of samples of the forwards of `Noting`: what forward puts into a global list is not seen."""


class Noting(Chain):
    """Notes its numbers of samples, and has memory for `most` samples at a time."""

    def __init__(self, most: int = 100) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: Tensor, *, squares: bool = False, texts: Sequence[str] = ()) -> Any:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("as on a device that is full")
        SIZES.append(len(x))
        y = super().forward(x)
        return y.square() if squares else y


def test_a_kind_of_batch_is_compared_once() -> None:
    """The first two micro-batches of each new kind run whole, too; the batches after it are split alone."""
    model, x = seeded(Noting), torch.randn(12, 8)
    with pipelined(model, rows(12), microbatches=3):
        for options in ({}, {"squares": True}):
            SIZES.clear()
            for _ in range(70):
                model(x, **options)
            assert SIZES == [8, 4, 4] + [4, 4, 4] * 70
        model.eval()
        SIZES.clear()
        with torch.no_grad():
            model(x)
        assert SIZES == [8, 4, 4, 4, 4, 4]


def test_a_small_first_batch_tells_nothing_of_larger_ones() -> None:
    """A batch that has no two micro-batches runs whole; later ones are compared, and joined."""
    model = seeded(Noting)
    plain = copy.deepcopy(model)
    with pipelined(model, rows(8)), not_split_once(None):
        for samples in (1, 8):
            x = torch.randn(samples, 8)
            torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize(("most", "compared"), [(3, [2, 1, 1]), (7, [4, 2, 2])])
def test_a_comparison_under_little_memory(most: int, compared: list[int]) -> None:
    """Where two micro-batches do not fit as one, fewer samples are compared, and the batch is split."""
    model, x = seeded(Noting), torch.randn(8, 8)
    expected = copy.deepcopy(model)(x)
    model.most = most
    SIZES.clear()
    inputs = rows(most)
    with pipelined(model, inputs, microbatches=8 // (most // 2 + most % 2)), not_split_once(None):
        torch.testing.assert_close(model(x), expected)
    planned, *_ = SIZES
    assert planned == most
    assert SIZES[1 : 1 + len(compared)] == compared


class Counting(Chain):
    """Runs whole, because forward changes state; draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(self.drop(x))


@pytest.mark.filterwarnings("ignore:batches like this one are not split")
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_batch_that_runs_whole_draws_the_numbers_of_one_process(microbatches: int) -> None:
    """Neither the plan nor the comparison draws numbers or leaves state, so that whole batches equal one process's."""
    model = seeded(Counting)
    plain = copy.deepcopy(model)
    x = torch.randn(8, 8)
    torch.manual_seed(3)
    expected = [plain(x) for _ in range(3)]
    torch.manual_seed(3)
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=microbatches)):
        for output in expected:
            assert torch.equal(model(x), output)
    assert model.calls == 3


class Cut(nn.Module):
    """Cuts its output to the most large values that a sample of the batch has; draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.last = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.drop(self.norm(x)))
        return y[:, : 1 + int((x > 9).sum(1).max())]


def test_a_failed_try_to_split_leaves_nothing_behind() -> None:
    """If the outputs of a later batch cannot be joined, it runs whole as in one process: numbers and statistics."""
    model = seeded(Cut)
    even = torch.randn(8, 8)
    uneven = even.clone()
    uneven[1, 1] = 10.0
    with pipelined(model, ((even,), {}), microbatches=2):
        model(even)
        plain = copy.deepcopy(model)
        torch.manual_seed(3)
        with not_split_once("cannot be joined"):
            output = model(uneven)
    torch.manual_seed(3)
    assert torch.equal(output, plain(uneven))
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


class Related(Chain):
    """Returns values without a gradient, each of which depends on all samples."""

    def __init__(self, related: Any) -> None:
        super().__init__()
        self.related = related

    def forward(self, x: Tensor) -> Any:
        return self.related(super().forward(x))


@pytest.mark.parametrize(
    "related",
    [
        lambda y: y.argsort(0),
        lambda y: y > y.mean(0),
        lambda y: torch.complex(y, y - y.mean(0)),
    ],
    ids=["integers", "Booleans", "complex numbers"],
)
def test_values_of_any_type_are_compared(related: Any) -> None:
    """Ranks within a batch, and what else depends on its other samples, are those of the whole batch."""
    model = seeded(lambda: Related(related))
    plain = copy.deepcopy(model)
    x = torch.randn(8, 8)
    with torch.no_grad(), pipelined(model, rows(8)):
        torch.testing.assert_close(model(x), plain(x))


class Moded(Chain):
    """Computes what an argument names."""

    def forward(self, x: Tensor, mode: Any, *_: Any) -> Any:
        y = super().forward(x)
        return y - y.mean(0) if mode in {"centered", Mode.CENTERED} else y


class Mode(Enum):
    """The same as an enum."""

    PLAIN = auto()
    CENTERED = auto()


@pytest.mark.parametrize("modes", [("plain", "centered"), (Mode.PLAIN, Mode.CENTERED)], ids=["texts", "an enum"])
def test_arguments_that_name_what_forward_computes(modes: tuple[Any, Any]) -> None:
    """A batch with another text or member of an enum is of another kind, which is compared."""
    model = seeded(Moded)
    plain = copy.deepcopy(model)
    x = torch.randn(8, 8)
    with pipelined(model, ((x, modes[0]), {})):
        with not_split_once(None):
            torch.testing.assert_close(model(x, modes[0]), plain(x, modes[0]))
        with not_split_once("differs from that of the batch"):
            torch.testing.assert_close(model(x, modes[1]), plain(x, modes[1]))


def test_texts_of_samples_make_no_new_kind() -> None:
    """Texts in a list, such as captions, are other ones in each batch, which is not compared again."""
    model, x = seeded(Noting), torch.randn(8, 8)
    with pipelined(model, rows(8), microbatches=2):
        model(x, texts=["a cat"])
        SIZES.clear()
        model(x, texts=["a dog"])
    assert SIZES == [4, 4]


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_of_backward_see_the_whole_batch(register: str) -> None:
    """A batch runs whole if a module in the model has a hook that would see the gradients of a part."""
    model, x = seeded(Chain), torch.randn(8, 8)
    shapes: list[torch.Size] = []
    with pipelined(model, rows(8)):
        getattr(next(model.children()), register)(lambda _module, *gradients: shapes.append(gradients[-1][0].shape))
        with not_split_once("has a hook"):
            model(x).sum().backward()
    assert [shape[0] for shape in shapes] == [8]


def test_a_hook_of_no_module() -> None:
    """A hook whose function is in no module of Python is a hook of the user's."""

    def hook(*_: Any) -> None:
        pass

    hook.__module__ = None  # type: ignore[assignment]  # as of functions that a program has built
    model, x = seeded(Chain), torch.randn(8, 8)
    expected = copy.deepcopy(model)(x)
    with pipelined(model, rows(8)), not_split_once("has a hook"):
        next(model.children()).register_forward_hook(hook)
        torch.testing.assert_close(model(x), expected)


def test_batches_that_run_whole_are_freed() -> None:
    """Inputs and outputs of such batches are freed at once, without the collector."""
    model = seeded(Counting)
    kept: list[weakref.ref[Tensor]] = []
    with pipelined(model, rows(8)):
        with not_split_once("forward changes calls"):
            model(torch.randn(8, 8))
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                x = torch.randn(8, 8)
                output = model(x)
                kept += [weakref.ref(x), weakref.ref(output)]
                del x, output
            assert [ref() for ref in kept] == [None] * 6
        finally:
            gc.enable()
