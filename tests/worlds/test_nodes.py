"""One call on several nodes: two agents on loopback, and two hosts with their own addresses and names."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks import free_port
from worlds.two_hosts import Host, missing, two_hosts

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from parallelize import distributed, rank
from parallelize.launchers.local.plugin import LocalLauncher

what, folder = sys.argv[1], pathlib.Path(sys.argv[2])
options = dict(processes=2, num_nodes=2, timeout=60) | json.loads(sys.argv[3])
if "heartbeat_timeout" in options:
    options["launcher"] = LocalLauncher(heartbeat_timeout=options.pop("heartbeat_timeout"))

class Boom(Exception):
    pass

@distributed(**options)
def train(factor=1):
    total = torch.ones(1) * rank()
    dist.all_reduce(total)
    (folder / f"pid.{rank()}").write_text(str(os.getpid()))
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if rank() == 3 and attempt < options.get("fails", 1):
        if what == "raise":
            raise Boom("rank 3 of attempt", attempt)
        if what == "kill":
            os.write(1, b"last words")
            os.kill(os.getpid(), signal.SIGKILL)
    if what in ("raise", "kill", "sleep") and not options.get("max_restarts"):
        time.sleep(300)
    if what == "save":
        try:
            time.sleep(300)
        except KeyboardInterrupt:
            (folder / f"saved.{rank()}").touch()
    while what == "wait" and not (folder / "go").exists():
        time.sleep(0.1)
    return [total.item() * factor, rank(), int(os.environ["NODE_RANK"]), int(os.environ["LOCAL_RANK"]), attempt]

result = {}
try:
    if what == "large":
        result["value"] = len(distributed(**options)(lambda: b"x" * 20_000_000)())
    else:
        result["value"] = train(factor=2)
        result["all"] = distributed(**options | {"timeout": 21})(train.__wrapped__).all_ranks(factor=1)
except BaseException as error:
    result["error"] = type(error).__name__
    result["text"] = "\\n".join([str(error), *getattr(error, "__notes__", [])])
    result["at"] = time.time()
print(json.dumps(result))
"""


@dataclass
class Nodes:
    """Starts the same script once per node and reads their results."""

    folder: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self,
        what: str,
        *,
        options: Mapping[str, Any] | None = None,
        environ: Mapping[str, str],
        on: Host | None = None,
    ) -> subprocess.Popen[str]:
        script = self.folder / "script.py"
        if not script.exists():  # a node that has been started may be reading it
            script.write_text(SCRIPT)
        command = [sys.executable, str(script), what, str(self.folder), json.dumps(dict(options or {}))]
        process = subprocess.Popen(
            on.command(*command) if on else command,
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        return process

    def result(self, process: subprocess.Popen[str], timeout_s: float = 90.0) -> dict[str, Any]:
        out, err = process.communicate(timeout=timeout_s)
        assert out.strip(), err
        result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return result

    def worker_pids(self, count: int) -> list[int]:
        """Return the process ids of all workers, once they are connected."""
        files = [self.folder / f"pid.{rank}" for rank in range(count)]
        wait_for(lambda: all(file.exists() and file.read_text() for file in files), timeout_s=90)
        return [int(file.read_text()) for file in files]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    started = Nodes(tmp_path)
    yield started
    for process in started.running:
        process.kill()
        process.communicate()


def wait_for(fact: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < end, f"not within {timeout_s:g} s"
        time.sleep(0.02)


def on_loopback(node_rank: int | None, port: int) -> dict[str, str]:
    number = {} if node_rank is None else {"NODE_RANK": str(node_rank)}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **number}


@pytest.fixture
def port() -> int:
    return free_port()


def running_pids(pids: Sequence[int]) -> list[int]:
    """Return those that still run; a zombie process does not."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


ALL_RANKS = [[6.0, 0, 0, 0, 0], [6.0, 1, 0, 1, 0], [6.0, 2, 1, 0, 0], [6.0, 3, 1, 1, 0]]


@pytest.mark.parametrize("numbers", [(0, 1), (None, None)], ids=["numbered", "unnumbered"])
def test_every_node_gets_rank_0s_value(nodes: Nodes, port: int, numbers: Sequence[int | None]) -> None:
    """Two calls with different timeouts return rank 0's value and all ranks' values, with and without NODE_RANK."""
    started = [nodes.start("return", environ=on_loopback(number, port)) for number in numbers]
    for process in started:
        result = nodes.result(process)
        assert result == {"value": [12.0, 0, 0, 0, 0], "all": ALL_RANKS}


def test_one_mpi_process_per_node_starts_the_workers(nodes: Nodes, port: int) -> None:
    """The only process that mpirun starts on a node starts the two requested workers there."""
    mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    started = [
        nodes.start("return", environ={**on_loopback(None, port), **mpi, "OMPI_COMM_WORLD_RANK": str(number)})
        for number in (0, 1)
    ]
    for process in started:
        assert nodes.result(process) == {"value": [12.0, 0, 0, 0, 0], "all": ALL_RANKS}


def test_large_values_reach_other_nodes(nodes: Nodes, port: int) -> None:
    """A value of 20 MB reaches the other node, although the store limits values to 8 MB."""
    started = [nodes.start("large", environ=on_loopback(number, port)) for number in (0, 1)]
    assert [nodes.result(process) for process in started] == [{"value": 20_000_000}] * 2


@pytest.mark.parametrize(("what", "error"), [("raise", "Boom"), ("kill", "WorkerError")])
def test_failure_reaches_sleeping_nodes(nodes: Nodes, port: int, what: str, error: str) -> None:
    """Rank 3 fails while all others sleep: both nodes raise the same error, and no worker is left."""
    started = [nodes.start(what, environ=on_loopback(number, port)) for number in (0, 1)]
    pids = nodes.worker_pids(4)
    for process in started:
        result = nodes.result(process)
        assert result["error"] == error
        assert "rank 3" in result["text"]
        assert "the others: ranks 0-2: stopped" in result["text"]
        assert ("last words" in result["text"]) == (what == "kill")
    assert not running_pids(pids)


@pytest.mark.parametrize("what", ["save", "sleep"], ids=["the function returns", "it does not catch it"])
def test_ctrl_c_on_a_node_interrupts_all(nodes: Nodes, port: int, what: str) -> None:
    """Each rank gets a KeyboardInterrupt, and may save, and so does the caller on each node."""
    started = [nodes.start(what, environ=on_loopback(rank, port)) for rank in range(2)]
    nodes.worker_pids(4)
    time.sleep(1.0)  # until the last rank sleeps
    started[1].send_signal(signal.SIGINT)
    assert [nodes.result(process)["error"] for process in started] == ["KeyboardInterrupt"] * 2
    assert len([*nodes.folder.glob("saved.*")]) == (4 if what == "save" else 0)


def test_a_restart_includes_all_nodes(nodes: Nodes, port: int) -> None:
    """With max_restarts=1 a failure on one node restarts the workers of both, and the call succeeds."""
    options = {"max_restarts": 1}
    started = [nodes.start("raise", options=options, environ=on_loopback(number, port)) for number in (0, 1)]
    for process in started:
        result = nodes.result(process)
        assert result["value"] == [12.0, 0, 0, 0, 1]


@pytest.mark.soak
def test_the_error_lists_earlier_attempts(nodes: Nodes, port: int) -> None:
    """When the last restart fails too, the notes contain the errors of earlier attempts."""
    # `fails` is the script's own option: in how many attempts rank 3 fails.
    script = SCRIPT.replace('options.get("fails", 1)', "2")
    (nodes.folder / "script.py").write_text(script)
    started = [
        subprocess.Popen(
            [sys.executable, str(nodes.folder / "script.py"), "raise", str(nodes.folder), '{"max_restarts": 1}'],
            env={**os.environ, **on_loopback(number, port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (0, 1)
    ]
    nodes.running.extend(started)
    for process in started:
        result = nodes.result(process)
        assert result["error"] == "Boom"
        assert "attempt 0 had failed with Boom" in result["text"]


def test_missing_node_is_named(nodes: Nodes, port: int) -> None:
    """When a node does not join, the error says which nodes did, and their hosts."""
    result = nodes.result(nodes.start("return", options={"timeout": 2}, environ=on_loopback(0, port)))
    assert result["error"] == "LaunchError"
    assert f"1 of 2 nodes joined within 2 s: node 0 from {socket.gethostname()}" in result["text"]
    assert "node 1 is missing" in result["text"]


@pytest.mark.soak
def test_no_node_0_is_named(nodes: Nodes, port: int) -> None:
    """A node that cannot connect to MASTER_ADDR:MASTER_PORT raises LaunchError."""
    result = nodes.result(nodes.start("return", options={"timeout": 2}, environ=on_loopback(1, port)))
    assert result["error"] == "LaunchError"
    assert f"no node 0 at 127.0.0.1:{port} within 2 s" in result["text"]


def test_nodes_with_different_requests_refuse(nodes: Nodes, port: int) -> None:
    """Nodes with different numbers of processes raise ConfigError with both requests."""
    started = [
        nodes.start("return", options={"processes": 1 + number}, environ=on_loopback(number, port)) for number in (0, 1)
    ]
    for process in started:
        result = nodes.result(process)
        assert result["error"] == "ConfigError"
        assert "2 nodes x 1 processes" in result["text"]
        assert "2 nodes x 2 processes" in result["text"]


def test_two_nodes_with_one_node_rank_refuse(nodes: Nodes, port: int) -> None:
    """A duplicate NODE_RANK is refused, and the others go on."""
    started = [nodes.start("wait", environ=on_loopback(number, port)) for number in (0, 1)]
    nodes.worker_pids(4)
    refused = nodes.result(nodes.start("wait", environ=on_loopback(1, port)))
    assert refused["error"] == "ConfigError"
    assert "another node has the same NODE_RANK" in refused["text"]
    (nodes.folder / "go").touch()
    assert [nodes.result(process)["value"] for process in started] == [[12.0, 0, 0, 0, 0]] * 2


def test_nodes_with_different_arguments_refuse(nodes: Nodes, port: int) -> None:
    """Values that each node has drawn for itself are named; each trained with its own, in silence."""
    (nodes.folder / "script.py").write_text(SCRIPT.replace("train(factor=2)", "train(factor=os.getpid())"))
    started = [nodes.start("return", environ=on_loopback(number, port)) for number in (0, 1)]
    for number, process in enumerate(started):
        result = nodes.result(process)
        assert result["error"] == "ConfigError"
        assert "argument 'factor' differs between the nodes" in result["text"]
        assert f"node {number} ({socket.gethostname()}): {process.pid}" in result["text"]


def test_a_node_may_call_again_after_it_has_failed_alone(nodes: Nodes, port: int) -> None:
    """Its next call joins the call in which the other node waits for it."""
    fails = """
    if os.environ["NODE_RANK"] == "1":
        import threading
        try:
            train(factor=threading.Lock())
        except Exception as error:
            assert "cannot be pickled" in str(error), error
    if what == "large":"""
    (nodes.folder / "script.py").write_text(
        SCRIPT.replace(
            """
    if what == "large":""",
            fails,
        )
    )
    started = [nodes.start("return", environ=on_loopback(number, port)) for number in (0, 1)]
    for process in started:
        assert nodes.result(process) == {"value": [12.0, 0, 0, 0, 0], "all": ALL_RANKS}


def send(port: int, what: bytes) -> None:
    """Connect to node 0 as soon as it listens; send some bytes, and wait until it ends the connection.

    What it sends is its question for the key.
    """

    def is_sent() -> bool:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)) as stranger:
            with contextlib.suppress(OSError):  # node 0 has ended the connection already
                stranger.sendall(what)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(100):
                    pass
            return True
        return False

    wait_for(is_sent, timeout_s=60)


def test_strangers_change_nothing(nodes: Nodes, port: int) -> None:
    """Neither random bytes nor a node without PARALLELIZE_KEY is heard; the nodes that have it make their call."""
    key = {"PARALLELIZE_KEY": "secret"}
    first = nodes.start("return", environ={**on_loopback(0, port), **key})
    rng = random.Random(0)
    for size in (0, 7, 40, 1000):
        send(port, rng.randbytes(size))
    send(port, (100).to_bytes(8, "big") + rng.randbytes(132))  # the form of a message
    stranger = nodes.start("return", options={"timeout": 3}, environ=on_loopback(1, port))
    result = nodes.result(stranger)
    assert (result["error"], "another PARALLELIZE_KEY is not heard" in result["text"]) == ("LaunchError", True)
    second = nodes.start("return", environ={**on_loopback(1, port), **key})
    for process in (first, second):
        assert nodes.result(process) == {"value": [12.0, 0, 0, 0, 0], "all": ALL_RANKS}


def test_num_nodes_without_master_addr_is_refused(nodes: Nodes) -> None:
    """num_nodes=2 without MASTER_ADDR raises an error that contains the command to type."""
    result = nodes.result(nodes.start("return", environ={}))
    assert result["error"] == "ConfigError"
    assert "MASTER_ADDR=<address of node 0>" in result["text"]


@pytest.mark.soak
@pytest.mark.parametrize("killed", [0, 1], ids=["node 0", "node 1"])
def test_killed_agent_ends_the_run(nodes: Nodes, port: int, killed: int) -> None:
    """When the agent of one node is killed, the other node detects the missing heartbeat and raises."""
    options = {"heartbeat_timeout": 4}
    started = [nodes.start("sleep", options=options, environ=on_loopback(number, port)) for number in (0, 1)]
    pids = nodes.worker_pids(4)
    started[killed].send_signal(signal.SIGKILL)
    result = nodes.result(started[1 - killed])
    assert result["error"] == "LaunchError"
    assert f"node {killed} is gone" in result["text"]
    wait_for(lambda: not running_pids(pids))


def test_a_killed_node_0_ends_the_others(nodes: Nodes, port: int) -> None:
    """Of three nodes the other two cannot hear each other any more; neither waits for the other's report."""
    options = {"processes": 1, "num_nodes": 3}
    started = [nodes.start("sleep", options=options, environ=on_loopback(number, port)) for number in range(3)]
    pids = nodes.worker_pids(3)
    started[0].send_signal(signal.SIGKILL)
    for process in started[1:]:
        result = nodes.result(process)
        assert (result["error"], "node 0 is gone" in result["text"]) == ("LaunchError", True), result
    wait_for(lambda: not running_pids(pids))


@pytest.mark.soak
@pytest.mark.timeout(180)
@pytest.mark.parametrize("stopped", [0, 1], ids=["node 0", "node 1"])
@pytest.mark.parametrize(("for_s", "heartbeat_timeout"), [(12, 60), (15, 6)], ids=["short", "long"])
def test_a_stopped_agent(nodes: Nodes, port: int, stopped: int, for_s: int, heartbeat_timeout: int) -> None:
    """An agent that is stopped by SIGSTOP continues its run; after heartbeat_timeout it is lost, on all nodes."""
    options = {"heartbeat_timeout": heartbeat_timeout}
    started = [nodes.start("wait", options=options, environ=on_loopback(number, port)) for number in (0, 1)]
    nodes.worker_pids(4)
    started[stopped].send_signal(signal.SIGSTOP)
    time.sleep(for_s)
    started[stopped].send_signal(signal.SIGCONT)
    (nodes.folder / "go").touch()
    for result in [nodes.result(process) for process in started]:
        if for_s < heartbeat_timeout:
            assert result["value"] == [12.0, 0, 0, 0, 0]
        else:
            assert (result["error"], f"node {stopped} is gone" in result["text"]) == ("LaunchError", True), result


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts() as both:
        yield both


def test_two_hosts_without_names(nodes: Nodes, hosts: tuple[Host, Host]) -> None:
    """Hosts whose names do not resolve train together by address, over their own interface."""
    where = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29400"}
    started = [nodes.start("return", environ=where, on=host) for host in hosts]
    for process in started:
        assert nodes.result(process) == {"value": [12.0, 0, 0, 0, 0], "all": ALL_RANKS}


def test_a_failure_names_its_host(nodes: Nodes, hosts: tuple[Host, Host]) -> None:
    """Both hosts raise an error that names the host of the failed rank."""
    where = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29401"}
    started = [nodes.start("raise", environ=where, on=host) for host in hosts]
    for process in started:
        result = nodes.result(process)
        assert result["error"] == "Boom"
        assert "rank 3 of 4 on node-2" in result["text"]


def test_only_the_given_address_listens(nodes: Nodes, hosts: tuple[Host, Host]) -> None:
    """All listening sockets are bound to the host's address or to loopback, node 0's store to MASTER_ADDR."""
    where = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29402"}
    for host in hosts:
        nodes.start("sleep", environ=where, on=host)
    nodes.worker_pids(4)
    for host in hosts:
        lines = subprocess.run(host.command("ss", "-Hltn"), check=True, capture_output=True, text=True).stdout
        sockets = [line.split()[3] for line in lines.splitlines()]
        own = {host.address, "127.0.0.1", "[::1]", f"[::ffff:{host.address}]"}
        assert sockets, "gloo's ranks listen for each other"
        assert {each.rpartition(":")[0] for each in sockets} <= own
        assert (f"{host.address}:29402" in sockets) == (host == hosts[0])
