"""What the main thread of a rank does, as the watchdog's thread sees it twice a second.

    RUNNING ── 3 s at one position, held or with a pending collective ──► WAITING
       ▲                                                                     │
       └────────────────────── is at another position ───────────────────────┘

    RUNNING, WAITING ── asks its user at the prompt of pdb ──► STOPPED ── goes on ──► RUNNING
    any of them ── the block ends ──► RETURNED
    any of them ── torch raises an error that is to be explained ──► WAITING, with `has_failed`

The words of this file:

    position   where the thread is: while it is the same, the thread has not moved
    held       in a call that returns when other ranks have done their part, and only then
    blocked    held and not moved, while no other thread could make a missing collective

A thread is held in one of these:

    a call of this package     it has said so: `waiting_for(..., is_blocked=True)`
    a call of torch            its innermost frame is one of torch.distributed
    a value of rank 0          see `from_rank_0`
    a read of a GPU            see `device_reads`; after 3 s, with a pending collective of NCCL

A thread that waits for a message, as in `dist.recv`, is held, too. Which rank sends the message is
not known, and the collectives that are pending do not hold it: see `RankState.awaited`.

Of a read it is known that the current stream of the GPU has not ended for seconds, while a
collective of this rank has not. The stream waits for it after every call without `async_op=True`,
and at the end of backward. A collective that was begun with `async_op=True` before a read that
takes long, and in another order than on other ranks, would be taken for what the read waits for.
"""

from __future__ import annotations

import pdb
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any

import torch.distributed as dist

from parallelize.hang_detection.device_reads import read_at
from parallelize.hang_detection.from_rank_0 import RANK_0, ValuesOfRank0
from parallelize.hang_detection.rank_state import (
    Collective,
    RankState,
    RankStatus,
    latest_collectives,
    pending_of,
    progress,
)
from parallelize.hang_detection.stack_frames import (
    Stack,
    call_site,
    has_other_active_threads,
    is_in_collective,
    is_in_exchange_of_messages,
    operation,
    with_root,
)
from parallelize.hang_detection.statements import statements_around
from parallelize.hang_detection.waiting import Wait, WaitKind, wait_of_thread

WAITS_AFTER_S = 3.0
"""A thread that has not moved for so long waits."""


class MainThread:
    """The thread that makes this object.

    Args:
        values_of_rank_0: the values of rank 0 that this process waits for.

    Attributes:
        status: what the thread does, of the latest look.
        is_held: whether the thread is held, of the latest look.
    """

    def __init__(self, values_of_rank_0: ValuesOfRank0) -> None:
        self.status = RankStatus.RUNNING
        self.is_held = False
        self._number = threading.get_ident()
        self._values_of_rank_0 = values_of_rank_0
        self._began_ns = time.time_ns()
        self._has_failed = False
        # After the end of the block, or an error: where the thread was, in place of where it is.
        self._last_stack: Stack | None = None
        self._last_wait: Wait | None = None
        # The read of a GPU that holds the thread.
        self._read: Wait | None = None
        self._position: object = None
        self._since_s = 0.0
        self._mark: object = None

    def look(self) -> None:
        """Find out what the thread does."""
        is_in_call, is_debugged = self._what_holds(self.frames())
        position = self._position_now()
        if position != self._position:
            self._position, self._since_s = position, time.monotonic()
        is_still = time.monotonic() - self._since_s >= WAITS_AFTER_S
        self._read = None
        if is_still and not is_in_call:
            self._read = self._read_of_device()
        self.is_held = is_in_call or self._read is not None
        self.status = RankStatus.RUNNING
        if is_debugged:
            self.status = RankStatus.STOPPED
        elif is_still and (self.is_held or _has_pending_collective()):
            self.status = RankStatus.WAITING

    def _what_holds(self, stack: Stack) -> tuple[bool, bool]:
        """Return whether a call holds the thread, and whether its user has it in pdb.

        The frame of a call that holds the thread gets a mark. The frame of the next such call has
        none, although it may have the same address.
        """
        wait = wait_of_thread(self._number)
        is_held = is_in_collective(stack) or self._awaited() is not None
        is_held = is_held or (wait is not None and wait.is_blocked)
        innermost, _ = stack[0]
        if is_held and innermost.f_trace is not self._mark:
            self._mark = _Mark()
            innermost.f_trace = self._mark
        code_of_prompt = pdb.Pdb.interaction.__code__
        is_debugged = any(frame.f_code is code_of_prompt for frame, _ in stack)
        return is_held, is_debugged

    def _read_of_device(self) -> Wait | None:
        """Return the read of a GPU that holds the thread, which has not moved; None: none does."""
        if not _has_pending_collective("nccl"):
            return None
        read = read_at(self._innermost_frame())
        return Wait(read, is_blocked=True, wait_kind=WaitKind.READ) if read else None

    def _innermost_frame(self) -> FrameType:
        return sys._current_frames()[self._number]

    def frames(self) -> Stack:
        """Return the stack of the thread, or that of its error.

        It keeps the user's tensors, so that nobody has it while the thread runs, such as during
        `progress()`.
        """
        if self._last_stack is not None:
            return self._last_stack
        return list(traceback.walk_stack(self._innermost_frame()))

    def call(self, stack: Stack) -> str:
        """Return the call that the thread is in: that of its wait, or else that of its line."""
        wait = self._wait(stack)
        return operation(stack) if wait is None else wait.call

    def _wait(self, stack: Stack) -> Wait | None:
        """Return what the thread waits for; None: it does not say so."""
        if is_in_exchange_of_messages(stack):
            return Wait(operation(stack), is_blocked=False, wait_kind=WaitKind.MESSAGE)
        if self._last_stack is not None:
            return self._last_wait
        return wait_of_thread(self._number) or self._read

    def _awaited(self) -> Collective | None:
        """Return the value of rank 0 that the thread waits for."""
        return self._values_of_rank_0.awaited_by(self._number)

    def _position_now(self) -> object:
        """Return the position of the thread: two positions are equal if it has not moved."""
        awaited, progress_of_groups = self._awaited(), progress()
        # A thread that waits for a value of rank 0 looks for it again and again.
        if awaited is not None:
            return id(awaited), progress_of_groups
        frame = self._innermost_frame()
        return id(frame), frame.f_trace, frame.f_lasti, progress_of_groups

    def end(self) -> None:
        """Note that the block has ended: this rank makes no further collectives."""
        self._last_stack, self.status = (), RankStatus.RETURNED

    def fail(self, stack: Stack, wait: Wait | None) -> None:
        """Note that torch has raised an error, which the states of the ranks are to explain.

        Args:
            stack: of the error.
            wait: in which it was raised; None: in none.
        """
        self._last_stack, self._last_wait = stack, wait
        self._has_failed, self.status, self.is_held = True, RankStatus.WAITING, False

    def state(self, rank: int, *, since: int, answers: int, facts: Any) -> RankState:
        """Return the state of this rank, for a question.

        Args:
            rank: number of this rank.
            since: number of the question with which its wait began; 0: it does not wait.
            answers: number of the question.
            facts: what `on_look` has returned.
        """
        # The recorder is read before the stack, and the position after both. If the collective
        # ends meanwhile, the position is another one, and the rank does not count as blocked.
        collectives = latest_collectives(self._began_ns)
        stack = self.frames()
        self._describe_wait_in(collectives, stack)
        collectives += self._values_of_rank_0.collectives()
        groups = list[str](dist.distributed_c10d._world.pg_names.values())
        if rank == 0:
            groups.append(RANK_0)
        awaited = self._awaited()
        wait = self._wait(stack) or Wait("", is_blocked=False)
        return RankState(
            rank=rank,
            status=self.status,
            location=call_site(stack),
            operation=self.call(stack) if awaited is None else awaited.signature,
            collectives=collectives,
            groups=groups,
            is_blocked=self._is_blocked(),
            since=since,
            answers=answers,
            facts=facts,
            wait_kind=wait.wait_kind,
            block=wait.block,
            statements=statements_around(stack),
        )

    def _is_blocked(self) -> bool:
        if self.status is not RankStatus.WAITING or not self.is_held:
            return False
        has_moved = self._position_now() != self._position
        return not has_moved and not has_other_active_threads(self._number)

    def _describe_wait_in(self, collectives: list[Collective], stack: Stack) -> None:
        """Give the collective that the thread waits in, if it is known, the root of its call.

        The collective of an error counts as pending: gloo has marked it as completed.
        """
        pending = pending_of(collectives)
        if not pending and self._has_failed:
            pending = collectives[-1:]
        if len(pending) == 1 and self.status is not RankStatus.RUNNING:
            index = collectives.index(pending[0])
            signature = with_root(pending[0].signature, stack)
            collectives[index] = pending[0]._replace(is_completed=False, signature=signature)


class _Mark:
    """A trace function that does nothing: Python calls it for the frame under a debugger."""

    def __call__(self, *_event: object) -> None:
        """Ignore what the frame does."""


def _has_pending_collective(library: str | None = None) -> bool:
    """Whether a collective has begun on this rank, and not completed.

    Args:
        library: as of `Progress`; None: any.
    """
    for group in progress():
        if group.begun != group.completed and library in (None, group.library):
            return True
    return False
