"""One call on several nodes: two agents on loopback, and two hosts with addresses and names of their own."""

from __future__ import annotations

import contextlib
import json
import os
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
from worlds.two_hosts import Host, missing, two_hosts

SCRIPT = """
import json, os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from parallelize import distributed, rank

what, folder = sys.argv[1], pathlib.Path(sys.argv[2])
options = dict(processes=2, num_nodes=2, timeout=20) | json.loads(sys.argv[3])

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
            os.kill(os.getpid(), signal.SIGKILL)
    if what in ("raise", "kill", "sleep") and not options.get("max_restarts"):
        time.sleep(300)
    return [total.item() * factor, rank(), int(os.environ["NODE_RANK"]), int(os.environ["LOCAL_RANK"]), attempt]

said = {}
try:
    if what == "large":
        said["value"] = len(distributed(**options)(lambda: b"x" * 20_000_000)())
    else:
        said["value"] = train(factor=2)
        said["all"] = train.all_ranks()
except BaseException as error:
    said["error"] = type(error).__name__
    said["text"] = "\\n".join([str(error), *getattr(error, "__notes__", [])])
    said["at"] = time.time()
print(json.dumps(said))
"""


@dataclass
class Nodes:
    """Starts the same script once per node and collects what each says."""

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

    def said(self, process: subprocess.Popen[str], timeout_s: float = 50.0) -> dict[str, Any]:
        out, err = process.communicate(timeout=timeout_s)
        assert out.strip(), err
        said: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return said

    def worker_pids(self, count: int) -> list[int]:
        """Process ids of all workers, once they have met."""
        files = [self.folder / f"pid.{rank}" for rank in range(count)]
        wait_for(lambda: all(file.exists() and file.read_text() for file in files))
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
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def on_loopback(node_rank: int | None, port: int) -> dict[str, str]:
    number = {} if node_rank is None else {"NODE_RANK": str(node_rank)}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **number}


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def alive(pids: Sequence[int]) -> list[int]:
    """Those that still run; one that has ended and that nobody has asked about is not."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


WHOLE = [[6.0, 0, 0, 0, 0], [6.0, 1, 0, 1, 0], [6.0, 2, 1, 0, 0], [6.0, 3, 1, 1, 0]]


@pytest.mark.parametrize("numbers", [(0, 1), (None, None)], ids=["numbered", "unnumbered"])
def test_every_node_gets_rank_0s_value(nodes: Nodes, port: int, numbers: Sequence[int | None]) -> None:
    """Two calls in a row: rank 0's value on both nodes, then every rank's in rank order, by NODE_RANK or without."""
    started = [nodes.start("return", environ=on_loopback(number, port)) for number in numbers]
    for process in started:
        said = nodes.said(process)
        assert said == {"value": [12.0, 0, 0, 0, 0], "all": WHOLE}


def test_one_mpi_process_per_node_stands_for_it(nodes: Nodes, port: int) -> None:
    """A launcher's only process on a node, asked for two there, starts them itself."""
    alone = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    started = [
        nodes.start("return", environ={**on_loopback(None, port), **alone, "OMPI_COMM_WORLD_RANK": str(number)})
        for number in (0, 1)
    ]
    for process in started:
        assert nodes.said(process) == {"value": [12.0, 0, 0, 0, 0], "all": WHOLE}


def test_large_values_cross(nodes: Nodes, port: int) -> None:
    """A value of 20 MB reaches the other node, though the store takes no more than 8 MB at once."""
    started = [nodes.start("large", environ=on_loopback(number, port)) for number in (0, 1)]
    assert [nodes.said(process)["value"] for process in started] == [20_000_000] * 2


@pytest.mark.parametrize(("what", "error"), [("raise", "Boom"), ("kill", "WorkerError")])
def test_failure_reaches_sleeping_nodes(nodes: Nodes, port: int, what: str, error: str) -> None:
    """Rank 3 fails while all others sleep: the same cause on both nodes, and no worker is left."""
    started = [nodes.start(what, environ=on_loopback(number, port)) for number in (0, 1)]
    pids = nodes.worker_pids(4)
    for process in started:
        said = nodes.said(process)
        assert said["error"] == error
        assert "rank 3" in said["text"]
        assert "the others: ranks 0-2: stopped" in said["text"]
    assert not alive(pids)


def test_restart_is_of_all_nodes(nodes: Nodes, port: int) -> None:
    """With max_restarts=1 a failure on one node starts the workers of both again, and the call succeeds."""
    options = {"max_restarts": 1}
    started = [nodes.start("raise", options=options, environ=on_loopback(number, port)) for number in (0, 1)]
    for process in started:
        said = nodes.said(process)
        assert said["value"] == [12.0, 0, 0, 0, 1]


@pytest.mark.soak
def test_spent_restarts_name_every_cause(nodes: Nodes, port: int) -> None:
    """When the last restart fails too, the error tells of the earlier attempts."""
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
        said = nodes.said(process)
        assert said["error"] == "Boom"
        assert "attempt 0 had failed with Boom" in said["text"]


def test_missing_node_is_named(nodes: Nodes, port: int) -> None:
    """A node that never comes: the error says how many came and from where."""
    said = nodes.said(nodes.start("return", options={"timeout": 2}, environ=on_loopback(0, port)))
    assert said["error"] == "LaunchError"
    assert f"1 of 2 nodes came within 2 s: node 0 from {socket.gethostname()}" in said["text"]
    assert "node 1 did not" in said["text"]


@pytest.mark.soak
def test_no_node_0_is_named(nodes: Nodes, port: int) -> None:
    """A node that finds nobody at MASTER_ADDR:MASTER_PORT says so."""
    said = nodes.said(nodes.start("return", options={"timeout": 2}, environ=on_loopback(1, port)))
    assert said["error"] == "LaunchError"
    assert f"no node 0 at 127.0.0.1:{port} within 2 s" in said["text"]


def test_nodes_with_different_requests_refuse(nodes: Nodes, port: int) -> None:
    """Nodes that were asked for different numbers of processes: both name both requests."""
    started = [
        nodes.start("return", options={"processes": 1 + number}, environ=on_loopback(number, port)) for number in (0, 1)
    ]
    for process in started:
        said = nodes.said(process)
        assert said["error"] == "ConfigError"
        assert "2 nodes x 1 processes" in said["text"]
        assert "2 nodes x 2 processes" in said["text"]


def test_two_nodes_of_one_number_refuse(nodes: Nodes, port: int) -> None:
    """A NODE_RANK that is given twice is refused on the node that comes second."""
    started = [nodes.start("return", options={"timeout": 8}, environ=on_loopback(number, port)) for number in (0, 1, 1)]
    errors = [nodes.said(process) for process in started]
    refused = [said for said in errors if said.get("error") == "ConfigError"]
    assert len(refused) == 1
    assert "another node of that number" in refused[0]["text"]


def test_no_meeting_place_is_refused(nodes: Nodes) -> None:
    """num_nodes=2 with nothing that says where the nodes meet: the line to type."""
    said = nodes.said(nodes.start("return", environ={}))
    assert said["error"] == "ConfigError"
    assert "MASTER_ADDR=<address of node 0>" in said["text"]


@pytest.mark.soak
@pytest.mark.parametrize("killed", [0, 1], ids=["node 0", "node 1"])
def test_killed_agent_ends_the_run(nodes: Nodes, port: int, killed: int) -> None:
    """One node's own process is killed while all workers sleep: the other says so within the time of lost beats."""
    started = [nodes.start("sleep", environ=on_loopback(number, port)) for number in (0, 1)]
    pids = nodes.worker_pids(4)
    started[killed].send_signal(signal.SIGKILL)
    said = nodes.said(started[1 - killed])
    assert said["error"] == "LaunchError"
    assert f"node {killed} is gone" in said["text"]
    wait_for(lambda: not alive(pids))


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts() as both:
        yield both


def test_two_hosts_without_names(nodes: Nodes, hosts: tuple[Host, Host]) -> None:
    """Hosts whose names resolve nowhere train together by address alone, over their own interface."""
    where = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29400"}
    started = [nodes.start("return", environ=where, on=host) for host in hosts]
    for process in started:
        assert nodes.said(process) == {"value": [12.0, 0, 0, 0, 0], "all": WHOLE}


def test_failure_crosses_hosts(nodes: Nodes, hosts: tuple[Host, Host]) -> None:
    """A failure names the host it was on, on the other host too."""
    where = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29401"}
    started = [nodes.start("raise", environ=where, on=host) for host in hosts]
    for process in started:
        said = nodes.said(process)
        assert said["error"] == "Boom"
        assert "rank 3 of 4 on node-2" in said["text"]


def test_only_the_given_address_listens(nodes: Nodes, hosts: tuple[Host, Host]) -> None:
    """Whatever listens on a host is bound to its own address or to loopback, node 0's store to MASTER_ADDR."""
    where = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29402"}
    for host in hosts:
        nodes.start("sleep", environ=where, on=host)
    nodes.worker_pids(4)
    for host in hosts:
        said = subprocess.run(host.command("ss", "-Hltn"), check=True, capture_output=True, text=True).stdout
        places = [line.split()[3] for line in said.splitlines()]
        own = {host.address, "127.0.0.1", "[::1]", f"[::ffff:{host.address}]"}
        assert places, "gloo's ranks listen for each other"
        assert {place.rpartition(":")[0] for place in places} <= own
        assert (f"{host.address}:29402" in places) == (host == hosts[0])
