"""Where a thread is: the lines of the user's program on its stack, and the functions that they call."""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Sequence
from importlib.metadata import packages_distributions
from pathlib import Path
from types import FrameType, TracebackType

import torch
import torch.distributed

from parallelize.cluster.code_owner import CodeOwner, is_user_frame, owner_of_file, owner_of_frame

__all__ = [
    "Stack",
    "call_site",
    "call_site_in",
    "has_other_active_threads",
    "is_in_collective",
    "operation",
    "traceback_of",
    "with_root",
]

Stack = Sequence[tuple[FrameType, int]]
"""Frames with their line numbers, innermost first."""

_OWN = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_COLLECTIVES = str(torch.distributed.distributed_c10d.__file__)
_FUNCTIONAL_COLLECTIVES = _TORCH + "distributed/_functional_collectives.py"
_OPERATORS = (_TORCH + "_ops.py", _TORCH + "_library")  # Python frames of a custom operator's call


def call_site(stack: Stack = ()) -> str:
    """Return the innermost line of the user's program, or of an installed package: "train.py:41"; "" if none.

    Args:
        stack: the stack to search; empty: the stack of the caller.
    """
    stack = sorted(stack or traceback.walk_stack(sys._getframe(1)), key=lambda each: not is_user_frame(each[0]))
    for frame, line in stack:
        if owner_of_frame(frame) in (CodeOwner.USER, CodeOwner.INSTALLED):
            return f"{Path(frame.f_code.co_filename).name}:{line}"
    return ""


def call_site_in(text: str) -> str:
    """Return the innermost line of the user's program in a printed traceback of Python or faulthandler; "" if none."""
    lines = re.findall(r'File "(.+)", line (\d+),? in ', text)
    users = [f"{Path(file).name}:{line}" for file, line in lines if owner_of_file(file) is CodeOwner.USER]
    return users[0 if "(most recent call first)" in text else -1] if users else ""


def is_in_collective(stack: Stack) -> bool:
    """Whether the innermost frame waits for other ranks, and does not prepare a collective, as by pickling."""
    codes = (frame.f_code for frame, _ in stack)
    code = next(each for each in codes if not each.co_filename.startswith(_OPERATORS))
    if code.co_filename == _COLLECTIVES:
        return not code.co_name.startswith("_")
    return code.co_filename == _FUNCTIONAL_COLLECTIVES


def operation(stack: Stack) -> str:
    """Return the function that the user's innermost line calls, such as "backward", or else the one with that line.

    A call that waits for other ranks may say more: see `waiting_for`.
    """
    outermost = ""
    for frame, _ in stack:
        name = frame.f_code.co_name
        owner = owner_of_frame(frame)
        if owner is CodeOwner.USER:
            return outermost or name
        is_internal = name.startswith(("_", "<")) or name.endswith("wrapper")
        if owner in (CodeOwner.PARALLELIZE, CodeOwner.TORCH) and not is_internal:
            outermost = name
    return outermost


def with_root(signature: str, stack: Stack) -> str:
    """Add " (root 0)" to a signature if its call in torch.distributed is in the stack, and has such an argument."""
    for frame, _ in stack:
        if frame.f_code.co_filename == _COLLECTIVES and frame.f_code.co_name in signature:
            root = frame.f_locals.get("src", frame.f_locals.get("dst"))  # None: given as a rank of the group
            return signature if root is None else f"{signature} (root {root})"
    return signature


def traceback_of(stack: Stack) -> TracebackType | None:
    """Build a traceback from the user's function to the innermost frame, for an error made in another thread."""
    trace = None
    for frame, line in stack:
        if frame.f_code.co_filename == _OWN + "worker/function_run.py":
            break
        trace = TracebackType(trace, frame, frame.f_lasti, line)
    return trace


def has_other_active_threads(main: int) -> bool:
    """Whether a thread beside `main` and the calling one is in a module that may make a collective call.

    These are the user's modules, and those of libraries that use torch, whatever folder they are installed in. A timer
    may call any function.
    """
    frames = [each for ident, each in sys._current_frames().items() if ident not in {main, threading.get_ident()}]
    modules = {each.f_globals.get("__name__", "") for frame in frames for each, _ in traceback.walk_stack(frame)}
    packages = {each.partition(".")[0] for each in modules} - {"parallelize", "torch", *sys.stdlib_module_names}
    return (
        any(each.startswith("torch.distributed") for each in modules)
        or not packages <= packages_distributions().keys()
        or threading.Timer in map(type, threading.enumerate())
        or any(
            name.partition(".")[0] in packages and "torch" in getattr(module, "__dict__", ())
            for name, module in list(sys.modules.items())
        )
    )
