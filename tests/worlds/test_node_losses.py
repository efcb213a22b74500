"""Processes of a call on two nodes that are killed, at each stage, and a network that is cut."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks import free_port, running_pids, wait_for
from worlds.two_hosts import two_hosts

pytestmark = pytest.mark.soak

SCRIPT = """
import json, os, pathlib, sys, time
from parallelize import distributed, rank
from parallelize.launchers.local.launcher import LocalLauncher

stage, folder = sys.argv[1], pathlib.Path(sys.argv[2])

def here(name):
    part = folder / f"{os.getpid()}.part"
    part.write_text(json.dumps([os.getpid(), os.getppid()]))
    part.rename(folder / f"{stage}.{name}")
    if stage != "none":
        time.sleep(300)

class Argument:  # is unpickled in each worker
    def __setstate__(self, state):
        if stage == "starting" and "RANK" in os.environ:
            here(os.environ["RANK"])
    def __getstate__(self):
        return {"a": 1}

class Value:  # is pickled by rank 0, while the first rank of node 1 waits for it
    def __reduce__(self):
        if stage == "returning" and "RANK" in os.environ:
            here(0)
        return (str, ("value",))

@distributed(processes=2, num_nodes=2, timeout=120, launcher=LocalLauncher(heartbeat_timeout=15))
def train(argument):
    if stage == "running":
        here(rank())
    if stage == "returning":
        (folder / f"pids.{rank()}").write_text(json.dumps([os.getpid(), os.getppid()]))
    return Value() if rank() == 0 else None

result = {}
try:
    result["value"] = train(Argument())
except BaseException as error:
    result["error"] = type(error).__name__
    result["text"] = str(error)
print(json.dumps(result))
"""


class Pair:
    """Two nodes on this machine, or on two hosts, which make one call."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        (folder / "script.py").write_text(SCRIPT)
        self.callers: list[subprocess.Popen[str]] = []

    def start(self, stage: str, node: int, *, port: int = 0, prefix: list[str] | None = None, **more: str) -> None:
        command = [sys.executable, str(self.folder / "script.py"), stage, str(self.folder)]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or self.port), "NODE_RANK": str(node)}
        self.callers.append(
            subprocess.Popen(
                [*(prefix or []), *command],
                env={**os.environ, **address, **more},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )

    def pids(self, name: str) -> tuple[int, int]:
        """Return the process of a rank and its fork server, once the rank has written them."""
        path = self.folder / name
        wait_for(lambda: path.exists() and path.read_text(), timeout_s=240)
        pid, server = json.loads(path.read_text())
        return pid, server

    def result(self, node: int) -> dict[str, Any]:
        out, err = self.callers[node].communicate(timeout=250)
        assert out.strip(), err
        found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return found


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    for process in made.callers:
        process.kill()
        process.communicate()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("killed", ["caller", "server", "rank"])
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("stage", ["starting", "running", "returning"])
def test_the_end_of_a_process_ends_the_call_on_both_nodes(pair: Pair, stage: str, node: int, killed: str) -> None:
    """Each caller that lives gets one exception, and no process is left."""
    for number in (0, 1):
        pair.start(stage, number)
    pids = set[int]()
    if stage == "returning":
        places = [pair.pids(f"pids.{rank}") for rank in range(4)]
        pair.pids("returning.0")
    else:
        places = [pair.pids(f"{stage}.{rank}") for rank in range(4)]
    pids.update(pid for place in places for pid in place)
    pid, server = places[2 * node]
    victim = {"caller": pair.callers[node].pid, "server": server, "rank": pid}[killed]
    os.kill(victim, signal.SIGKILL)
    for number in (0, 1):
        if (killed, node) == ("caller", number):
            continue
        result = pair.result(number)
        assert result["error"] in {"LaunchError", "WorkerError"}, result
        if killed == "caller":
            assert f"node {node} is gone" in result["text"]
    wait_for(lambda: not running_pids(sorted(pids)), timeout_s=60)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_is_killed_while_it_joins_can_be_started_again(pair: Pair, node: int) -> None:
    """It waits for the other one when it is killed; the port is free again, and nobody has heard of it."""
    pair.start("none", node)
    first = pair.callers[0]
    wait_for(lambda: any(thread_names(first.pid)), timeout_s=240)
    first.kill()
    first.communicate()
    pair.callers.clear()
    for number in (0, 1):
        pair.start("none", number)
    assert [pair.result(number) for number in (0, 1)] == [{"value": "value"}] * 2


def thread_names(pid: int) -> Iterator[bool]:
    """Yield for each thread of a process whether it is that of the nodes; before it there are as many as torch has."""
    with contextlib.suppress(psutil.Error, FileNotFoundError):
        listens = [c for c in psutil.Process(pid).net_connections("tcp") if c.status in {"LISTEN", "SYN_SENT"}]
        threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
        yield bool(listens) or (threads > 1 and "torch" in Path(f"/proc/{pid}/maps").read_text())


@pytest.mark.timeout(600)
def test_a_cut_network_ends_the_call_on_both_hosts(pair: Pair) -> None:
    """Each host says that the other one is gone."""
    with two_hosts() as hosts:
        for number, host in enumerate(hosts):
            pair.start("running", number, prefix=host.command(), MASTER_ADDR=hosts[0].address)
        places = [pair.pids(f"running.{rank}") for rank in range(4)]
        interface = ["ip", "-n", hosts[0].namespace, "link", "set", hosts[0].interface, "down"]
        subprocess.run(interface, check=True)
        for number in (0, 1):
            result = pair.result(number)
            assert (result["error"], f"node {1 - number} is gone" in result["text"]) == ("LaunchError", True), result
    wait_for(lambda: not running_pids([pid for pid, _ in places]), timeout_s=60)


class Relay:
    """Stands between node 1 and the store, and changes a byte of what node 0 answers."""

    def __init__(self, port: int, change_at: int) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._target, self._change_at, self._seen = port, change_at, 0
        self._sockets = contextlib.ExitStack()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._sockets.enter_context(self._server.accept()[0])
                with contextlib.suppress(OSError):
                    upstream = self._sockets.enter_context(socket.create_connection(("127.0.0.1", self._target)))
                    for one, other, changes in ((client, upstream, False), (upstream, client, True)):
                        threading.Thread(target=self._copy, args=(one, other, changes), daemon=True).start()
                    continue
                client.close()

    def _copy(self, source: socket.socket, target: socket.socket, changes: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                if changes and self._seen <= self._change_at < self._seen + len(data):
                    data[self._change_at - self._seen] ^= 0x41
                if changes:
                    self._seen += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)  # `close` alone does not end a thread in accept()
        self._server.close()
        self._sockets.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("change_at", [3, 40, 150, 300, 520, 900, 1500])
def test_changed_bytes_end_in_one_exception_or_change_nothing(pair: Pair, change_at: int) -> None:
    """Whatever a relay changes in what node 1 hears: each node returns the value, or raises one exception of ours."""
    pair.start("none", 0)
    relay = Relay(pair.port, change_at)
    pair.start("none", 1, port=relay.port)
    for number in (1, 0):
        result = pair.result(number)
        if "value" in result:
            assert result == {"value": "value"}
        else:
            assert result["error"] in {"LaunchError", "WorkerError", "ConfigError", "SyncError"}, result
    relay.close()
