"""Coordination between the agents of a run's nodes: joining a call, failures, completion, outcomes.

Node 0 serves one store at MASTER_ADDR:MASTER_PORT for as long as its process lives. Its keys, per call:
    joined/<node>         host and request                     each node waits for all
    <attempt>/port        port of the workers' rendezvous store
    <attempt>/abort       a node has failed: stop
    <attempt>/report/<n>  outcomes and exits of node n         all nodes find the root cause in the same reports
    <attempt>/done/<n>    all workers of node n have returned  the call succeeds once all nodes are done
    heartbeat/<node>      changes every second
    result/<rank>         an outcome, in chunks below the store's limit
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

from parallelize.cluster.network import is_local_address
from parallelize.cluster.store import serve_store
from parallelize.cluster.world import Node
from parallelize.errors import ConfigError, LaunchError
from parallelize.launchers.elastic import heartbeats
from parallelize.launchers.elastic.failures import WorkerExit
from parallelize.launchers.elastic.store_client import StoreClient

__all__ = ["NodeCoordinator", "join_call"]

_CHUNK_BYTES = 4 << 20  # the store refuses values above 8 MiB
_POLL_EVERY_S = 0.05
_REPORTS_TIMEOUT_S = 15.0  # longer than heartbeats.LOST_AFTER_S


def join_call(node: Node, *, num_nodes: int, request: str, timeout: timedelta) -> NodeCoordinator:
    """Wait until every node of the run has made the same call, then start the heartbeat.

    Args:
        node: the address of node 0, and this node's rank.
        num_nodes: number of nodes.
        request: description of this call, compared between nodes.
        timeout: how long to wait for the other nodes.

    Raises:
        LaunchError: not all nodes joined in time; the message lists those that did.
        ConfigError: two nodes have the same rank or different requests.
    """
    client, node_rank = _join_run(node, num_nodes, timeout)
    coordinator = NodeCoordinator(
        client,
        f"call/{next(_call_numbers)}",
        address=node.master_addr,
        node_rank=node_rank,
        num_nodes=num_nodes,
        timeout=timeout,
    )
    coordinator.wait_for_all_nodes(request)
    coordinator.heartbeats.start()
    return coordinator


_call_numbers = itertools.count()  # every node makes its calls in the same order


@functools.cache
def _join_run(node: Node, num_nodes: int, timeout: timedelta) -> tuple[StoreClient, int]:
    """Serve or connect to the run's store, once per process; return its client and this node's rank."""
    hosts = node.node_rank == 0 or (node.node_rank is None and is_local_address(node.master_addr))
    store = _serve_run_store(node, timeout) if hosts else None
    node_rank = node.node_rank
    if store is not None:
        node_rank = 0
    else:
        store = _connect_to_run_store(node, timeout)
    if node_rank is None:
        node_rank = store.add("numbered", 1)
    if node_rank >= num_nodes or store.add(f"node/{node_rank}", 1) > 1:
        raise ConfigError(
            f"node {node_rank} of num_nodes={num_nodes} on {socket.gethostname()}",
            why="another node has the same NODE_RANK, or more nodes were started than num_nodes",
            fix="give every node its own NODE_RANK from 0, or set it on none of them",
        )
    return StoreClient(store, heartbeats.LOST_AFTER_S), node_rank


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


class NodeCoordinator:
    """One call, coordinated with the other nodes through the run's store.

    Args:
        client: client of the run's store.
        name: prefix of the call's keys.
        address: address of node 0.
        node_rank: rank of this node.
        num_nodes: number of nodes.
        timeout: limit of each wait for other nodes.

    Attributes:
        store: the run's store with the prefix; its blocking calls may never return if node 0 is lost.
        heartbeats: heartbeats of all nodes.
    """

    def __init__(
        self, client: StoreClient, name: str, *, address: str, node_rank: int, num_nodes: int, timeout: timedelta
    ) -> None:
        self.store, self.address = client.prefixed(name), address
        self._client, self._name = client, name
        self.node_rank, self.num_nodes = node_rank, num_nodes
        self._timeout_s = timeout.total_seconds()
        self.heartbeats = heartbeats.NodeHeartbeats(
            client, f"{name}/heartbeat", node_rank=node_rank, num_nodes=num_nodes
        )

    def wait_for_all_nodes(self, request: str) -> None:
        """Publish this node's request, wait for the other nodes' requests, and require that all are equal."""
        self._set(f"joined/{self.node_rank}", json.dumps([socket.gethostname(), request]))
        keys = [f"joined/{rank}" for rank in range(self.num_nodes)]
        if not self._poll_until(lambda: self._has(*keys), self._timeout_s):
            raise self._missing_nodes_error(keys)
        joined = [json.loads(self._get(key)) for key in keys]
        if len({request for _, request in joined}) > 1:
            raise ConfigError(
                "the nodes of this run have different requests",
                why="; ".join(f"node {rank} ({host}): {request}" for rank, (host, request) in enumerate(joined)),
                fix="start the same script with the same options on every node",
            )

    def _set(self, key: str, value: str | bytes) -> None:
        self._client.set(f"{self._name}/{key}", value)

    def _get(self, key: str) -> bytes:
        return self._client.get(f"{self._name}/{key}")

    def _has(self, *keys: str) -> bool:
        return self._client.check([f"{self._name}/{key}" for key in keys])

    def _missing_nodes_error(self, keys: Sequence[str]) -> LaunchError:
        hosts = {rank: json.loads(self._get(key))[0] for rank, key in enumerate(keys) if self._has(key)}
        joined = ", ".join(f"node {rank} from {host}" for rank, host in hosts.items())
        absent = ", ".join(str(rank) for rank in range(self.num_nodes) if rank not in hosts)
        return LaunchError(
            f"{len(hosts)} of {self.num_nodes} nodes joined within {self._timeout_s:g} s: {joined}",
            why=f"node {absent} is missing: it was not started, or cannot reach MASTER_ADDR:MASTER_PORT",
            fix="start the script on every node, or correct num_nodes; timeout= allows more time",
        )

    def has_failed(self, attempt: int) -> bool:
        """Return whether a node has failed in this attempt or is lost."""
        self.heartbeats.check_if_due()
        return bool(self.heartbeats.lost) or self._has(f"{attempt}/abort")

    def report(self, attempt: int, outcomes: Sequence[bytes], exits: Sequence[WorkerExit]) -> None:
        """Publish the outcomes and exits of this node's workers in an attempt that failed on some node."""
        self._put_chunks(f"{attempt}/report/{self.node_rank}", pickle.dumps((list(outcomes), list(exits))))
        self._set(f"{attempt}/abort", "1")

    def collect_reports(self, attempt: int) -> tuple[list[bytes], list[WorkerExit]]:
        """Return the outcomes and exits of all nodes, once every node has reported or is lost."""
        keys = {rank: f"{attempt}/report/{rank}" for rank in range(self.num_nodes)}

        def is_settled() -> bool:
            self.heartbeats.check()
            return all(rank in self.heartbeats.lost or self._has(key) for rank, key in keys.items())

        self._poll_until(is_settled, _REPORTS_TIMEOUT_S)
        outcomes: list[bytes] = []
        exits: list[WorkerExit] = []
        for key in filter(self._has, keys.values()):
            of_node = pickle.loads(self._get_chunks(key))  # written by a node of the same user's run
            outcomes += of_node[0]
            exits += of_node[1]
        return outcomes, exits

    def all_done(self, attempt: int) -> bool:
        """Publish that this node's workers have returned; return whether all nodes have published this."""
        self._set(f"{attempt}/done/{self.node_rank}", "1")
        return self._has(*(f"{attempt}/done/{rank}" for rank in range(self.num_nodes)))

    def exchange_outcomes(self, own: dict[int, Path], wanted: Sequence[int], folder: Path) -> dict[int, Path]:
        """Publish this node's outcome files (`own`, by rank) and fetch those of other ranks in `wanted`; return all."""
        for rank in sorted(own.keys() & set(wanted)):
            self._put_chunks(f"result/{rank}", own[rank].read_bytes())
        paths = dict(own)
        for rank in (each for each in wanted if each not in own):
            paths[rank] = folder / f"fetched.{rank}"
            paths[rank].write_bytes(self._get_chunks(f"result/{rank}"))
        self._set(f"fetched/{self.node_rank}", "1")
        if self.node_rank == 0:  # the store ends with this process
            self._poll_until(lambda: self._has(*(f"fetched/{n}" for n in range(self.num_nodes))), self._timeout_s)
        return paths

    def _put_chunks(self, name: str, value: bytes) -> None:
        starts = range(0, max(len(value), 1), _CHUNK_BYTES)
        for number, start in enumerate(starts):
            self._set(f"{name}/chunk/{number}", value[start : start + _CHUNK_BYTES])
        self._set(name, str(len(starts)))

    def _get_chunks(self, name: str) -> bytes:
        """Wait for a value and return it; raise LaunchError if the value is not set in time."""
        if not self._poll_until(lambda: self._has(name), self._timeout_s):
            raise LaunchError(
                f"no {name} within {self._timeout_s:g} s", why="node 0 is gone", fix="see node 0's output"
            )
        return b"".join(self._get(f"{name}/chunk/{number}") for number in range(int(self._get(name))))

    @staticmethod
    def _poll_until(fact: Callable[[], bool], timeout_s: float) -> bool:
        """Poll `fact`; return whether it became true in time; waits inside the store would block signal handlers."""
        end = time.monotonic() + timeout_s
        while not fact():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_EVERY_S)
        return True
