"""A stack of Python as the user's program sees it: where hers ends and the library's begins."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType

import torch
import torch.distributed

from parallelize.hang_detection.rank_state import Call

__all__ = [
    "Stack",
    "awaits",
    "doing",
    "has_others",
    "is_blocking",
    "is_in_distributed",
    "lines",
    "raised_in",
    "site",
    "site_in",
    "stack_of",
    "traceback_of",
    "with_root",
]

Stack = Sequence[tuple[FrameType, int]]
"""Frames and the lines where they are, innermost first."""

_OWN = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_COLLECTIVES = str(torch.distributed.distributed_c10d.__file__)
_BLOCKING = (_COLLECTIVES, *(_TORCH + str(Path(each)) + os.sep for each in ("autograd", "nn/parallel")))
_DECORATOR, _HELPERS, _WORKER = (_OWN + name for name in ("decorator.py", "collectives.py", "worker/main.py"))
_ROOTS = {"broadcast": "src", "scatter": "src", "reduce": "dst", "gather": "dst"}
_PEERS = {"recv": "src", "send": "dst"}
_MOST_LINES = 8
_PRINTED = re.compile(r'File "(.+)", line (\d+),? in ')


def stack_of(frame: FrameType | None) -> Stack:
    """The stack of a thread that runs, from its innermost frame."""
    found = []
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found


def raised_in(error: BaseException) -> Stack:
    """The stack that led to where an error was raised."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found[::-1]


@functools.cache
def _foreign() -> tuple[str, ...]:
    """What the files of code begin with that the user has not written."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (_OWN, _TORCH, "<frozen", *(folder + os.sep for folder in folders if folder))


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_foreign())


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((_OWN, _TORCH, "<frozen"))


def _stand(stack: Stack) -> tuple[FrameType, int] | None:
    """The innermost frame of the user's program; of an installed package, if no other is there."""
    users = (each for each in stack if _is_users(each[0]))
    return next(users, None) or next((each for each in stack if not _is_ours(each[0])), None)


def _line(frame: FrameType, number: int) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{number}"


def site(stack: Stack | None = None) -> str:
    """The innermost line of the user's program: "train.py:41"; "" if there is none.

    Args:
        stack: where to look; None: where this is called.
    """
    found = _stand(stack_of(sys._getframe(1)) if stack is None else stack)
    return "" if found is None else _line(*found)


def lines(stack: Stack) -> tuple[str, ...]:
    """The user's lines of a stack, outermost first: "train.py:30 in train"."""
    inside = itertools.takewhile(lambda each: each[0].f_code.co_filename != _WORKER, stack)  # of the function's call
    users = [f"{_line(*each)} in {each[0].f_code.co_name}" for each in inside if _is_users(each[0])]
    return tuple(users[:_MOST_LINES][::-1])


def is_blocking(stack: Stack) -> bool:
    """Whether a stack ends where torch itself waits for what other ranks send, and nothing else is done."""
    return bool(stack) and stack[0][0].f_code.co_filename.startswith(_BLOCKING)


def is_in_distributed(stack: Stack) -> bool:
    """Whether a stack ends where torch talks to other ranks."""
    return bool(stack) and stack[0][0].f_code.co_filename == _COLLECTIVES


def doing(stack: Stack) -> str:
    """What is called at the user's innermost line, "barrier('epoch')", "all_reduce", "backward"; else her function."""
    outermost = ""
    for frame, _ in stack:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if file == _HELPERS and name in ("_agree", "_meet"):
            return str(frame.f_locals.get("what") or frame.f_locals.get("where"))
        if file == _DECORATOR and name in ("_of_rank_0", "_everyones"):
            return "the return of its value"
        if _is_users(frame):
            return outermost or name
        if _is_ours(frame) and not name.startswith(("_", "<")) and not name.endswith("wrapper"):
            outermost = name
    return outermost


def with_root(calls: Sequence[Call], stack: Stack, *, failed: bool) -> Iterator[Call]:
    """The calls, the one that a stack is in with what only the stack knows of it.

    Args:
        calls: as the recorder has them, the oldest first.
        stack: of the main thread.
        failed: whether the last one has just failed, and is none that has ended.
    """
    waited_in = [call for call in calls if not call.is_over] or list(calls[-1:] if failed else ())
    for call in calls:
        if waited_in == [call]:
            yield dataclasses.replace(call, root=_argument(stack, _ROOTS), is_over=False)
        else:
            yield call


def awaits(stack: Stack) -> tuple[int, ...]:
    """The rank that a stack sends to or receives from, one of another."""
    peer = _argument(stack, _PEERS)
    return () if peer is None else (peer,)


def _argument(stack: Stack, names: dict[str, str]) -> int | None:
    for frame, _ in stack:
        if frame.f_code.co_filename == _COLLECTIVES and frame.f_code.co_name in names:
            value = frame.f_locals.get(names[frame.f_code.co_name])
            return value if type(value) is int else None
    return None


def has_others(main: int) -> bool:
    """Whether a thread other than `main` and the calling one runs the user's code, or talks to other ranks."""
    own = {main, threading.get_ident()}
    others = [stack_of(frame) for ident, frame in sys._current_frames().items() if ident not in own]
    return any(is_in_distributed(stack) or any(_is_users(frame) for frame, _ in stack) for stack in others)


def traceback_of(stack: Stack) -> TracebackType | None:
    """A traceback from the user's outermost line to the end of a stack, for an error raised on its behalf."""
    trace = None
    inside = list(itertools.takewhile(lambda each: each[0].f_code.co_filename != _WORKER, stack))
    users = [number for number, (frame, _) in enumerate(inside) if _is_users(frame)]
    for frame, line in inside[: users[-1] + 1 if users else None]:
        trace = TracebackType(trace, frame, frame.f_lasti, line)
    return trace


def _is_ours_elsewhere(file: str) -> bool:
    """Whether a file of another process is one of this library, which may be installed in another place there."""
    _, found, below = file.rpartition(f"{os.sep}{Path(_OWN).name}{os.sep}")
    return bool(found) and (Path(_OWN) / below).exists()


def site_in(text: str) -> str:
    """The innermost line of the user's program in a traceback that was printed, by Python or by its faulthandler."""
    is_innermost_first = "(most recent call first)" in text
    found = [
        f"{Path(file).name}:{line}"
        for file, line in _PRINTED.findall(text)
        if not (file.startswith(_foreign()) or _is_ours_elsewhere(file))
    ]
    return found[0 if is_innermost_first else -1] if found else ""
