"""Calls and their outcomes are written to files and read back."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from parallelize.call.outcome import Outcome
from parallelize.call.task import Call, Task
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import Layout
from parallelize.errors import ConfigError, WorkerError

CPU = torch.device("cpu")


def plain() -> int:
    return 1


def layout(**options: Any) -> Layout:
    return Layout(Config.parse(processes=2, **options), 1, ((CPU,),) * 2)


numbers = (number for number in range(3))


def uses_a_generator() -> int:
    return next(numbers)


def train(model: object, loader: object = None, *more: object, epochs: object = 1) -> None: ...


class Trainer:
    def fit(self, loader: object) -> None: ...


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    """An argument or an option, but no global of a function that is pickled by name."""
    Task.of(Call(uses_a_generator, (), {}, layout())).write(tmp_path / "task")
    connect = functools.partial(print, numbers)
    with pytest.raises(ConfigError, match=r"option 'init_connection' cannot be pickled"):
        Task.of(Call(plain, (), {}, layout(init_connection=connect)))


class Holder:
    def __init__(self, item: object) -> None:
        self.item = item


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "name"),
    [
        (train, (numbers,), {}, "argument 'model' (first)"),
        (train, (1, numbers), {}, "argument 'loader' (second)"),
        (train, (1, 2, 3, numbers), {}, "fourth argument"),
        (train, (*range(11), numbers), {}, "12th argument"),
        (train, (1,), {"epochs": numbers}, "argument 'epochs'"),
        (train, (1, Holder([numbers])), {}, "argument 'loader'.item[0]"),
        (train, (1, {"all": numbers}), {}, "argument 'loader'['all']"),
        (Trainer.fit, (Trainer(), numbers), {}, "argument 'loader' (first)"),
        (Trainer.fit, (Holder(numbers), 1), {}, "self.item"),
        (print, (1, numbers), {}, "second argument"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_argument_is_named_by_its_parameter(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], name: str
) -> None:
    """With its place as the call has it, and its attribute or item by the parameter's name."""
    with pytest.raises(ConfigError) as caught:
        Task.of(Call(function, args, kwargs, layout()))
    assert str(caught.value).startswith(f"{name} cannot be pickled\n")


def test_a_lock_is_no_value() -> None:
    """It would be another lock in the caller."""
    with pytest.raises(WorkerError, match="the returned value cannot be pickled"):
        Outcome.returned(World(), threading.Lock()).dumps()


@pytest.mark.parametrize("lock", [threading.Lock(), threading.RLock(), threading.Condition()])
def test_a_lock_is_no_argument(lock: object) -> None:
    """The caller would take it for one that all ranks share."""
    with pytest.raises(ConfigError, match=r"argument 'model' \(first\) cannot be pickled(.|\n)*have its own"):
        Task.of(Call(train, (lock,), {}, layout()))


class ReadsLines:
    lines = numbers

    def fit(self) -> None: ...


def test_an_attribute_of_a_class_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot become an argument, so the fix is another one."""
    monkeypatch.setattr(ReadsLines, "__module__", "__main__")
    with pytest.raises(ConfigError) as caught:
        Task.of(Call(train, (ReadsLines(),), {}, layout()))
    assert str(caught.value).startswith("the attribute 'lines' of class 'ReadsLines' cannot be pickled\n")
    assert "__init__" in str(caught.value)
    assert "argument" not in str(caught.value)


WORLD = World(rank=1, local_rank=1, world_size=2, local_world_size=2)


def test_an_error_with_its_causes_traceback_shows_it_once() -> None:
    """torch's error, which the watchdog has explained, is shown as one line; any other cause keeps its traceback."""
    try:
        raise RuntimeError("closed by peer")
    except RuntimeError as error:
        explained = WorkerError("rank 1 has returned", why="it did", fix="do not").with_traceback(error.__traceback__)
        explained.__cause__ = error
    text = Outcome.raised(WORLD, explained).traceback
    assert text.count("Traceback (most recent call last)") == text.count('raise RuntimeError("closed by peer")') == 1
    assert text.startswith("RuntimeError: closed by peer\n")


class HoldsAGeneratorError(Exception):
    def __init__(self) -> None:
        super().__init__("held")
        self.numbers = numbers


class SpeechlessError(HoldsAGeneratorError):
    def __str__(self) -> str:
        raise ValueError("nothing to say")


class Unpicklable:
    def __reduce__(self) -> NoReturn:
        raise SpeechlessError


def test_a_reason_without_a_text_hides_no_name() -> None:
    """What cannot be pickled is named, also if the reason's own `__str__` raises."""
    with pytest.raises(ConfigError, match=r"argument 'model' \(first\) cannot be pickled\n(.|\n)*SpeechlessError"):
        Task.of(Call(train, (Unpicklable(),), {}, layout()))


@pytest.mark.parametrize(
    ("kind", "text"),
    [(HoldsAGeneratorError, "held"), (SpeechlessError, "(no text: its __str__ raised ValueError)")],
)
def test_an_exception_that_cannot_be_pickled_is_replaced(tmp_path: Path, kind: type[Exception], text: str) -> None:
    """Its type and text are in the message of the WorkerError; an error of its __str__ does not hide it."""
    Outcome.raised(WORLD, kind()).write(tmp_path / "outcome")
    error = Outcome.read(tmp_path / "outcome").error
    assert isinstance(error, WorkerError)
    assert str(error).startswith(f"{kind.__name__}: {text}\n")
    assert "generator" in str(error)


def test_an_exception_that_python_cannot_format_has_its_frames() -> None:
    """Python calculates with the attributes of a SyntaxError, to which a user's parser may have assigned anything."""
    try:
        raise SyntaxError("bad config", ("a.toml", 1, "column 3", "x = 1"))
    except SyntaxError as error:
        text = Outcome.raised(WORLD, error).traceback
    assert text.startswith("Traceback (most recent call last):\n")
    assert 'raise SyntaxError("bad config"' in text
    assert "SyntaxError: bad config" in text
