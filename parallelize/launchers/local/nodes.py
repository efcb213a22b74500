"""The nodes of a call, on each of which the same script runs: they meet, and exchange one report each.

    node 1 ── what it says ──> node 0, which keeps all that was said, in one order
    node 2 <── what it has not heard yet ── node 0
    ...

    start     by node 0: who has joined, with which request, and the port of rank 0's store
    interrupt Ctrl-C was pressed: all nodes interrupt their workers
    stop      a worker has failed: all nodes end theirs
    report    outcomes of a node: all nodes find the same value or root cause
    lost      a node is gone: its connection is closed, or it was silent for some time

Each node asks node 0 several times a second, which is its heartbeat, and the answer is node 0's.

Whoever connects proves first that it knows PARALLELIZE_KEY, as multiprocessing does it; what others send is not read.
A call meets those that wait for it now, so a node whose call has failed alone may call again.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from parallelize.call.task import Task
from parallelize.cluster.network import is_local_address, loopback
from parallelize.cluster.store import listen, serve_store
from parallelize.cluster.world import Node
from parallelize.errors import ConfigError, LaunchError

_ASK_EVERY_S = 0.1
_REFUSED_FOR_S = 10.0  # node 0 may take this long to leave its last call
_CLOSE_TIMEOUT_S = 5.0
_POLL_EVERY_S = 0.05  # waits are short, so that signal handlers run
_GONE = (EOFError, OSError, AuthenticationError)

_Message = tuple[str, int, Any]  # what is said, of which node, its value


class Nodes:
    """All nodes of a call, as one of them sees them.

    Args:
        node: the address of node 0, and this node's rank; None: the call runs on this node alone.
        task: the call.
        patience_s: seconds after which a node that sends nothing is lost.
        key: the secret of the run; "": what anybody sends to node 0 is read.
        serves_store: whether node 0 serves a TCPStore to the workers.

    Attributes:
        node_rank: rank of this node.
        address: address of node 0.
        stamp: a name for this call, by its time; all nodes get node 0's.

    Raises:
        LaunchError: node 0 was not reached in time, or cannot listen at its address.
        ConfigError: another node has the same rank, or more nodes were started than `num_nodes`.
    """

    def __init__(
        self, node: Node | None, task: Task, *, patience_s: float, key: str, serves_store: bool
    ) -> None:
        self._num_nodes, self._timeout = task.layout.num_nodes, task.layout.config.timeout
        self._patience_s, self._key, self._serves_store = patience_s, key.encode(), serves_store
        self.address = loopback() if node is None else node.master_addr
        self.stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns()}"
        self.node_rank = 0
        self._said = list[_Message]()  # by this node; at node 0 by all
        self._heard = defaultdict[str, dict[int, Any]](dict)  # what -> node -> value
        self._joined = {0: (socket.gethostname(), _request(task))}  # node 0 keeps the others', too
        self._store: Any = None  # of the workers
        self._lock, self._is_closed = threading.Lock(), threading.Event()
        self._threads: list[threading.Thread] = []
        if node is not None:
            listener = _listen(node)
            if listener is None:
                self._join(node)
            else:
                self._threads.append(_thread(self._accept, listener))

    def start(self) -> int:
        """Start the workers of all nodes; return the port of the store for them, or a free one if none is served.

        Raises:
            LaunchError: not all nodes joined in time, or node 0 is lost.
            ConfigError: two nodes make different calls.
        """
        end = time.monotonic() + self._timeout.total_seconds()
        if self.node_rank == 0:
            while len(self._joined) < self._num_nodes and time.monotonic() < end:
                time.sleep(_POLL_EVERY_S)
            if self._serves_store:
                self._store = serve_store(self.address, 0, self._timeout)
                port = int(self._store.port)
            else:
                with listen(self.address, 0) as free:
                    port = int(free.getsockname()[1])
            self._say("start", 0, (port, self.stamp, dict(self._joined)))
        while not (started := self._heard["start"]):
            if self._heard["lost"]:
                raise self.lost_error()
            time.sleep(_POLL_EVERY_S)
        port, self.stamp, joined = started[0]
        if len(joined) < self._num_nodes:
            raise self._absent_error(joined)
        _require_equal(joined)
        return int(port)

    def is_stopped(self) -> bool:
        """Return whether the call has failed on any node."""
        return bool(self._heard["lost"] or self._heard["stop"])

    def interrupt(self) -> None:
        """Tell all nodes that Ctrl-C was pressed on this one."""
        self._say("interrupt", self.node_rank)

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C was pressed on any node."""
        return bool(self._heard["interrupt"])

    def stop(self) -> None:
        """Tell all nodes that the call has failed."""
        self._say("stop", self.node_rank)

    def exchange(self, report: Mapping[int, Any]) -> list[Mapping[int, Any]]:
        """Return the reports of all nodes; wait for them until a node is lost.

        Args:
            report: rank -> outcome, or a file with it, of this node; of other nodes, files are bytes.
        """
        if self._num_nodes > 1:
            report = {
                rank: each.read_bytes() if isinstance(each, Path) else each
                for rank, each in report.items()
            }
        self._say("report", self.node_rank, report)
        found, lost, nodes = self._heard["report"], self._heard["lost"], set(range(self._num_nodes))
        # Without node 0 none is heard, and a node that the others have given up waits for none.
        while nodes - found.keys() - lost.keys() and not lost.keys() & {0, self.node_rank}:
            time.sleep(_POLL_EVERY_S)
        return list({self.node_rank: report, **found}.values())

    def close(self) -> None:
        """Leave the other nodes; wait until they have what was said, or some seconds."""
        self._store = None  # a process that is forked later lacks its thread, and would crash when it frees it
        self._is_closed.set()
        end = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def lost_error(self) -> LaunchError:
        """Return the error for the node that is lost."""
        ((rank, why),) = self._heard["lost"].items()
        return LaunchError(
            f"node {rank} is gone",
            why=why,
            fix="see that node's output: its process was killed or stopped, its machine failed, or the network between "
            "them did; LocalLauncher(heartbeat_timeout=) allows longer pauses",
        )

    def _absent_error(self, joined: Mapping[int, tuple[str, Any]]) -> LaunchError:
        missing = ", ".join(str(rank) for rank in range(self._num_nodes) if rank not in joined)
        hosts = ", ".join(f"node {rank} from {host}" for rank, (host, _) in sorted(joined.items()))
        return LaunchError(
            f"{len(joined)} of {self._num_nodes} nodes joined within {self._timeout.total_seconds():g} s: {hosts}",
            why=f"node {missing} is missing: it was not started, or its call has failed, or it cannot reach "
            "MASTER_ADDR:MASTER_PORT",
            fix="start the script on every node, or correct num_nodes; timeout= allows more time",
        )

    # What a node says, and hears

    def _say(self, what: str, of: int, value: Any = None) -> None:
        """Say something to all nodes, this one included."""
        self._said.append((what, of, value))
        if self.node_rank == 0:
            self._hear([(what, of, value)])

    def _hear(self, messages: Sequence[_Message]) -> None:
        for what, of, value in messages:
            if (
                what != "lost" or not self._heard["lost"]
            ):  # a node that leaves after that is not lost
                self._heard[what][of] = value

    def _talk(self, other: int, peer: Connection) -> None:
        """Talk with another node until one of the two leaves; if that is the other one, it is lost."""
        why = f"no heartbeat for {self._patience_s:g} s"
        with peer:
            try:
                self._exchange_news(peer)
            except BlockingIOError:
                pass
            except _GONE as exc:
                why = str(exc) or "its connection was closed"
            else:
                return
            self._say("lost", other, why)
            self._hear([("lost", other, why)])
            with contextlib.suppress(OSError):  # if it was only stopped, it hears that
                peer.send([("lost", other, why)])

    def _exchange_news(self, peer: Connection) -> None:
        """Hear what another node says, and tell it what it has not heard, until this node leaves."""
        told = 0
        while not (self._is_closed.is_set() and told == len(self._said)):
            if self.node_rank == 0:
                for message in peer.recv():
                    self._say(*message)
            news = self._said[told:]
            peer.send(news)
            told += len(news)
            if self.node_rank != 0:
                self._hear(peer.recv())
                self._is_closed.wait(_ASK_EVERY_S)

    # How they join

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(_POLL_EVERY_S)
        with listener:
            while not self._is_closed.is_set():
                with contextlib.suppress(TimeoutError):
                    _thread(self._admit, listener.accept()[0])

    def _admit(self, connected: socket.socket) -> None:
        """Let a node join that asks for a free rank, or for any; refuse others, which may try again."""
        with contextlib.suppress(*_GONE):
            peer = self._peer(connected, deliver_challenge, answer_challenge)
            wanted, *node = peer.recv()
            with self._lock:
                free = set(range(self._num_nodes)) - self._joined.keys()
                rank = min(free if wanted is None else free & {wanted}, default=None)
                peer.send(rank)
                if rank is None:
                    return
                self._joined[rank] = tuple(node)
                self._threads.append(threading.current_thread())
            self._talk(rank, peer)

    def _peer(
        self, connected: socket.socket, *prove: Callable[[Connection, bytes], None]
    ) -> Connection:
        """Return the connection to a node that knows the key; waiting for it too long raises BlockingIOError."""
        seconds, rest = divmod(self._patience_s, 1)
        connected.settimeout(None)
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connected.setsockopt(
                socket.SOL_SOCKET, direction, struct.pack("ll", int(seconds), int(rest * 1e6))
            )
        peer = Connection(connected.detach())
        for each in prove:
            each(peer, self._key)
        return peer

    def _join(self, node: Node) -> None:
        """Connect to node 0, again until its call takes this node."""
        at, timeout_s = (node.master_addr, node.master_port), self._timeout.total_seconds()
        end, is_refused, why = time.monotonic() + timeout_s, False, ""
        while time.monotonic() < end:
            try:
                peer = self._peer(
                    socket.create_connection(at, self._patience_s),
                    answer_challenge,
                    deliver_challenge,
                )
                peer.send((node.node_rank, *self._joined[0]))
                rank = peer.recv()
            except _GONE as exc:
                why = str(exc)
            else:
                if rank is not None:
                    self.node_rank = rank
                    self._threads.append(_thread(self._talk, 0, peer))
                    return
                if not is_refused:
                    is_refused, end = True, min(end, time.monotonic() + _REFUSED_FOR_S)
            time.sleep(_POLL_EVERY_S)
        if is_refused:
            raise ConfigError(
                f"node {node.node_rank} on {self._joined[0][0]}",
                why="another node has the same NODE_RANK, or more nodes were started than num_nodes",
                fix="give every node its own NODE_RANK from 0, or set it on none of them",
            )
        raise LaunchError(
            f"no node 0 at {at[0]}:{at[1]} within {timeout_s:g} s",
            why=f"{why}; a node with another PARALLELIZE_KEY is not heard",
            fix="start the script on node 0, with the same MASTER_ADDR, MASTER_PORT and PARALLELIZE_KEY on all nodes",
        )


def _listen(node: Node) -> socket.socket | None:
    """Return a socket at the address of node 0; None: this is another node."""
    if node.node_rank or (node.node_rank is None and not is_local_address(node.master_addr)):
        return None
    try:
        return listen(node.master_addr, node.master_port)
    except OSError as exc:
        if node.node_rank is None:  # another process of this machine is node 0
            return None
        raise LaunchError(
            f"node 0 cannot listen at {node.master_addr}:{node.master_port}",
            why=str(exc),
            fix="set MASTER_ADDR to an address of node 0 and MASTER_PORT to a free port, the same on every node",
        ) from exc


def _thread(target: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name="parallelize-nodes", daemon=True)
    thread.start()
    return thread


def _request(task: Task) -> dict[str, str]:
    """Return what must be the same on all nodes: the function, and the arguments that are plain values.

    A call on one node has nobody to compare its arguments with, which may be millions of numbers.
    """
    layout = task.layout
    request = {
        "the call": f"{task.name}, {layout.num_nodes} nodes x {layout.local_world_size} processes"
    }
    with contextlib.suppress(OSError, TypeError):  # a notebook's, or one that is no function
        request["the source of the function"] = inspect.getsource(inspect.unwrap(task.function))
    if layout.num_nodes == 1:
        return request
    for name, value in (*enumerate(task.args), *task.kwargs.items()):
        with contextlib.suppress(TypeError, ValueError, RecursionError):  # no plain value
            request[f"argument {name!r}"] = json.dumps(value)
    return request


def _require_equal(joined: Mapping[int, tuple[str, dict[str, str]]]) -> None:
    """Raise ConfigError for nodes that make different calls."""
    for name in dict.fromkeys(name for _, request in joined.values() for name in request):
        texts = {rank: request.get(name, "none") for rank, (_, request) in sorted(joined.items())}
        if len(set(texts.values())) > 1:
            raise ConfigError(
                f"{name} differs between the nodes",
                why="; ".join(
                    f"node {rank} ({joined[rank][0]}): {text[:80]}" for rank, text in texts.items()
                ),
                fix="start the same script with the same options on every node; draw random values in the function, or "
                "with a seed",
            )
