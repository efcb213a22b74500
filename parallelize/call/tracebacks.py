"""Tracebacks without the frames of this package, as they are shown to users; PARALLELIZE_TRACEBACK=full shows all.

raised in the function              shown
train.py      loss.backward()       train.py      loss.backward()
torch         _tensor.py, ...       SyncError: ...
parallelize   ...
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import cloudpickle
import torch

from parallelize.cluster.code_owner import CodeOwner, owner_of_frame
from parallelize.errors import ParallelizeError

_CLOUDPICKLE = str(Path(cloudpickle.__file__).parent) + os.sep
# torch.compiler.disable, which this package uses, calls its function from this file.
_CALLS_PACKAGE = str(Path(torch.__file__).parent / "_dynamo" / "external_utils.py")


class _FoldedTraceback(contextlib.AbstractContextManager[None]):
    """Context manager around the body of a public function: its exceptions leave without this package's frames.

    It has no state. On Python 3.10 the interpreter keeps the traceback as it was, and does not print notes: there the
    exception is folded when it ends the program, unless the program has an excepthook of its own.
    """

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # The interpreter re-raises `error` with its __traceback__; contextlib.contextmanager would restore the old one.
        if error is not None and not _is_full():
            shorten_chain(error)
        if (
            error is not None
            and sys.version_info < (3, 11)
            and sys.excepthook is sys.__excepthook__
        ):
            sys.excepthook = print_with_notes


folded_traceback = _FoldedTraceback()


def _is_full() -> bool:
    return os.environ.get("PARALLELIZE_TRACEBACK") == "full"


def print_with_notes(
    kind: type[BaseException], error: BaseException, _trace: TracebackType | None
) -> None:
    """Print an exception as Python 3.11 does, with its notes; an excepthook."""
    if not _is_full():
        shorten_chain(error)
    shown = traceback.format_exception(kind, error, error.__traceback__)
    sys.stderr.write("".join([*shown, *(f"{note}\n" for note in getattr(error, "__notes__", ()))]))


def shorten_chain(error: BaseException) -> None:
    """Remove this package's frames from the tracebacks of an exception, its causes and contexts.

    The frame that raises an exception which this package does not document is kept: it may be a
    defect of the package.
    """
    shared, pending, seen = error.__traceback__, [error], set[int]()
    while pending:
        each = pending.pop()
        seen.add(id(each))
        trace = in_users_code(each.__traceback__, keeps_last=_may_be_a_defect(each))
        # Assigning __traceback__ would fail on an exception that is a frozen dataclass.
        is_shared = each is not error and each.__traceback__ is shared
        BaseException.with_traceback(each, None if is_shared else trace)
        links = (each.__cause__, each.__context__)
        pending += [link for link in links if link is not None and id(link) not in seen]


def _may_be_a_defect(error: BaseException) -> bool:
    return (
        isinstance(error, Exception)
        and not isinstance(error, ParallelizeError)
        and not hasattr(error, "__notes__")
    )


def in_users_code(trace: TracebackType | None, *, keeps_last: bool = False) -> TracebackType | None:
    """Return a traceback without this package's frames; None if no frame of the user's program or packages is left.

    Frames of torch and of the standard library that lead to this package are left out, too.

    Args:
        trace: the traceback; not modified.
        keeps_last: whether the last frame is kept if it is this package's.
    """
    inner, is_inside, entries = None, False, list(_entries(trace))
    for each in reversed(entries):
        is_hidden = _is_own(each) and not (keeps_last and each is entries[-1])
        is_inside = is_inside or is_hidden
        if not (is_hidden or (is_inside and _is_underneath(each))):
            inner = TracebackType(inner, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return inner if is_inside else trace


def _is_own(entry: TracebackType) -> bool:
    """Whether code is this package's, or runs by the function of torch that calls this package's."""
    frame = entry.tb_frame
    return (
        owner_of_frame(frame) is CodeOwner.PARALLELIZE or frame.f_code.co_filename == _CALLS_PACKAGE
    )


def _is_underneath(entry: TracebackType) -> bool:
    """Whether code is torch's, Python's or cloudpickle's."""
    frame = entry.tb_frame
    is_cloudpickle = frame.f_code.co_filename.startswith(_CLOUDPICKLE)
    return is_cloudpickle or owner_of_frame(frame) in (CodeOwner.TORCH, CodeOwner.PYTHON)


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
