"""What a thread waits for, in the words of the code that waits: reports of hangs name it.

A stack does not show it. In compiled code, such as `work.wait()`, no frame says that the thread waits for other ranks,
and no frame has the call as the user has written it, such as "barrier('saved')".

    main thread      with waiting_for("barrier('saved')"):     notes the wait under the number of the thread
    watchdog thread  wait_of_thread(number of the main thread)   reads it twice a second
    an error         wait_of_error(error)                        has left the block, and has taken the wait along
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Wait", "wait_of_error", "wait_of_thread", "waiting_for"]


class Wait(NamedTuple):
    """A wait for other ranks.

    Args:
        call: the call that waits, as reports name it: "barrier('saved')", "backward".
        is_blocked: whether the thread does nothing but wait.
    """

    call: str
    is_blocked: bool


_wait_by_thread: dict[int, Wait] = {}
"""The innermost wait of each thread that is in one, by the number of the thread.

A `threading.local` would not do: the watchdog reads the wait of another thread.
"""

_ATTRIBUTE = "_parallelize_wait"
"""Attribute of an error that has left a wait."""


@contextlib.contextmanager
def waiting_for(call: str, *, is_blocked: bool = False) -> Iterator[None]:
    """Say in a block what this thread waits for, if it waits there for other ranks. Of nested blocks, the inner counts.

    Args:
        call: the call that waits, as reports name it.
        is_blocked: whether the block does nothing but wait. Hang detection then needs no frame of torch.distributed
            to know that the thread is blocked. It must be False where the block also pickles or writes a file: a rank
            that is slow would be reported as one that waits.
    """
    thread = threading.get_ident()
    outer = _wait_by_thread.get(thread)
    wait = Wait(call, is_blocked)
    _wait_by_thread[thread] = wait
    try:
        yield
    except BaseException as error:
        error.__dict__.setdefault(_ATTRIBUTE, wait)
        raise
    finally:
        if outer is None:
            del _wait_by_thread[thread]
        else:
            _wait_by_thread[thread] = outer


def wait_of_thread(thread: int) -> Wait | None:
    """Return the innermost wait of a thread, by its number; None: it is in none."""
    return _wait_by_thread.get(thread)


def wait_of_error(error: BaseException) -> Wait | None:
    """Return the innermost wait that an error has left; None: it was raised elsewhere."""
    wait: Wait | None = error.__dict__.get(_ATTRIBUTE)
    return wait
