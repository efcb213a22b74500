"""The stack of torch's function modes of this thread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["function_modes", "replace_function_modes"]


def function_modes() -> list[Any]:
    """Return the active function modes, the innermost last."""
    return list(map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack())))


def replace_function_modes(modes: Iterable[Any]) -> None:
    """Make these the active function modes, the innermost last.

    Modes are pushed and popped without their methods. Those of a default device reorder the stack, and store this
    thread's state on the mode, which other threads may share.
    """
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)
