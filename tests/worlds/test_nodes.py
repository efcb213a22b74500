"""One call on several nodes: two agents on loopback, and two hosts with their own addresses and names."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ranks import free_port, running_pids, wait_for
from worlds.two_hosts import Host, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

SCRIPT = """
import json, os, pathlib, signal, sys, threading, time
import torch, torch.distributed as dist
from parallelize import distributed, rank
from parallelize.launchers.local.launcher import LocalLauncher

what, folder = sys.argv[1], pathlib.Path(sys.argv[2])
options = dict(processes=2, num_nodes=2, timeout=60) | json.loads(sys.argv[3])
fails = options.pop("fails", 1)  # in how many attempts rank 3 does
if what == "own request":
    options["processes"] = 1 + int(os.environ["NODE_RANK"])
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
    if rank() == 3 and attempt < fails:
        if what == "raise":
            raise Boom("rank 3 of attempt", attempt)
        if what == "kill":
            os.write(1, b"last words")
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "kill server":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(300)
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
        if what == "fails alone" and os.environ["NODE_RANK"] == "1":
            try:
                train(factor=threading.Lock())
            except Exception as error:
                assert "cannot be pickled" in str(error), error
        result["value"] = train(factor=os.getpid() if what == "own argument" else 2)
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
    port: int = field(default_factory=free_port)
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, what: str, *numbers: int | Mapping[str, str], on: Sequence[Host] = (), **options: Any
    ) -> list[subprocess.Popen[str]]:
        """Start nodes on loopback, each with its NODE_RANK or with variables, or with the variables `on` hosts."""
        script = self.folder / "script.py"
        if not script.exists():  # a node that has been started may be reading it
            script.write_text(SCRIPT)
        command = [sys.executable, str(script), what, str(self.folder), json.dumps(options)]
        started = []
        for number, host in itertools.zip_longest(numbers, on):
            variables = {"NODE_RANK": str(number)} if isinstance(number, int) else number
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
            started.append(
                subprocess.Popen(
                    host.command(*command) if host else command,
                    env={key: each for key, each in {**os.environ, **address, **variables}.items() if each},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        self.running += started
        return started

    def worker_pids(self, count: int = 4) -> list[int]:
        """Return the process ids of all workers, once they are connected."""
        files = [self.folder / f"pid.{rank}" for rank in range(count)]
        wait_for(lambda: all(file.exists() and file.read_text() for file in files), timeout_s=240)
        return [int(file.read_text()) for file in files]


def results(started: Sequence[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    found = []
    for process in started:
        out, err = process.communicate(timeout=200)
        assert out.strip(), err
        found.append(json.loads(out.strip().splitlines()[-1]))
    return found


def errors(started: Sequence[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """Return the type and the text of each node's error."""
    return [(each["error"], each["text"]) for each in results(started)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    started = Nodes(tmp_path)
    yield started
    for process in started.running:
        process.kill()
        process.communicate()


VALUE = [12.0, 0, 0, 0, 0]
ALL_RANKS = [[6.0, 0, 0, 0, 0], [6.0, 1, 0, 1, 0], [6.0, 2, 1, 0, 0], [6.0, 3, 1, 1, 0]]
RETURNED = {"value": VALUE, "all": ALL_RANKS}

MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}

# what the script does, the nodes, the result of each
VALUES: dict[str, tuple[str, Sequence[int | Mapping[str, str]], dict[str, Any]]] = {
    "numbered": ("return", (0, 1), RETURNED),
    "unnumbered": ("return", ({}, {}), RETURNED),
    "one process of mpirun per node": ("return", [{**MPI, "OMPI_COMM_WORLD_RANK": each} for each in "01"], RETURNED),
    "a node had failed alone, in a call before": ("fails alone", (0, 1), RETURNED),
    "20 MB, although the store limits values to 8 MB": ("large", (0, 1), {"value": 20_000_000}),
}


@pytest.mark.parametrize("how", VALUES)
def test_every_node_gets_rank_0s_value(nodes: Nodes, how: str) -> None:
    """Two calls with different timeouts return rank 0's value and all ranks' values, however the nodes are started."""
    what, numbers, expected = VALUES[how]
    assert results(nodes.start(what, *numbers)) == [expected] * 2


def test_a_restart_includes_all_nodes(nodes: Nodes) -> None:
    """With max_restarts=1 a failure on one node restarts the workers of both, and the call succeeds."""
    assert [each["value"] for each in results(nodes.start("raise", 0, 1, max_restarts=1))] == [[12.0, 0, 0, 0, 1]] * 2


def test_a_killed_fork_server_restarts_all_nodes(nodes: Nodes) -> None:
    """The other node hears of it, and both start their workers anew."""
    started = nodes.start("kill server", 0, 1, max_restarts=1)
    assert [each["value"] for each in results(started)] == [[12.0, 0, 0, 0, 1]] * 2


def test_a_killed_fork_server_is_the_error_on_all_nodes(nodes: Nodes) -> None:
    """Without restarts: the node itself raises a LaunchError, and the other one a WorkerError with its text."""
    found = errors(nodes.start("kill server", 0, 1))
    assert [error for error, _ in found] == ["WorkerError", "LaunchError"]
    for _, text in found:
        assert "the fork server, which starts the worker processes, has ended" in text


# what the script does, the nodes, options, the error on each of them, parts of its text
ERRORS: dict[str, tuple[str, Sequence[int | Mapping[str, str]], dict[str, Any], str, Sequence[str]]] = {
    "a node is missing": (
        "return",
        (0,),
        {"timeout": 2},
        "LaunchError",
        ["1 of 2 nodes joined within 2 s: node 0 from {host}", "node 1 is missing"],
    ),
    "node 0 is missing": ("return", (1,), {"timeout": 2}, "LaunchError", ["no node 0 at 127.0.0.1:{port} within 2 s"]),
    "no address": ("return", ({"MASTER_ADDR": ""},), {}, "ConfigError", ["MASTER_ADDR=<address of node 0>"]),
    "other requests": ("own request", (0, 1), {}, "ConfigError", ["2 nodes x 1 processes", "2 nodes x 2 processes"]),
    "other arguments": (  # each trained with its own, in silence
        "own argument",
        (0, 1),
        {},
        "ConfigError",
        ["argument 'factor' differs between the nodes", "node {number} ({host}): {pid}"],
    ),
    "the last restart fails, too": (
        "raise",
        (0, 1),
        {"max_restarts": 1, "fails": 2},
        "Boom",
        ["attempt 0 had failed with ", "Boom"],
    ),
}
# The node of rank 3 raises its exception, and the other one says which it was.
ON_NODE_0 = {"Boom": "WorkerError"}
LONG = {"node 0 is missing", "the last restart fails, too"}


@pytest.mark.parametrize("why", [pytest.param(each, marks=[pytest.mark.soak] * (each in LONG)) for each in ERRORS])
def test_the_error_on_every_node_says_why(nodes: Nodes, why: str) -> None:
    """Which nodes are missing, or how they differ, and what earlier attempts raised."""
    what, numbers, options, error, texts = ERRORS[why]
    started = nodes.start(what, *numbers, **options)
    for number, (found, text) in enumerate(errors(started)):
        assert found == (error if number else ON_NODE_0.get(error, error))
        for each in texts:
            known = {"host": socket.gethostname(), "port": nodes.port, "number": number, "pid": started[number].pid}
            assert each.format(**known) in text


@pytest.mark.parametrize(("what", "error"), [("raise", "Boom"), ("kill", "WorkerError")])
def test_failure_reaches_sleeping_nodes(nodes: Nodes, what: str, error: str) -> None:
    """Rank 3 fails while all others sleep: its node raises its error, the other one names it, no worker is left."""
    started = nodes.start(what, 0, 1)
    pids = nodes.worker_pids()
    for number, (found, text) in enumerate(errors(started)):
        assert found == (error if number else "WorkerError")
        assert (what == "kill") or "Boom" in text
        assert "rank 3" in text
        assert "the others: ranks 0-2: stopped" in text
        assert ("last words" in text) == (what == "kill")
    assert not running_pids(pids)


@pytest.mark.parametrize("what", ["save", "sleep"], ids=["the function returns", "it does not catch it"])
def test_ctrl_c_on_a_node_interrupts_all(nodes: Nodes, what: str) -> None:
    """Each rank gets a KeyboardInterrupt, and may save, and so does the caller on each node."""
    started = nodes.start(what, 0, 1)
    nodes.worker_pids()
    time.sleep(1.0)  # until the last rank sleeps
    started[1].send_signal(signal.SIGINT)
    assert [error for error, _ in errors(started)] == ["KeyboardInterrupt"] * 2
    assert len([*nodes.folder.glob("saved.*")]) == (4 if what == "save" else 0)


def test_two_nodes_with_one_node_rank_refuse(nodes: Nodes) -> None:
    """A duplicate NODE_RANK is refused, and the others go on."""
    started = nodes.start("wait", 0, 1)
    nodes.worker_pids()
    ((error, text),) = errors(nodes.start("wait", 1))
    assert (error, "another node has the same NODE_RANK" in text) == ("ConfigError", True)
    (nodes.folder / "go").touch()
    assert [each["value"] for each in results(started)] == [VALUE] * 2


def send(port: int, what: bytes) -> None:
    """Connect to node 0 as soon as it listens, send some bytes, and end the connection."""

    def is_sent() -> bool:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(what)
            return True
        return False

    wait_for(is_sent, timeout_s=60)


def test_bytes_of_strangers_change_nothing(nodes: Nodes) -> None:
    """Neither random bytes nor those of a pickle are heard: the nodes make their call."""
    (first,) = nodes.start("return", 0)
    rng = random.Random(0)
    for size in (0, 7, 40, 1000):
        send(nodes.port, rng.randbytes(size))
    send(nodes.port, pickle.dumps({"joined": 1}))
    assert results([first, *nodes.start("return", 1)]) == [RETURNED] * 2


def test_nodes_with_different_keys_make_no_call(nodes: Nodes) -> None:
    """Both say so; neither shows its key."""
    variables = [{"NODE_RANK": number, "PARALLELIZE_KEY": f"secret{number}"} for number in "01"]
    for error, text in errors(nodes.start("return", *variables)):
        assert (error, "PARALLELIZE_KEY differs between the nodes" in text) == ("ConfigError", True), text
        assert "secret" not in text


@pytest.mark.parametrize(
    ("killed", "count", "options"),
    [
        pytest.param(0, 2, {"heartbeat_timeout": 15}, marks=pytest.mark.soak),
        pytest.param(1, 2, {"heartbeat_timeout": 15}, marks=pytest.mark.soak),
        (0, 3, {"processes": 1, "num_nodes": 3}),  # the others cannot hear each other any more
    ],
    ids=["node 0", "node 1", "node 0 of 3"],
)
def test_killed_agent_ends_the_run(nodes: Nodes, killed: int, count: int, options: dict[str, Any]) -> None:
    """When the agent of one node is killed, the others detect it and raise; neither waits for another's report."""
    started = nodes.start("sleep", *range(count), **options)
    pids = nodes.worker_pids(3 if count == 3 else 4)
    started.pop(killed).send_signal(signal.SIGKILL)
    for error, text in errors(started):
        assert (error, f"node {killed} is gone" in text) == ("LaunchError", True), text
    wait_for(lambda: not running_pids(pids), timeout_s=60)


@pytest.mark.soak
@pytest.mark.timeout(500)
@pytest.mark.parametrize("stopped", [0, 1], ids=["node 0", "node 1"])
@pytest.mark.parametrize(("for_s", "heartbeat_timeout"), [(12, 60), (15, 6)], ids=["short", "long"])
def test_a_stopped_agent(nodes: Nodes, stopped: int, for_s: int, heartbeat_timeout: int) -> None:
    """An agent that is stopped by SIGSTOP continues its run; after heartbeat_timeout it is lost, on all nodes."""
    started = nodes.start("wait", 0, 1, heartbeat_timeout=heartbeat_timeout)
    nodes.worker_pids()
    started[stopped].send_signal(signal.SIGSTOP)
    time.sleep(for_s)
    started[stopped].send_signal(signal.SIGCONT)
    (nodes.folder / "go").touch()
    for result in results(started):
        if for_s < heartbeat_timeout:
            assert result["value"] == VALUE
        else:
            assert (result["error"], f"node {stopped} is gone" in result["text"]) == ("LaunchError", True), result


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


def start_on(hosts: tuple[Host, Host], nodes: Nodes, what: str) -> list[subprocess.Popen[str]]:
    where = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(nodes.port)}
    return nodes.start(what, where, where, on=hosts)


def test_two_hosts_without_names(nodes: Nodes, hosts: tuple[Host, Host]) -> None:
    """Hosts whose names do not resolve train together by address, over their own interface."""
    assert results(start_on(hosts, nodes, "return")) == [RETURNED] * 2


def test_a_failure_names_its_host(nodes: Nodes, hosts: tuple[Host, Host]) -> None:
    """Both hosts raise an error that names the failed rank, its host and its exception."""
    found = errors(start_on(hosts, nodes, "raise"))
    assert sorted(error for error, _ in found) == ["Boom", "WorkerError"]
    for _, text in found:
        assert re.search(r"rank 3 (of 4 )?on node-2", text), text
        assert "Boom" in text


def test_only_the_given_address_listens(nodes: Nodes, hosts: tuple[Host, Host]) -> None:
    """All listening sockets are bound to the host's address or to loopback, node 0's store to MASTER_ADDR."""
    start_on(hosts, nodes, "sleep")
    nodes.worker_pids()
    for host in hosts:
        lines = subprocess.run(host.command("ss", "-Hltn"), check=True, capture_output=True, text=True).stdout
        sockets = [line.split()[3] for line in lines.splitlines()]
        own = {host.address, "127.0.0.1", "[::1]", f"[::ffff:{host.address}]"}
        assert sockets, "gloo's ranks listen for each other"
        assert {each.rpartition(":")[0] for each in sockets} <= own
        assert (f"{host.address}:{nodes.port}" in sockets) == (host == hosts[0])
