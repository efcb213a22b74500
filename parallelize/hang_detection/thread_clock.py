"""Whether a thread computes or stands still."""

from __future__ import annotations

import time

__all__ = ["ThreadClock"]

_IDLE_SHARE = 0.1


class ThreadClock:
    """Compares the processor's time of a thread with the time that has passed.

    Args:
        ident: the thread, as in threading.get_ident().
    """

    def __init__(self, ident: int) -> None:
        self._clock = time.pthread_getcpuclockid(ident) if hasattr(time, "pthread_getcpuclockid") else None
        self._before = (time.monotonic(), self._used_s())

    def is_idle(self) -> bool:
        """Whether the thread has hardly computed since this was asked last; so where the system cannot tell."""
        (then, used_then), now, used = self._before, time.monotonic(), self._used_s()
        self._before = (now, used)
        return used - used_then <= _IDLE_SHARE * (now - then)

    def _used_s(self) -> float:
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)
