"""The store that the nodes of a run share, and its client: every request returns in time or marks the store as lost.

Node 0 serves the store at MASTER_ADDR:MASTER_PORT for as long as its process lives.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from parallelize.cluster.network import is_local_address
from parallelize.cluster.store import serve_store
from parallelize.cluster.world import Node
from parallelize.errors import ConfigError, LaunchError

__all__ = ["StoreClient", "join_run"]

T = TypeVar("T")

_TICK_EVERY_S = 0.05
_CHUNK_BYTES = 4 << 20
_RESUME_S = 1.0  # a process that was stopped (SIGSTOP) reads an answer within this time after it continues


class StoreClient:
    """Requests to the run's store, each with a deadline.

    torch's TCPStore waits forever for a host that has vanished. Therefore a thread makes the requests.

    Args:
        store: the store.
        address: address of node 0.
        node_rank: rank of this node.

    Attributes:
        store: the store, with a prefix for the current call; only `on_tick` may use it, and functions given to `call`.
        on_tick: called every 0.05 s in the thread that makes the requests.
    """

    def __init__(self, store: dist.Store, address: str, node_rank: int) -> None:
        self.store, self.address, self.node_rank = store, address, node_rank
        self.on_tick: Callable[[], None] | None = None
        self._whole_store, self._calls = store, itertools.count()
        self._timeout_s = float("inf")
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._answered_at, self._overdue_since = time.monotonic(), float("inf")
        self._error: Exception | None = None
        # A daemon thread, because it may be blocked in a request when this process ends.
        threading.Thread(target=self._serve_requests, name="parallelize-store-client", daemon=True).start()

    def start_call(self, timeout_s: float) -> None:
        """Start a call, whose requests have this timeout; every node makes its calls in the same order."""
        self.store, self._timeout_s = dist.PrefixStore(f"call/{next(self._calls)}", self._whole_store), timeout_s

    def call(self, request: Callable[..., T], *args: Any) -> T:
        """Call a function that uses the store in the thread, and return its result.

        Raises:
            DistNetworkError: this request or an earlier one timed out.
            DistError, RuntimeError: raised by the store.
        """
        replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put((functools.partial(request, *args), replies))
        while self.error() is None:
            with contextlib.suppress(queue.Empty):
                reply, error = replies.get(timeout=_TICK_EVERY_S)
                if error is None:
                    return reply  # type: ignore[no-any-return]  # the result of `request`
                self._error = error
        assert self._error is not None
        raise self._error

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key; a long value is split into chunks, because the store refuses values above 8 MiB."""
        chunks: Any = [value[start : start + _CHUNK_BYTES] for start in range(0, max(len(value), 1), _CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            self.call(self.store.set, f"{key}/{number}", chunk)
        self.call(self.store.set, key, str(len(chunks)))

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists."""
        count = int(self.call(self.store.get, key))
        return b"".join(self.call(self.store.multi_get, [f"{key}/{number}" for number in range(count)]))

    def has(self, *keys: str) -> bool:
        """Return whether all keys exist."""
        return self.call(self.store.check, list(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which starts at 0; return it."""
        return self.call(self.store.add, key, amount)

    def error(self) -> Exception | None:
        """Return why the store is lost; None: it is not."""
        now = time.monotonic()
        if now - self._answered_at <= self._timeout_s:
            self._overdue_since = float("inf")
        else:
            self._overdue_since = min(self._overdue_since, now)
        if now - self._overdue_since > _RESUME_S and self._error is None:
            self._error = dist.DistNetworkError(f"no answer within {self._timeout_s:g} s")
        return self._error

    def _serve_requests(self) -> None:
        while self._error is None:
            with contextlib.suppress(queue.Empty):
                request, replies = self._requests.get(timeout=_TICK_EVERY_S)
                replies.put(_result_or_error(request))
            if self.on_tick is not None:
                _, self._error = _result_or_error(self.on_tick)
            self._answered_at = time.monotonic()


def _result_or_error(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except Exception as exc:  # noqa: BLE001 - raised again in the thread that made the request
        return None, exc


_runs: dict[Node, StoreClient] = {}  # the stores that this process has joined


def join_run(node: Node, num_nodes: int, timeout: timedelta) -> StoreClient:
    """Serve or connect to the run's store, once per process.

    Raises:
        LaunchError: node 0 was not reached in time, or cannot listen at its address.
        ConfigError: another node has the same rank, or more nodes were started than `num_nodes`.
    """
    client = _runs.get(node) or _runs.setdefault(node, _join(node, timeout))
    if client.node_rank >= num_nodes:
        raise _node_rank_error(client.node_rank, f" of num_nodes={num_nodes}")
    return client


def _join(node: Node, timeout: timedelta) -> StoreClient:
    hosts = node.node_rank == 0 or (node.node_rank is None and is_local_address(node.master_addr))
    store = _serve_run_store(node, timeout) if hosts else None
    node_rank = node.node_rank if store is None else 0
    if store is None:
        store = _connect_to_run_store(node, timeout)
    if node_rank is None:
        node_rank = store.add("numbered", 1)
    if store.add(f"node/{node_rank}", 1) > 1:
        raise _node_rank_error(node_rank)
    return StoreClient(store, node.master_addr, node_rank)


def _node_rank_error(node_rank: int, of: str = "") -> ConfigError:
    return ConfigError(
        f"node {node_rank}{of} on {socket.gethostname()}",
        why="another node has the same NODE_RANK, or more nodes were started than num_nodes",
        fix="give every node its own NODE_RANK from 0, or set it on none of them",
    )


def _serve_run_store(node: Node, timeout: timedelta) -> dist.Store | None:
    """Serve the run's store; return None if another process of this machine already serves it."""
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


def _connect_to_run_store(node: Node, timeout: timedelta) -> dist.Store:
    try:
        return dist.TCPStore(node.master_addr, node.master_port, is_master=False, timeout=timeout)
    except (dist.DistError, OSError, RuntimeError) as exc:
        raise LaunchError(
            f"no node 0 at {node.master_addr}:{node.master_port} within {timeout.total_seconds():g} s",
            why=str(exc).partition("\n")[0],
            fix="start the script on node 0 too, with the same MASTER_ADDR and MASTER_PORT on every node",
        ) from exc
