"""The line of the user's program that a warning is about."""

from __future__ import annotations

import sys
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallelize.cluster.code_owner import is_user_frame


@dataclass(frozen=True)
class UserLine:
    """A line of the user's program, which may be warned about later.

    Args:
        path: of the file.
        number: of the line.
        namespace: global variables of the line's module, where Python notes which warnings were
            shown.
    """

    path: str
    number: int
    namespace: dict[str, Any] = field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"{Path(self.path).name}:{self.number}"

    def warn(self, message: str) -> None:
        """Show a warning as if this line had called `warnings.warn`."""
        warnings.warn_explicit(
            message,
            UserWarning,
            self.path,
            self.number,
            module=self.namespace.get("__name__", "<unknown>"),
            registry=self.namespace.setdefault("__warningregistry__", {}),
        )


def user_line() -> UserLine | None:
    """Return the innermost line of the user's program in this thread; None: there is none."""
    for frame, number in traceback.walk_stack(sys._getframe(1)):
        if is_user_frame(frame):
            return UserLine(frame.f_code.co_filename, number, frame.f_globals)
    return None


def user_stacklevel() -> int:
    """Return the `stacklevel` by which the calling function warns at the user's innermost line.

    It is 1, the line of the call itself, if this thread runs no code of the user.
    """
    for level, (frame, _) in enumerate(traceback.walk_stack(sys._getframe(1)), start=1):
        if is_user_frame(frame):
            return level
    return 1
