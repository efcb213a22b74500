"""Ranks on one store: which of them judges, what ends them, and how long the judgement takes."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelize.hang_detection import judge as judge_file
from parallelize.hang_detection.judge import Judge, TorchError
from parallelize.hang_detection.last_seen import LastSeen, Process, SeenFiles
from parallelize.hang_detection.rank_state import Collective, RankState
from parallelize.hang_detection.watchdog import Watchdog

LINE = "ranks 0-2 wait at a.py:1 in barrier for rank 3, which is at a.py:1"


class CountedStore:
    """A store that counts requests by name."""

    def __init__(self, store: Any) -> None:
        self._store, self.counts = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.counts[name] += 1
        return getattr(self._store, name)


class World:
    """Ranks of which each makes its checks when told to; all but the last are in a collective."""

    def __init__(self, size: int, *, timeout_s: float = 600.0) -> None:
        self.store: Any = CountedStore(dist.HashStore())
        self.judges = [
            Judge(self.store, rank, size, lambda _: timeout_s, lambda rank=rank: self.state(rank))  # type: ignore[misc]  # its default
            for rank in range(size)
        ]
        self.status = ["waiting"] * (size - 1) + ["running"]
        self.silent: set[int] = set()
        self.ended: dict[int, str] = {}

    def state(self, rank: int) -> RankState:
        status, judge = self.status[rank], self.judges[rank]
        done = [Collective("0/gloo", seq, "all_reduce of float32[6553600]", True) for seq in range(1, 16)]
        calls = [*done, Collective("0/gloo", 16, "barrier", False)] if status == "waiting" else done
        is_blocked = status == "waiting"
        return RankState(rank, status, "a.py:1", "", calls, ["0"], is_blocked, judge.since, judge.answered)

    def check(self, rounds: int) -> set[str | None]:
        """Return what ended the ranks, None for those that were not."""
        for _ in range(rounds):
            for rank, judge in enumerate(self.judges):
                if self.status[rank] != "returned" and rank not in self.silent and rank not in self.ended:
                    verdict = judge.check(is_waiting=self.status[rank] == "waiting")
                    if verdict is not None:
                        self.ended[rank] = verdict["what"]
        waiting = [rank for rank, status in enumerate(self.status) if status == "waiting" and rank not in self.silent]
        return {self.ended.get(rank) for rank in waiting}

    def leave(self, rank: int) -> None:
        self.judges[rank].resign()
        self.status[rank] = "returned"
        self.judges[rank].since = 0
        self.judges[rank].check(is_waiting=True)


def test_ranks_that_wait_do_not_ask_each_other() -> None:
    """Once all have answered, each check of a rank is one request to the store; before, a few."""
    world = World(32)
    assert world.check(4) == {None}
    assert world.store.counts.total() < 20 * 32
    world.store.counts.clear()
    world.check(5)
    assert world.store.counts == {"get": 5 * 32}


@pytest.mark.parametrize("gone", [3, 0], ids=["awaited rank", "judge"])
def test_all_waiting_ranks_get_the_verdict_of_one_judge(gone: int) -> None:
    """A rank that returns makes the judge look again; if it was the judge, another waiting rank is."""
    world = World(4)
    world.check(4)
    world.leave(gone)
    ranks = "ranks 0-2" if gone else "ranks 1-2"
    assert world.check(5) == {f"{ranks} wait at a.py:1 in barrier for rank {gone}, which has returned"}


def test_rank_0_logs_who_is_missing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for all ranks, whichever rank judges."""
    monkeypatch.setattr(judge_file, "_FIRST_LINE_S", 3.0)  # as long as ranks that wait have waited
    world = World(4)
    with caplog.at_level(logging.WARNING, logger="parallelize"):
        world.check(6)
    assert caplog.messages == [LINE]


def test_a_wait_ends_before_torch_ends_it() -> None:
    """NCCL aborts the process at the timeout, so the verdict comes 2 s before it, and not earlier."""
    assert World(4, timeout_s=5.5).check(6) == {None}
    assert World(4, timeout_s=5.0).check(6) == {LINE}


def test_a_later_wait_is_not_ended_by_a_timeout_that_was_just_met() -> None:
    """The rank that was awaited came after the verdict, and before anybody had read it: all have gone on."""
    world = World(4, timeout_s=5.0)
    ranks = itertools.cycle(range(4))
    while not world.store.check(["verdict"]):
        rank = next(ranks)
        assert world.judges[rank].check(is_waiting=rank != 3) is None
    world.status = 4 * ["running"]
    world.check(3)
    for judge in world.judges:
        judge.timeout_s = lambda _: 600.0
    world.status = ["waiting"] * 3 + ["running"]
    assert world.check(4) == {None}


def test_a_rank_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process does not keep the judge from telling what the others have answered."""
    world = World(4, timeout_s=5.0)
    world.status[3] = "returned"  # it makes no checks, and has published nothing
    world.check(3)
    monkeypatch.setattr(judge_file, "_ANSWER_S", 0.0)
    assert world.check(3) == {LINE.replace("which is at a.py:1", "which has not answered")}


def test_a_new_question_does_not_delay_the_verdict() -> None:
    """Just before the limit a rank may begin to wait, and ask: a stopped rank then has no time to give no answer."""
    world = World(4, timeout_s=4.0)
    world.silent.add(3)
    assert world.check(3) == {LINE.replace("which is at a.py:1", "which has not answered")}


def test_a_rank_that_is_debugged_has_time_to_answer() -> None:
    """No timeout of torch ends the ranks that wait for it, so that no verdict is urgent."""
    world = World(4, timeout_s=4.0)
    world.silent.add(3)
    for judge in world.judges:
        judge.ends_in_time = False
    assert world.check(3) == {None}
    world.silent.clear()
    world.status[3] = "stopped"  # in pdb
    assert world.check(3) == {None}


def test_the_verdict_comes_although_the_judge_is_stopped() -> None:
    """Another waiting rank takes over, and says where the judge was."""
    world = World(4, timeout_s=4.0)
    world.check(1)
    world.silent.add(0)
    text = "ranks 1-2 wait at a.py:1 in barrier for rank 0, which has not answered; rank 3, which is at a.py:1"
    world.judges[0].store.delete_key("state/0")  # an answer would tell where it was
    assert world.check(3) == {text}


def test_a_deadlock_is_found_although_the_judge_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge asks every 4 s, so that none is at work if nobody asks for long."""
    monkeypatch.setattr(judge_file, "_ANSWER_S", 0.0)
    world = World(4)
    world.check(3)
    world.silent.add(0)
    world.leave(3)
    world.check(1)
    monkeypatch.setattr(judge_file, "_NO_SIGN_S", 0.0)
    assert world.check(3) == {"ranks 1-2 wait at a.py:1 in barrier for rank 3, which has returned"}


@pytest.mark.parametrize(("error", "ends"), [(TorchError.TIMEOUT, True), (TorchError.OTHER, False)])
def test_only_a_collective_that_has_timed_out_is_explained_by_its_timeout(error: TorchError, ends: bool) -> None:
    """A closed connection may come at any time, also after a timeout= that is shorter than the search."""
    world = World(4, timeout_s=2.0)
    world.status[1:] = 3 * ["running"]
    world.judges[0].error = error
    world.check(4)
    assert (0 in world.ended) is ends


def test_a_record_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    """Of a write that goes on, a reader may see a part."""
    records, process = SeenFiles(tmp_path, 3), Process.current()
    assert records.read(3) is None
    records.write(LastSeen(process, "train.py:4 in step"))
    size = (tmp_path / "seen.3").stat().st_size
    records.write(LastSeen(process, 1000 * "é"))
    assert (tmp_path / "seen.3").stat().st_size == size
    records.write(LastSeen(process, "train.py:5 in step"))
    assert records.read(3) == LastSeen(process, "train.py:5 in step")
    record = (tmp_path / "seen.3").read_bytes()
    (tmp_path / "seen.3").write_bytes(record.replace(b":5 in", b":6 in"))
    assert records.read(3) is None
    records.close()


def test_the_state_of_a_silent_process_is_named() -> None:
    """As far as it is certain: of a process on this machine that has not ended, and whose number is not used again."""
    process = subprocess.Popen(["sleep", "60"])
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        child = Process.current()._replace(pid=process.pid, started=int(fields[19]))
        seen = LastSeen(child, "train.py:4 in step")
        where = f"(process {process.pid} on {child.host}), last seen at train.py:4 in step"
        assert not seen.certain()
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert seen.certain() == f"is stopped by a signal {where}"
        assert not LastSeen(child._replace(machine="another"), "").certain()
        assert seen._replace(process=child._replace(started=1)).certain() == f"has ended {where}"
    finally:
        process.kill()
        process.wait()
    assert seen.certain() == f"has ended {where}"
    text = "is stopped, in compiled code that holds the GIL, or cut off from others"
    assert text in LastSeen(child._replace(machine="another"), "").silence(had_time=True)


STORE = """
import torch.distributed as dist, sys
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_a_store_that_is_stopped_does_not_keep_the_error() -> None:
    """It is that of rank 0 under srun; a request gets no answer then, and each further one would wait for it."""
    server = subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout
    store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    guard, is_stopped = Watchdog(), threading.Event()

    def stop_server(*_: object, **_facts: object) -> None:
        if not is_stopped.is_set():
            os.kill(server.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, server.pid, os.WSTOPPED)
            is_stopped.set()

    guard.on_look = stop_server
    try:
        with guard.watch(store, timeout_s=lambda *_: 60.0, since_ns=None):
            assert is_stopped.wait(20)
            explained = guard.explain(dist.DistBackendError("Timed out waiting 14000ms"))
            assert "the store does not answer" in str(explained)
            assert explained.__notes__ == ["torch has raised DistBackendError: Timed out waiting 14000ms"]
    finally:
        server.kill()
        server.communicate()
        for thread in threading.enumerate():
            if thread.name == "parallelize-watch":
                thread.join()
        dist.destroy_process_group()


@pytest.mark.parametrize(("size", "limit_s"), [(64, 0.05), (256, 0.2), (1024, 1.0)])
def test_a_judgement_is_fast(size: int, limit_s: float) -> None:
    """Of many ranks, from their answers to the verdict, in time of this thread."""

    def judgement_s() -> float:
        world = World(size)
        world.check(2)
        world.leave(size - 1)
        world.check(1)
        before = time.thread_time()
        world.judges[0].check(is_waiting=True)
        judged_s = time.thread_time() - before
        assert None not in world.check(2)
        return judged_s

    assert min(judgement_s() for _ in range(2)) < limit_s  # the machine may be busy


def test_a_look_keeps_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store is asked, which takes long on a busy machine, what a function has had is freed with it."""
    asked, answered = threading.Event(), threading.Event()

    def check(*_: object, is_waiting: bool) -> None:
        assert not is_waiting
        asked.set()
        answered.wait(20)

    def step() -> weakref.ref[torch.Tensor]:
        tensor = torch.ones(1)
        assert asked.wait(20)
        return weakref.ref(tensor)

    monkeypatch.setattr(Judge, "check", check)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with Watchdog().watch(store, timeout_s=lambda *_: 60.0, since_ns=None):
            tensor = step()
            assert tensor() is None
            answered.set()
    finally:
        dist.destroy_process_group()
