"""Watchdog thread: finds which ranks a blocked rank is waiting for, and whether they are deadlocked.

    every 0.5 s         each rank looks whether its main thread has moved, and whether a question was asked
    3 s in one call     it waits: it asks where all ranks are, and each publishes its state
    compare-and-set     picks one of the waiting ranks as the judge, which reads the states
    deadlock            every waiting rank ends with the verdict
    none                the judge asks again every 4 s, and whenever a rank begins to wait, or returns
    a rank in pdb       nothing ends the ranks that wait, as long as the user has it
    30 s, 1 min, ...    rank 0 logs which ranks wait, and where
    timeout - 2 s       the verdict is where all ranks are; later NCCL would abort the process, and gloo name no rank;
                        the longest timeout counts, of the default group and of the groups that the judge waits in

The keys in the process group's store, all plain data:

    asked         number of the latest question
    state/<rank>  the state of a rank, with the number of the question that it answers
    judge         the rank that judges
    verdict       what ends the ranks that wait
    line          what rank 0 logs

This needs a separate thread: the main thread is in compiled code, where no Python exception can be raised.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import pdb
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallelize.errors import SyncError
from parallelize.hang_detection.deadlock import Verdict, find_deadlock, waiting_line
from parallelize.hang_detection.rank_state import RankState, latest_collectives, progress
from parallelize.hang_detection.stack_frames import (
    Stack,
    call_site,
    has_other_active_threads,
    is_in_collective,
    operation,
    traceback_of,
    with_root,
)

__all__ = ["Judge", "Watchdog"]

_CHECK_EVERY_S, _ANSWER_S, _ASK_EVERY_S = 0.5, 2.5, 4.0
_WAITS_AFTER_S, _FIRST_LINE_S = 3.0, 30.0
_ABORT_MARGIN_S = 2.0
_ERROR_S = 1.0  # for the explanation of an error: a rank is killed 3 s after another one has failed


@dataclass
class Judge:
    """One rank's part in the search for a deadlock, and the search itself on the rank that judges.

    Args:
        store: a separate connection to the store, because the main one may be blocked in a wait.
        rank: rank of this process.
        world_size: number of ranks.
        timeout_s: returns the timeout of this rank's wait from its pending collectives.
        observe: returns this rank's state; called when a question was asked.
        since: number of the latest question when the current wait began; 0: this rank does not wait.
        answered: number of the latest question that this rank has answered.
    """

    store: dist.Store
    rank: int
    world_size: int
    timeout_s: Callable[..., float]
    observe: Callable[[], RankState]
    since: int = 0
    answered: int = 0
    _states: Any = None  # of the ranks that have answered the latest question
    _is_judge = _is_judged = False
    _began_s = _asked_s = _line_due_s = _limit_s = 0.0

    def check(self, *, is_waiting: bool) -> Verdict | None:
        """Answer a new question, as a wait that begins is; return the verdict that ends this rank, if there is one."""
        begins = is_waiting and not self.since
        number = self.store.add("asked", begins)
        if begins:
            self.since, self._began_s, self._line_due_s = number, time.monotonic() - _WAITS_AFTER_S, _FIRST_LINE_S
        elif not is_waiting:
            self.since = 0
            self.resign()
        if number == self.answered:
            if self._is_judge:
                self._judge()
            return None
        self.answered, self._asked_s, self._states, self._is_judged = number, time.monotonic(), {}, False
        state = self.observe()
        self.store.set(f"state/{self.rank}", json.dumps(state))
        if self.rank == 0 and self.store.check(["line"]):  # the user sees rank 0's output
            logging.getLogger("parallelize").warning(self.store.get("line").decode())
            self.store.delete_key("line")
        if state.status != "waiting":
            return None
        self._limit_s = self.timeout_s(state.pending())
        self._is_judge = int(self.store.compare_set("judge", "", str(self.rank))) == self.rank
        return json.loads(self.store.get("verdict")) if self.store.check(["verdict"]) else None

    def _judge(self) -> None:
        """Judge when all ranks have answered, or had the time to; ask again after a while."""
        now_s, verdict = time.monotonic(), None
        for rank in range(self.world_size) - self._states.keys():
            if self.store.check([key := f"state/{rank}"]):
                state = RankState.loads(self.store.get(key))
                if state.status == "returned" or state.answers >= self.answered:
                    self._states[rank] = state
        if any(each.status == "stopped" for each in self._states.values()):
            self._began_s, self._is_judged = now_s, True
        waited_s, asked_s = now_s - self._began_s, now_s - self._asked_s
        if not self._is_judged and (len(self._states) == self.world_size or asked_s >= _ANSWER_S):
            self._is_judged, verdict = True, find_deadlock(self._states)
        if not verdict and self._is_judged and waited_s >= self._limit_s - _ABORT_MARGIN_S:
            verdict = Verdict(
                what=waiting_line(self._states, self.world_size),
                why=f"timeout={self._limit_s:g} s is over, and no deadlock could be proven",
                fix="increase timeout= if the awaited rank is only slow, else make that rank reach the same call",
            )
        if verdict:
            self.store.set("verdict", json.dumps(verdict))
        elif waited_s >= self._line_due_s:
            self._line_due_s *= 2
            self.store.set("line", waiting_line(self._states, self.world_size))
        elif asked_s < _ASK_EVERY_S:
            return
        self.store.add("asked", 1)  # to answer it, each rank looks for what concerns it

    def resign(self) -> None:
        """Make way for another judge: the first of the waiting ranks to answer a new question."""
        if self._is_judge:
            self._is_judge = False
            self.store.delete_key("judge")
            self.store.add("asked", 1)


def _end_program(error: SyncError) -> None:
    """Print the error and exit as after an uncaught exception; for programs that torchrun or srun started."""
    try:
        traceback.print_exception(error)
        sys.stdout.flush()
    finally:
        os._exit(1)


def _allow_captures() -> None:
    """Let this thread query events while another one captures a CUDA graph, which that would end by default.

    NCCL's recorder queries events. torch's own watchdog is in the same mode, cudaStreamCaptureModeThreadLocal.
    """
    with contextlib.suppress(OSError):  # a torch without CUDA
        runtime = f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}"
        ctypes.CDLL(runtime).cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(1)))


class Watchdog:
    """Detects hangs of the thread that enters `watch`; inactive outside of that block.

    Attributes:
        on_hang: function that ends this process with an error; called in the watchdog thread.
        has_debugger: whether a user may stop ranks in pdb; then this thread alone ends what waits for too long.
        on_look: function that gets the main thread's stack twice a second and returns facts for the state of this rank.
    """

    on_hang: Callable[[SyncError], None] = staticmethod(_end_program)
    on_look: Any = None
    has_debugger = False

    _judge: Judge | None = None
    _stack: Stack | None = None
    _facts: Any = None
    _position: object = None
    _mark: Any = 0

    @contextlib.contextmanager
    def watch(self, store: dist.Store, *, timeout_s: Callable[..., float], since_ns: int | None) -> Iterator[None]:
        """Watch this thread in a block, which every rank of the default process group must enter.

        Args:
            store: the default group's store with a prefix that no other block uses.
            timeout_s: returns the timeout of a wait from its pending collectives; called in the watchdog thread.
            since_ns: time when the group was initialized for this block (time.time_ns); None: the group outlives the
                block, so ranks that have left the block may still make collectives.
        """
        try:
            own_store = store.clone()  # type: ignore[attr-defined]  # not in the stub
        except RuntimeError:  # a user's store that cannot be cloned for a second thread
            yield
            return
        own_store.set_timeout(timedelta(seconds=10))  # so that a call fails if the store is lost
        judge = Judge(own_store, dist.get_rank(), dist.get_world_size(), timeout_s, self._state)
        self._judge, self._main, self._since_ns = judge, threading.get_ident(), time.time_ns()
        self._is_over, self._stack = threading.Event(), None
        self._thread = threading.Thread(target=self._run, args=[judge], name="parallelize-watch", daemon=True)
        self._thread.start()
        try:
            yield
            if since_ns is not None:
                self._tell(judge, "returned", ())
        except RuntimeError as error:
            raise self.explain(error)  # noqa: B904 - it has its cause
        finally:
            self._is_over.set()
            self._thread.join(_ERROR_S)
            self._judge = None
            with contextlib.suppress(RuntimeError):
                judge.resign()

    def explain(self, error: BaseException) -> BaseException:
        """Return a SyncError that explains an error of a torch collective by the states of all ranks, or the error."""
        stack = list(traceback.walk_tb(error.__traceback__))[::-1]
        is_ours = isinstance(error, dist.DistError) or (type(error) is RuntimeError and is_in_collective(stack))
        verdict = self._tell(self._judge, "failed", stack) if self._judge and is_ours else None
        if not verdict:
            return error
        explained = SyncError(**verdict)
        explained.__cause__ = error
        return explained

    def _tell(self, judge: Judge, status: str, stack: Stack) -> Verdict | None:
        """Publish that this rank has "returned", or "failed" with an error of torch; return what explains the error."""
        self._is_over.set()
        self._thread.join(_ERROR_S)
        self._status, self._stack, judge.since, verdict = status, stack, 0, None
        end_s = time.monotonic() + _ERROR_S * (status == "failed")
        with contextlib.suppress(RuntimeError):  # the store is lost
            while (verdict := judge.check(is_waiting=True)) is None and time.monotonic() < end_s:
                time.sleep(0.05)
        return verdict

    def _run(self, judge: Judge) -> None:
        _allow_captures()
        with contextlib.suppress(RuntimeError):  # the store is lost
            while not self._is_over.wait(_CHECK_EVERY_S):
                self._look()
                verdict = judge.check(is_waiting=self._status == "waiting")
                if verdict and not self._is_over.is_set():
                    self.on_hang(SyncError(**verdict).with_traceback(traceback_of(self._frames())))

    def _look(self) -> None:
        """Find out whether the main thread waits: for 3 s in one collective, or elsewhere with a pending one."""
        is_stopped = self._look_at(self._frames())
        position = self._here()
        if position != self._position:
            self._position, self._since_s = position, time.monotonic()
        is_waiting = time.monotonic() - self._since_s >= _WAITS_AFTER_S and (
            self._is_held or any(begun != completed for begun, completed in progress())
        )
        self._status = "stopped" if is_stopped else "waiting" if is_waiting else "running"

    def _look_at(self, stack: Stack) -> bool:
        """Note what the main thread's stack shows; return whether the thread is stopped in pdb."""
        self._is_held = is_in_collective(stack)
        innermost, _ = stack[0]
        if self._is_held and innermost.f_trace is not self._mark:
            # The next call's frame has no mark, though it may have the same address. It is called under a debugger.
            self._mark = innermost.f_trace = lambda *_: None
        self._facts = self.on_look and self.on_look(stack)
        return any(frame.f_code is pdb.Pdb.interaction.__code__ for frame, _ in stack)

    def _frames(self) -> Stack:
        """Return the stack of the error that is explained, or the main thread's.

        It keeps the user's tensors, so that nobody has it while the main thread runs, such as during `progress()`.
        """
        if self._stack is not None:
            return self._stack
        return list(traceback.walk_stack(sys._current_frames()[self._main]))

    def _here(self) -> object:
        """Return the main thread's position: while it is the same, that thread has not moved."""
        done = progress()
        frame = sys._current_frames()[self._main]
        return id(frame), frame.f_trace, frame.f_lasti, done

    def _state(self) -> RankState:
        """Return the state of this rank."""
        assert self._judge
        calls, stack = latest_collectives(self._since_ns), self._frames()
        has_failed, is_waiting = self._status == "failed", self._status == "waiting"
        pending = [each for each in calls if not each.is_completed] or calls[len(calls) - has_failed :]
        if len(pending) == 1 and self._status != "running":
            signature = with_root(pending[0].signature, stack)
            calls[calls.index(pending[0])] = pending[0]._replace(is_completed=False, signature=signature)
        is_blocked = is_waiting and self._is_held and not has_other_active_threads(self._main)
        return RankState(
            self._judge.rank,
            "waiting" if has_failed else self._status,
            call_site(stack),
            operation(stack),
            calls,
            list(dist.distributed_c10d._world.pg_names.values()),
            is_blocked and self._here() == self._position,
            self._judge.since,
            self._judge.answered,
            self._facts,
        )
