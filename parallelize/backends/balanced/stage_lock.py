"""The gate of a stage: one micro-batch at a time, at first in their order.

    micro-batch 0   [ stage 0 ]──>[ stage 1 ]──>[ stage 2 ]
    micro-batch 1    waits  [ stage 0 ]──>[ stage 1 ]──>[ stage 2 ]
    micro-batch 2            waits  [ stage 0 ]──>[ stage 1 ]──>[ stage 2 ]

A micro-batch leaves its stage before it waits for the next one, so nobody who waits holds anything and no order of
visits can end in a deadlock. One that comes back to a stage (a shared module, a loop) goes in as soon as it is free.
"""

from __future__ import annotations

import threading

__all__ = ["Aborted", "Turnstile"]


class Aborted(Exception):  # noqa: N818  # no error of its own: it ends the threads that wait when another one has failed
    """Another micro-batch has failed, so this one need not go on."""


class Turnstile:
    """The gate of one stage during one forward."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_busy = False
        self._is_aborted = False
        self._came: set[int] = set()  # have been here, or will not come any more
        self._next = 0  # the first that is not in there

    def enter(self, microbatch: int) -> None:
        """Wait for the stage.

        Raises:
            Aborted: another micro-batch has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_aborted or self._may_enter(microbatch))
            if self._is_aborted:
                raise Aborted
            self._is_busy = True
            self._note(microbatch)

    def leave(self) -> None:
        """Let the next one in."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()

    def pass_by(self, microbatch: int) -> None:
        """This micro-batch has ended: whether it has been here or not, nobody waits for it any more."""
        with self._changed:
            self._note(microbatch)
            self._changed.notify_all()

    def abort(self) -> None:
        """Send everybody away who waits here or comes later."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()

    def _may_enter(self, microbatch: int) -> bool:
        return not self._is_busy and (microbatch in self._came or microbatch == self._next)

    def _note(self, microbatch: int) -> None:
        self._came.add(microbatch)
        while self._next in self._came:
            self._next += 1
