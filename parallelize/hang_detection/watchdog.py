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
    0.75 s later        the verdict comes even if ranks had no time to answer the latest question
    no sign of a judge  for 8 s, or 1 s after its verdict was due: it is stopped, and another rank
                        that waits judges

A rank that is stopped, or in compiled code that holds the GIL, does not answer. Its line is known
from the record that its watchdog has left at its latest look: see `last_seen`.

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
import math
import os
import pdb
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallelize.errors import SyncError, add_note
from parallelize.hang_detection.deadlock import Verdict, find_deadlock, timeout_verdict, waiting_line
from parallelize.hang_detection.from_rank_0 import RANK_0, ValuesOfRank0
from parallelize.hang_detection.last_seen import (
    LastSeen,
    Process,
    SeenFiles,
    SeenKeys,
    SeenRecords,
    can_overwrite,
    line_of_function,
    line_of_stack,
)
from parallelize.hang_detection.rank_state import Collective, RankState, latest_collectives, progress
from parallelize.hang_detection.stack_frames import (
    Stack,
    call_site,
    has_other_active_threads,
    is_in_collective,
    operation,
    traceback_of,
    with_root,
)
from parallelize.hang_detection.statements import statements_around
from parallelize.hang_detection.waiting import Wait, wait_of_error, wait_of_thread

__all__ = ["Judge", "Watchdog"]

_CHECK_EVERY_S, _ANSWER_S, _ASK_EVERY_S = 0.5, 2.5, 4.0
_WAITS_AFTER_S, _FIRST_LINE_S = 3.0, 30.0
_ABORT_MARGIN_S, _LATE_ANSWER_S, _TAKE_OVER_S = 2.0, 0.75, 1.0
_CHECK_OFTEN_S = 0.1
"""Between checks of a rank that waits, shortly before and after its verdict is due."""
_NO_SIGN_S = 2 * _ASK_EVERY_S
"""Without a question while ranks wait: the judge, which asks every 4 s, is stopped."""
_STORE_S = 10.0
"""Longest time of a request to the store, and of a look on a busy machine."""
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_ERROR_S = 1.5  # for the explanation of an error: a rank is killed 3 s after another one has failed


@dataclass
class Judge:
    """One rank's part in the search for a deadlock, and the search itself on the rank that judges.

    Args:
        store: a separate connection to the store, because the main one may be blocked in a wait.
        rank: rank of this process.
        world_size: number of ranks.
        timeout_s: returns the timeout of this rank's wait from its pending collectives.
        observe: returns this rank's state; called when a question was asked.
        seen_records: where each rank was last seen; None: nobody publishes it.
        since: number of the latest question when the current wait began; 0: this rank does not wait.
        answered: number of the latest question that this rank has answered.
        ends_in_time: whether torch ends a wait at the timeout, before which the verdict must come;
            not with a debugger.
        has_timed_out: whether the torch error that is explained is a timeout; None: none is.
    """

    store: dist.Store
    rank: int
    world_size: int
    timeout_s: Callable[..., float]
    observe: Callable[[], RankState]
    seen_records: SeenRecords | None = None
    since: int = 0
    answered: int = 0
    ends_in_time: bool = True
    has_timed_out: bool | None = None
    # The latest state of each rank that has answered a question of this wait.
    _states: dict[int, RankState] = field(default_factory=dict)
    # The number of the latest question of this wait that all ranks have answered, or had the time
    # to; 0: none.
    _judged: int = 0
    # The rank that judges, when this one has last looked; -1: none.
    _judge_rank: int = -1
    # Whether the store has the number of questions.
    _has_key: bool = False
    _began_s = _asked_s = _line_due_s = _limit_s = 0.0

    def check(self, *, is_waiting: bool) -> Verdict | None:
        """Answer a new question, as a wait that begins is; return the verdict that ends this rank, if there is one."""
        begins = is_waiting and not self.since
        number = self._number_of_question(begins=begins)
        if begins:
            self.since, self._began_s, self._line_due_s = number, time.monotonic() - _WAITS_AFTER_S, _FIRST_LINE_S
            self._states, self._judged = {}, 0
        elif not is_waiting:
            self.since = 0
            self.resign()
        if number == self.answered:
            if self._is_judge() or self._takes_over():
                self._judge()
            return None
        self.answered, self._asked_s = number, time.monotonic()
        state = self.observe()
        self.store.set(f"state/{self.rank}", json.dumps(state))
        if self.rank == 0 and self.store.check(["line"]):  # the user sees rank 0's output
            logging.getLogger("parallelize").warning(self.store.get("line").decode())
            self.store.delete_key("line")
        if state.status != "waiting":
            return None
        self._limit_s = self.timeout_s(state.pending())
        self._judge_rank = int(self.store.compare_set("judge", "", str(self.rank)))
        return json.loads(self.store.get("verdict")) if self.store.check(["verdict"]) else None

    def pause_s(self) -> float:
        """Return the seconds until the next check: few while the verdict on this wait is due."""
        is_due_soon = bool(self.since) and self._late_s() >= -_CHECK_EVERY_S
        return _CHECK_OFTEN_S if is_due_soon else _CHECK_EVERY_S

    def _late_s(self) -> float:
        """Return for how long the verdict on the timeout has been due; negative: it is not yet."""
        waited_s = time.monotonic() - self._began_s
        if self.has_timed_out is None:
            return waited_s - (self._limit_s - _ABORT_MARGIN_S)
        # Of another error, such as a closed connection, the timeout is no explanation.
        return waited_s - _WAITS_AFTER_S if self.has_timed_out else -math.inf

    def _is_judge(self) -> bool:
        return self._judge_rank == self.rank

    def _takes_over(self) -> bool:
        """Become the judge if this rank waits and the judge gives no sign; whether it now is."""
        asked_s = time.monotonic() - self._asked_s
        if not self.since or (asked_s < _NO_SIGN_S and self._late_s() < _TAKE_OVER_S):
            return False
        # The first of several ranks succeeds: the key must name the judge that this rank knows.
        judge = self.store.compare_set("judge", str(self._judge_rank), str(self.rank))
        self._judge_rank = int(judge or -1)
        return self._is_judge()

    def _number_of_question(self, *, begins: bool) -> int:
        """Return the number of the latest question, which the beginning of a wait is.

        A FileStore keeps all that was ever written: a request each half second that adds 0 would fill the disk.
        """
        if begins or not self._has_key:
            self._has_key = True  # by which `parallelize top` finds the store's keys, too
            return int(self.store.add("asked", int(begins)))
        return int(self.store.get("asked"))

    def _judge(self) -> None:
        """Judge when all ranks have answered, or had the time to; ask again after a while."""
        answers = self._read_answers()
        asked_s = time.monotonic() - self._asked_s
        is_debugged = any(state.status == "stopped" for state in self._answering().values())
        verdict = None
        had_time = len(answers) == self.world_size or asked_s >= _ANSWER_S
        if self._judged < self.answered and had_time:
            self._judged = self.answered
            verdict = None if is_debugged else find_deadlock(answers)
        if is_debugged:
            self._began_s = time.monotonic()
        is_judged = self._judged == self.answered
        patience_s = 0.0 if is_judged else _LATE_ANSWER_S if self.ends_in_time else math.inf
        if not verdict and self._late_s() >= patience_s:
            verdict = self._timeout_verdict()
        if verdict:
            self.store.set("verdict", json.dumps(verdict))
        elif time.monotonic() - self._began_s >= self._line_due_s:
            self._line_due_s *= 2
            self.store.set("line", self._waiting_line())
        elif asked_s < _ASK_EVERY_S:
            return
        self.store.add("asked", 1)  # to answer it, each rank looks for what concerns it

    def _read_answers(self) -> dict[int, RankState]:
        """Read the states of ranks that have answered since the latest look.

        Return the answers to the latest question. A rank that has returned answers no more, and
        does not need to.
        """
        answers = {}
        for rank in range(self.world_size):
            state = self._states.get(rank)
            if not (state and self._is_answer(state)) and self.store.check([f"state/{rank}"]):
                state = RankState.loads(self.store.get(f"state/{rank}"))
                if state.status == "returned" or state.answers >= self.since:
                    self._states[rank] = state
            if state and self._is_answer(state):
                answers[rank] = state
        return answers

    def _is_answer(self, state: RankState) -> bool:
        return state.status == "returned" or state.answers >= self.answered

    def _answering(self) -> dict[int, RankState]:
        """Return the states of ranks that answer; the latest question may be only a moment old."""
        return {
            rank: state
            for rank, state in self._states.items()
            if state.status == "returned" or state.answers >= self._judged
        }

    def _waiting_line(self) -> str:
        """Say which ranks wait for which, and where those are, or were last seen."""
        states, silent = self._answering(), dict[int, str]()
        for rank in range(self.world_size):
            has_answered = rank in states and self._is_answer(states[rank])
            seen = self.seen_records.read(rank) if self.seen_records and not has_answered else None
            if seen is None:
                continue
            text = seen.certain()
            if not text and rank not in states:
                text = seen.silence(had_time=self._judged > 0)
            if text:
                silent[rank] = text
                states.pop(rank, None)
        return waiting_line(states, self.world_size, silent)

    def _timeout_verdict(self) -> Verdict:
        reason = "a collective has timed out"
        if self.has_timed_out is None:
            reason = f"timeout={self._limit_s:g} s is over"
        return timeout_verdict(self._waiting_line(), self._answering(), reason=reason)

    def resign(self) -> None:
        """Make way for another judge: the first of the waiting ranks to answer a new question."""
        if self._is_judge():
            self._judge_rank = -1
            self.store.delete_key("judge")
            self.store.add("asked", 1)


def _silent_store(rank: int, place: str) -> Verdict:
    """Return the verdict on a collective that has timed out while the store does not answer.

    Args:
        rank: rank of this process.
        place: where it has waited: "train.py:41 in all_reduce".
    """
    return Verdict(
        what=f"rank {rank} has waited at {place}, and the store does not answer",
        why="the process that serves the store, that of rank 0 if no launcher does, is stopped, or "
        "cut off from the network, so that no rank can say where it is",
        fix="look at the process of rank 0; increase timeout= if it is only slow",
    )


def _call_of(stack: Stack, wait: Wait | None) -> str:
    """Return the call of a wait, or else the function that the user's innermost line calls."""
    return operation(stack) if wait is None else wait.call


def _is_blocked(wait: Wait | None) -> bool:
    return wait is not None and wait.is_blocked


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

    Args:
        has_debugger: whether a user may stop ranks in pdb; then this thread alone ends what waits for too long.
        seen_folder: private folder of the call, if all of its ranks are on this node, for the
            records of where they were last seen; None: the store has them.

    Attributes:
        on_hang: function that ends this process with an error; called in the watchdog thread.
        on_start: function that the watchdog thread calls first.
        on_look: function that returns facts for the state of this rank. It is called twice a second with the main
            thread's stack, and `is_waiting=`, whether that thread is in a collective.
        on_collective: function that is called at each look that finds the main thread in a collective; None: there
            is none.
    """

    on_hang: Callable[[SyncError], None] = staticmethod(_end_program)
    on_start: Callable[[], object] = staticmethod(lambda: None)
    on_look: Callable[..., Any] | None = None
    on_collective: Callable[[], object] | None = None
    values_of_rank_0: ValuesOfRank0 | None = None
    """What rank 0 tells the other ranks in the block; None: there is no group of several ranks."""

    _judge: Judge | None = None
    _stack: Stack | None = None
    _wait_of_error: Wait | None = None
    _facts: Any = None
    _position: object = None
    _mark: Any = 0
    _seen_records: SeenRecords | None = None
    _seen_line: str | None = None

    def __init__(self, *, has_debugger: bool = False, seen_folder: Path | None = None) -> None:
        self.has_debugger = has_debugger
        self._seen_folder = seen_folder

    @contextlib.contextmanager
    def watch(self, store: dist.Store, *, timeout_s: Callable[..., float], since_ns: int | None) -> Iterator[None]:
        """Watch this thread in a block, which every rank of the default process group must enter.

        Args:
            store: the default group's store with a prefix that no other block uses.
            timeout_s: returns the timeout of a wait from its pending collectives; called in the watchdog thread.
            since_ns: time when the group was initialized for this block (time.time_ns); None: the group outlives the
                block, so ranks that have left the block may still make collectives.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        outer = self.values_of_rank_0
        self.values_of_rank_0 = ValuesOfRank0(store, rank, world_size, timeout_s(()) + _ASK_EVERY_S)
        try:
            with self._watching(store, timeout_s=timeout_s, since_ns=since_ns):
                yield
        finally:
            self.values_of_rank_0 = outer

    @contextlib.contextmanager
    def _watching(self, store: dist.Store, *, timeout_s: Callable[..., float], since_ns: int | None) -> Iterator[None]:
        try:
            own_store = store.clone()  # type: ignore[attr-defined]  # not in the stub
        except RuntimeError:  # a user's store that cannot be cloned for a second thread
            yield
            return
        own_store.set_timeout(timedelta(seconds=_STORE_S))  # so that a call fails if the store is lost
        self._seen_records, self._process = self._open_records(own_store), Process.current()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        judge = Judge(own_store, rank, world_size, timeout_s, self._state, self._seen_records)
        judge.ends_in_time = not self.has_debugger
        self._judge, self._main, self._since_ns = judge, threading.get_ident(), time.time_ns()
        self._is_over, self._stack, self._seen_line = threading.Event(), None, None
        with contextlib.suppress(RuntimeError):  # the store is lost
            self._publish(self._line(self._frames()))
        self._thread = threading.Thread(target=self._run, args=[judge], name="parallelize-watch", daemon=True)
        self._thread.start()
        try:
            yield
            if since_ns is not None:
                self._tell(judge, "returned", ())
        except RuntimeError as error:
            raise self.explain(error)  # noqa: B904 - it says what it explains
        finally:
            self._is_over.set()
            self._thread.join(_ERROR_S)
            self._judge = None
            if not self._thread.is_alive():
                with contextlib.suppress(RuntimeError):
                    judge.resign()
                if self._seen_records:
                    self._seen_records.close()
            self._seen_records = None

    def begin(self, function: Any) -> None:
        """Publish that the user's function begins: it may stop before the first look."""
        with contextlib.suppress(RuntimeError):  # the store is lost
            self._publish(line_of_function(function))

    def _open_records(self, store: dist.Store) -> SeenRecords | None:
        if self._seen_folder is None:
            return SeenKeys(store, dist.get_rank()) if can_overwrite(store) else None
        try:
            return SeenFiles(self._seen_folder, dist.get_rank())
        except OSError:  # the disk is full, or the caller has left
            return None

    def _publish(self, line: str) -> None:
        """Publish the main thread's line if it has changed; "" before the user's program begins."""
        if self._seen_records and line and line != self._seen_line:
            self._seen_line = line
            self._seen_records.write(LastSeen(self._process, line))

    def explain(self, error: BaseException) -> BaseException:
        """Return a SyncError that explains an error of a torch collective by the states of all ranks, or the error."""
        stack = list(traceback.walk_tb(error.__traceback__))[::-1]
        self._wait_of_error = wait_of_error(error)
        is_ours = isinstance(error, dist.DistError)
        if type(error) is RuntimeError:
            is_ours = _is_blocked(self._wait_of_error) or is_in_collective(stack)
        verdict, has_timed_out = None, False
        if self._judge and is_ours:
            has_timed_out = bool(_TIMED_OUT.search(str(error)))
            verdict = self._tell(self._judge, "failed", stack, has_timed_out=has_timed_out)
        if not verdict:
            return error
        explained = SyncError(**verdict).with_traceback(error.__traceback__)
        # It says what torch's error means, which as its cause would only be shown before it.
        explained.__suppress_context__ = True
        if has_timed_out:
            add_note(explained, f"torch has raised {type(error).__name__}: {error}".partition("\n")[0])
        return explained

    def _tell(self, judge: Judge, status: str, stack: Stack, *, has_timed_out: bool | None = None) -> Verdict | None:
        """Publish that this rank has "returned", or "failed" with an error of torch; return what explains the error."""
        self._is_over.set()
        self._thread.join(_STORE_S if has_timed_out else _ERROR_S)
        if has_timed_out and self._thread.is_alive():
            # TCPStore has one lock for all requests of a connection, and the thread's request gets
            # no answer: another request would wait for it without end.
            return _silent_store(judge.rank, f"{call_site(stack)} in {_call_of(stack, self._wait_of_error)}")
        self._status, self._stack, judge.since, verdict = status, stack, 0, None
        judge.has_timed_out = has_timed_out
        end_s = time.monotonic() + _ERROR_S * (status == "failed")
        with contextlib.suppress(RuntimeError):  # the store is lost
            while (verdict := judge.check(is_waiting=True)) is None and time.monotonic() < end_s:
                time.sleep(0.05)
        return verdict

    def _run(self, judge: Judge) -> None:
        self.on_start()  # It sets the thread's device, on which the next line may make a context.
        _allow_captures()
        with contextlib.suppress(RuntimeError):  # the store is lost
            while not self._is_over.wait(judge.pause_s()):
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
        is_waiting = _is_blocked(wait_of_thread(self._main)) or is_in_collective(stack)
        self._is_held = is_waiting or self._awaited() is not None
        innermost, _ = stack[0]
        if self._is_held and innermost.f_trace is not self._mark:
            # The next call's frame has no mark, though it may have the same address. It is called under a debugger.
            self._mark = innermost.f_trace = lambda *_: None
        if self._is_held and self.on_collective is not None:
            self.on_collective()
        self._facts = None if self.on_look is None else self.on_look(stack, is_waiting=is_waiting)
        self._publish(self._line(stack))
        return any(frame.f_code is pdb.Pdb.interaction.__code__ for frame, _ in stack)

    def _frames(self) -> Stack:
        """Return the stack of the error that is explained, or the main thread's.

        It keeps the user's tensors, so that nobody has it while the main thread runs, such as during `progress()`.
        """
        if self._stack is not None:
            return self._stack
        return list(traceback.walk_stack(sys._current_frames()[self._main]))

    def _call(self, stack: Stack) -> str:
        """Return the call in which the main thread is, or in which the error that is explained was raised."""
        return _call_of(stack, self._wait())

    def _wait(self) -> Wait | None:
        """Return what the main thread waits for, or the wait in which the error that is explained was raised."""
        if self._stack is not None:
            return self._wait_of_error
        return wait_of_thread(self._main)

    def _line(self, stack: Stack) -> str:
        return line_of_stack(stack, self._call(stack))

    def _here(self) -> object:
        """Return the main thread's position: while it is the same, that thread has not moved."""
        awaited, done = self._awaited(), progress()
        if awaited is not None:  # it looks for the value again and again
            return id(awaited), done
        frame = sys._current_frames()[self._main]
        return id(frame), frame.f_trace, frame.f_lasti, done

    def _awaited(self) -> Collective | None:
        """Return the value of rank 0 that the main thread waits for."""
        return self.values_of_rank_0.awaited_by(self._main) if self.values_of_rank_0 else None

    def _state(self) -> RankState:
        """Return the state of this rank."""
        assert self._judge
        assert self.values_of_rank_0
        calls, stack = latest_collectives(self._since_ns), self._frames()
        has_failed, is_waiting = self._status == "failed", self._status == "waiting"
        pending = [each for each in calls if not each.is_completed] or calls[len(calls) - has_failed :]
        if len(pending) == 1 and self._status != "running":
            signature = with_root(pending[0].signature, stack)
            calls[calls.index(pending[0])] = pending[0]._replace(is_completed=False, signature=signature)
        awaited, groups = self._awaited(), list[str](dist.distributed_c10d._world.pg_names.values())
        calls += self.values_of_rank_0.collectives()
        if self._judge.rank == 0:
            groups.append(RANK_0)
        is_blocked = is_waiting and self._is_held and not has_other_active_threads(self._main)
        wait = self._wait() or Wait("", is_blocked=False)
        return RankState(
            self._judge.rank,
            "waiting" if has_failed else self._status,
            call_site(stack),
            self._call(stack) if awaited is None else awaited.signature,
            calls,
            groups,
            is_blocked and self._here() == self._position,
            self._judge.since,
            self._judge.answered,
            self._facts,
            wait.wait_kind,
            wait.block,
            statements_around(stack),
        )
