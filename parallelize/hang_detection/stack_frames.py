"""Where a thread is: the lines of the user's program on its stack, and what they call.

A stack shows where a thread is, and not what it waits for. What this package waits for says so
itself: see `waiting_for`. The user's own calls of torch.distributed cannot, so that their frames
are looked for by the file of torch that they run in.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Collection, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch
import torch.distributed

from parallelize.cluster.code_owner import CodeOwner, owner_of_file, owner_of_frame

Stack = Sequence[tuple[FrameType, int]]
"""Frames with their line numbers, innermost first."""

_TORCH = str(Path(torch.__file__).parent) + os.sep
_COLLECTIVES = str(torch.distributed.distributed_c10d.__file__)
_FUNCTIONAL_COLLECTIVES = _TORCH + "distributed/_functional_collectives.py"
_OPERATORS = (_TORCH + "_ops.py", _TORCH + "_library")
"""Files whose frames are around the call of a custom operator."""
_EXCHANGES_OF_MESSAGES = frozenset(
    {"send", "recv", "isend", "irecv", "batch_isend_irecv", "monitored_barrier"}
)
"""Functions of torch.distributed that wait for messages, and begin no collective."""


def call_site(stack: Stack = ()) -> str:
    """Return the innermost line of the user's program: "train.py:41".

    If there is none, it is the innermost line of an installed package; "": there is none, either.

    Args:
        stack: the stack to search; empty: the stack of the caller.
    """
    line_of_package = ""
    for frame, line in stack or traceback.walk_stack(sys._getframe(1)):
        owner = owner_of_frame(frame)
        if owner is CodeOwner.USER:
            return _place(frame.f_code.co_filename, line)
        if owner is CodeOwner.INSTALLED and not line_of_package:
            line_of_package = _place(frame.f_code.co_filename, line)
    return line_of_package


def call_site_in(text: str) -> str:
    """Return the innermost line of the user's program in a printed traceback; "": it has none.

    Args:
        text: printed by Python, which has the innermost line last, or by its faulthandler, which
            has it first, and says so.
    """
    places = []
    for path, line in re.findall(r'File "(.+)", line (\d+),? in ', text):
        if owner_of_file(path) is CodeOwner.USER:
            places.append(_place(path, line))
    if not places:
        return ""
    if "(most recent call first)" in text:
        return places[0]
    return places[-1]


def _place(path: str, line: int | str) -> str:
    return f"{Path(path).name}:{line}"


def is_in_collective(stack: Stack) -> bool:
    """Whether the innermost frame waits for other ranks, and does not prepare that, as by pickling.

    Functions of torch.distributed whose names have an underscore prepare a collective.
    """
    for frame, _ in stack:
        code = frame.f_code
        if code.co_filename.startswith(_OPERATORS):
            continue
        if code.co_filename == _COLLECTIVES:
            return not code.co_name.startswith("_")
        return code.co_filename == _FUNCTIONAL_COLLECTIVES
    return False


def is_in_exchange_of_messages(stack: Stack) -> bool:
    """Whether the innermost frame waits for a message, and so for no collective that is pending."""
    if not stack:
        return False
    code = stack[0][0].f_code
    return code.co_filename == _COLLECTIVES and code.co_name in _EXCHANGES_OF_MESSAGES


def operation(stack: Stack) -> str:
    """Return the function that the user's innermost line calls, or else the one with that line.

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
    """Add " (root 0)" to a signature whose call has such an argument.

    The recorder does not note the root. The call is the user's, of a function of torch.distributed,
    whose documented arguments are read: `src` or `dst`.

    Args:
        signature: of the collective that the thread is in: "broadcast of float32[4]".
        stack: of the thread.
    """
    for frame, _ in stack:
        code = frame.f_code
        if code.co_filename == _COLLECTIVES and code.co_name in signature:
            arguments = frame.f_locals
            root = arguments.get("src", arguments.get("dst"))
            # The caller may have said which rank of the group it is, as `group_src=`.
            if root is None:
                return signature
            return f"{signature} (root {root})"
    return signature


def traceback_of(stack: Stack, caller: CodeType | None) -> TracebackType | None:
    """Build a traceback of a stack, for an error that is made in another thread.

    Args:
        stack: the stack.
        caller: the code that has called the user's function; the traceback begins below it. None:
            it begins at the outermost frame.
    """
    trace = None
    for frame, line in stack:
        if frame.f_code is caller:
            break
        trace = TracebackType(trace, frame, frame.f_lasti, line)
    return trace


def has_other_active_threads(main: int) -> bool:
    """Whether another thread of this process may make a collective call.

    It may if it runs a module of the user, or of a library that uses torch, whatever folder that is
    installed in. A timer may call any function.

    Args:
        main: number of the main thread, which does not count, as the calling one does not.
    """
    if any(isinstance(thread, threading.Timer) for thread in threading.enumerate()):
        return True
    modules = _modules_of_threads(without={main, threading.get_ident()})
    packages = set()
    for module in modules:
        if module.startswith("torch.distributed"):
            return True
        packages.add(module.partition(".")[0])
    packages -= {"parallelize", "torch", *sys.stdlib_module_names}
    if not packages:
        return False
    is_installed = packages <= packages_distributions().keys()
    return not is_installed or _use_torch(packages)


def _modules_of_threads(without: Collection[int]) -> set[str]:
    """Return the names of the modules whose functions run in threads.

    Args:
        without: numbers of threads that do not count.
    """
    modules = set()
    for thread, innermost in sys._current_frames().items():
        if thread in without:
            continue
        for frame, _ in traceback.walk_stack(innermost):
            modules.add(frame.f_globals.get("__name__", ""))
    return modules


def _use_torch(packages: Collection[str]) -> bool:
    """Whether an imported module of one of these packages has imported torch."""
    for name, module in list(sys.modules.items()):
        is_of_package = name.partition(".")[0] in packages
        # Some programs put other objects than modules there.
        if is_of_package and "torch" in getattr(module, "__dict__", ()):
            return True
    return False
