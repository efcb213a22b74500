"""Console logging settings of a process: captured in the caller, applied in each worker."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TextIO

__all__ = ["LogSettings"]

_PACKAGE = "parallelize"


@dataclass(frozen=True)
class LogSettings:
    """Logging levels and console handlers of a process; file handlers and other handlers are not copied to workers.

    Args:
        level: level of the root logger.
        package_level: effective level of this package's logger.
        console_handlers: (stream name, level, formatter) of each root handler that writes to stdout or stderr.
    """

    level: int
    package_level: int
    console_handlers: tuple[tuple[str, int, logging.Formatter | None], ...]

    @classmethod
    def capture(cls) -> LogSettings:
        """Return the logging settings of this process."""
        root = logging.getLogger()
        handlers = ((_stream_name(each), each.level, _picklable(each.formatter)) for each in root.handlers)
        on_console = tuple((name, level, formatter) for name, level, formatter in handlers if name is not None)
        return cls(root.level, logging.getLogger(_PACKAGE).getEffectiveLevel(), on_console)

    def apply(self) -> None:
        """Apply the settings to this new process; the root logger is unchanged if there are no console handlers."""
        root, package = logging.getLogger(), logging.getLogger(_PACKAGE)
        for name, level, formatter in self.console_handlers:
            stream: TextIO = getattr(sys, name)
            handler = logging.StreamHandler(stream)
            handler.setLevel(level)
            handler.setFormatter(formatter)
            root.addHandler(handler)
        if self.console_handlers:
            root.setLevel(self.level)
        if package.getEffectiveLevel() != self.package_level:
            package.setLevel(self.package_level)
        if logging.lastResort is not None:
            logging.lastResort.setLevel(min(self.package_level, logging.lastResort.level))


def _stream_name(handler: logging.Handler) -> str | None:
    """Return "stdout" or "stderr" for a handler that writes there, else None."""
    stream = getattr(handler, "stream", None)
    for name in ("stdout", "stderr"):
        if stream is not None and stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
            return name
    return None


def _picklable(formatter: logging.Formatter | None) -> logging.Formatter | None:
    """Return the formatter if its type is exactly logging.Formatter, else None: a subclass may not be picklable."""
    return formatter if type(formatter) is logging.Formatter else None
