"""Watchdog thread: finds which ranks a blocked rank is waiting for, and whether they are deadlocked.

    every 0.5 s         check cheaply whether the main thread has moved and whether states are requested
    2 s in one call     this rank waits: it requests the states of all ranks, and the judge looks for a deadlock
    deadlock confirmed  every waiting rank ends with the judge's report
    30 s, 1 min, ...    no deadlock proven: rank 0 logs which ranks wait, and where
    timeout             torch ends the wait; the error gives the positions of all ranks

This needs a separate thread: the main thread is in compiled code, where no Python exception can be raised.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from parallelize.errors import SyncError
from parallelize.hang_detection import deadlock, stack_frames
from parallelize.hang_detection.flight_recorder import FlightRecorder, group_names
from parallelize.hang_detection.judge import Judge
from parallelize.hang_detection.rank_state import RankState, Status

__all__ = ["Watchdog"]

_SUSPECT_AFTER_S = 2.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 8.0  # between checks of a wait in the store
_JOIN_TIMEOUT_S = 10.0

# Messages of torch's errors that a peer may have caused, and those of timeouts among them.
_PEER_ERROR = re.compile(r"gloo/|NCCL|timed? ?out", re.IGNORECASE)
_TIMEOUT = re.compile(r"timed? ?out", re.IGNORECASE)


class Watchdog:
    """Detects hangs of the thread that enters `watch`; inactive outside of that block.

    Attributes:
        on_hang: function that ends this process with an error; called in the watchdog thread.
    """

    def __init__(self) -> None:
        self.on_hang: Callable[[SyncError], None] = _end_program
        self._block: _WatchedBlock | None = None

    @contextlib.contextmanager
    def watch(self, store: dist.Store, *, timeout: timedelta, since_ns: int | None) -> Iterator[None]:
        """Watch this thread in a block, which every rank of the default process group must enter.

        Args:
            store: the default group's store with a prefix that no other block uses.
            timeout: timeout of a collective.
            since_ns: time when the group was initialized for this block (time.time_ns); None: the group outlives the
                block, so ranks that have left the block may still make collectives.
        """
        try:
            shared: Any = store  # the stub has no clone()
            own_store = shared.clone()
        except (NotImplementedError, RuntimeError):  # a user's store that cannot be cloned for a second thread
            yield
            return
        self._block = _WatchedBlock(own_store, timeout=timeout, since_ns=since_ns, on_hang=self._end)
        try:
            with self._block.running():
                yield
        except RuntimeError as error:
            explained = self.explain(error)
            if explained is error:
                raise
            raise explained from error
        finally:
            self._block = None

    @contextlib.contextmanager
    def waiting_in_store(self, ranks: Callable[[], Sequence[int]]) -> Iterator[Callable[[], str]]:
        """Check, during a wait for other ranks' keys in the store, whether these ranks can still write them.

        Args:
            ranks: returns the ranks whose keys are not in the store yet; called in the watchdog thread.

        Yields:
            A function that returns why a rank can no longer write its key; "" if all ranks still can.
        """
        store_wait = _StoreWait(ranks)
        if self._block is not None:
            self._block.store_wait = store_wait
        try:
            yield lambda: store_wait.failure
        finally:
            if self._block is not None:
                self._block.store_wait = None

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of a collective, if another one than at the start of the block."""
        if self._block is not None:
            self._block.judge.timeout_s = timeout.total_seconds()

    def _end(self, error: SyncError) -> None:
        self.on_hang(error)  # on_hang may be replaced while the block is watched

    def explain(self, error: BaseException) -> BaseException:
        """Return a SyncError that explains a torch error by the states of all ranks, or the error itself."""
        is_peer_error = type(error) is RuntimeError and _PEER_ERROR.search(str(error))
        if self._block is None or not (is_peer_error or isinstance(error, dist.DistError)):
            return error
        report = self._block.diagnose(error, is_timeout=bool(_TIMEOUT.search(str(error))))
        if report is None:
            return error
        explained = _as_error(report).with_traceback(error.__traceback__)
        explained.__cause__ = error
        return explained


class _WatchedBlock:
    """One watched block: the watchdog thread, and the last observed position of the main thread."""

    def __init__(
        self, store: dist.Store, *, timeout: timedelta, since_ns: int | None, on_hang: Callable[[SyncError], None]
    ) -> None:
        self.judge = Judge(
            store, rank=dist.get_rank(), world_size=dist.get_world_size(), timeout_s=timeout.total_seconds()
        )
        self.store_wait: _StoreWait | None = None
        self._on_hang, self._owns_group = on_hang, since_ns is not None
        self._main = threading.get_ident()
        self._cpu_clock, self._recorder = stack_frames.ThreadCpuClock(self._main), FlightRecorder(since_ns or 0)
        self._is_spinning = "nccl" in str(dist.get_backend())  # NCCL: a blocked thread uses 100 % of a core
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="parallelize-watch", daemon=True)
        self._position: object = None
        self._position_since = time.monotonic()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the watchdog thread; on success, publish that this rank has returned if the group ends with the block."""
        self._thread.start()
        try:
            yield
            self._stop()
            if self._owns_group:
                with contextlib.suppress(dist.DistError, RuntimeError):  # the store is lost
                    self.judge.publish_state(self._state("returned", ()))
        finally:
            self._stop()

    def _stop(self) -> None:
        self._is_over.set()
        self._thread.join(_JOIN_TIMEOUT_S)
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store is lost
            self.judge.resign()

    def _run(self) -> None:
        while not self._is_over.wait(self.judge.interval_s):
            try:
                self._check()
            except (dist.DistError, RuntimeError):  # the store is lost
                return

    def _check(self) -> None:
        """Check the main thread, answer a request for states, and end this rank if a report is published."""
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return
        idle_s = self._idle_s(frame)
        is_waiting = idle_s >= _SUSPECT_AFTER_S and (
            stack_frames.is_in_distributed(stack_frames.stack_of(frame)) or self._recorder.has_pending()
        )
        store_wait = self.store_wait  # the main thread may reset it
        if store_wait is not None:
            store_wait.check(self.judge)
        status: Status = "waiting" if is_waiting else "running"
        report = self.judge.check(
            idle_s if is_waiting else None,
            lambda: self._state(status, stack_frames.stack_of(frame), idle_s=idle_s),
        )
        if report is not None:
            self._end_with(report)

    def _idle_s(self, frame: FrameType) -> float:
        """Return the time in s that the main thread has been at one position without computing."""
        position, is_idle = (id(frame), frame.f_lasti, self._recorder.progress()), self._cpu_clock.is_idle()
        if position != self._position or not (is_idle or self._is_spinning):
            self._position, self._position_since = position, time.monotonic()
        return time.monotonic() - self._position_since

    def _end_with(self, report: deadlock.HangReport) -> None:
        frame = sys._current_frames().get(self._main)
        if frame is not None and self._idle_s(frame) >= _SUSPECT_AFTER_S and not self._is_over.is_set():
            self._on_hang(_as_error(report).with_traceback(stack_frames.traceback_of(stack_frames.stack_of(frame))))

    def _state(
        self, status: Status, stack: stack_frames.Stack, *, idle_s: float = 0.0, failed: bool = False
    ) -> RankState:
        """Return the state of this rank; `failed`: torch has just raised an error in the last collective."""
        is_waiting = status == "waiting"
        calls = self._recorder.collectives(self._position, fresh=status != "running" or failed)
        if is_waiting:
            calls = tuple(stack_frames.with_root(calls, stack, failed=failed))
        is_on_device = any(call.library != "gloo" for call in calls if not call.is_completed)
        return RankState(
            rank=self.judge.rank,
            status=status,
            location=stack_frames.call_site(stack),
            operation=stack_frames.operation(stack),
            stack=stack_frames.user_lines(stack),
            collectives=calls,
            groups=group_names(),
            peers=stack_frames.peers(stack) if is_waiting else (),
            is_blocked=is_waiting
            and not failed
            and stack_frames.is_blocking(stack, on_device=is_on_device)
            and not stack_frames.has_other_active_threads(self._main),
            idle_s=round(idle_s, 1),
            request_id=self.judge.answered,
        )

    def diagnose(self, error: BaseException, *, is_timeout: bool) -> deadlock.HangReport | None:
        """Return the report that explains a torch error in the main thread, or None if the states do not explain it."""
        self._stop()
        reason, stack = str(error).partition("\n")[0], stack_frames.stack_of_error(error)
        try:
            report = self.judge.explain(reason, lambda: self._state("waiting", stack, failed=True))
        except (dist.DistError, RuntimeError):  # the store is also lost
            return None
        return report if is_timeout or report.ranks else None


class _StoreWait:
    """A wait for keys of other ranks; `failure` is why one can no longer write its key, "" if all still can."""

    def __init__(self, ranks: Callable[[], Sequence[int]]) -> None:
        self._ranks, self._pause_s, self._check_at = ranks, _FIRST_PAUSE_S, time.monotonic() + _FIRST_PAUSE_S
        self._suspected: tuple[deadlock.HangReport | None, int] = None, 0
        self.failure = ""

    def check(self, judge: Judge) -> None:
        """Request all states and look for a rank that cannot write its key; newer states must confirm the result."""
        if self.failure or time.monotonic() < self._check_at:
            return
        ranks, request = self._ranks(), judge.request_states()
        states = judge.states({judge.rank, *ranks})
        report = deadlock.find_absent_rank(judge.rank, ranks, states)
        if report is None:
            self._check_at = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        if report is None or self._suspected[0] != report:
            self._suspected = report, request
        elif report.is_confirmed(states, since=self._suspected[1]):
            self.failure = report.what


def _as_error(report: deadlock.HangReport) -> SyncError:
    return SyncError(report.what, why=report.why, fix=report.fix)


def _end_program(error: SyncError) -> None:
    """Print the error and exit as after an uncaught exception; for programs that torchrun or srun started."""
    traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)
