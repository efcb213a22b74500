"""What a process shows of its log on its console, to be shown alike in another one."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TextIO

__all__ = ["Logs"]

_PACKAGE = "parallelize"


@dataclass(frozen=True)
class Logs:
    """The settings of logging that show on a console; files and other handlers are a process's own.

    Args:
        level: of the root logger.
        package_level: from which level on this package's log is seen.
        shown: handlers of the root logger that write to the console: stream's name, level, formatter.
    """

    level: int
    package_level: int
    shown: tuple[tuple[str, int, logging.Formatter | None], ...]

    @classmethod
    def here(cls) -> Logs:
        """Those of this process."""
        root = logging.getLogger()
        found = ((_console(each), each.level, _plain(each.formatter)) for each in root.handlers)
        shown = tuple((name, level, formatter) for name, level, formatter in found if name is not None)
        return cls(root.level, logging.getLogger(_PACKAGE).getEffectiveLevel(), shown)

    def settle(self) -> None:
        """Make them this process's, which has just started; without handlers, loggers are left to the user's code."""
        root, package = logging.getLogger(), logging.getLogger(_PACKAGE)
        for name, level, formatter in self.shown:
            stream: TextIO = getattr(sys, name)
            handler = logging.StreamHandler(stream)
            handler.setLevel(level)
            handler.setFormatter(formatter)
            root.addHandler(handler)
        if self.shown:
            root.setLevel(self.level)
        if package.getEffectiveLevel() != self.package_level:
            package.setLevel(self.package_level)
        if logging.lastResort is not None:
            logging.lastResort.setLevel(min(self.package_level, logging.lastResort.level))


def _console(handler: logging.Handler) -> str | None:
    """The name in sys of the stream that a handler writes to; None: it writes elsewhere."""
    stream = getattr(handler, "stream", None)
    for name in ("stdout", "stderr"):
        if stream is not None and stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
            return name
    return None


def _plain(formatter: logging.Formatter | None) -> logging.Formatter | None:
    """The formatter if it is logging's own; one of a user's class may not travel."""
    return formatter if type(formatter) is logging.Formatter else None
