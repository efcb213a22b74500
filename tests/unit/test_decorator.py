"""A decorated function is the function in all but its calls; decorating does nothing else."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
from collections.abc import AsyncIterator, Iterator

import pytest
import torch
import torch.distributed as dist

import parallelize
from parallelize import ConfigError, distributed


@distributed(processes=1, timeout=5)
def train(epochs: int, *, lr: float = 0.1) -> tuple[int, float]:
    """Train a model."""
    return epochs, lr


class Trainer:
    @distributed(processes=1)
    def fit(self, x: int) -> tuple[Trainer, int]:
        """Fit."""
        return self, x


def test_it_looks_like_the_function() -> None:
    """Name, docstring, module, signature and annotations are the user's."""
    plain = train.__wrapped__
    assert (train.__name__, train.__qualname__, train.__doc__) == ("train", "train", "Train a model.")
    assert train.__module__ == __name__
    assert inspect.signature(train) == inspect.signature(plain)
    assert inspect.unwrap(train) is plain
    assert inspect.getsource(train).startswith("@distributed")
    assert list(inspect.signature(Trainer.fit).parameters) == ["self", "x"]
    assert list(inspect.signature(Trainer().fit).parameters) == ["x"]
    assert train.__wrapped__(2, lr=1.0) == (2, 1.0)


def test_one_process_runs_here_and_gives_everything_back() -> None:
    """A world of one has a group of one, and leaves none behind; arguments and values are the very objects."""
    seen = {}
    here = object()

    @distributed(processes=1)
    def look(thing: object) -> object:
        seen.update(pid=os.getpid(), size=dist.get_world_size(), world=parallelize.world_size())
        return thing

    environ = dict(os.environ)
    assert look(here) is here
    assert look.all_ranks(here) == [here]
    assert seen == {"pid": os.getpid(), "size": 1, "world": 1}
    assert not dist.is_initialized()
    assert dict(os.environ) == environ


def test_methods_are_bound() -> None:
    """By instance, by class, and their options too."""
    trainer = Trainer()
    assert trainer.fit(3) == (trainer, 3)
    assert Trainer.fit(trainer, 4) == (trainer, 4)
    assert trainer.fit.options(timeout=3)(5) == (trainer, 5)
    assert trainer.fit.all_ranks(6) == [(trainer, 6)]


def test_options_leave_the_original_alone() -> None:
    """Each is a function with a request of its own."""
    other = train.options(timeout=9, seed=3)
    assert "9 s" in other.explain()
    assert "5 s" in train.explain()
    assert other(1) == train(1) == (1, 0.1)
    with pytest.raises(ConfigError, match="did you mean 'timeout'"):
        train.options(timeuot=3)


def test_wrong_options_are_refused_where_they_are_written() -> None:
    """Before any call, all at once."""
    with pytest.raises(ConfigError, match="2 faults") as caught:
        distributed(backend="dpp", processes=0)
    assert len(caught.value.faults) == 2


def test_a_decorator_without_parentheses_is_refused() -> None:
    """With what to write instead; the same where options are given without their names."""
    for given, named in ((train.__wrapped__, "train"), ("ddp", "str")):
        with pytest.raises(ConfigError, match=rf"distributed\({named}\)(.|\n)*write @distributed\(\)"):
            distributed(given)  # type: ignore[arg-type]  # the mistake


def test_what_has_no_name_is_explained_too() -> None:
    """A partial by the function it calls."""
    partial = distributed(processes=2)(functools.partial(train.__wrapped__, 3))
    assert partial.explain().startswith("train would run as\n")


async def coroutine() -> None: ...


async def async_generator() -> AsyncIterator[int]:
    yield 1


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (coroutine, "an async function"),
        (async_generator, "an async function"),
        (generator, "a generator function"),
        (functools.partial(generator), "a generator function"),
        (staticmethod(generator), "a generator function"),
        (Trainer, "a class"),
        (3, "a int"),
    ],
)
def test_what_does_not_return_one_value_is_refused(function: object, kind: str) -> None:
    """At decoration, with the kind and the fix."""
    with pytest.raises(ConfigError, match=f"@distributed on {kind}(.|\n)*plain function"):
        distributed()(function)


def test_it_pickles_by_name_like_a_function() -> None:
    """Where its name leads to it; a closure's does not."""
    assert pickle.loads(pickle.dumps(train)) is train
    assert pickle.loads(pickle.dumps(Trainer.fit)).__wrapped__ is Trainer.fit.__wrapped__
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(distributed(processes=1)(lambda: 1))


def test_an_exception_here_is_the_plain_one() -> None:
    """In the calling process the traceback itself is there, and needs no notes."""

    @distributed(processes=1)
    def fail() -> None:
        raise KeyError("lr")

    with pytest.raises(KeyError) as caught:
        fail()
    assert not hasattr(caught.value, "__notes__")
    assert not dist.is_initialized()


def test_a_call_inside_a_call_is_part_of_it() -> None:
    """The inner function runs in the outer one's world, whatever its own options say."""

    @distributed(processes=7)
    def inner() -> int:
        return dist.get_world_size()

    @distributed(processes=1)
    def outer() -> tuple[int, list[int]]:
        return inner(), inner.all_ranks()

    assert outer() == (1, [1])


def test_gradients_mode_is_the_callers() -> None:
    """What torch keeps per thread applies to a call in the calling process."""

    @distributed(processes=1)
    def mode() -> bool:
        return torch.is_grad_enabled()

    with torch.no_grad():
        assert not mode()
