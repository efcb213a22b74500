"""What a thread waits for, in the words of the code that waits: reports of hangs name it.

A stack does not show this. In compiled code, such as `work.wait()`, no frame says that the thread
waits for other ranks, and no frame has the call as the user has written it, such as
"barrier('saved')".

    main thread        with waiting_for("barrier('saved')"):
                           work.wait()     the wait is noted under the number of the thread
    watchdog's thread  wait_of_thread(number of the main thread)     twice a second
    after an error     wait_of_error(error)     the error has left the block, and has the wait
"""

from __future__ import annotations

import enum
import threading
import types
from typing import NamedTuple


class WaitKind(enum.StrEnum):
    """What a report of a hang may say about a wait, beside its call."""

    CALL = "call"
    """The user has written a call that every rank makes, such as `save`."""

    END_OF_BLOCK = "end of block"
    """The thread has come to the end of a parallel_model block, where the ranks meet."""

    READ = "read"
    """The thread reads a number of a GPU, whose stream waits: see `device_reads`."""

    MESSAGE = "message"
    """The thread exchanges messages with some ranks, which no state shows, as in `dist.recv`."""

    OTHER = "other"
    """A part of another call, such as backward, or no wait is noted."""


class Wait(NamedTuple):
    """A wait for other ranks.

    Args:
        call: the call that waits, as reports name it: "barrier('saved')", "backward".
        is_blocked: whether the thread does nothing but wait.
        wait_kind: what a report may say about it.
        block: of the kind END_OF_BLOCK, the line where the block begins: "train.py:11".
    """

    call: str
    is_blocked: bool
    wait_kind: WaitKind = WaitKind.OTHER
    block: str = ""


_wait_by_thread: dict[int, Wait] = {}
"""Number of a thread that waits -> its wait that counts, as a rule the innermost one.

A `threading.local` would not do, because the watchdog's thread reads the wait of the main thread.
"""

_ATTRIBUTE = "_parallelize_wait"
"""Attribute of an error with the wait that counted when the error was raised."""


class Waiting:
    """A block in which a thread waits; it may be entered again after its end.

    It is a class, because a generator would cost four calls more in each step.

    Args:
        wait: what the thread waits for.
    """

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self._outer: Wait | None = None

    def __enter__(self) -> None:
        """Note the wait for the current thread.

        Of calls in each other, the outer one counts, which is the one that the user has written:
        `loader.mean` calls `all_gather`.
        """
        thread = threading.get_ident()
        self._outer = _wait_by_thread.get(thread)
        is_call = self._wait.wait_kind is WaitKind.CALL
        if is_call and self._outer is not None and self._outer.wait_kind is WaitKind.CALL:
            return
        _wait_by_thread[thread] = self._wait

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        """Note the wait around this one again, if there is one; an error takes this wait along."""
        thread = threading.get_ident()
        wait_that_counted = _wait_by_thread[thread]
        if self._outer is None:
            del _wait_by_thread[thread]
        else:
            _wait_by_thread[thread] = self._outer
        if error is not None:
            # An inner block has come first, and its wait stays.
            error.__dict__.setdefault(_ATTRIBUTE, wait_that_counted)


def waiting_for(
    call: str,
    *,
    is_blocked: bool = False,
    wait_kind: WaitKind = WaitKind.OTHER,
    block: str = "",
) -> Waiting:
    """Say what this thread waits for if it waits for other ranks in the block.

    Of nested blocks, the innermost one counts; of calls, the outermost one.

    Args:
        call: the call that waits, as reports name it.
        is_blocked: whether the block does nothing but wait. Hang detection then knows that the
            thread is blocked, even if its stack has no frame of torch.distributed. It must be False
            if the block also pickles or writes a file: a slow rank would be reported as waiting.
        wait_kind: what a report may say about the wait.
        block: as for `Wait`.
    """
    return Waiting(Wait(call, is_blocked, wait_kind, block))


def wait_of_thread(thread: int) -> Wait | None:
    """Return the wait that counts of the thread with a number; None: the thread is in no wait."""
    return _wait_by_thread.get(thread)


def wait_of_error(error: BaseException) -> Wait | None:
    """Return the wait in which an error was raised; None: the error was raised in no wait."""
    wait: Wait | None = error.__dict__.get(_ATTRIBUTE)
    return wait
