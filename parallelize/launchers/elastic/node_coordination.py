"""What the agents of a run's nodes tell each other: who is there, who failed, what came of it.

node 0 serves one store at MASTER_ADDR:MASTER_PORT for as long as its process lives; under it, for every call
    joined/<node>         host, and what it was asked for      all wait for all
    <attempt>/port        where the workers of this attempt meet
    <attempt>/abort       some node has failed: stop
    <attempt>/report/<n>  outcomes and deaths of that node     all judge from the same reports
    <attempt>/done/<n>    its workers have all returned        a call succeeds when all have
    beat/<node>           still there
    result/<rank>         an outcome, in pieces that the store takes
"""

from __future__ import annotations

import functools
import itertools
import json
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from parallelize.cluster.network import is_own
from parallelize.cluster.store import serve_store
from parallelize.cluster.world import Node
from parallelize.errors import ConfigError, LaunchError
from parallelize.launchers.elastic.agent import Death
from parallelize.launchers.elastic.store_client import Line

__all__ = ["Control", "meet"]

_PIECE = 4 << 20  # bytes; the store refuses values above 8 MiB
_LOOK_EVERY_S = 0.05
_LISTEN_EVERY_S = 1.0
_LOST_AFTER_S = 10.0
_REPORTS_WITHIN_S = 15.0  # longer than it takes to see that a node is lost


def meet(node: Node, *, num_nodes: int, request: str, timeout: timedelta) -> Control:
    """Wait until every node of the run has made the same call.

    Args:
        node: where the nodes meet, and which this is.
        num_nodes: how many there are.
        request: what this node was asked for, compared with the others'.
        timeout: how long to wait for the others.

    Raises:
        LaunchError: somebody did not come in time; says who did.
        ConfigError: two nodes have one number, or were asked for different things.
    """
    line, node_rank = _join(node, num_nodes, timeout)
    control = Control(line, f"call/{next(_calls)}", node_rank=node_rank, num_nodes=num_nodes, timeout=timeout)
    control.wait_for_all(request)
    control.beat(is_on=True)
    return control


_calls = itertools.count()  # every node makes its calls in the same order


@functools.cache
def _join(node: Node, num_nodes: int, timeout: timedelta) -> tuple[Line, int]:
    """The line to the run's store, and this node's number; once in a process: a second call finds the first's."""
    hosts = node.node_rank == 0 or (node.node_rank is None and is_own(node.master_addr))
    store = _served(node, timeout) if hosts else None
    node_rank = node.node_rank
    if store is not None:
        node_rank = 0
    else:
        store = _reached(node, timeout)
    if node_rank is None:
        node_rank = store.add("numbered", 1)
    if node_rank >= num_nodes or store.add(f"node/{node_rank}", 1) > 1:
        raise ConfigError(
            f"node {node_rank} of num_nodes={num_nodes} on {socket.gethostname()}",
            why="there is another node of that number, or one more node than asked for",
            fix="give every node its own NODE_RANK from 0, or none of them any",
        )
    return Line(store, _LOST_AFTER_S), node_rank


def _served(node: Node, timeout: timedelta) -> dist.Store | None:
    """The store, if this process is the one to serve it; None: another process of this machine does."""
    try:
        return serve_store(node.master_addr, node.master_port, timeout)
    except OSError as exc:
        if node.node_rank is None:
            return None
        raise LaunchError(
            f"node 0 cannot listen at {node.master_addr}:{node.master_port}",
            why=str(exc),
            fix="set MASTER_ADDR to an address of node 0 and MASTER_PORT to a free port, the same on every node",
        ) from exc


def _reached(node: Node, timeout: timedelta) -> dist.Store:
    try:
        return dist.TCPStore(node.master_addr, node.master_port, is_master=False, timeout=timeout)
    except (dist.DistError, OSError, RuntimeError) as exc:
        raise LaunchError(
            f"no node 0 at {node.master_addr}:{node.master_port} within {timeout.total_seconds():g} s",
            why=str(exc).partition("\n")[0],
            fix="start the script on node 0 too, and let MASTER_ADDR and MASTER_PORT name it on every node",
        ) from exc


class Control:
    """One call, as its nodes see it.

    Args:
        line: to their store.
        name: of this call, in the store.
        node_rank: this node.
        num_nodes: nodes in all.
        timeout: of a wait for all.

    Attributes:
        store: theirs, under the name of this call; a wait in it may have no end.
        lost: nodes that have said nothing for long.
    """

    def __init__(self, line: Line, name: str, *, node_rank: int, num_nodes: int, timeout: timedelta) -> None:
        self.store = line.under(name)
        self._line, self._name = line, name
        self.node_rank, self.num_nodes = node_rank, num_nodes
        self._timeout_s = timeout.total_seconds()
        self._listened = 0.0
        self._heard: dict[int, tuple[bytes, float]] = {}
        self.lost: list[int] = []

    def beat(self, *, is_on: bool) -> None:
        """Begin, or end, to tell the others that this node is in the call; without it they give it up."""
        self._line.beats = f"{self._name}/beat/{self.node_rank}" if is_on else ""

    def wait_for_all(self, request: str) -> None:
        """Say that this node is here, wait for the others, compare what all were asked for."""
        self._set(f"joined/{self.node_rank}", json.dumps([socket.gethostname(), request]))
        keys = [f"joined/{rank}" for rank in range(self.num_nodes)]
        if not self._until(lambda: self._has(*keys), self._timeout_s):
            raise self._missing(keys)
        said = [json.loads(self._get(key)) for key in keys]
        differing = {text for _, text in said}
        if len(differing) > 1:
            listed = "; ".join(f"node {rank} ({host}): {text}" for rank, (host, text) in enumerate(said))
            raise ConfigError(
                "the nodes of this run were asked for different things",
                why=listed,
                fix="start the same script with the same options on every node",
            )

    def _set(self, key: str, value: str | bytes) -> None:
        self._line.set(f"{self._name}/{key}", value)

    def _get(self, key: str) -> bytes:
        return self._line.get(f"{self._name}/{key}")

    def _has(self, *keys: str) -> bool:
        return self._line.check([f"{self._name}/{key}" for key in keys])

    def _missing(self, keys: Sequence[str]) -> LaunchError:
        here = {rank: json.loads(self._get(key))[0] for rank, key in enumerate(keys) if self._has(key)}
        came = ", ".join(f"node {rank} from {host}" for rank, host in here.items())
        absent = ", ".join(str(rank) for rank in range(self.num_nodes) if rank not in here)
        return LaunchError(
            f"{len(here)} of {self.num_nodes} nodes came within {self._timeout_s:g} s: {came}",
            why=f"node {absent} did not: not started, or it cannot reach MASTER_ADDR:MASTER_PORT",
            fix="start the script on every node, or correct num_nodes; timeout= gives them longer",
        )

    # --- one attempt: failures spread, success is everybody's ---

    def publish(self, name: str, value: str) -> None:
        """Set a value of this call."""
        self._set(name, value)

    def read(self, name: str) -> str:
        """A value of this call, waited for.

        Raises:
            LaunchError: nobody set it in time.
        """
        if not self._until(lambda: self._has(name), self._timeout_s):
            raise LaunchError(
                f"no {name} within {self._timeout_s:g} s", why="node 0 is gone", fix="see node 0's output"
            )
        return str(self._get(name).decode())

    def has_failed(self, attempt: int) -> bool:
        """Whether some node has failed, or has not been heard of for long."""
        if time.monotonic() - self._listened > _LISTEN_EVERY_S:
            self._listen()
        return bool(self.lost) or self._has(f"{attempt}/abort")

    def _listen(self) -> None:
        """Find the nodes that are lost."""
        now = self._listened = time.monotonic()
        for rank in range(self.num_nodes):
            beat = self._get(f"beat/{rank}") if self._has(f"beat/{rank}") else b""
            if rank not in self._heard or self._heard[rank][0] != beat:
                self._heard[rank] = (beat, now)
        self.lost = [rank for rank, (_, since) in self._heard.items() if now - since > _LOST_AFTER_S]

    def report(self, attempt: int, outcomes: Sequence[bytes], deaths: Sequence[Death]) -> None:
        """Tell what became of this node's workers in an attempt that failed somewhere."""
        self._put(f"{attempt}/report/{self.node_rank}", pickle.dumps((list(outcomes), list(deaths))))
        self._set(f"{attempt}/abort", "1")

    def reports(self, attempt: int) -> tuple[list[bytes], list[Death]]:
        """What became of the workers of every node that still answers; waits until the others are known to be lost."""
        keys = {rank: f"{attempt}/report/{rank}" for rank in range(self.num_nodes)}

        def is_settled() -> bool:
            self._listen()
            return all(rank in self.lost or self._has(key) for rank, key in keys.items())

        self._until(is_settled, _REPORTS_WITHIN_S)
        outcomes: list[bytes] = []
        deaths: list[Death] = []
        for key in filter(self._has, keys.values()):
            theirs, died = pickle.loads(self._take(key))  # written by a node of the same user's run
            outcomes += theirs
            deaths += died
        return outcomes, deaths

    def all_done(self, attempt: int) -> bool:
        """Say that this node's workers have returned; whether every node's have."""
        self._set(f"{attempt}/done/{self.node_rank}", "1")
        return self._has(*(f"{attempt}/done/{rank}" for rank in range(self.num_nodes)))

    # --- what came of it ---

    def exchange(self, own: dict[int, Path], wanted: Sequence[int], folder: Path) -> dict[int, Path]:
        """Give the wanted outcomes that are this node's, get the others' into `folder`."""
        for rank in sorted(own.keys() & set(wanted)):
            self._put(f"result/{rank}", own[rank].read_bytes())
        paths = dict(own)
        for rank in (each for each in wanted if each not in own):
            paths[rank] = folder / f"fetched.{rank}"
            paths[rank].write_bytes(self._take(f"result/{rank}"))
        self._set(f"fetched/{self.node_rank}", "1")
        if self.node_rank == 0:  # the store ends with this process
            self._until(lambda: self._has(*(f"fetched/{n}" for n in range(self.num_nodes))), self._timeout_s)
        return paths

    def _put(self, name: str, value: bytes) -> None:
        pieces = range(0, max(len(value), 1), _PIECE)
        for number, start in enumerate(pieces):
            self._set(f"{name}/piece/{number}", value[start : start + _PIECE])
        self._set(name, str(len(pieces)))

    def _take(self, name: str) -> bytes:
        count = int(self.read(name))
        return b"".join(self._get(f"{name}/piece/{number}") for number in range(count))

    @staticmethod
    def _until(fact: Callable[[], bool], timeout_s: float) -> bool:
        """Wait by looking: a wait inside the store would not let signals through."""
        end = time.monotonic() + timeout_s
        while not fact():
            if time.monotonic() > end:
                return False
            time.sleep(_LOOK_EVERY_S)
        return True
