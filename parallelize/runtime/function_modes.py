"""The stack of torch's function modes of this thread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

__all__ = ["function_modes", "replace_function_modes"]


def function_modes() -> list[Any]:
    """Return the active function modes, the innermost last."""
    modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch has no type for it
    return modes


def replace_function_modes(modes: Iterable[Any]) -> None:
    """Make these the active function modes, the innermost last.

    Modes are pushed and popped by the methods of the base class. Those of a default device reorder the stack, and store
    this thread's state on the mode, which other threads may share.
    """
    for former in reversed(function_modes()):
        TorchFunctionMode.__exit__(former, None, None, None)  # type: ignore[no-untyped-call]  # torch has no types
    for mode in modes:
        TorchFunctionMode.__enter__(mode)  # type: ignore[no-untyped-call]  # torch has no types
