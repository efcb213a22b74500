"""Hooks around optimizer steps run in their declared order, in whatever order contexts were entered."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from parallelize.torch_patches.step import (
    AfterStep,
    BeforeStep,
    after_step,
    before_step,
    change_closure,
)

BEFORE_AND_AFTER = [
    pytest.param(before_step, [*BeforeStep], register_optimizer_step_pre_hook, id="before"),
    pytest.param(after_step, [*AfterStep], register_optimizer_step_post_hook, id="after"),
]


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.zeros(1))
    return torch.optim.SGD([parameter], lr=1.0)


@contextlib.contextmanager
def noting(subscribe: Any, places: Sequence[Any], calls: list[Any]) -> Iterator[None]:
    """Enter a context for each place, one after the other, whose hook notes the place in `calls`."""
    with contextlib.ExitStack() as stack:
        for place in places:
            stack.enter_context(subscribe(place, lambda *_, place=place: calls.append(place)))
        yield


@pytest.mark.parametrize(("subscribe", "places", "_register"), BEFORE_AND_AFTER)
def test_the_order_of_contexts_does_not_matter(
    subscribe: Any, places: list[Any], _register: Any, optimizer: torch.optim.Optimizer
) -> None:
    """Every order of contexts has the same order of hooks; those of one place run as they were entered."""
    for entered in itertools.permutations(places):
        calls: list[Any] = []
        with noting(subscribe, entered, calls):
            optimizer.step()
        assert calls == places
    calls = []
    place = places[1]
    with (
        subscribe(place, lambda *_: calls.append("outer")),
        subscribe(place, lambda *_: calls.append("inner")),
    ):
        optimizer.step()
    assert calls == ["outer", "inner"]


@pytest.mark.parametrize(("subscribe", "places", "_register"), BEFORE_AND_AFTER)
def test_a_hook_leaves_with_its_context(
    subscribe: Any, places: list[Any], _register: Any, optimizer: torch.optim.Optimizer
) -> None:
    """A context that ends before another one takes its own hook away, and the last one torch's."""
    calls: list[Any] = []
    first, second = noting(subscribe, places[:1], calls), noting(subscribe, places[1:2], calls)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    optimizer.step()
    assert calls == [places[1]]
    second.__exit__(None, None, None)
    optimizer.step()
    assert calls == [places[1]]


@pytest.mark.parametrize(("subscribe", "places", "register"), BEFORE_AND_AFTER)
def test_hooks_of_the_user_keep_their_place(
    subscribe: Any, places: list[Any], register: Any, optimizer: torch.optim.Optimizer
) -> None:
    """A hook of all optimizers from before a context runs before its hook, and a later one after it."""
    calls: list[Any] = []
    with noting(subscribe, places[:1], calls):
        earlier = register(lambda *_: calls.append("the user's earlier hook"))
        with noting(subscribe, places[1:2], calls):
            later = register(lambda *_: calls.append("the user's later hook"))
            optimizer.step()
    earlier.remove()
    later.remove()
    assert calls == ["the user's earlier hook", *places[:2], "the user's later hook"]


def test_a_hook_gets_the_arguments_of_the_one_before(optimizer: torch.optim.Optimizer) -> None:
    """The closure that an early place has replaced is the one that a late place replaces, and that the step calls."""

    def adding(number: int) -> Any:
        def change(closure: Any) -> Any:
            return lambda: closure() * 10 + number

        return lambda _, args, kwargs: change_closure(change, args, kwargs)

    with before_step(BeforeStep.VERIFY, adding(2)), before_step(BeforeStep.SCALE, adding(1)):
        assert optimizer.step(lambda: 0.0) == 12.0
        assert optimizer.step(closure=lambda: 0.0) == 12.0
        assert optimizer.step() is None


def test_a_refused_step_reaches_no_later_hook(optimizer: torch.optim.Optimizer) -> None:
    """The hooks behind one that raises, and those after the step, are not called."""
    calls: list[Any] = []

    def refuse(*_: Any) -> None:
        raise ValueError("refused")

    with (
        noting(before_step, [BeforeStep.VERIFY, BeforeStep.WATCH], calls),
        noting(after_step, [AfterStep.COUNT], calls),
        before_step(BeforeStep.SCALE, refuse),
        pytest.raises(ValueError, match="refused"),
    ):
        optimizer.step()
    assert calls == [BeforeStep.WATCH]
