"""The nodes of a call, on each of which the same script runs: they meet, and exchange one report each per attempt.

Node 0 passes every message of a node on to all nodes, in one order, so that each finds the same by itself:
    join      of all nodes, with the same request: the attempt starts when node 0 has sent the port of rank 0's store
    stop      a worker has failed: all nodes end theirs
    report    outcomes and exits of a node: all nodes find the same value or root cause
    lost      a node is gone: its connection is closed, or it has sent nothing, not even a heartbeat, for some time

Each message has a MAC under PARALLELIZE_KEY; what has another one is not read. A call meets those that wait for it now,
so a node whose call has failed alone may call again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import inspect
import json
import math
import pickle
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallelize.call.task import Task
from parallelize.cluster.network import is_local_address
from parallelize.cluster.store import serve_store
from parallelize.cluster.world import Node
from parallelize.errors import ConfigError, LaunchError
from parallelize.launchers.failures import WorkerExit

__all__ = ["Nodes", "OneNode", "Report"]

_HEARTBEAT_EVERY_S = 1.0
_REPORTS_TIMEOUT_S = 30.0  # after a failure: a node takes at most 18 s to end its workers
_CLOSE_TIMEOUT_S = 5.0
_POLL_EVERY_S = 0.05  # waits are short, so that signal handlers run
_JOIN_BYTES = 1 << 20  # of a message from a process that may not know the key
_CHUNK_BYTES = 1 << 20


@dataclass
class Report:
    """How the workers of one node have ended.

    Args:
        has_returned: whether all have returned.
        outcomes: rank -> outcome, as a file of this node or as bytes from another one.
        exits: workers that have ended without returning.
    """

    has_returned: bool
    outcomes: dict[int, Any]
    exits: list[WorkerExit] = field(default_factory=list)


class OneNode:
    """A call on one node.

    Attributes:
        lost: nodes that are gone, and why.
        stamp: a name for this call, by its time; all nodes get node 0's.
    """

    node_rank, address = 0, "127.0.0.1"

    def __init__(self, task: Task) -> None:
        self.stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns()}"
        self._timeout, self.lost = task.layout.config.timeout, dict[int, str]()
        self._store: Any = None  # of the workers

    def start(self, attempt: int) -> int:  # noqa: ARG002 - as Nodes
        """Start an attempt on all nodes; return the port of a store for it alone: no worker reads old keys."""
        self._store = serve_store(self.address, 0, self._timeout)
        return int(self._store.port)

    def is_stopped(self) -> bool:
        """Return whether the attempt has failed on another node."""
        return False

    def stop(self) -> None:
        """Tell the other nodes that the attempt has failed."""

    def exchange(self, report: Report) -> list[Report]:
        """Return the reports of all nodes that are not lost; wait for them."""
        return [report]

    def lost_error(self) -> LaunchError:
        """Return the error for the nodes that are lost."""
        return LaunchError(
            f"node {', '.join(map(str, sorted(self.lost)))} is gone",
            why="; ".join(dict.fromkeys(self.lost.values())),
            fix="see that node's output: its process was killed or stopped, its machine failed, or the network between "
            "them did; LocalLauncher(heartbeat_timeout=) allows longer pauses",
        )

    def close(self) -> None:
        """Leave the other nodes."""
        self._store = None  # a process that is forked later lacks its thread, and would crash when it frees it


class _Channel:
    """A connection between two nodes: messages of plain values, and one byte string.

    Args:
        connection: the connection; a read or write that makes no progress for its timeout raises.
        key: the secret of the run.
    """

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self._socket, self._key, self._lock = connection, key, threading.Lock()

    def send(self, message: dict[str, Any], blob: bytes = b"") -> None:
        head = json.dumps(message).encode()
        text = memoryview(b"".join([len(head).to_bytes(8, "big"), head, blob]))
        mac = hmac.digest(self._key, text, "sha256")
        with self._lock:
            self._socket.sendall(len(text).to_bytes(8, "big") + mac)
            for start in range(0, len(text), _CHUNK_BYTES):  # the timeout is that of each sendall
                self._socket.sendall(text[start : start + _CHUNK_BYTES])

    def receive(self, limit: float = math.inf) -> tuple[dict[str, Any], bytes]:
        """Return the next message.

        Raises:
            OSError: the other end is gone, or sends what is longer than `limit`, or does not have the key.
        """
        size, mac = int.from_bytes(self._read(8), "big"), self._read(32)
        if size > limit:
            raise OSError("no message of a node")
        text = self._read(size)
        if not hmac.compare_digest(mac, hmac.digest(self._key, text, "sha256")):
            raise OSError("another PARALLELIZE_KEY")
        end = 8 + int.from_bytes(text[:8], "big")
        return json.loads(text[8:end]), text[end:]

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            try:
                new = self._socket.recv(min(size - len(found), _CHUNK_BYTES))
            except TimeoutError:
                raise OSError(f"no heartbeat for {self._socket.gettimeout():g} s") from None
            if not new:
                raise ConnectionResetError("its connection was closed")
            found += new
        return bytes(found)

    def close(self, how: int = socket.SHUT_RDWR) -> None:
        """Close the connection, or one direction of it: SHUT_WR lets the other end read what it has not read yet."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(how)


class _Relay:
    """Passes messages on between the nodes, in node 0's process.

    Args:
        listener: socket at the address of node 0.
        num_nodes: how many nodes are to join.
        patience_s: seconds after which a node that sends nothing is lost.
        key: the secret of the run.
    """

    def __init__(self, listener: socket.socket, num_nodes: int, patience_s: float, key: bytes) -> None:
        self._num_nodes, self._patience_s, self._key = num_nodes, patience_s, key
        self._lock, self._is_closed = threading.Lock(), threading.Event()
        self._channels: dict[int, _Channel] = {}  # of the nodes that have joined
        self._joined: dict[int, dict[str, Any]] = {}
        self._threads: list[threading.Thread] = []
        listener.settimeout(_POLL_EVERY_S)
        self._threads.append(_thread(self._accept, listener))

    def close(self) -> None:
        """Wait until the nodes have read what was sent, and left, or some seconds."""
        self._is_closed.set()
        end = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while not self._is_closed.is_set():
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    connection.settimeout(self._patience_s)
                    _thread(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        """Read what one process sends: a node, or one that does not know the key."""
        rank, channel = None, _Channel(connection, self._key)
        with connection, contextlib.suppress(OSError):
            rank = self._admit(channel, channel.receive(_JOIN_BYTES)[0])
            while rank is not None:
                try:
                    message, blob = channel.receive()
                except OSError as exc:
                    message, blob = {"kind": "lost", "lost": rank, "why": str(exc)}, b""
                with self._lock:
                    self._pass_on(rank, message, blob)
                if message["kind"] == "lost":
                    return

    def _admit(self, channel: _Channel, message: dict[str, Any]) -> int | None:
        """Return the rank of a node that joins; None: it is refused, or this call has begun: it tries the next one."""
        rank, end = message["rank"], time.monotonic() + _CLOSE_TIMEOUT_S
        while rank in self._channels and time.monotonic() < end:  # it may just be leaving, to make its next call
            time.sleep(_POLL_EVERY_S)
        with self._lock:
            is_full = len(self._joined) == self._num_nodes
            if rank is None and not is_full:
                rank = min(set(range(1, self._num_nodes)) - self._joined.keys(), default=self._num_nodes)
            if is_full and len(self._channels) < self._num_nodes:
                return None
            if is_full or rank in self._channels or rank >= self._num_nodes:
                channel.send({**message, "kind": "refused", "rank": rank})
                return None
            channel.send({"kind": "welcome", "rank": rank})
            for earlier in self._joined.values():
                channel.send(earlier)
            self._threads.append(threading.current_thread())
            self._channels[rank] = channel
            self._pass_on(rank, message)
            self._joined[rank] = {**message, "rank": rank}
            return int(rank)

    def _pass_on(self, rank: int, message: dict[str, Any], blob: bytes = b"") -> None:
        for other, channel in list(self._channels.items()):
            with contextlib.suppress(OSError):  # its own thread finds that it is gone
                if message["kind"] != "beat" or other == rank:  # a heartbeat is answered
                    channel.send({**message, "rank": rank}, b"" if other == rank else blob)
        if message["kind"] == "lost":
            self._channels.pop(rank, None)
            if len(self._joined) < self._num_nodes:
                self._joined.pop(rank, None)  # it may join again


def _thread(target: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name="parallelize-nodes", daemon=True)
    thread.start()
    return thread


_node_ranks: dict[tuple[str, int], int] = {}  # of this process, by the address of node 0: the same in all its calls


class Nodes(OneNode):
    """A call on several nodes.

    Args:
        node: the address of node 0, and this node's rank.
        task: the call.
        patience_s: seconds after which a node that sends nothing is lost.
        key: the secret of the run; "": what anybody sends to node 0 is read.

    Raises:
        LaunchError: node 0 was not reached in time, or cannot listen at its address.
        ConfigError: another node has the same rank, or more nodes were started than `num_nodes`.
    """

    def __init__(self, node: Node, task: Task, *, patience_s: float, key: str) -> None:
        super().__init__(task)
        self._node, self._key, self._patience_s, self.address = node, key.encode(), patience_s, node.master_addr
        self._ranks, self._attempt = range(task.layout.num_nodes), 0
        self._messages: dict[tuple[str, int], dict[int, tuple[dict[str, Any], bytes]]] = defaultdict(dict)
        self._is_closed = threading.Event()
        rank = node.node_rank
        if rank is None:
            rank = _node_ranks.get((node.master_addr, node.master_port))
        listener = None if rank else self._listen(rank)
        self._relay = listener and _Relay(listener, len(self._ranks), patience_s, self._key)
        self._channel = self._join(0 if listener else rank, _request(task))
        _thread(self._read)
        _thread(self._beat)

    def start(self, attempt: int) -> int:
        """Start an attempt, as OneNode.

        Raises:
            LaunchError: not all nodes joined in time, or one is lost.
            ConfigError: two nodes make different calls.
        """
        self._attempt, end = attempt, time.monotonic() + self._timeout.total_seconds()
        joined = self._messages["join", 0]
        while len(joined) < len(self._ranks):
            if self.lost:
                raise self.lost_error()
            if time.monotonic() > end:
                raise self._absent_error(joined)
            time.sleep(_POLL_EVERY_S)
        _require_equal({rank: message for rank, (message, _) in sorted(joined.items())})
        if self._relay:
            self._send("port", port=super().start(attempt), stamp=self.stamp)
        while not (ports := self._messages["port", attempt]):
            if self.lost:
                raise self.lost_error()
            time.sleep(_POLL_EVERY_S)
        self.stamp = ports[0][0]["stamp"]
        return int(ports[0][0]["port"])

    def is_stopped(self) -> bool:
        """Return whether the attempt has failed on another node."""
        return bool(self.lost or self._messages["stop", self._attempt])

    def stop(self) -> None:
        """Tell the other nodes that the attempt has failed."""
        self._send("stop")

    def exchange(self, report: Report) -> list[Report]:
        """Return the reports of all nodes that are not lost; wait for them."""
        sent = {rank: path.read_bytes() for rank, path in report.outcomes.items()}
        self._send("report", pickle.dumps(dataclasses.replace(report, outcomes=sent)))
        found, end, others = self._messages["report", self._attempt], math.inf, set(self._ranks) - {self.node_rank}
        # A node that the others have given up waits for none.
        while self.node_rank not in self.lost and (missing := others - found.keys() - self.lost.keys()):
            if self.is_stopped():
                end = min(end, time.monotonic() + _REPORTS_TIMEOUT_S)
            if time.monotonic() > end:
                self.lost.update(dict.fromkeys(missing, f"no report within {_REPORTS_TIMEOUT_S:g} s of a failure"))
            time.sleep(_POLL_EVERY_S)
        return [report, *(pickle.loads(found[rank][1]) for rank in others & found.keys())]  # each has the key

    def close(self) -> None:
        """Leave the other nodes; node 0 waits until they have what was sent, or some seconds."""
        super().close()
        self._is_closed.set()
        self._channel.close(socket.SHUT_WR)
        if self._relay:
            self._relay.close()

    def _listen(self, rank: int | None) -> socket.socket | None:
        """Return a socket at the address of node 0; None: this is another node."""
        address, port = self._node.master_addr, self._node.master_port
        if rank is None and not is_local_address(address):
            return None
        try:
            family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            # A hostname that is loopback on its own host, as under Debian: other nodes use another of its interfaces.
            is_alias = str(target[0]).startswith("127.") and not address.startswith("127.") and address != "localhost"
            return socket.create_server(("", port) if is_alias else target[:2], family=family)
        except OSError as exc:
            if rank is None:  # another process of this machine is node 0
                return None
            raise LaunchError(
                f"node 0 cannot listen at {address}:{port}",
                why=str(exc),
                fix="set MASTER_ADDR to an address of node 0 and MASTER_PORT to a free port, the same on every node",
            ) from exc

    def _join(self, rank: int | None, request: dict[str, str]) -> _Channel:
        """Connect to node 0, again until its call takes this node."""
        at, timeout_s = (self._node.master_addr, self._node.master_port), self._timeout.total_seconds()
        end, why = time.monotonic() + timeout_s, ""
        while time.monotonic() < end:
            try:
                channel = _Channel(socket.create_connection(at, self._patience_s), self._key)
                channel.send({"kind": "join", "rank": rank, "host": socket.gethostname(), "request": request})
                message, _ = channel.receive(_JOIN_BYTES)
            except OSError as exc:
                why = str(exc)
                time.sleep(_POLL_EVERY_S)
                continue
            if message["kind"] == "refused":
                raise ConfigError(
                    f"node {message['rank']} on {socket.gethostname()}",
                    why="another node has the same NODE_RANK, or more nodes were started than num_nodes",
                    fix="give every node its own NODE_RANK from 0, or set it on none of them",
                )
            self.node_rank = _node_ranks[at] = message["rank"]
            return channel
        raise LaunchError(
            f"no node 0 at {at[0]}:{at[1]} within {timeout_s:g} s",
            why=f"{why}; a node with another PARALLELIZE_KEY is not heard",
            fix="start the script on node 0, with the same MASTER_ADDR, MASTER_PORT and PARALLELIZE_KEY on all nodes",
        )

    def _absent_error(self, joined: Mapping[int, Any]) -> LaunchError:
        missing = ", ".join(str(rank) for rank in self._ranks if rank not in joined)
        hosts = ", ".join(f"node {rank} from {message['host']}" for rank, (message, _) in sorted(joined.items()))
        return LaunchError(
            f"{len(joined)} of {len(self._ranks)} nodes joined within {self._timeout.total_seconds():g} s: {hosts}",
            why=f"node {missing} is missing: it was not started, or its call has failed, or it cannot reach "
            "MASTER_ADDR:MASTER_PORT",
            fix="start the script on every node, or correct num_nodes; timeout= allows more time",
        )

    def _read(self) -> None:
        try:
            while True:
                self._keep(*self._channel.receive())
        except OSError as exc:
            if not (self._is_closed.is_set() or self.lost):  # node 0, if it was only stopped, is to hear of it
                self._send("lost", lost=0, why=str(exc))
                self.lost.setdefault(0, str(exc))

    def _keep(self, message: dict[str, Any], blob: bytes) -> None:
        kind, joined = message["kind"], self._messages["join", 0]
        if kind != "lost":
            self._messages[kind, message.get("attempt", 0)][message["rank"]] = message, blob
        elif len(joined) < len(self._ranks):
            joined.pop(message["lost"], None)  # it may join again
        else:
            self.lost.setdefault(message["lost"], message["why"])

    def _beat(self) -> None:
        while not self._is_closed.wait(_HEARTBEAT_EVERY_S):
            self._send("beat")

    def _send(self, kind: str, blob: bytes = b"", **values: Any) -> None:
        with contextlib.suppress(OSError):  # `_read` finds that node 0 is lost
            self._channel.send({"kind": kind, "attempt": self._attempt, **values}, blob)


def _request(task: Task) -> dict[str, str]:
    """Return what must be the same on all nodes: the function, and its arguments as far as they are plain values."""
    layout = task.layout
    request = {"the call": f"{task.name}, {layout.num_nodes} nodes x {layout.local_world_size} processes"}
    with contextlib.suppress(OSError, TypeError):  # a notebook's, or one that is no function
        source = inspect.getsource(inspect.unwrap(task.function))
        request["the source of the function"] = hashlib.sha256(source.encode()).hexdigest()
    arguments: dict[Any, Any] = {**dict(enumerate(task.args)), **task.kwargs}
    with contextlib.suppress(TypeError, ValueError):  # a function without a signature
        arguments = inspect.signature(task.function).bind(*task.args, **task.kwargs).arguments
    for name, value in arguments.items():
        with contextlib.suppress(TypeError, ValueError, RecursionError):  # no plain value
            text = json.dumps(value)
            long = f"{text[:80]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"
            request[f"argument {name!r}"] = text if len(text) < 100 else long
    return request


def _require_equal(joined: Mapping[int, dict[str, Any]]) -> None:
    """Raise ConfigError for nodes that make different calls."""
    for name in dict.fromkeys(name for each in joined.values() for name in each["request"]):
        texts = {rank: each["request"].get(name, "none") for rank, each in joined.items()}
        if len(set(texts.values())) > 1:
            raise ConfigError(
                f"{name} differs between the nodes",
                why="; ".join(f"node {rank} ({joined[rank]['host']}): {text}" for rank, text in texts.items()),
                fix="start the same script with the same options on every node; draw random values in the function, or "
                "with a seed",
            )
