"""Watchdog thread: finds which ranks a blocked rank waits for, and whether they are deadlocked.

    every 0.5 s         each rank looks whether its main thread has moved, and whether it was asked
    3 s at one place    it waits: it asks where all ranks are, and each publishes its state
    compare-and-set     picks one of the waiting ranks as the judge, which reads the states
    deadlock            every waiting rank ends with the verdict
    none                the judge asks again every 4 s, and whenever a rank begins to wait, or
                        returns
    a rank in pdb       nothing ends the ranks that wait, as long as the user has it
    30 s, 1 min, ...    rank 0 logs which ranks wait, and where
    timeout - 2 s       the verdict is where all ranks are
    no sign of a judge  it is stopped, and another rank that waits judges

A rank that is stopped, or in compiled code that holds the GIL, does not answer. Its line is known
from the record that its watchdog has left at its latest look: see `last_seen`.

This needs a separate thread: the main thread is in compiled code, where no Python exception can be
raised.

The words of this room, each explained where it lives:

    wait      what a thread waits for, as whoever waits says it              waiting.py
    held      in a call that returns only when other ranks do their part     main_thread.py
    blocked   held, and nothing else in the process could help another rank  main_thread.py
    state     what a rank does, as it publishes it                           rank_state.py
    question  asks all ranks for their states; questions are numbered        judge.py
    judge     the rank that looks for a deadlock in the states               judge.py
    verdict   the parts of the error that ends the ranks that wait           deadlock.py
    advice    what the states show about the mistake in the program          advice.py
    record    where a rank was last seen, for the case that it is silent     last_seen.py
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

from parallelize.errors import SyncError, add_note
from parallelize.hang_detection.deadlock import Verdict
from parallelize.hang_detection.from_rank_0 import ValuesOfRank0
from parallelize.hang_detection.judge import ASK_EVERY_S, Judge, Timeout, TorchError
from parallelize.hang_detection.last_seen import (
    OwnRecord,
    SeenFiles,
    SeenKeys,
    SeenRecords,
    can_overwrite,
    line_of_function,
    line_of_stack,
)
from parallelize.hang_detection.main_thread import MainThread
from parallelize.hang_detection.rank_state import RankState, RankStatus
from parallelize.hang_detection.stack_frames import (
    Stack,
    call_site,
    is_in_collective,
    traceback_of,
)
from parallelize.hang_detection.waiting import Wait, wait_of_error

_STORE_S = 10.0
"""Longest time of a request to the store, and of a look on a busy machine."""
_ERROR_S = 1.5
"""For the explanation of an error: a rank is killed 3 s after another one has failed."""
_EXPLAIN_EVERY_S = 0.05
"""Between two checks while an error is explained."""
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)


def _end_program(error: SyncError) -> None:
    """Print the error, and exit as after an uncaught exception; under torchrun or srun."""
    try:
        traceback.print_exception(error)
        sys.stdout.flush()
    finally:
        os._exit(1)


def _allow_captures() -> None:
    """Let this thread query events while another thread captures a CUDA graph.

    NCCL's recorder queries events, which would end the capture by default. torch's own watchdog is
    in the same mode, cudaStreamCaptureModeThreadLocal.
    """
    version, _, _ = str(torch.version.cuda).partition(".")
    # A torch without CUDA has no such library.
    with contextlib.suppress(OSError):
        runtime = ctypes.CDLL(f"libcudart.so.{version}")
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(1)))


def _cloned(store: dist.Store) -> dist.Store | None:
    """Return another connection to a store; None: it is a user's store that has only one."""
    try:
        clone: dist.Store = store.clone()  # type: ignore[attr-defined]  # not in the stub
    except RuntimeError:
        return None
    # A request must fail if the store is lost, or the thread would not end.
    clone.set_timeout(timedelta(seconds=_STORE_S))
    return clone


class Watchdog:
    """Detects hangs of the thread that enters `watch`; inactive outside of that block.

    Args:
        has_debugger: whether a user may stop ranks in pdb; then this thread alone ends what waits
            for too long.
        seen_folder: private folder of the call, if all of its ranks are on this node, for the
            records of where they were last seen; None: the store has them.

    Attributes:
        on_hang: function that ends this process with an error; called in the watchdog thread.
        on_start: function that the watchdog thread calls first.
        on_look: function that returns facts for the state of this rank. It is called twice a second
            with the main thread's stack, and `is_waiting=`, whether that thread is held.
        on_collective: function that is called at each look that finds the main thread held; None:
            there is none.
        values_of_rank_0: what rank 0 tells the other ranks in the block; None: there is no group of
            several ranks.
        caller: the code that has called the user's function; None: no function was called.
    """

    on_hang: Callable[[SyncError], None] = staticmethod(_end_program)
    on_start: Callable[[], object] = staticmethod(lambda: None)
    on_look: Callable[..., Any] | None = None
    on_collective: Callable[[], object] | None = None

    def __init__(self, *, has_debugger: bool = False, seen_folder: Path | None = None) -> None:
        self.has_debugger = has_debugger
        self.values_of_rank_0: ValuesOfRank0 | None = None
        self.caller: CodeType | None = None
        self._seen_folder = seen_folder
        self._watch: _Watch | None = None

    @contextlib.contextmanager
    def watch(
        self, store: dist.Store, *, timeout_s: Timeout, since_ns: int | None
    ) -> Iterator[None]:
        """Watch this thread in a block, which every rank of the default process group must enter.

        Args:
            store: the default group's store with a prefix that no other block uses.
            timeout_s: called in the watchdog thread.
            since_ns: time when the group was initialized for this block (time.time_ns); None: the
                group outlives the block, so ranks that have left the block may still make
                collectives.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        outer_values, outer_watch = self.values_of_rank_0, self._watch
        longest_s = timeout_s(()) + ASK_EVERY_S
        values = ValuesOfRank0(store, rank, world_size, longest_s)
        self.values_of_rank_0 = values
        try:
            clone = _cloned(store)
            if clone is None:
                yield
                return
            watch = _Watch(self, values, clone, timeout_s, self._open_records(clone))
            self._watch = watch
            with watch.explaining_errors():
                yield
                if since_ns is not None:
                    watch.say_returned()
        finally:
            self.values_of_rank_0, self._watch = outer_values, outer_watch

    def begin(self, function: Any, caller: CodeType) -> None:
        """Publish that the user's function begins: it may stop before the first look.

        Args:
            function: the function.
            caller: the code that calls it. Reports of hangs show the frames below this one.
        """
        self.caller = caller
        if self._watch is not None:
            self._watch.publish(line_of_function(function))

    def explain(self, error: BaseException) -> BaseException:
        """Return a SyncError that explains an error of torch by the states of all ranks.

        Returns:
            The error itself if it is of no collective, or if the states do not explain it.
        """
        if self._watch is None:
            return error
        return self._watch.explain(error)

    def _open_records(self, store: dist.Store) -> SeenRecords | None:
        """Return the records of where ranks were last seen; None: there is no place for them."""
        rank = dist.get_rank()
        if self._seen_folder is None:
            return SeenKeys(store, rank) if can_overwrite(store) else None
        # The disk may be full, or the caller may have left.
        with contextlib.suppress(OSError):
            return SeenFiles(self._seen_folder, rank)
        return None


class _Watch:
    """The thread that watches one block, and what the main thread asks of it at the end.

        main thread                            thread
        explaining_errors: the block begins ─► _run: looks, and checks, twice a second
        the user's program                       a verdict ─► on_hang ends the process
        say_returned, or explain ────────────► ends; the main thread checks in its place
        the block ends

    Args:
        watchdog: the watchdog, whose functions are called.
        values_of_rank_0: what rank 0 tells the other ranks in the block.
        store: a connection to the store of its own.
        timeout_s: as for `Watchdog.watch`.
        records: where each rank was last seen; None: nobody publishes it.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        values_of_rank_0: ValuesOfRank0,
        store: dist.Store,
        timeout_s: Timeout,
        records: SeenRecords | None,
    ) -> None:
        self._watchdog = watchdog
        self._judge = Judge(
            store,
            dist.get_rank(),
            dist.get_world_size(),
            timeout_s,
            self._state,
            records,
            ends_in_time=not watchdog.has_debugger,
        )
        self._main_thread = MainThread(values_of_rank_0)
        self._record = OwnRecord(records)
        # What `on_look` has returned at the latest look.
        self._facts: Any = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="parallelize-watch", daemon=True)

    @contextlib.contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Run the thread in the block; an error of torch that leaves the block is explained."""
        self.publish(self._line(self._main_thread.frames()))
        self._thread.start()
        try:
            yield
        except RuntimeError as error:
            raise self.explain(error)  # noqa: B904 - it says what it explains
        finally:
            self._end_thread(_ERROR_S)
            if not self._thread.is_alive():
                with contextlib.suppress(RuntimeError):  # the store is lost
                    self._judge.resign()
                self._record.close()

    def _end_thread(self, longest_s: float) -> None:
        """Let the thread end, which may be in a request to a store that is lost."""
        self._is_over.set()
        self._thread.join(longest_s)

    def publish(self, line: str) -> None:
        """Publish where the main thread is: see `OwnRecord`."""
        with contextlib.suppress(RuntimeError):  # the store is lost
            self._record.write(line)

    def _line(self, stack: Stack) -> str:
        """Return the user's innermost line with its call: "train.py:41 in all_reduce"."""
        return line_of_stack(stack, self._main_thread.call(stack))

    def _run(self) -> None:
        """Look and check until the block is over, the store is lost, or there is a verdict."""
        # It sets the thread's device, on which the next line may make a context.
        self._watchdog.on_start()
        _allow_captures()
        with contextlib.suppress(RuntimeError):  # the store is lost
            while not self._is_over.wait(self._judge.pause_s()):
                self._look()
                is_waiting = self._main_thread.status is RankStatus.WAITING
                verdict = self._judge.check(is_waiting=is_waiting)
                if verdict is not None and not self._is_over.is_set():
                    self._watchdog.on_hang(self._error(verdict))

    def _error(self, verdict: Verdict) -> SyncError:
        """Return the error that ends this rank, at the main thread's line."""
        trace = traceback_of(self._main_thread.frames(), self._watchdog.caller)
        return SyncError(**verdict).with_traceback(trace)

    def _look(self) -> None:
        """Find out what the main thread does, note its facts, and publish its line."""
        self._main_thread.look()
        if self._main_thread.is_held and self._watchdog.on_collective is not None:
            self._watchdog.on_collective()
        stack = self._main_thread.frames()
        if self._watchdog.on_look is not None:
            self._facts = self._watchdog.on_look(stack, is_waiting=self._main_thread.is_held)
        self._record.write(self._line(stack))

    def _state(self) -> RankState:
        """Return the state of this rank, for the judge."""
        judge = self._judge
        return self._main_thread.state(
            judge.rank, since=judge.since, answers=judge.answered, facts=self._facts
        )

    def say_returned(self) -> None:
        """Publish that this rank makes no further collectives."""
        self._end_thread(_ERROR_S)
        self._main_thread.end()
        self._judge.since = 0
        with contextlib.suppress(RuntimeError):  # the store is lost
            self._judge.check(is_waiting=True)

    def explain(self, error: BaseException) -> BaseException:
        """Return what `Watchdog.explain` does."""
        stack = list(traceback.walk_tb(error.__traceback__))[::-1]
        wait = wait_of_error(error)
        if not _is_of_collective(error, stack, wait):
            return error
        has_timed_out = bool(_TIMED_OUT.search(str(error)))
        verdict = self._verdict_on_error(stack, wait, has_timed_out=has_timed_out)
        if verdict is None:
            return error
        explained = SyncError(**verdict).with_traceback(error.__traceback__)
        # It says what torch's error means, which as its cause would only be shown before it.
        explained.__suppress_context__ = True
        if has_timed_out:
            first_line, _, _ = f"{type(error).__name__}: {error}".partition("\n")
            add_note(explained, f"torch has raised {first_line}")
        return explained

    def _verdict_on_error(
        self, stack: Stack, wait: Wait | None, *, has_timed_out: bool
    ) -> Verdict | None:
        """Publish that torch has raised an error, and return the verdict that explains it.

        Args:
            stack: of the error.
            wait: in which it was raised.
            has_timed_out: whether the error is that of a timeout.
        """
        self._end_thread(_STORE_S if has_timed_out else _ERROR_S)
        self._main_thread.fail(stack, wait)
        if has_timed_out and self._thread.is_alive():
            # TCPStore has one lock for all requests of a connection, and the thread's request gets
            # no answer: another request would wait for it without end.
            place = f"{call_site(stack)} in {self._main_thread.call(stack)}"
            return _silent_store(self._judge.rank, place)
        self._judge.since = 0
        self._judge.error = TorchError.TIMEOUT if has_timed_out else TorchError.OTHER
        end_s = time.monotonic() + _ERROR_S
        with contextlib.suppress(RuntimeError):  # the store is lost
            while True:
                verdict = self._judge.check(is_waiting=True)
                if verdict is not None or time.monotonic() >= end_s:
                    return verdict
                time.sleep(_EXPLAIN_EVERY_S)
        return None


def _is_of_collective(error: BaseException, stack: Stack, wait: Wait | None) -> bool:
    """Whether an error is one that a collective of torch has raised.

    Args:
        error: the error.
        stack: of the error.
        wait: in which it was raised.
    """
    if type(error) is RuntimeError:
        is_in_wait = wait is not None and wait.is_blocked
        return is_in_wait or is_in_collective(stack)
    return isinstance(error, dist.DistError)


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
