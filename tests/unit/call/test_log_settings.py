"""Console logging settings of the caller, pickled and applied in another process."""

from __future__ import annotations

import io
import logging
import pickle
import sys
from collections.abc import Iterator

import pytest

from parallelize.call.log_settings import LogSettings


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger; it is restored afterwards."""
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


def test_console_handlers_keep_level_and_format(root: logging.Logger) -> None:
    """Handlers that write elsewhere, to a file or a string, are left out."""
    console = logging.StreamHandler(sys.stdout)
    console.setFormatter(logging.Formatter("{name}-{message}", style="{"))
    console.setLevel(logging.INFO)
    root.handlers[:] = [console, logging.StreamHandler(io.StringIO())]
    root.setLevel(logging.DEBUG)
    logs = pickle.loads(pickle.dumps(LogSettings.capture()))
    root.handlers[:] = []
    root.setLevel(logging.WARNING)
    logs.apply()
    (handler,) = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    assert (handler.stream, handler.level, root.level) == (sys.stdout, logging.INFO, logging.DEBUG)
    assert handler.format(logging.makeLogRecord({"name": "a", "msg": "b"})) == "a-b"


def test_a_formatter_of_a_users_class_is_left_out(root: logging.Logger) -> None:
    """It may not be picklable; lines are shown without its format."""

    class Coloured(logging.Formatter):
        pass

    console = logging.StreamHandler()
    console.setFormatter(Coloured())
    root.handlers[:] = [console]
    assert pickle.loads(pickle.dumps(LogSettings.capture())).console_handlers == (("stderr", logging.NOTSET, None),)


def test_without_handlers_levels_are_left_to_the_function(root: logging.Logger) -> None:
    """A function that calls basicConfig itself sets the level, also of this package's logger."""
    before = root.handlers[:]
    LogSettings(level=logging.DEBUG, package_level=root.level, console_handlers=()).apply()
    assert root.handlers == before
    assert logging.getLogger("parallelize").level == logging.NOTSET
