"""The line of the user's program that a warning is about."""

from __future__ import annotations

import sys
import traceback

from parallelize.hang_detection.stack_frames import is_user_code

__all__ = ["user_stacklevel"]


def user_stacklevel() -> int:
    """Return the `stacklevel` with which the calling function warns at the innermost line of the user's program."""
    stack = enumerate(traceback.walk_stack(sys._getframe(1)), start=1)
    return next((level for level, (frame, _) in stack if is_user_code(frame)), 1)
