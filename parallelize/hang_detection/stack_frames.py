"""Inspection of threads of this process: Python stacks, split into user and library code, and CPU time."""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import itertools
import os
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType

import torch
import torch.distributed

from parallelize.hang_detection.rank_state import Collective

__all__ = [
    "Stack",
    "ThreadCpuClock",
    "call_site",
    "call_site_in",
    "has_other_active_threads",
    "is_blocking",
    "is_in_distributed",
    "operation",
    "peers",
    "stack_of",
    "stack_of_error",
    "traceback_of",
    "user_lines",
    "user_stacklevel",
    "with_root",
]

Stack = Sequence[tuple[FrameType, int]]
"""Frames with their line numbers, innermost first."""

_OWN = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_COLLECTIVES = str(torch.distributed.distributed_c10d.__file__)
_BLOCKING = (
    _COLLECTIVES,
    _TORCH + str(Path("distributed/_functional_collectives.py")),
    _OWN + str(Path("block/reducer.py")),
    *(_TORCH + str(Path(each)) + os.sep for each in ("autograd", "nn/parallel")),
)
_OPERATORS = (_TORCH + "_ops.py", _TORCH + "_library" + os.sep)  # Python frames of a custom operator's call
_ON_DEVICE = tuple(_TORCH + each for each in ("cuda" + os.sep, "accelerator" + os.sep, "_tensor.py", "_tensor_str.py"))
_DEVICE_WAITS = {"item", "tolist", "cpu", "numpy", "synchronize", "wait", "float", "int", "bool"}
_IN_PROCESS, _HELPERS, _WORKER = (_OWN + name for name in ("worker/in_process.py", "collectives.py", "worker/main.py"))
_ROOTS = {"broadcast": "src", "scatter": "src", "reduce": "dst", "gather": "dst"}
_PEERS = {"recv": "src", "send": "dst"}
_MAX_LINES = 8
_TRACEBACK_LINE = re.compile(r'File "(.+)", line (\d+),? in ')
_IDLE_SHARE = 0.1


class ThreadCpuClock:
    """Compares a thread's CPU time with wall time.

    Args:
        ident: identifier of the thread, from threading.get_ident().
    """

    def __init__(self, ident: int) -> None:
        self._clock = time.pthread_getcpuclockid(ident) if hasattr(time, "pthread_getcpuclockid") else None
        self._last = (time.monotonic(), self._cpu_s())

    def is_idle(self) -> bool:
        """Whether the thread has used at most 10 % of a core since the last call; True if its CPU time is unknown."""
        (last, last_cpu_s), now, cpu_s = self._last, time.monotonic(), self._cpu_s()
        self._last = (now, cpu_s)
        return cpu_s - last_cpu_s <= _IDLE_SHARE * (now - last)

    def _cpu_s(self) -> float:
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)


def stack_of(frame: FrameType | None) -> Stack:
    """Return the stack of a thread, given its innermost frame."""
    stack = []
    while frame is not None:
        stack.append((frame, frame.f_lineno))
        frame = frame.f_back
    return stack


def stack_of_error(error: BaseException) -> Stack:
    """Return the frames of an error's traceback as a stack."""
    stack, trace = [], error.__traceback__
    while trace is not None:
        stack.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return stack[::-1]


@functools.cache
def _library_prefixes() -> tuple[str, ...]:
    """Return the path prefixes of library code: parallelize, torch, the standard library and installed packages."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (_OWN, _TORCH, "<frozen", *(folder + os.sep for folder in folders if folder))


def _is_user_code(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_library_prefixes())


def _is_own_or_torch(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((_OWN, _TORCH, "<frozen"))


def _innermost_user_frame(stack: Stack) -> tuple[FrameType, int] | None:
    """Return the innermost frame of the user's program, or of an installed package if the stack has no user code."""
    users = (each for each in stack if _is_user_code(each[0]))
    return next(users, None) or next((each for each in stack if not _is_own_or_torch(each[0])), None)


def _line(frame: FrameType, number: int) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{number}"


def user_stacklevel() -> int:
    """Return the `stacklevel` with which the calling function warns at the innermost line of the user's program."""
    frames = [each.frame for each in inspect.stack(context=0)[1:]]
    return 1 + next((level for level, frame in enumerate(frames) if _is_user_code(frame)), 0)


def call_site(stack: Stack | None = None) -> str:
    """Return the innermost line of the user's program: "train.py:41"; "" if the stack has no such line.

    Args:
        stack: the stack to search; None: the stack of the caller.
    """
    frame = _innermost_user_frame(stack_of(sys._getframe(1)) if stack is None else stack)
    return "" if frame is None else _line(*frame)


def user_lines(stack: Stack) -> tuple[str, ...]:
    """Return the lines of the user's program in a stack, outermost first: "train.py:30 in train"."""
    inside = itertools.takewhile(lambda each: each[0].f_code.co_filename != _WORKER, stack)  # up to the worker
    users = [f"{_line(*each)} in {each[0].f_code.co_name}" for each in inside if _is_user_code(each[0])]
    return tuple(users[:_MAX_LINES][::-1])


def is_blocking(stack: Stack, *, on_device: bool) -> bool:
    """Whether the innermost frame only waits for other ranks: in a collective or backward, or for a device.

    Args:
        stack: stack of a thread.
        on_device: whether a collective is pending on a device, for which `loss.item()` and `synchronize()` wait, too.
    """
    if not stack:
        return False
    frames = [frame for frame, _ in stack]
    frame = next((each for each in frames if not each.f_code.co_filename.startswith(_OPERATORS)), frames[0])
    file = frame.f_code.co_filename
    return file.startswith(_BLOCKING) or (on_device and (file.startswith(_ON_DEVICE) or bool(_device_wait(frame))))


def _device_wait(frame: FrameType) -> str:
    """Return the name of the called method or function if a frame is in a call that waits for a device, else ""."""
    name = ""
    for each in dis.get_instructions(frame.f_code):
        if each.offset >= frame.f_lasti:
            return name if each.opname.startswith(("CALL", "PRECALL")) and name in _DEVICE_WAITS else ""
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME"):
            name = str(each.argval)
        elif each.opname.startswith(("CALL", "STORE_", "POP_")):
            name = ""
    return ""


def is_in_distributed(stack: Stack) -> bool:
    """Whether the innermost frame is in a call of torch.distributed."""
    return bool(stack) and stack[0][0].f_code.co_filename == _COLLECTIVES


def operation(stack: Stack) -> str:
    """Return the call at the user's innermost line ("barrier('epoch')", "backward"), or the function with that line."""
    outermost = ""
    for frame, _ in stack:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if file == _HELPERS and name in ("_check_same_call", "_raise_remote_failure"):
            return str(frame.f_locals["call"])
        if file == _IN_PROCESS and name in ("_broadcast_value", "gather_values"):
            return "the return of its value"
        if _is_user_code(frame):
            return outermost or _device_wait(frame) or name
        if _is_own_or_torch(frame) and not name.startswith(("_", "<")) and not name.endswith("wrapper"):
            outermost = name
    return outermost


def with_root(collectives: Sequence[Collective], stack: Stack, *, failed: bool) -> Iterator[Collective]:
    """Yield the collectives; a single pending one gets its root rank, which only the stack shows.

    Args:
        collectives: collectives from the flight recorder, oldest first.
        stack: stack of the main thread.
        failed: whether torch has just raised an error in the last collective, which then counts as pending.
    """
    pending = [call for call in collectives if not call.is_completed] or list(collectives[-1:] if failed else ())
    for call in collectives:
        if pending == [call]:
            # With NCCL, the main thread may be in another operation than the pending one.
            roots = {name: parameter for name, parameter in _ROOTS.items() if name in call.signature}
            yield dataclasses.replace(call, root=_argument(stack, roots), is_completed=False)
        else:
            yield call


def peers(stack: Stack) -> tuple[int, ...]:
    """Return the peer rank of a torch.distributed.send or recv in a stack; empty if the stack has no such call."""
    peer = _argument(stack, _PEERS)
    return () if peer is None else (peer,)


def _argument(stack: Stack, names: dict[str, str]) -> int | None:
    """Return an integer argument of the torch.distributed call in a stack, or None; `names`: function -> parameter."""
    for frame, _ in stack:
        if frame.f_code.co_filename == _COLLECTIVES and frame.f_code.co_name in names:
            value = frame.f_locals.get(names[frame.f_code.co_name])
            return value if type(value) is int else None
    return None


def has_other_active_threads(main: int) -> bool:
    """Whether a thread other than `main` and the calling thread runs user code or a call of torch.distributed."""
    excluded = {main, threading.get_ident()}
    others = [stack_of(frame) for ident, frame in sys._current_frames().items() if ident not in excluded]
    return any(is_in_distributed(stack) or any(_is_user_code(frame) for frame, _ in stack) for stack in others)


def traceback_of(stack: Stack) -> TracebackType | None:
    """Build a traceback from the user's outermost frame to the innermost frame, for an error made in another thread."""
    trace = None
    inside = list(itertools.takewhile(lambda each: each[0].f_code.co_filename != _WORKER, stack))
    users = [number for number, (frame, _) in enumerate(inside) if _is_user_code(frame)]
    for frame, line in inside[: users[-1] + 1 if users else None]:
        trace = TracebackType(trace, frame, frame.f_lasti, line)
    return trace


def _is_own_elsewhere(file: str) -> bool:
    """Whether a file path of another process belongs to parallelize, which may be in another folder there."""
    _, separator, relative = file.rpartition(f"{os.sep}{Path(_OWN).name}{os.sep}")
    return bool(separator) and (Path(_OWN) / relative).exists()


def call_site_in(text: str) -> str:
    """Return the innermost line of the user's program in a printed traceback of Python or faulthandler; "" if none."""
    is_innermost_first = "(most recent call first)" in text
    users = [
        f"{Path(file).name}:{line}"
        for file, line in _TRACEBACK_LINE.findall(text)
        if not (file.startswith(_library_prefixes()) or _is_own_elsewhere(file))
    ]
    return users[0 if is_innermost_first else -1] if users else ""
