"""Tracebacks of exceptions as users see them: without the frames of this package.

    raised in the function              shown
    train.py      loss.backward()       train.py      loss.backward()
    torch         _tensor.py, ...       SyncError: ...
    parallelize   ...

PARALLELIZE_TRACEBACK=full shows all frames.

The words of this file:

    entry         one line of a traceback: a frame, and the line that it has reached
    own           of this package
    underneath    of torch, cloudpickle or the standard library, through which a user's line reaches
                  this package, and this package reaches the user's code
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType

import cloudpickle
import torch

from parallelize.cluster.code_owner import CodeOwner, owner_of_frame
from parallelize.errors import ParallelizeError, SyncError

_CLOUDPICKLE = str(Path(cloudpickle.__file__).parent) + os.sep
# torch.compiler.disable, which this package uses, calls its function from this file.
_CALLS_PACKAGE = str(Path(torch.__file__).parent / "_dynamo" / "external_utils.py")


class _FoldedTraceback(contextlib.AbstractContextManager[None]):
    """The context around the body of a public function: exceptions leave it as users see them.

    It has no state. It is a class, because `contextlib.contextmanager` would restore the traceback
    that the exception had before.
    """

    def __exit__(
        self,
        _error_type: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Shorten the traceback of an exception, with which the interpreter goes on."""
        if error is not None:
            shorten_chain(error)


folded_traceback = _FoldedTraceback()


def shorten_chain(error: BaseException) -> None:
    """Remove this package's frames from the tracebacks of an exception, its causes and contexts.

    The frame that raises an exception which this package does not document is kept: it may be a
    defect of the package. A SyncError says what each rank does at its line of the program; what
    torch does below that line is left out, also in the exceptions that the SyncError explains.
    """
    if os.environ.get("PARALLELIZE_TRACEBACK") == "full":
        return
    explains_torch = isinstance(error, SyncError)
    traceback_of_error = error.__traceback__
    pending = [error]
    seen_ids: set[int] = set()
    while pending:
        shortened = pending.pop()
        seen_ids.add(id(shortened))
        traceback = in_users_code(
            shortened.__traceback__,
            keeps_last=_may_be_a_defect(shortened),
            hides_underneath=explains_torch,
        )
        if shortened is not error and shortened.__traceback__ is traceback_of_error:
            # The same frames would be shown twice.
            traceback = None
        # Assigning __traceback__ would fail on an exception that is a frozen dataclass.
        BaseException.with_traceback(shortened, traceback)
        links = (shortened.__cause__, shortened.__context__)
        pending += [link for link in links if link is not None and id(link) not in seen_ids]


def _may_be_a_defect(error: BaseException) -> bool:
    """Whether an exception that this package raises may be a defect of it: it is not documented."""
    is_documented = isinstance(error, ParallelizeError) or hasattr(error, "__notes__")
    return isinstance(error, Exception) and not is_documented


def in_users_code(
    traceback: TracebackType | None, *, keeps_last: bool = False, hides_underneath: bool = False
) -> TracebackType | None:
    """Return a traceback without this package's frames, and without those underneath.

    Frames underneath are left out only where they lead to a frame of this package.

    Args:
        traceback: the traceback; not modified.
        keeps_last: whether the last frame is kept if it is this package's.
        hides_underneath: whether frames underneath are also left out after the last line of the
            user's program, or of an installed package.

    Returns:
        None if no frame is left. If there is nothing to leave out, the same object.
    """
    entries: list[TracebackType] = []
    entry = traceback
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    shortened: TracebackType | None = None
    # Whether frames underneath are left out from here on, outwards.
    leads_to_hidden = hides_underneath
    is_shortened = False
    for entry in reversed(entries):
        is_kept_as_last = keeps_last and entry is entries[-1]
        is_hidden = _is_own(entry) and not is_kept_as_last
        if is_hidden:
            leads_to_hidden = True
        if is_hidden or (leads_to_hidden and _is_underneath(entry)):
            is_shortened = True
            continue
        shortened = TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shortened if is_shortened else traceback


def _is_own(entry: TracebackType) -> bool:
    """Whether code is this package's, or the function of torch that calls this package's."""
    frame = entry.tb_frame
    return (
        owner_of_frame(frame) is CodeOwner.PARALLELIZE or frame.f_code.co_filename == _CALLS_PACKAGE
    )


def _is_underneath(entry: TracebackType) -> bool:
    """Whether code is torch's, Python's or cloudpickle's."""
    frame = entry.tb_frame
    is_cloudpickle = frame.f_code.co_filename.startswith(_CLOUDPICKLE)
    return is_cloudpickle or owner_of_frame(frame) in (CodeOwner.TORCH, CodeOwner.PYTHON)
