"""The nodes of a call, as they are made in one process: each has a thread, and they meet in a store."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, wait_for

from parallelize.call.outcome import Outcome
from parallelize.call.task import Call, Task
from parallelize.cluster.world import Node
from parallelize.config.config import Config
from parallelize.config.layout import Layout
from parallelize.errors import ConfigError, LaunchError, ParallelizeError, SyncError, WorkerError, add_note
from parallelize.launchers.failures import caller_exception, is_cause
from parallelize.launchers.local.node_reports import RankEnd, json_of_ends, outcomes_of_json
from parallelize.launchers.local.node_requests import Request
from parallelize.launchers.local.nodes import Nodes


def function(_: object) -> None: ...


def request(*args: Any, key: str = "") -> Request:
    layout = Layout(Config.parse(processes=2, num_nodes=2), 2, ((torch.device("cpu"),),) * 2)
    return Request.of(Task.of(Call(function, args, {}, layout)), key)


Make = Callable[..., Nodes]


@pytest.fixture
def make() -> Iterator[Make]:
    """Return a function that makes a node of a call of two, at an address of this test."""
    port = free_port()
    with contextlib.ExitStack() as ended:

        def made(rank: int | None, *, asks: Request | None = None, timeout_s: float = 30.0, **options: Any) -> Nodes:
            node = Node("127.0.0.1", options.pop("port", port), rank)
            options = {"patience_s": 30.0} | options
            nodes = Nodes(node, 2, asks or request(1), timeout=timedelta(seconds=timeout_s), **options)
            ended.callback(nodes.close)
            return nodes

        made.port = port  # type: ignore[attr-defined]  # read by a test that writes into the store
        yield made


def store_of(make: Make) -> dist.TCPStore:
    port: int = make.port  # type: ignore[attr-defined]  # see there
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))


def test_two_nodes_hear_each_other(make: Make) -> None:
    """They meet with ranks as given, get one name for the call, and each other's reports."""
    first, second = make(0), make(1)
    meetings = [first.start(), second.start()]
    assert [meeting.node_rank for meeting in meetings] == [0, 1]
    assert meetings[0][1:] == meetings[1][1:]
    second.say("stop")
    wait_for(first.has_failed)
    first.say("ended", json_of_ends([Outcome(0, "a", 1, value=object())]))
    reports = second.exchange([Outcome(2, "b", 2), Outcome(3, "b", 3, error=ValueError("x"))])
    assert [outcome.rank for outcome in reports[0]] == [0]
    wait_for(lambda: 1 in first._heard["ended"])


def test_nodes_without_ranks_get_them(make: Make) -> None:
    """The process that can listen is node 0."""
    ranks = {nodes.start().node_rank for nodes in [make(None), make(None)]}
    assert ranks == {0, 1}


def test_another_argument_is_named(make: Make) -> None:
    """On both nodes, with its value on each."""
    for nodes in [make(0, asks=request(1)), make(1, asks=request(2))]:
        with pytest.raises(ConfigError, match=r"argument 0 differs between the nodes\n.*: 1; node 1 \(.*: 2"):
            nodes.start()


def test_a_large_argument_is_compared_by_its_digest() -> None:
    """What is said of it has the size of a digest."""
    numbers = list(range(10**5))
    assert len(json.dumps(request(numbers))) < 2000
    assert request(numbers).parts == request(list(numbers)).parts
    assert request(numbers).parts != request(numbers[:-1]).parts


def test_a_missing_node_is_named_on_all(make: Make) -> None:
    """Node 0 alone knows when it is too late."""
    with pytest.raises(LaunchError, match=r"1 of 2 nodes joined within 0\.5 s: node 0 from"):
        make(0, timeout_s=0.5).start()


def test_node_0_is_missing(make: Make) -> None:
    """The error has the address, and the reason of the last attempt to connect."""
    with pytest.raises(LaunchError, match=r"no node 0 at 127.0.0.1:\d+ within 0.5 s\n.*refused"):
        make(1, timeout_s=0.5).start()


def test_a_port_in_use_is_an_error_of_node_0(make: Make) -> None:
    """It has the system's reason."""
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(LaunchError, match="cannot listen"):
        make(0, port=other.getsockname()[1])


def test_a_silent_node_is_lost(make: Make) -> None:
    """One that took its rank, and whose thread says nothing any more."""
    first, second = make(0, patience_s=0.5), make(1)
    second._talk = lambda _log: None  # type: ignore[method-assign]  # as a stopped process
    wait_for(lambda: 1 in first._heard["joined"] or second.node_rank == 1)
    if 1 not in first._heard["joined"]:
        log = store_of(make)
        assert log.compare_set("nodes/said/1", "", json.dumps(["joined", 1, request(1)]))
    wait_for(first.has_failed)
    assert "node 1 is gone\n  why: no heartbeat for 0.5 s" in str(first.lost_error())
    del second._talk  # so that it can leave


NODE_0 = """
import sys, time
from datetime import timedelta
from parallelize.cluster.world import Node
from parallelize.launchers.local.node_requests import Request
from parallelize.launchers.local.nodes import Nodes
node, request = Node("127.0.0.1", int(sys.argv[1]), 0), Request("a", "1-1", {})
nodes = Nodes(node, 2, request, timeout=timedelta(minutes=3), patience_s=60)
nodes.start()
time.sleep(300)
"""


@pytest.mark.parametrize(
    ("sent", "match"), [(signal.SIGSTOP, "no heartbeat for 8 s"), (signal.SIGKILL, "node 0 is gone")]
)
def test_node_0_is_lost(make: Make, sent: signal.Signals, match: str) -> None:
    """If it is stopped, requests to its store do not return; if it has ended, they raise."""
    port: int = make.port  # type: ignore[attr-defined]  # see `make`
    with subprocess.Popen([sys.executable, "-c", NODE_0, str(port)]) as process:
        try:
            second = make(1, asks=Request("c", "2-2", {}), timeout_s=120.0, patience_s=8.0)
            assert second.start().stamp == "1-1"
            process.send_signal(sent)
            wait_for(second.has_failed, timeout_s=60)
            assert match in str(second.lost_error())
        finally:
            process.kill()


def test_a_node_that_leaves_before_its_report_is_lost(make: Make) -> None:
    """As by an exception before its workers have started."""
    first, second = make(0), make(1)
    first.start()
    second.start()
    second.close()
    wait_for(first.has_failed)
    assert "node 1 is gone" in str(first.lost_error())


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[1]",
        '["joined", 1, {}]',
        '["joined", 1, ["host", "1-2", {"the call": 1}]]',
        '["joined", 1, ["host", "1-2", [1]]]',
        '["joined", 1, ["host", "../../x", {}]]',
        '["ended", 1, [["0"]]]',
        '["ended", 1, 3]',
        '["lost", "x", ""]',
        '["lost", 1, 2]',
    ],
)
def test_what_is_no_message_is_one_error(make: Make, text: str) -> None:
    """A stranger in the store can end the call, and does not reach the user with an error of ours."""
    first = make(0)
    wait_for(lambda: 0 in first._heard["joined"])
    store_of(make).compare_set("nodes/said/1", "", text)
    with pytest.raises(LaunchError, match="is gone"):
        first.start()


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - any error
        return caught


def lost_connection() -> BaseException:
    return raised(RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed by peer"))


ENDED = WorkerError("rank 3 on b was ended by SIGKILL", why="it ended", fix="see")
ENDED.exitcode, ENDED.signal_name = -9, "SIGKILL"
SYNC = SyncError("rank 0 waits", why="it does", fix="call")
SYNC.__cause__ = lost_connection()
ERRORS: dict[str, BaseException] = {
    "of the user": ValueError("of the user"),
    "killed": ENDED,
    "explained": SYNC,
    "stopped": SystemExit(128 + signal.SIGTERM),
    "secondary": SyncError("x", why="y", fix="z", is_secondary=True),
    "connection": lost_connection(),
    "exit": SystemExit(3),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_crosses_as_text(name: str) -> None:
    """Another node finds the same root cause, and raises a WorkerError with class, text, traceback, rank and host."""
    outcome = Outcome.raised(_world(3), raised(ERRORS[name]))
    add_note(outcome.error or ValueError(), "a note")
    (heard,) = outcomes_of_json(json.loads(json.dumps(json_of_ends([outcome]))))
    assert is_cause(heard) == is_cause(outcome)
    error = caller_exception([heard], world_size=4)
    if not is_cause(outcome):
        return
    assert isinstance(error, WorkerError)
    text = "\n".join([str(error), *error.__notes__])
    assert type(outcome.error).__name__ in text or isinstance(outcome.error, WorkerError)
    # Nobody reads notes of a SystemExit: it ends a program without a word.
    assert "a note" in text or name == "exit"
    assert error.rank == 3
    if isinstance(outcome.error, ParallelizeError):
        assert outcome.error.faults[0].fix in text
    else:
        assert "Traceback" in text
    if name == "killed":
        assert (error.exitcode, error.signal_name) == (-9, "SIGKILL")


def _world(rank: int) -> Any:
    from parallelize.cluster.world import World

    return World(rank=rank, local_rank=1, node_rank=1, world_size=4, local_world_size=2)


def test_a_rank_that_has_returned_crosses_without_its_value() -> None:
    """But with the number that it has evaluated, which rank 0's is compared with."""
    outcome = Outcome.returned(_world(3), 1.5, evaluated="1.5")
    (heard,) = outcomes_of_json(json.loads(json.dumps(json_of_ends([outcome]))))
    assert (heard.rank, heard.value, heard.error, heard.evaluated) == (3, None, None, "1.5")


def test_a_long_traceback_is_cut() -> None:
    """The store takes values of 8 MB."""
    outcome = Outcome(0, "a", 1, error=ValueError("x" * 10**7), traceback="y" * 10**7, failed_at=1.0)
    assert len(json.dumps(RankEnd.of(outcome))) < 10**5
