"""Calls and their outcomes are written to files and read back."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelize.call.outcome import Outcome
from parallelize.call.task import Task
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import Layout
from parallelize.errors import ConfigError, WorkerError

CPU = torch.device("cpu")


def plain() -> int:
    return 1


def layout(**options: Any) -> Layout:
    return Layout(Config.parse(processes=2, **options), 1, ((CPU,),) * 2)


lock = threading.Lock()


def uses_a_lock() -> bool:
    return lock.acquire(blocking=False)


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    """An argument or an option, but no global of a function that is pickled by name."""
    Task(uses_a_lock, (), {}, layout()).write(tmp_path / "task")
    with pytest.raises(ConfigError, match="argument 0 cannot be pickled"):
        Task(uses_a_lock, (lock,), {}, layout()).write(tmp_path / "task")
    connect = functools.partial(print, lock)
    with pytest.raises(ConfigError, match=r"option 'init_connection' cannot be pickled"):
        Task(plain, (), {}, layout(init_connection=connect)).write(tmp_path / "task")


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


class HoldsALockError(Exception):
    def __init__(self) -> None:
        super().__init__("held")
        self.lock = lock


class SpeechlessError(HoldsALockError):
    def __str__(self) -> str:
        raise ValueError("nothing to say")


@pytest.mark.parametrize(
    ("kind", "text"),
    [(HoldsALockError, "held"), (SpeechlessError, "(no text: its __str__ raised ValueError)")],
)
def test_an_exception_that_cannot_be_pickled_is_replaced(tmp_path: Path, kind: type[Exception], text: str) -> None:
    """Its type and text are in the message of the WorkerError; an error of its __str__ does not hide it."""
    Outcome.raised(WORLD, kind()).write(tmp_path / "outcome")
    error = Outcome.read(tmp_path / "outcome").error
    assert isinstance(error, WorkerError)
    assert str(error).startswith(f"{kind.__name__}: {text}\n")
    assert "lock" in str(error)


def test_an_exception_that_python_cannot_format_has_its_frames() -> None:
    """Python calculates with the attributes of a SyntaxError, to which a user's parser may have assigned anything."""
    try:
        raise SyntaxError("bad config", ("a.toml", 1, "column 3", "x = 1"))
    except SyntaxError as error:
        text = Outcome.raised(WORLD, error).traceback
    assert text.startswith("Traceback (most recent call last):\n")
    assert 'raise SyntaxError("bad config"' in text
    assert "SyntaxError: bad config" in text
