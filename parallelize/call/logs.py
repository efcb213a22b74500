"""Loggers of the caller in its workers, whose records come home to the caller's handlers.

    worker    a logger of the user's ──> _Forwarder ──> a line of JSON ──> RecordFile, or ssh
    caller    the line ──> handle_record ──> the logger of the same name, with its handlers

A record is formatted, as its arguments may not be sent, and keeps its other attributes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any, NamedTuple


class _LoggerSettings(NamedTuple):
    """Settings of a logger.

    Args:
        level: its level.
        propagates: whether its records go to the handlers of its parent.
        is_disabled: whether it drops all records.
        has_handlers: whether it has handlers of its own, beside those that do nothing.
    """

    level: int
    propagates: bool
    is_disabled: bool
    has_handlers: bool


@dataclass(frozen=True)
class LogSettings:
    """The loggers of a process.

    Args:
        loggers: their settings, by name; "": the root.
        formatter: of the root's first handler that has a plain one; None: there is none.
    """

    loggers: Mapping[str, _LoggerSettings]
    formatter: logging.Formatter | None

    @classmethod
    def capture(cls) -> LogSettings:
        """Return the logging settings of this process."""
        loggers = {}
        for name, logger in _loggers().items():
            has_handlers = any(type(h) is not logging.NullHandler for h in logger.handlers)
            loggers[name] = _LoggerSettings(
                logger.level, logger.propagate, logger.disabled, has_handlers
            )
        return cls(loggers, _plain_formatter())

    def apply(self, send: Callable[[str], object] | None = None) -> None:
        """Send the records that the caller's handlers would get to the caller.

        Handlers of modules that this process has imported are removed: the caller has them, too.
        Those that the function adds are this process's own.

        Args:
            send: sends a record as a line; None: this process of a cluster's job shows the records
                on stderr.
        """
        if send is None:
            handler: logging.Handler = logging.StreamHandler()
            handler.setFormatter(self.formatter)
        else:
            handler = _Forwarder(send)  # type: ignore[arg-type]  # its queue is a function
            for logger in _loggers().values():
                logger.handlers.clear()
        for name, settings in self.loggers.items():
            logger = logging.getLogger(name)
            logger.setLevel(settings.level)
            logger.propagate = settings.propagates
            logger.disabled = settings.is_disabled
            if settings.has_handlers and (send is not None or logger is logging.root):
                logger.addHandler(handler)


def _loggers() -> dict[str, logging.Logger]:
    """Return all loggers but torch's, which it sets up itself in every process."""
    names = ["", *logging.root.manager.loggerDict]
    return {name: logging.getLogger(name) for name in names if name.partition(".")[0] != "torch"}


def _plain_formatter() -> logging.Formatter | None:
    """Return the first formatter of the root's handlers that can be pickled.

    A formatter of another class, or with a converter of its own, may not be picklable.
    """
    for handler in logging.root.handlers:
        formatter = handler.formatter
        if type(formatter) is logging.Formatter and "converter" not in vars(formatter):
            return formatter
    return None


class _Forwarder(QueueHandler):
    """Sends records as lines of JSON; attributes that JSON does not have are sent as text."""

    # QueueHandler's attribute: here it is the function that sends a line.
    queue: Any
    last: logging.LogRecord | None = None

    def emit(self, record: logging.LogRecord) -> None:
        # A logger and its parent may have this handler, and each passes the record on.
        if record is not self.last:
            self.last = record
            super().emit(record)

    def enqueue(self, record: logging.LogRecord) -> None:
        self.queue(json.dumps(vars(record), default=str, skipkeys=True) + "\n")


class RecordMark(NamedTuple):
    """A line of a RecordFile.

    Args:
        sizes: how many bytes the rank had written to its stdout and to its stderr.
        record: attributes of the record that it logged then; None: it wrote to the other stream.
    """

    sizes: tuple[int, int]
    record: Mapping[str, Any] | None


class RecordFile:
    """A rank's file of log records, each with the place in its output where it was logged.

    So the caller shows output and records in the order of time, although they come in three files.

    Args:
        path: the file.
        streams: the files of the rank's stdout and stderr.
    """

    def __init__(self, path: Path, streams: Sequence[Path]) -> None:
        self._path = path
        self._streams = streams

    def mark(self, record: str = "null") -> None:
        """Append a line; a full disk loses it.

        Args:
            record: the record as JSON; "null": there is none, and output follows.
        """
        with contextlib.suppress(OSError):
            out, err = (stream.stat().st_size for stream in self._streams)
            with self._path.open("a") as file:
                file.write(f"[[{out}, {err}], {record.strip()}]\n")


def read_mark(line: str) -> RecordMark | None:
    """Return what a line of a RecordFile says; None: a killed worker has not completed it."""
    try:
        (out, err), record = json.loads(line)
    except ValueError:
        return None
    return RecordMark((out, err), record)


def handle_records(text: str, *, prefix: str, at_least: int) -> None:
    """Let this process's loggers handle the records in the lines that a `_Forwarder` has sent.

    Args:
        text: complete lines.
        prefix: put before each message.
        at_least: lowest level of the records that are handled.
    """
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # a line that a killed process has not completed
            handle_record(json.loads(line), prefix=prefix, at_least=at_least)


def handle_record(attributes: Mapping[str, Any], *, prefix: str, at_least: int) -> None:
    """Let this process's loggers handle a record, as `handle_records` does."""
    record = _record(attributes)
    if record.levelno < at_least or record.levelno <= logging.root.manager.disable:
        return
    record.msg = prefix + record.msg
    try:
        logging.getLogger(record.name).handle(record)
    except Exception:  # noqa: BLE001 - of the user's filter or handler: the call goes on
        traceback.print_exc()


def text_of_record(attributes: Mapping[str, Any]) -> str:
    """Return the text of a record: that of the first handler that has a formatter.

    The handlers are those of this process: of the record's logger, then of the logger's parents.
    """
    record = _record(attributes)
    for handler in _handlers_of(logging.getLogger(record.name)):
        if handler.formatter is not None:
            # The user's formatter may need an attribute that a filter sets, or raise anything.
            with contextlib.suppress(Exception):
                return handler.format(record)
    return logging.Formatter().format(record)


def _handlers_of(logger: logging.Logger) -> Iterator[logging.Handler]:
    """Yield the handlers of a logger, then those of its parents, whether it propagates or not."""
    yield from logger.handlers
    if logger.parent is not None:
        yield from _handlers_of(logger.parent)


def _record(attributes: Mapping[str, Any]) -> logging.LogRecord:
    record = logging.makeLogRecord(dict(attributes))
    record.levelname = logging.getLevelName(record.levelno)  # the caller may have named levels
    return record


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
