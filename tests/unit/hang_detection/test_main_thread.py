"""What the watchdog's thread sees of the main thread: whether it runs, waits, or is held."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from parallelize.hang_detection import main_thread
from parallelize.hang_detection.from_rank_0 import ValuesOfRank0
from parallelize.hang_detection.main_thread import MainThread
from parallelize.hang_detection.rank_state import RankState, RankStatus
from parallelize.hang_detection.waiting import WaitKind, waiting_for


class Watched:
    """A thread in place of a program's main thread, which waits for a lock in `run`."""

    def __init__(self, *, is_blocked: bool | None) -> None:
        self._is_blocked = is_blocked
        self._lock, self._is_ready = threading.Lock(), threading.Event()
        self._lock.acquire()
        self._thread = threading.Thread(target=self.run)

    def run(self) -> None:
        """Make what watches this thread, and wait."""
        self.main_thread = MainThread(ValuesOfRank0(dist.HashStore(), 1, 2, 60.0))
        if self._is_blocked is None:
            self._is_ready.set()
            self._lock.acquire()
        else:
            with waiting_for("save('a.pt')", is_blocked=self._is_blocked, wait_kind=WaitKind.CALL):
                self._is_ready.set()
                self._lock.acquire()

    def __enter__(self) -> MainThread:
        self._thread.start()
        assert self._is_ready.wait(20)
        while self.main_thread.frames()[0][0].f_code is not Watched.run.__code__:
            pass
        return self.main_thread

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._thread.join()


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a process group, and count a thread as one that waits at once."""
    monkeypatch.setattr(main_thread, "WAITS_AFTER_S", 0.0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def state_of(watched: MainThread) -> RankState:
    watched.look()
    return watched.state(1, since=1, answers=1, facts=None)


def test_a_thread_that_says_that_it_is_blocked_waits() -> None:
    """No other thread could make the call that it waits for."""
    with Watched(is_blocked=True) as watched:
        state = state_of(watched)
    assert watched.is_held
    assert (state.status, state.operation, state.wait_kind) == ("waiting", "save('a.pt')", WaitKind.CALL)
    assert state.is_blocked


def test_another_thread_may_make_the_call() -> None:
    """A timer may call any function."""
    timer = threading.Timer(60, print)
    timer.start()
    with Watched(is_blocked=True) as watched:
        state = state_of(watched)
    timer.cancel()
    assert state.status == RankStatus.WAITING
    assert not state.is_blocked


@pytest.mark.parametrize("is_blocked", [None, False], ids=["says nothing", "works"])
def test_a_thread_without_a_collective_runs(is_blocked: bool | None) -> None:
    """A lock is none; a save also writes files, so that its thread is not known to wait."""
    with Watched(is_blocked=is_blocked) as watched:
        state = state_of(watched)
    assert not watched.is_held
    assert (state.status, state.is_blocked) == ("running", False)


def test_an_error_has_ended_the_wait() -> None:
    """The rank answers as one that waits, and counts for no cycle: it waits no more."""
    with Watched(is_blocked=True) as watched:
        watched.look()
        watched.fail(watched.frames(), None)
        state = watched.state(1, since=1, answers=1, facts=None)
        assert (state.status, state.is_blocked) == ("waiting", False)


def test_a_block_that_has_ended_makes_no_more_calls() -> None:
    """Whatever its thread does after it."""
    with Watched(is_blocked=True) as watched:
        watched.look()
        watched.end()
        assert watched.state(1, since=1, answers=1, facts=None).status == RankStatus.RETURNED
