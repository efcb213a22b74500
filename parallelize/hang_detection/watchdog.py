"""Watchdog thread: finds which ranks a blocked rank is waiting for, and whether they are deadlocked.

    every second        check cheaply whether the main thread has moved and whether a rank requests states
    2 s in one call     request the states of all ranks; every rank writes its state to the store
    deadlock seen twice the leader among the waiting ranks publishes a report; every waiting rank ends with this error
    30 s, 1 min, ...    no deadlock proven: rank 0 logs which ranks wait, and where
    timeout             torch ends the wait; the error gives the positions of all ranks

This needs a separate thread: the main thread is in compiled code, where no Python exception can be raised.
"""

from __future__ import annotations

import contextlib
import logging
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
from parallelize.hang_detection.exchange import StateExchange
from parallelize.hang_detection.flight_recorder import FlightRecorder, group_ranks
from parallelize.hang_detection.rank_state import RankState, Status
from parallelize.hang_detection.store_wait import StoreWait

__all__ = ["Watchdog"]

_CHECK_INTERVAL_S, _FAST_CHECK_INTERVAL_S = 1.0, 0.4
_SUSPECT_AFTER_S = 2.0
_ANSWER_TIMEOUT_S = 2.5
_JOIN_TIMEOUT_S = 10.0

# Messages of torch's errors that a peer may have caused, and those of timeouts among them.
_PEER_ERROR = re.compile(r"gloo/|NCCL|timed? ?out", re.IGNORECASE)
_TIMEOUT = re.compile(r"timed? ?out", re.IGNORECASE)

_log = logging.getLogger("parallelize")


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
            exchange = StateExchange(shared.clone(), rank=dist.get_rank(), world_size=dist.get_world_size())
        except (NotImplementedError, RuntimeError):  # a user's store that cannot be cloned for a second thread
            yield
            return
        self._block = _WatchedBlock(exchange, timeout=timeout, since_ns=since_ns, on_hang=self._end)
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
        store_wait = StoreWait(ranks)
        if self._block is not None:
            self._block.store_wait = store_wait
        try:
            yield store_wait.failure
        finally:
            if self._block is not None:
                self._block.store_wait = None

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of a collective, if another one than at the start of the block."""
        if self._block is not None:
            self._block.timeout_s = timeout.total_seconds()

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
        self, exchange: StateExchange, *, timeout: timedelta, since_ns: int | None, on_hang: Callable[[SyncError], None]
    ) -> None:
        self._exchange, self._on_hang = exchange, on_hang
        self.store_wait: StoreWait | None = None
        self.timeout_s, self._owns_group = timeout.total_seconds(), since_ns is not None
        self._main = threading.get_ident()
        self._cpu_clock, self._recorder = stack_frames.ThreadCpuClock(self._main), FlightRecorder(since_ns or 0)
        self._is_spinning = "nccl" in str(dist.get_backend())  # NCCL: a blocked thread uses 100 % of a core
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="parallelize-watch", daemon=True)
        self._position: object = None
        self._position_since = time.monotonic()
        self._answered = self._lines = 0
        self._first_request = 0  # number of the first request during the current wait
        self._suspected: tuple[deadlock.HangReport, int] | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the watchdog thread; on success, publish that this rank has returned if the group ends with the block."""
        self._thread.start()
        try:
            yield
            self._stop()
            if self._owns_group:
                with contextlib.suppress(dist.DistError, RuntimeError):  # the store is lost
                    self._exchange.publish_state(self._state("returned", ()))
        finally:
            self._stop()

    def _stop(self) -> None:
        self._is_over.set()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        pause_s = _CHECK_INTERVAL_S
        while not self._is_over.wait(pause_s):
            try:
                pause_s = _FAST_CHECK_INTERVAL_S if self._check() else _CHECK_INTERVAL_S
            except (dist.DistError, RuntimeError):  # the store is lost
                return

    def _check(self) -> bool:
        """Check the main thread and answer a request for states; return whether to check again soon."""
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return False
        idle_s = self._idle_s(frame)
        is_waiting = idle_s >= _SUSPECT_AFTER_S and (
            stack_frames.is_in_distributed(stack_frames.stack_of(frame)) or self._recorder.has_pending()
        )
        store_wait = self.store_wait
        if store_wait is not None:
            store_wait.check(self._exchange)
        request = self._exchange.request_states() if is_waiting else self._exchange.last_request()
        if not is_waiting:
            self._suspected, self._lines, self._first_request = None, 0, request + 1
            self._exchange.resign_leader()
        if request == self._answered:
            return idle_s >= _SUSPECT_AFTER_S or store_wait is not None
        self._answered = request
        state = self._state("waiting" if is_waiting else "running", stack_frames.stack_of(frame), idle_s=idle_s)
        self._exchange.publish_state(state)
        line = self._exchange.new_line() if self._exchange.rank == 0 else ""  # the user sees rank 0's output
        if line:
            _log.warning("%s", line)
        if is_waiting:
            self._resolve(state)
        return True

    def _idle_s(self, frame: FrameType) -> float:
        """Return the time in s that the main thread has been at one position without computing."""
        position, is_idle = (id(frame), frame.f_lasti, self._recorder.progress()), self._cpu_clock.is_idle()
        if position != self._position or not (is_idle or self._is_spinning):
            self._position, self._position_since = position, time.monotonic()
        return time.monotonic() - self._position_since

    def _resolve(self, own: RankState) -> None:
        """End this waiting rank if a report is published; as the leader, look for a deadlock and publish its report."""
        published = self._exchange.report()
        if published is not None:
            self._end_with(published)
        if not self._exchange.try_become_leader():
            return
        states = self._exchange.states()
        report = deadlock.find_deadlock(states)
        if report is None:
            self._suspected = None
            self._keep_waiting(own, states)
        elif self._suspected is None or self._suspected[0] != report:
            self._suspected = (report, self._answered)
        elif report.is_confirmed(states, since=self._suspected[1]):
            self._exchange.publish_report(report)
            self._end_with(report)

    def _keep_waiting(self, own: RankState, states: list[RankState]) -> None:
        states = _answering(states, self._first_request)
        libraries = {call.library for call in own.pending()}
        if libraries - {"gloo"} and own.idle_s >= self.timeout_s - _SUSPECT_AFTER_S:
            # At the timeout, NCCL would abort this process without an exception.
            self._end_with(self._timeout_report(states, reason="nothing was received"))
        if own.idle_s >= deadlock.line_due_s(self._lines):
            self._lines += 1
            self._exchange.publish_line(deadlock.waiting_line(states, world_size=self._exchange.world_size))

    def _timeout_report(self, states: list[RankState], *, reason: str) -> deadlock.HangReport:
        return deadlock.timeout_report(states, self.timeout_s, world_size=self._exchange.world_size, reason=reason)

    def _end_with(self, report: deadlock.HangReport) -> None:
        frame = sys._current_frames().get(self._main)
        if frame is not None and self._idle_s(frame) >= _SUSPECT_AFTER_S and not self._is_over.is_set():
            self._on_hang(_as_error(report).with_traceback(stack_frames.traceback_of(stack_frames.stack_of(frame))))

    def _state(
        self, status: Status, stack: stack_frames.Stack, *, idle_s: float = 0.0, failed: bool = False
    ) -> RankState:
        """Return the state of this rank.

        Args:
            status: status of this rank.
            stack: stack of the main thread; empty if the block has ended.
            idle_s: time in s that the main thread has been at this position.
            failed: whether torch has just raised an error in the last collective, which then counts as pending.
        """
        is_waiting = status == "waiting"
        calls = self._recorder.collectives(self._position, fresh=status != "running" or failed)
        if is_waiting:
            calls = tuple(stack_frames.with_root(calls, stack, failed=failed))
        groups = {call.group for call in calls}
        is_on_device = any(call.library != "gloo" for call in calls if not call.is_completed)
        return RankState(
            rank=self._exchange.rank,
            status=status,
            location=stack_frames.call_site(stack),
            operation=stack_frames.operation(stack),
            stack=stack_frames.user_lines(stack),
            collectives=calls,
            groups=tuple((name, ranks) for name, ranks in group_ranks().items() if name in groups),
            peers=stack_frames.peers(stack) if is_waiting else (),
            is_blocked=is_waiting
            and not failed
            and stack_frames.is_blocking(stack, on_device=is_on_device)
            and not stack_frames.has_other_active_threads(self._main),
            idle_s=round(idle_s, 1),
            request_id=self._answered,
        )

    def diagnose(self, error: BaseException, *, is_timeout: bool) -> deadlock.HangReport | None:
        """Return the report that explains a torch error in the main thread, or None if the states do not explain it."""
        self._stop()
        try:
            return self._diagnose(error, is_timeout=is_timeout)
        except (dist.DistError, RuntimeError):  # the store is also lost
            return None

    def _diagnose(self, error: BaseException, *, is_timeout: bool) -> deadlock.HangReport | None:
        self._answered, end = self._exchange.request_states(), time.monotonic() + _ANSWER_TIMEOUT_S
        own = self._state("waiting", stack_frames.stack_of_error(error), failed=True)
        self._exchange.publish_state(own)
        while True:
            states = _answering(self._exchange.states(), own.request_id)
            report = self._exchange.report() or deadlock.find_deadlock(states)
            if report is not None:
                self._exchange.publish_report(report)
                return report
            if time.monotonic() > end or len(states) == self._exchange.world_size:
                reason = str(error).partition("\n")[0]
                return self._timeout_report(states, reason=reason) if is_timeout else None
            time.sleep(0.05)


def _answering(states: Sequence[RankState], request: int) -> list[RankState]:
    """Return the states of ranks that have returned, or have answered `request` or a later request."""
    return [each for each in states if each.status == "returned" or each.request_id >= request]


def _as_error(report: deadlock.HangReport) -> SyncError:
    return SyncError(report.what, why=report.why, fix=report.fix)


def _end_program(error: SyncError) -> None:
    """Print the error and exit as after an uncaught exception; for programs that torchrun or srun started."""
    traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)
