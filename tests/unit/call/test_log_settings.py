"""What a caller sees of a log on her console travels."""

from __future__ import annotations

import io
import logging
import pickle
import sys
from collections.abc import Iterator

import pytest

from parallelize.call.log_settings import Logs


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, given back as it was."""
    root, last = logging.getLogger(), logging.lastResort
    handlers, level = root.handlers[:], root.level
    package = logging.getLogger("parallelize").level
    last_level = last.level if last else 0
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("parallelize").setLevel(package)
    if last:
        last.setLevel(last_level)


def test_handlers_on_the_console_travel_with_level_and_format(root: logging.Logger) -> None:
    """A file's and a string's handlers stay behind."""
    shown = logging.StreamHandler(sys.stdout)
    shown.setFormatter(logging.Formatter("{name}-{message}", style="{"))
    shown.setLevel(logging.INFO)
    root.handlers[:] = [shown, logging.StreamHandler(io.StringIO())]
    root.setLevel(logging.DEBUG)
    logs = pickle.loads(pickle.dumps(Logs.here()))
    root.handlers[:] = []
    root.setLevel(logging.WARNING)
    logs.settle()
    (handler,) = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    assert (handler.stream, handler.level, root.level) == (sys.stdout, logging.INFO, logging.DEBUG)
    assert handler.format(logging.makeLogRecord({"name": "a", "msg": "b"})) == "a-b"


def test_a_formatter_of_a_users_class_stays_behind(root: logging.Logger) -> None:
    """It may hold anything; lines come without its format."""

    class Coloured(logging.Formatter):
        pass

    shown = logging.StreamHandler()
    shown.setFormatter(Coloured())
    root.handlers[:] = [shown]
    assert pickle.loads(pickle.dumps(Logs.here())).shown == (("stderr", logging.NOTSET, None),)


def test_without_handlers_levels_are_left_to_the_function(root: logging.Logger) -> None:
    """A function that calls basicConfig itself decides what is seen, of this package too."""
    before = root.handlers[:]
    Logs(level=logging.DEBUG, package_level=root.level, shown=()).settle()
    assert root.handlers == before
    assert logging.getLogger("parallelize").level == logging.NOTSET
