"""The stack of torch's function modes of this thread."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

__all__ = ["function_modes", "replace_function_modes"]


def function_modes() -> list[Any]:
    """Return the active function modes, the innermost last."""
    modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch has no type for it
    return modes


def replace_function_modes(modes: list[Any]) -> None:
    """Make these the active function modes, the innermost last."""
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)
