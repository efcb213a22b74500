"""Search for a deadlock: the first rank that waits judges the states of all ranks.

a rank begins to wait    it requests all states; the first such rank becomes the judge
every 0.5 s              every rank reads the number of the latest request, and answers a new one with its state
until all have answered  the judge reads the states every 0.2 s
a deadlock is suspected  the judge requests the states again, and publishes the report that newer states confirm
else                     the judge requests them again after 2 s, 4 s, 8 s, 8 s ..., and others when they wait or return

The keys in the process group's store:
    request       number of the latest request for states
    state/<rank>  the state of a rank, with the number of the request that it answers
    judge         the rank that judges
    report        the report of a deadlock (`request` is then above _REPORTED), or of the first rank with a torch error
    line          a line for rank 0 to log
    diagnosing    number of ranks with a torch error
"""

from __future__ import annotations

import logging
import math
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist

from parallelize.hang_detection import deadlock
from parallelize.hang_detection.rank_state import RankState

__all__ = ["Judge", "existing_keys"]

_REPORTED = 1 << 40
_ANSWER_TIMEOUT_S = 2.5
_ABORT_MARGIN_S = 3.0  # before its timeout NCCL's wait is ended here, because NCCL aborts the process
_CHECK_INTERVAL_S, _JUDGE_INTERVAL_S = 0.5, 0.2
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 8.0
_FIRST_LINE_S = 30.0  # the next lines are due after 60 s, 120 s, 240 s ...

_log = logging.getLogger("parallelize")


class Judge:
    """One rank's part in the search, and the search itself on the rank that judges.

    Args:
        store: a separate connection to the store, because the main one may be blocked in a wait.
        rank: rank of this process.
        world_size: number of ranks.
        timeout_s: timeout of a collective.

    Attributes:
        answered: number of the latest request that this rank has answered.
    """

    def __init__(self, store: dist.Store, *, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s, self.answered = rank, world_size, timeout_s, 0
        self._store = store
        self._store.set_timeout(timedelta(seconds=10))  # so that a call fails if the store is lost
        self._is_judge = False
        self._first_request = 0  # number of the first request in the current wait; 0: this rank does not wait
        self._own_request, self._line_due_s = 0, _FIRST_LINE_S
        self._asked_at: float | None = None  # None: all ranks have answered the latest request, or had time to
        self._ask_at, self._pause_s = math.inf, _FIRST_PAUSE_S
        self._suspected: tuple[deadlock.HangReport | None, int] = None, 0

    @property
    def interval_s(self) -> float:
        """Time in s until the next check."""
        return _JUDGE_INTERVAL_S if self._is_judge else _CHECK_INTERVAL_S

    def request_states(self) -> int:
        """Request the states of all ranks; return the number of the request."""
        return self._store.add("request", 1)

    def states(self, ranks: Iterable[int]) -> list[RankState]:
        """Return the latest state of each of these ranks that has published one."""
        # Written by the same user's run.
        keys = existing_keys(self._store, [f"state/{rank}" for rank in ranks])
        return [pickle.loads(each) for each in self._store.multi_get(keys)]

    def publish_state(self, state: RankState) -> None:
        """Publish the state of this rank."""
        self._set(f"state/{self.rank}", state)
        if state.status == "returned":
            self.request_states()

    def resign(self) -> None:
        """Make way for another judge: the first of the waiting ranks to answer a new request."""
        if self._is_judge:
            self._is_judge = False
            self._store.delete_key("judge")
            self.request_states()

    def check(self, idle_s: float | None, observe: Callable[[], RankState]) -> deadlock.HangReport | None:
        """Answer a new request; return the report that ends this rank, if there is one.

        Args:
            idle_s: time in s that this rank has been waiting; None: it does not wait.
            observe: returns this rank's state, with the number `answered`.
        """
        begins = idle_s is not None and not self._first_request
        number = self._store.add("request", int(begins))
        if idle_s is None:
            self._first_request, self._line_due_s, self._suspected = 0, _FIRST_LINE_S, (None, 0)
            self.resign()
        elif begins:
            self._first_request = number
        if idle_s is not None and number > _REPORTED:
            return self._report()
        if number != self.answered:
            self._answer(number, observe)
        return None if idle_s is None or not self._is_judge else self._search(idle_s)

    def _answer(self, number: int, observe: Callable[[], RankState]) -> None:
        self.answered = number
        self.publish_state(observe())
        if self.rank == 0 and self._store.check(["line"]):  # the user sees rank 0's output
            _log.warning("%s", self._store.get("line").decode())
            self._store.delete_key("line")
        if self._first_request and not self._is_judge:
            self._is_judge = self._store.compare_set("judge", "", str(self.rank)).decode() == str(self.rank)
        if self._is_judge and number != self._own_request:  # another rank waits, too
            self._pause_s = _FIRST_PAUSE_S
            # The requests of many ranks do not extend the time to answer: one of them may never do so.
            self._asked_at = time.monotonic() if self._asked_at is None else self._asked_at

    def _search(self, idle_s: float) -> deadlock.HangReport | None:
        """Read the requested states; return the report of a confirmed deadlock, or of a timeout."""
        if self._asked_at is None and time.monotonic() >= self._ask_at:
            self._ask()
            return None
        states = None if self._asked_at is None else self._settled_states()
        if states is None:
            return None
        report = deadlock.find_deadlock(states)
        if report is not None:
            if self._suspected[0] == report and report.is_confirmed(states, since=self._suspected[1]):
                self._publish_report(report)
                return report
            self._suspected = report, self._ask() - 1
            return None
        self._suspected, self._asked_at = (None, 0), None
        report = self._keep_waiting(idle_s, states)
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        dues_s = [due_s for due_s in (self._line_due_s, self.timeout_s - _ABORT_MARGIN_S) if due_s > idle_s]
        self._ask_at = time.monotonic() + min([self._pause_s, *(due_s - idle_s for due_s in dues_s)])
        return report

    def _ask(self) -> int:
        self._own_request, self._asked_at = self.request_states(), time.monotonic()
        return self._own_request

    def _settled_states(self) -> list[RankState] | None:
        """Return the states that answer a request of this wait; None: some may still come."""
        states = self.states(range(self.world_size))
        is_over = time.monotonic() - (self._asked_at or 0.0) > _ANSWER_TIMEOUT_S
        latest = max(self._first_request, self._own_request)
        has_all = sum(s.status == "returned" or s.request_id >= latest for s in states) == self.world_size
        current = [s for s in states if s.status == "returned" or s.request_id >= self._first_request]
        return current if has_all or is_over else None

    def _keep_waiting(self, idle_s: float, states: Sequence[RankState]) -> deadlock.HangReport | None:
        """Log a line if it is due; return the report of a timeout, if torch would abort this process."""
        pending = {call.library for state in states if state.rank == self.rank for call in state.pending()}
        if pending - {"gloo"} and idle_s >= self.timeout_s - _ABORT_MARGIN_S:
            return self._timeout_report(states, "nothing was received")
        if idle_s >= self._line_due_s:
            self._line_due_s *= 2
            self._store.set("line", deadlock.waiting_line(states, world_size=self.world_size))
            self._ask()  # rank 0 looks for a line when it answers
        return None

    def _timeout_report(self, states: Sequence[RankState], reason: str) -> deadlock.HangReport:
        return deadlock.timeout_report(states, self.timeout_s, world_size=self.world_size, reason=reason)

    def explain(self, reason: str, observe: Callable[[], RankState]) -> deadlock.HangReport:
        """Return what explains a torch error of this rank, whose watchdog has ended; without `ranks`, nothing does.

        Args:
            reason: first line of the error.
            observe: returns this rank's state, with the number `answered`.
        """
        self.answered = self._first_request = self._ask()
        is_first = self._store.add("diagnosing", 1) == 1
        if not is_first:
            self.answered = self._store.add("request", 0)  # so that this state answers the request of the first
        self.publish_state(observe())
        if self.answered > _REPORTED or not is_first:
            return self._report()
        while (states := self._settled_states()) is None:
            time.sleep(0.05)
        report = deadlock.find_deadlock(states) or self._timeout_report(states, reason)
        if not report.ranks and self._store.add("request", 0) > _REPORTED:
            return self._report()
        self._publish_report(report)
        return report

    def _publish_report(self, report: deadlock.HangReport) -> None:
        """Publish a report; that of a deadlock ends all waiting ranks."""
        self._set("report", report)
        self._store.add("request", _REPORTED if report.ranks else 0)

    def _report(self) -> deadlock.HangReport:
        report: deadlock.HangReport = pickle.loads(self._store.get("report"))  # waits if there is none yet
        return report

    def _set(self, key: str, value: object) -> None:
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # set() accepts bytes too


def existing_keys(store: dist.Store, keys: list[str]) -> list[str]:
    """Return the keys that exist, by few requests if few are missing."""
    if not keys or store.check(keys):
        return keys
    middle = len(keys) // 2
    return [*existing_keys(store, keys[:middle]), *existing_keys(store, keys[middle:])] if middle else []
