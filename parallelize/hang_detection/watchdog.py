"""A thread beside each rank that finds out, when the rank waits for long, for whom it waits, and whether for ever.

    every second        has the main thread moved? has anybody asked?       two looks and no more while all is well
    2 s in one call     ask: all ranks leave where they are in the store
    proof, seen twice   the judge among those that wait writes the verdict; each of them ends with it as its error
    30 s, 1 min, ...    no proof: rank 0 logs one line
    timeout             torch ends the wait, and the error says where all were

Only the thread can act: the main thread is in compiled code, where no exception reaches it.
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
from parallelize.hang_detection.exchange import Board
from parallelize.hang_detection.flight_recorder import Recorder, members
from parallelize.hang_detection.rank_state import Place, State
from parallelize.hang_detection.store_wait import Need
from parallelize.hang_detection.thread_clock import ThreadClock

__all__ = ["Watch"]

LOOK_EVERY_S, BUSY_EVERY_S = 1.0, 0.4
SUSPECT_S = 2.0
_ANSWERS_WITHIN_S = 2.5
_ENDS_WITHIN_S = 10.0

# What torch says of a peer that is gone or does something else, and of one that does not come.
_LOST = re.compile(r"gloo/|NCCL|timed? ?out", re.IGNORECASE)
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)

_log = logging.getLogger("parallelize")


class Watch:
    """Watches the thread that enters `over`; outside of that it knows of nothing.

    Attributes:
        on_proof: ends this process with an error; called in the watching thread.
    """

    def __init__(self) -> None:
        self.on_proof: Callable[[SyncError], None] = _end_program
        self._now: _Watching | None = None

    @contextlib.contextmanager
    def over(self, store: dist.Store, *, timeout: timedelta, since_ns: int | None) -> Iterator[None]:
        """Watch the block, on every rank of the default process group.

        Args:
            store: where the ranks have met, under a name that no other block uses.
            timeout: of a wait in the group.
            since_ns: when the group was made for this block, which ends it (time.time_ns); None: it was there before
                and lives on, so that a rank that has left the block may still take part in it.
        """
        try:
            shared: Any = store  # whose stub has no clone()
            board = Board(shared.clone(), rank=dist.get_rank(), world_size=dist.get_world_size())
        except (NotImplementedError, RuntimeError):  # a store of the user's own, that no thread can have for itself
            yield
            return
        self._now = _Watching(board, timeout=timeout, since_ns=since_ns, on_proof=self._end)
        try:
            with self._now.running():
                yield
        except RuntimeError as error:
            explained = self.explained(error)
            if explained is error:
                raise
            raise explained from error
        finally:
            self._now = None

    @contextlib.contextmanager
    def needing(self, ranks: Callable[[], Sequence[int]]) -> Iterator[Callable[[], str]]:
        """A wait for other ranks that is no collective: the block looks, again and again, for what they leave.

        Args:
            ranks: those that have not come yet; asked in another thread.

        Yields:
            What tells why one of them cannot come any more, or "".
        """
        need = Need(ranks)
        if self._now is not None:
            self._now.need = need
        try:
            yield need.hopeless
        finally:
            if self._now is not None:
                self._now.need = None

    def _end(self, error: SyncError) -> None:
        self.on_proof(error)  # as it is now: it may be set while the watch is on

    def explained(self, error: BaseException) -> BaseException:
        """The same error, or a SyncError in its place where it is but the end of a wait for others."""
        is_torchs = isinstance(error, dist.DistError) or (type(error) is RuntimeError and _LOST.search(str(error)))
        if self._now is None or not is_torchs:
            return error
        finding = self._now.diagnosed(error, is_late=bool(_LATE.search(str(error))))
        if finding is None:
            return error
        explained = _as_error(finding).with_traceback(error.__traceback__)
        explained.__cause__ = error
        return explained


class _Watching:
    """A block that is watched."""

    def __init__(
        self, board: Board, *, timeout: timedelta, since_ns: int | None, on_proof: Callable[[SyncError], None]
    ) -> None:
        self._board, self._on_proof = board, on_proof
        self.need: Need | None = None
        self._timeout_s, self._owns_group = timeout.total_seconds(), since_ns is not None
        self._main = threading.get_ident()
        self._clock, self._recorder = ThreadClock(self._main), Recorder(since_ns or 0)
        self._is_spinning = "nccl" in str(dist.get_backend())  # its waits take all of a processor's time
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="parallelize-watch", daemon=True)
        self._stands: object = None
        self._since = time.monotonic()
        self._answered = self._lines = 0
        self._first_asked = 0  # in this wait
        self._suspected: tuple[deadlock.Finding, int] | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watch until the block ends; the others hear of it if it has ended well."""
        self._thread.start()
        try:
            yield
            self._end()
            if self._owns_group:
                with contextlib.suppress(dist.DistError, RuntimeError):  # a store that is gone needs to hear nothing
                    self._board.post(self._place("returned", ()))
        finally:
            self._end()

    def _end(self) -> None:
        self._is_over.set()
        self._thread.join(_ENDS_WITHIN_S)

    def _run(self) -> None:
        pause_s = LOOK_EVERY_S
        while not self._is_over.wait(pause_s):
            try:
                pause_s = BUSY_EVERY_S if self._look() else LOOK_EVERY_S
            except (dist.DistError, RuntimeError):  # the store is gone, and nobody is left to talk to
                return

    def _look(self) -> bool:
        """One look; whether the next one should follow soon."""
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return False
        stood_s = self._stood_s(frame)
        waits = stood_s >= SUSPECT_S and (
            stack_frames.is_in_distributed(stack_frames.stack_of(frame)) or self._recorder.has_pending()
        )
        need = self.need
        if need is not None:
            need.look(self._board)
        question = self._board.ask() if waits else self._board.question()
        if not waits:
            self._suspected, self._lines, self._first_asked = None, 0, question + 1
            self._board.leave()
        if question == self._answered:
            return stood_s >= SUSPECT_S or need is not None
        self._answered = question
        place = self._place("waits" if waits else "runs", stack_frames.stack_of(frame), since_s=stood_s)
        self._board.post(place)
        if self._board.rank == 0:  # it speaks for all: its output is what the user sees
            self._say(self._board.news())
        if waits:
            self._act(place)
        return True

    def _stood_s(self, frame: FrameType) -> float:
        """For how long the main thread has stood at one place without computing."""
        stands, is_idle = (id(frame), frame.f_lasti, self._recorder.progress()), self._clock.is_idle()
        if stands != self._stands or not (is_idle or self._is_spinning):
            self._stands, self._since = stands, time.monotonic()
        return time.monotonic() - self._since

    def _act(self, mine: Place) -> None:
        """What a rank that waits does: end by the verdict, or be the one that finds it."""
        verdict = self._board.verdict()
        if verdict is not None:
            self._end_by(verdict)
        if not self._board.becomes_judge():
            return
        places = self._board.places()
        finding = deadlock.find(places)
        if finding is None:
            self._suspected = None
            self._be_patient(mine, places)
        elif self._suspected is None or self._suspected[0] != finding:
            self._suspected = (finding, self._answered)
        elif finding.is_confirmed(places, since=self._suspected[1]):
            self._board.decide(finding)
            self._end_by(finding)

    def _be_patient(self, mine: Place, places: list[Place]) -> None:
        places = _answering(places, self._first_asked)
        engines = {call.engine for call in mine.pending()}
        if engines - {"gloo"} and mine.since_s >= self._timeout_s - SUSPECT_S:
            # NCCL would end this process without a word.
            self._end_by(self._overdue(places, said="nothing has come"))
        if mine.since_s >= deadlock.line_due_s(self._lines):
            self._lines += 1
            self._board.announce(deadlock.waiting_line(places, world_size=self._board.world_size))

    def _overdue(self, places: list[Place], *, said: str) -> deadlock.Finding:
        return deadlock.overdue(places, self._timeout_s, world_size=self._board.world_size, said=said)

    def _end_by(self, finding: deadlock.Finding) -> None:
        frame = sys._current_frames().get(self._main)
        if frame is not None and self._stood_s(frame) >= SUSPECT_S and not self._is_over.is_set():
            self._on_proof(_as_error(finding).with_traceback(stack_frames.traceback_of(stack_frames.stack_of(frame))))

    @staticmethod
    def _say(line: str) -> None:
        if line:
            _log.warning("%s", line)

    def _place(self, state: State, stack: stack_frames.Stack, *, since_s: float = 0.0, failed: bool = False) -> Place:
        """Where this rank is.

        Args:
            state: as judged by the caller.
            stack: of the main thread; empty: the block has ended.
            since_s: for how long it has been there.
            failed: whether the last collective has just failed, and is none that has ended.
        """
        calls = self._recorder.calls(self._stands, at_once=state != "runs" or failed)
        waits = state == "waits"
        if waits:
            calls = tuple(stack_frames.with_root(calls, stack, failed=failed))
        return Place(
            rank=self._board.rank,
            state=state,
            at=stack_frames.site(stack),
            doing=stack_frames.doing(stack),
            stack=stack_frames.lines(stack),
            calls=calls,
            groups=tuple((name, ranks) for name, ranks in members().items() if any(c.group == name for c in calls)),
            awaits=stack_frames.awaits(stack) if waits else (),
            is_alone=waits
            and not failed
            and stack_frames.is_blocking(stack)
            and not stack_frames.has_others(self._main),
            since_s=round(since_s, 1),
            answer=self._answered,
        )

    # --- in the main thread, where torch has raised ---

    def diagnosed(self, error: BaseException, *, is_late: bool) -> deadlock.Finding | None:
        """What the places of all ranks say of an error that torch has raised here; None: nothing."""
        self._end()
        try:
            return self._diagnosed(error, is_late=is_late)
        except (dist.DistError, RuntimeError):  # the store is gone, too
            return None

    def _diagnosed(self, error: BaseException, *, is_late: bool) -> deadlock.Finding | None:
        self._answered, end = self._board.ask(), time.monotonic() + _ANSWERS_WITHIN_S
        mine = self._place("waits", stack_frames.raised_in(error), failed=True)
        self._board.post(mine)
        while True:
            places = self._board.places()
            current = _answering(places, mine.answer)
            finding = self._board.verdict() or deadlock.find(current)
            if finding is not None:
                self._board.decide(finding)
                return finding
            if time.monotonic() > end or len(current) == self._board.world_size:
                said = str(error).partition("\n")[0]
                return self._overdue(current, said=said) if is_late else None
            time.sleep(0.05)


def _answering(places: Sequence[Place], question: int) -> list[Place]:
    """The places of ranks that have answered a question or a later one; who has returned need not."""
    return [each for each in places if each.state == "returned" or each.answer >= question]


def _as_error(finding: deadlock.Finding) -> SyncError:
    return SyncError(finding.what, why=finding.why, fix=finding.fix)


def _end_program(error: SyncError) -> None:
    """End a program that torchrun or srun has started, as an exception that nobody catches would."""
    traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)
