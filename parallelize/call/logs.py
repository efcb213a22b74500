"""Loggers of the caller in its workers, whose records come home to the caller's handlers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LogSettings:
    """The loggers of a process.

    Args:
        loggers: name -> level, whether it propagates, whether it is disabled, whether it has
            handlers; "": the root.
        formatter: of the root's first handler.
    """

    loggers: Mapping[str, tuple[int, bool, bool, bool]]
    formatter: logging.Formatter | None

    @classmethod
    def capture(cls) -> LogSettings:
        """Return the logging settings of this process."""
        loggers = {}
        for name, each in _loggers().items():
            has_handlers = any(type(h) is not logging.NullHandler for h in each.handlers)
            loggers[name] = each.level, each.propagate, each.disabled, has_handlers
        formatters = (each.formatter for each in logging.root.handlers)
        # One of another class, or with a converter of its own, may not be picklable.
        plain = (
            each
            for each in formatters
            if type(each) is logging.Formatter and "converter" not in vars(each)
        )
        return cls(loggers, next(plain, None))

    def apply(self, send: Callable[[str], object] | None = None) -> None:
        """Send the records that the caller's handlers would get to the caller.

        Handlers of modules that this process has imported are removed: the caller has them, too.
        Those that the function adds are this process's own.

        Args:
            send: sends a line for `handle_records`; None: this process of a cluster's job shows the records on stderr.
        """
        for each in _loggers().values() if send else ():
            each.handlers.clear()
        handler = _Forwarder(send) if send else logging.StreamHandler()  # type: ignore[arg-type]  # its queue sends
        handler.setFormatter(None if send else self.formatter)
        for name, (level, propagates, is_disabled, has_handlers) in self.loggers.items():
            logger = logging.getLogger(name)
            logger.setLevel(level)
            logger.propagate, logger.disabled = propagates, is_disabled
            if has_handlers and (send or logger is logging.root):
                logger.addHandler(handler)


def _loggers() -> dict[str, logging.Logger]:
    """Return all loggers but torch's, which it sets up itself in every process."""
    names = ["", *logging.root.manager.loggerDict]
    return {name: logging.getLogger(name) for name in names if name.partition(".")[0] != "torch"}


class _Forwarder(QueueHandler):
    """Sends records, an object of JSON per line; attributes that JSON does not have are sent as text."""

    queue: Any  # a function
    last: logging.LogRecord | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record is not self.last:  # it may come from another logger, too
            self.last = record
            super().emit(record)

    def enqueue(self, record: logging.LogRecord) -> None:
        self.queue(json.dumps(vars(record), default=str, skipkeys=True) + "\n")


def append_line(path: Path, line: str) -> None:
    """Append a line to a file; a full disk loses it."""
    with contextlib.suppress(OSError), path.open("a") as file:
        file.write(line)


def handle_records(text: str, *, prefix: str, at_least: int) -> None:
    """Let this process's loggers handle the records in the lines of a worker's file.

    Args:
        text: complete lines.
        prefix: put before each message.
        at_least: lowest level of the records that are handled.
    """
    for line in text.splitlines():
        try:
            record = logging.makeLogRecord(json.loads(line))
        except ValueError:  # a line that a killed worker has not completed
            continue
        if record.levelno >= at_least and record.levelno > logging.root.manager.disable:
            record.msg, record.levelname = prefix + record.msg, logging.getLevelName(record.levelno)
            try:
                logging.getLogger(record.name).handle(record)
            except Exception:  # noqa: BLE001 - of the user's filter or handler: the call goes on, and keeps its value
                traceback.print_exc()


@contextlib.contextmanager
def without_log_files() -> Iterator[None]:
    """Let file handlers open nothing: those of imported modules are open in the caller, too."""
    handler: Any = logging.FileHandler
    before = handler._open
    handler._open = lambda _: open(os.devnull, "w")  # noqa: PTH123, SIM115 - the handler closes it
    try:
        yield
    finally:
        handler._open = before
