"""The judge: one of the ranks that wait, which looks for a deadlock in the states of all ranks.

What a rank does in each of its checks, twice a second:

    its wait begins       it asks all ranks: the number of the question grows, and is its `since`
    a new question        it publishes its state; if it waits, it becomes the judge if there is
                          none, and reads the verdict if there is one
    no new question       if it is the judge, it judges; if the judge gives no sign, it takes over
    its wait ends         it makes way for another judge

What the judge does about one question:

    ASKED ── all ranks have answered, or 2.5 s are over ──► JUDGED

    JUDGED ── a deadlock ──────────────────────────► the verdict, which ends the ranks that wait
    JUDGED ── 2 s before the timeout ──────────────► the verdict, which says where all ranks are
    JUDGED ── 30 s, 1 min, ... of the wait ────────► the line that rank 0 logs
    JUDGED ── 4 s, or a rank begins to wait ───────► ASKED, by the next question
    ASKED ── 0.75 s after that verdict was due ────► the verdict, although some have not answered

A rank in pdb answers, too: as long as its user has it, there is no verdict, and the times of the
wait begin anew.

The keys in the store of the process group, all plain data:

    asked         number of the latest question
    state/<rank>  the state of a rank, with the number of the question that it answers
    judge         the rank that judges
    verdict       what ends the ranks that wait. On a timeout it has the number of the latest
                  question: the awaited rank may still come before anybody reads the verdict, which
                  must not end the waits that begin later
    line          what rank 0 logs
"""

from __future__ import annotations

import enum
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from parallelize.hang_detection.deadlock import (
    Verdict,
    find_deadlock,
    timeout_verdict,
    waiting_line,
)
from parallelize.hang_detection.last_seen import SeenRecords
from parallelize.hang_detection.main_thread import WAITS_AFTER_S
from parallelize.hang_detection.rank_state import Collective, RankState, RankStatus

CHECK_EVERY_S = 0.5
"""Between two checks of a rank."""
_CHECK_OFTEN_S = 0.1
"""Between checks of a rank that waits, shortly before and after its verdict is due."""
ASK_EVERY_S = 4.0
"""Between two questions of the judge."""
_ANSWER_S = 2.5
"""In this time a rank answers that can answer, also on a busy machine."""
_FIRST_LINE_S = 30.0
"""A wait of this time gets a line in the log; the next ones come after twice the time each."""
_ABORT_MARGIN_S = 2.0
"""The verdict comes so long before the timeout. Later NCCL would abort the process, and gloo would
raise an error that names no rank."""
_LATE_ANSWER_S = 0.75
"""After this time the verdict on a timeout waits no more for answers."""
_TAKE_OVER_S = 1.0
"""A verdict that is late by this time shows that the judge is stopped."""
_NO_SIGN_S = 2 * ASK_EVERY_S
"""Ranks wait, and nobody has asked for so long: the judge is stopped."""
_NO_JUDGE = -1

Timeout = Callable[[Sequence[Collective]], float]
"""Returns the timeout of a wait, in seconds, from its pending collectives: the longest one, of the
default group and of the groups of these collectives. Without collectives, that of any wait."""


class TorchError(enum.Enum):
    """The error of torch that a rank explains by the states of all ranks."""

    NONE = "the rank waits"
    TIMEOUT = "a collective has timed out"
    OTHER = "another error, such as a closed connection, which a timeout does not explain"


@dataclass
class Judge:
    """One rank's part in the search for a deadlock, and the search itself on the rank that judges.

    Args:
        store: a separate connection to the store, because the main one may be blocked in a wait.
        rank: rank of this process.
        world_size: number of ranks.
        timeout_s: returns the timeout of this rank's wait.
        observe: returns this rank's state; called when a question was asked.
        seen_records: where each rank was last seen; None: nobody publishes it.
        since: number of the latest question when the current wait began; 0: this rank does not
            wait.
        answered: number of the latest question that this rank has answered.
        ends_in_time: whether torch ends a wait at the timeout, before which the verdict must come;
            not with a debugger.
        error: the error of torch that is to be explained.
    """

    store: dist.Store
    rank: int
    world_size: int
    timeout_s: Timeout
    observe: Callable[[], RankState]
    seen_records: SeenRecords | None = None
    since: int = 0
    answered: int = 0
    ends_in_time: bool = True
    error: TorchError = TorchError.NONE
    # The latest state that was read of each rank; it may answer a question before this wait.
    _states: dict[int, RankState] = field(default_factory=dict)
    # The number of the latest question of this wait that was judged; 0: none.
    _judged: int = 0
    # The rank that judges, when this one has last looked.
    _judge_rank: int = _NO_JUDGE
    # Whether the store has the number of questions.
    _has_key: bool = False
    # When this rank's wait began, and when it has answered the latest question.
    _began_s: float = 0.0
    _asked_s: float = 0.0
    # After how long a wait the next line is due, and after how long it times out.
    _line_due_s: float = 0.0
    _limit_s: float = 0.0

    def check(self, *, is_waiting: bool) -> Verdict | None:
        """Do this rank's part, and return the verdict that ends it, if there is one.

        Args:
            is_waiting: whether this rank waits.
        """
        if is_waiting and not self.since:
            self._begin_wait()
        elif not is_waiting:
            self.since = 0
            self.resign()
        number = self._number_of_question()
        if number == self.answered:
            if self._is_judge() or self._takes_over():
                self._judge()
            return None
        return self._answer(number)

    def _begin_wait(self) -> None:
        """Ask all ranks, because this one begins to wait."""
        self.since = self._ask()
        self._began_s = time.monotonic() - WAITS_AFTER_S
        self._line_due_s = _FIRST_LINE_S
        self._states = {}
        self._judged = 0

    def _answer(self, number: int) -> Verdict | None:
        """Publish this rank's state, the answer to a question; return the verdict that ends it.

        A rank that waits becomes the judge, if none of those that waited before it has.
        """
        self.answered, self._asked_s = number, time.monotonic()
        state = self.observe()
        self.store.set(f"state/{self.rank}", json.dumps(state))
        self._log_line()
        if state.status != RankStatus.WAITING:
            return None
        self._limit_s = self.timeout_s(state.awaited())
        self._judge_rank = int(self.store.compare_set("judge", "", str(self.rank)))
        return self._read_verdict()

    def _read_verdict(self) -> Verdict | None:
        """Return the verdict that ends this rank, which waits; None: there is none."""
        if not self.store.check(["verdict"]):
            return None
        verdict: Verdict
        verdict, last_question = json.loads(self.store.get("verdict"))
        began_later = last_question is not None and self.since > last_question
        if began_later and self.error is TorchError.NONE:
            return None
        return verdict

    def _log_line(self) -> None:
        """Log the line of the judge on rank 0, whose output the user sees."""
        if self.rank == 0 and self.store.check(["line"]):
            logging.getLogger("parallelize").warning(self.store.get("line").decode())
            self.store.delete_key("line")

    def pause_s(self) -> float:
        """Return the seconds until the next check: few while the verdict on this wait is due."""
        if self.since and self._late_s() >= -CHECK_EVERY_S:
            return _CHECK_OFTEN_S
        return CHECK_EVERY_S

    def _late_s(self) -> float:
        """Return for how long the verdict on the timeout has been due; negative: it is not yet."""
        waited_s = time.monotonic() - self._began_s
        if self.error is TorchError.OTHER:
            return -math.inf
        if self.error is TorchError.TIMEOUT:
            return waited_s - WAITS_AFTER_S
        return waited_s - (self._limit_s - _ABORT_MARGIN_S)

    def _is_judge(self) -> bool:
        return self._judge_rank == self.rank

    def _takes_over(self) -> bool:
        """Become the judge if this rank waits and the judge gives no sign; whether it now is."""
        asked_s = time.monotonic() - self._asked_s
        has_sign = asked_s < _NO_SIGN_S and self._late_s() < _TAKE_OVER_S
        if not self.since or has_sign:
            return False
        # The first of several ranks succeeds: the key must name the judge that this rank knows.
        judge = self.store.compare_set("judge", str(self._judge_rank), str(self.rank))
        self._judge_rank = int(judge or _NO_JUDGE)
        return self._is_judge()

    def _ask(self) -> int:
        """Ask all ranks where they are, and return the number of the question."""
        return int(self.store.add("asked", 1))

    def _number_of_question(self) -> int:
        """Return the number of the latest question.

        The first check makes the key, by which `parallelize top` finds the store's keys, too. Later
        ones only read it: a FileStore keeps all that was ever written, so that a request each half
        second that adds 0 would fill the disk.
        """
        if not self._has_key:
            self._has_key = True
            return int(self.store.add("asked", 0))
        return int(self.store.get("asked"))

    def _judge(self) -> None:
        """Judge when all ranks have answered, or had the time to; ask again after a while."""
        answers = self._read_answers()
        asked_s = time.monotonic() - self._asked_s
        is_debugged = self._is_debugged()
        if is_debugged:
            self._began_s = time.monotonic()
        verdict = None
        last_question: int | None = None
        had_time = len(answers) == self.world_size or asked_s >= _ANSWER_S
        if self._judged < self.answered and had_time:
            self._judged = self.answered
            if not is_debugged:
                verdict = find_deadlock(answers)
        if verdict is None and self._late_s() >= self._patience_s():
            verdict = self._timeout_verdict()
            last_question = self.answered
        if verdict is not None:
            self.store.set("verdict", json.dumps([verdict, last_question]))
        elif time.monotonic() - self._began_s >= self._line_due_s:
            self._line_due_s *= 2
            self.store.set("line", self._waiting_line())
        elif asked_s < ASK_EVERY_S:
            return
        # To answer the question, each rank looks for the verdict and the line.
        self._ask()

    def _is_debugged(self) -> bool:
        """Whether the user has one of the ranks in pdb."""
        states = self._answering().values()
        return any(state.status == RankStatus.STOPPED for state in states)

    def _patience_s(self) -> float:
        """Return for how long the verdict on a timeout may be late, while ranks still answer."""
        if self._judged == self.answered:
            return 0.0
        if self.ends_in_time:
            return _LATE_ANSWER_S
        return math.inf

    def _read_answers(self) -> dict[int, RankState]:
        """Read the states of ranks that have answered since the latest look.

        Returns:
            The answers to the latest question.
        """
        has_answered = self._states_since(self.answered)
        for rank in range(self.world_size):
            if rank not in has_answered and self.store.check([f"state/{rank}"]):
                self._states[rank] = RankState.loads(self.store.get(f"state/{rank}"))
        return self._states_since(self.answered)

    def _states_since(self, question: int) -> dict[int, RankState]:
        """Return the states that answer a question, or a later one.

        A rank that has returned answers no more, and does not need to.
        """
        states = {}
        for rank in sorted(self._states):
            state = self._states[rank]
            if state.status == RankStatus.RETURNED or state.answers >= question:
                states[rank] = state
        return states

    def _answering(self) -> dict[int, RankState]:
        """Return the states of ranks that answer; the latest question may be only a moment old."""
        return self._states_since(max(self.since, self._judged))

    def _waiting_line(self) -> str:
        """Say which ranks wait for which, and where those are, or were last seen."""
        states = self._answering()
        answers = self._states_since(self.answered)
        silent: dict[int, str] = {}
        for rank in range(self.world_size):
            if rank in answers:
                continue
            text = self._silence_of(rank, has_state=rank in states)
            if text:
                silent[rank] = text
                states.pop(rank, None)
        return waiting_line(states, self.world_size, silent)

    def _silence_of(self, rank: int, *, has_state: bool) -> str:
        """Say why a rank has not answered the latest question, and where it was last seen.

        Args:
            rank: the rank.
            has_state: whether it has answered an earlier question, whose answer says where it is.
                Then only what is certain is said; "": nothing is.
        """
        seen = None
        if self.seen_records is not None:
            seen = self.seen_records.read(rank)
        if seen is None:
            return ""
        text = seen.certain()
        if not text and not has_state:
            text = seen.silence(had_time=self._judged > 0)
        return text

    def _timeout_verdict(self) -> Verdict:
        reason = self.error.value
        if self.error is TorchError.NONE:
            reason = f"timeout={self._limit_s:g} s is over"
        return timeout_verdict(self._waiting_line(), self._answering(), reason=reason)

    def resign(self) -> None:
        """Make way for another judge: the first of the waiting ranks to answer a new question."""
        if self._is_judge():
            self._judge_rank = _NO_JUDGE
            self.store.delete_key("judge")
            self._ask()
