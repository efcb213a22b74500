"""Cost of hang detection and of the nodes of a call by their number, up to 128 nodes of 8 ranks on one machine.

Real: a TCPStore, a connection and a `Judge` per rank, a `Nodes` per node. Simulated: what the ranks do. The numbers of
requests do not depend on the machine; the times are upper bounds, because all nodes share it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallelize import distributed
from parallelize.call.task import Call, Task
from parallelize.cluster.devices import Hardware
from parallelize.cluster.store import serve_store
from parallelize.cluster.world import Node
from parallelize.config.config import Config
from parallelize.config.layout import compute_layout
from parallelize.hang_detection import judge
from parallelize.hang_detection.judge import Judge
from parallelize.hang_detection.rank_state import Collective, RankState
from parallelize.launchers.local.node_requests import Request
from parallelize.launchers.local.nodes import Nodes

RANKS_PER_NODE = 8
HOST, TIMEOUT = "127.0.0.1", timedelta(seconds=60)
CHECK_EVERY_S = 0.5
judge._FIRST_LINE_S = 3.0  # the line that names the missing ranks is due when they wait, not after 30 s
MAX_THREADS, MAX_CONNECTING = 8, 64
COLUMNS = (
    "nodes",
    "ranks",
    "training: requests/s",
    "until found: requests per rank",
    "waiting: requests/s",
    "waiting: per rank",
    "missing rank found",
    "deadlock: all ranks told",
    "failure: all nodes ended",
)


class CountedStore:
    """A store that counts the requests made through it, and keeps the times of a request for states and of a line."""

    def __init__(self, store: Any) -> None:
        self._store, self.requests = store, 0
        self.asked_at = self.line_at = float("inf")

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._store, name)

        def call(*args: Any) -> Any:
            self.requests += 1
            if name == "set" and args[0] == "line":
                self.line_at = time.monotonic()
            if name == "add" and args == ("asked", True):
                self.asked_at = min(self.asked_at, time.monotonic())
            return function(*args)

        return call


class Rank:
    """The watchdog of a simulated rank."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        self.store: Any = CountedStore(dist.PrefixStore("watch", dist.TCPStore(HOST, port, timeout=TIMEOUT)))
        self.judge = Judge(self.store, rank, world_size, lambda _: 1800.0, self.state)
        self.is_waiting, self.status, self.ended_at = False, "running", 0.0
        self.due_at = time.monotonic() + CHECK_EVERY_S * rank / world_size

    def state(self) -> RankState:
        """Return a state like that of data parallel training: 15 completed collectives and a pending one."""
        calls = [Collective("0/gloo", seq, "all_reduce of float32[6553600]", is_completed=True) for seq in range(1, 16)]
        if self.is_waiting:
            calls.append(Collective("0/gloo", 16, "all_reduce of float32[6553600]", is_completed=False))
        return RankState(
            rank=self.judge.rank,
            status="waiting" if self.is_waiting else self.status,
            location="train.py:41" if self.is_waiting else "eval.py:12",
            operation="backward" if self.is_waiting else "evaluate",
            collectives=calls,
            groups=["0"],
            is_blocked=self.is_waiting,
            since=self.judge.since,
            answers=self.judge.answered,
        )

    def check(self) -> None:
        """Do what the watchdog thread does twice a second."""
        verdict = self.judge.check(is_waiting=self.is_waiting)
        if verdict is not None and not self.ended_at:
            self.ended_at = time.monotonic()
        self.due_at = time.monotonic() + CHECK_EVERY_S

    def leave(self) -> None:
        """Return from the function, as seen by the other ranks."""
        self.status, self.due_at = "returned", float("inf")
        self.judge.check(is_waiting=True)


def drive(ranks: Sequence[Rank], is_over: threading.Event) -> None:
    while not is_over.is_set():
        rank = min(ranks, key=lambda each: each.due_at)
        if not is_over.wait(min(max(0.0, rank.due_at - time.monotonic()), 0.1)) and rank.due_at <= time.monotonic():
            rank.check()


class Lines(logging.Handler):
    """Looks for the line that names the missing rank."""

    def __init__(self, missing: int) -> None:
        super().__init__()
        self.text, self.is_found = f"for rank {missing}, which is at eval.py:12", False

    def emit(self, record: logging.LogRecord) -> None:
        self.is_found |= self.text in record.getMessage()


def wait_until(fact: Callable[[], Any], *, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not fact():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.005)


def hang(num_nodes: int, seconds: float) -> dict[str, float]:
    """Train, then let one rank miss a collective, then let it return; return requests per second, and times."""
    world_size = num_nodes * RANKS_PER_NODE
    server = serve_store(HOST, 0, TIMEOUT)
    with ThreadPoolExecutor(MAX_CONNECTING) as connecting:
        ranks = list(connecting.map(lambda rank: Rank(rank, world_size, server.port), range(world_size)))
    lines = Lines(missing=world_size - 1)
    logging.getLogger("parallelize").addHandler(lines)
    is_over = threading.Event()
    num_threads = min(MAX_THREADS, num_nodes)
    with ThreadPoolExecutor(num_threads) as threads:
        driven = [threads.submit(drive, ranks[first::num_threads], is_over) for first in range(num_threads)]
        try:
            training = requests_per_s(ranks, seconds)
            before = sum(each.store.requests for each in ranks)
            for each in ranks[:-1]:
                each.is_waiting = True
            wait_until(lambda: lines.is_found)
            found_s = min(each.store.line_at for each in ranks) - min(each.store.asked_at for each in ranks)
            asked = sum(each.store.requests for each in ranks) - before
            waiting = requests_per_s(ranks, 2 * seconds)
            returned_at = time.monotonic()
            ranks[-1].leave()
            wait_until(lambda: all(each.ended_at for each in ranks[:-1]))
            proof_s = max(each.ended_at for each in ranks) - returned_at
        finally:
            is_over.set()
        for each in driven:
            each.result()
    return {"training": training, "asked": asked, "waiting": waiting, "found_s": found_s, "proof_s": proof_s}


def requests_per_s(ranks: Sequence[Rank], seconds: float) -> float:
    before, begin = sum(each.store.requests for each in ranks), time.monotonic()
    time.sleep(seconds)
    return (sum(each.store.requests for each in ranks) - before) / (time.monotonic() - begin)


def failure(num_nodes: int) -> dict[str, float]:
    """Let a node fail; return the time until every node has all reports."""
    config = Config.parse(processes=RANKS_PER_NODE, num_nodes=num_nodes, timeout=TIMEOUT)
    task = Task.of(Call(failure, (), {}, compute_layout(config, Hardware())))
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]

    def join(rank: int) -> Nodes:
        node = Node(HOST, port, rank)
        return Nodes(node, num_nodes, Request.of(task, ""), timeout=TIMEOUT, patience_s=60.0)

    with ThreadPoolExecutor(num_nodes) as threads:
        nodes = list(threads.map(join, range(num_nodes)))
        list(threads.map(lambda node: node.start(), nodes))
        ends = [threads.submit(run_node, node) for node in nodes[:-1]]
        failed_at = time.monotonic()
        nodes[-1].say("stop")
        ends.append(threads.submit(nodes[-1].exchange, []))
        for each in ends:
            each.result()
        ended_at = time.monotonic()
        list(threads.map(lambda node: node.close(), nodes))
    return {"failure_s": ended_at - failed_at}


def run_node(node: Nodes) -> None:
    """Do what the launcher of a node does: end when a node has failed, and wait for all reports."""
    wait_until(node.has_failed)
    node.exchange([])


def open_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def descriptors(processes: int) -> int:
    """Return the number of file descriptors that a call with this many processes opens in its caller."""
    before = open_descriptors(os.getpid())
    return distributed(processes=processes)(open_descriptors)(os.getpid()) - before


def measure(num_nodes: int, seconds: float) -> dict[str, float]:
    """Measure in a process of its own, so that the connections and threads of smaller worlds are gone."""
    command = [sys.executable, __file__, "--one", str(num_nodes), "--seconds", str(seconds)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def rows(counts: Sequence[int], seconds: float) -> Iterator[str]:
    reference = 0.0
    for count in counts:
        found, ranks = measure(count, seconds), count * RANKS_PER_NODE
        reference = reference or found["waiting"] / ranks
        yield (
            f"| {count} | {ranks} | {found['training']:.1f} | {found['asked'] / ranks:.1f} | {found['waiting']:.0f} "
            f"| {found['waiting'] / ranks / reference:.2f}x | {found['found_s']:.2f} s | {found['proof_s']:.2f} s "
            f"| {found['failure_s']:.2f} s |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128], help="of nodes")
    parser.add_argument("--seconds", type=float, default=2.0, help="for counting requests")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8], help="of a real call")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measured = {**hang(options.one, options.seconds), **failure(options.one)}
        print(json.dumps(measured), flush=True)
        os._exit(0)  # without waiting for the clients' threads
    print(f"{platform.machine()}, {os.cpu_count()} cores, ", end="")
    print(f"Python {platform.python_version()}, torch {torch.__version__}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for row in rows(options.counts, options.seconds):
        print(row, flush=True)
    descriptors(1)  # starts the fork server
    print("\n| processes of a call | descriptors of the caller | per process |\n|---|---|---|")
    for processes in options.processes:
        number = descriptors(processes)
        print(f"| {processes} | {number} | {number / processes:.1f} |", flush=True)


if __name__ == "__main__":
    main()
