"""Control plane of a call on several nodes: joining, heartbeats, failures, completion, outcomes.

The keys in the run's store, per call:
    joined/<n>            host and request of node n                    node 0 alone reads them
    started               the error that refuses the call, or None      all nodes wait for it
    heartbeat/<n>         changes every second                          node 0 alone reads them
    <attempt>/end         "done" or "failed"                            each node reads it every 0.05 s
    <attempt>/done        number of nodes whose workers have returned
    <attempt>/report/<n>  outcomes and exits of node n after a failure  node 0 alone reads them
    <attempt>/failures    all reports and the lost nodes, so that all nodes find the same root cause
    result/<rank>         an outcome, published before `done`
    fetched               number of nodes that have all outcomes
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parallelize.call.task import Outcome, Task
from parallelize.errors import ConfigError, LaunchError, ParallelizeError
from parallelize.launchers.elastic.failures import WorkerExit, has_root_cause
from parallelize.launchers.elastic.run_store import StoreClient
from parallelize.worker.main import outcome_path

__all__ = ["MultiNode", "SingleNode"]

_HEARTBEAT_EVERY_S = 1.0
_LOST_AFTER_FAILURE_S = 10.0  # a node without a heartbeat is probably the cause of the other nodes' failures
_REPORTS_TIMEOUT_S = 30.0  # a node takes at most 18 s to end its workers
_POLL_EVERY_S = 0.05
_IGNORED_LOSS = contextlib.suppress(dist.DistError, RuntimeError)  # `has_failed` reports that the store is lost


class SingleNode:
    """A run on one node: all outcomes are in this node's folder.

    Args:
        task: the call.
        folder: folder of this node's outcomes.

    Attributes:
        ranks: global ranks of this node's workers.
    """

    node_rank, num_nodes, address = 0, 1, "127.0.0.1"
    store: Any = None

    def __init__(self, task: Task, folder: Path) -> None:
        self._folder, size = folder, task.layout.local_world_size
        self.ranks = range(self.node_rank * size, (self.node_rank + 1) * size)
        self._wanted = range(task.layout.world_size if task.all_ranks else 1)
        self._exits: dict[int, Sequence[WorkerExit]] = {}

    def has_failed(self, attempt: int) -> bool:  # noqa: ARG002 - as MultiNode
        """Return False: no other node exists."""
        return False

    def fail(self, attempt: int) -> None:
        """Do nothing: no other node exists."""

    def all_done(self, attempt: int) -> bool:  # noqa: ARG002 - as MultiNode
        """Return True: no other node exists."""
        return True

    def collect_outcomes(self, attempt: int) -> list[Outcome]:
        """Return the outcomes that the call returns, in rank order."""
        return [Outcome.read(outcome_path(self._folder, rank, attempt)) for rank in self._wanted]

    def report(self, attempt: int, exits: Sequence[WorkerExit]) -> None:
        """Keep the exits of the workers for `collect_failures`."""
        self._exits[attempt] = exits

    def collect_failures(self, attempt: int) -> tuple[list[Outcome], list[WorkerExit]]:
        """Return the outcomes and the early exits of a failed attempt."""
        return [Outcome.read(each) for each in self._written_outcomes(attempt)], list(self._exits[attempt])

    def require_all_nodes(self) -> None:
        """Do nothing: a single node can always restart."""

    def close(self) -> None:
        """Do nothing: no other node exists."""

    def _written_outcomes(self, attempt: int) -> list[bytes]:
        paths = [outcome_path(self._folder, rank, attempt) for rank in self.ranks]
        return [path.read_bytes() for path in paths if path.exists()]


class MultiNode(SingleNode):
    """One call on several nodes, which exchange reports through the run's store.

    Args:
        client: client of the run's store.
        task: the call.
        folder: folder of this node's outcomes.
        heartbeat_timeout: seconds without a heartbeat after which a node is lost.

    Attributes:
        store: the run's store, with a prefix for this call; its blocking calls may never return if node 0 is lost.
    """

    def __init__(self, client: StoreClient, task: Task, folder: Path, *, heartbeat_timeout: float) -> None:
        self.address, self.node_rank, self.num_nodes = client.address, client.node_rank, task.layout.num_nodes
        super().__init__(task, folder)
        self._client, self._heartbeat_timeout = client, heartbeat_timeout
        client.start_call(heartbeat_timeout)
        self.store = client.store
        self._attempt, self._done_attempt = 0, -1
        self._ends: dict[int, bytes] = {}
        self._ticked_at = self._beat_at = time.monotonic()
        self._was_stopped = False
        self._last_seen: dict[int, tuple[bytes, float]] = {}  # node 0: last heartbeats, and when they changed
        self._lost: set[int] = set()
        self._failures: dict[int, tuple[list[bytes], list[WorkerExit], set[int]]] = {}

    def wait_for_all_nodes(self, request: str, timeout: timedelta) -> None:
        """Publish this node's request; wait until every node has made the same one; start the heartbeat.

        Raises:
            LaunchError: not all nodes joined in time; the message lists those that did.
            ConfigError: two nodes have different requests.
        """
        timeout_s = timeout.total_seconds()
        self._client.call(self.store.set, f"heartbeat/{self.node_rank}", "")
        self._client.set(f"joined/{self.node_rank}", pickle.dumps((socket.gethostname(), request)))
        if self.node_rank == 0:
            self._client.set("started", pickle.dumps(self._start_error(timeout_s)))
        # Node 0 has waited for `timeout` before: it served the store before this node connected.
        self._poll_until(lambda: self._client.has("started"), timeout_s + _REPORTS_TIMEOUT_S)
        error = pickle.loads(self._client.get("started")) if self._client.has("started") else self._lost_error({0})
        if error is not None:
            raise error
        self._ticked_at = time.monotonic()
        self._client.on_tick = self._tick

    def _start_error(self, timeout_s: float) -> ParallelizeError | None:
        """Wait for the requests of all nodes; return the error if a node is missing or has a different request."""
        keys = [f"joined/{rank}" for rank in range(self.num_nodes)]
        self._poll_until(lambda: self._client.has(*keys), timeout_s)
        joined = {rank: pickle.loads(self._client.get(key)) for rank, key in enumerate(keys) if self._client.has(key)}
        absent = [str(rank) for rank in range(self.num_nodes) if rank not in joined]
        if absent:
            hosts = ", ".join(f"node {rank} from {host}" for rank, (host, _) in joined.items())
            return LaunchError(
                f"{len(joined)} of {self.num_nodes} nodes joined within {timeout_s:g} s: {hosts}",
                why=f"node {', '.join(absent)} is missing: it was not started, or cannot reach MASTER_ADDR:MASTER_PORT",
                fix="start the script on every node, or correct num_nodes; timeout= allows more time",
            )
        if len({request for _, request in joined.values()}) > 1:
            return ConfigError(
                "the nodes of this run have different requests",
                why="; ".join(f"node {rank} ({host}): {request}" for rank, (host, request) in joined.items()),
                fix="start the same script with the same options on every node",
            )
        return None

    def close(self) -> None:
        """Stop sending heartbeats."""
        self._client.on_tick = None

    def has_failed(self, attempt: int) -> bool:
        """Return whether this attempt has failed on some node, or the run's store is lost."""
        self._attempt = attempt
        return self._ends.get(attempt) == b"failed" or self._client.error() is not None

    def fail(self, attempt: int) -> None:
        """End the attempt on all nodes, unless it has ended."""
        with _IGNORED_LOSS:
            self._client.call(self._end, attempt, "failed")

    def _end(self, attempt: int, how: str) -> None:
        self._ends[attempt] = self.store.compare_set(f"{attempt}/end", "", how)

    def all_done(self, attempt: int) -> bool:
        """Publish that this node's workers have returned, and their outcomes; return whether all nodes have."""
        if self._done_attempt != attempt:
            self._done_attempt = attempt
            with _IGNORED_LOSS:
                for rank in set(self.ranks) & set(self._wanted):
                    self._client.set(f"result/{rank}", outcome_path(self._folder, rank, attempt).read_bytes())
                if self._client.add(f"{attempt}/done", 1) == self.num_nodes:
                    self._client.call(self._end, attempt, "done")
        return self._ends.get(attempt) == b"done"

    def collect_outcomes(self, attempt: int) -> list[Outcome]:
        """Return the outcomes that the call returns, from all nodes, in rank order.

        Raises:
            LaunchError: node 0 is lost.
        """
        try:
            values = {rank: self._client.get(f"result/{rank}") for rank in self._wanted if rank not in self.ranks}
            self._client.add("fetched", 1)
            if self.node_rank == 0:  # the store ends with this process
                self._poll_until(lambda: self._client.add("fetched", 0) == self.num_nodes or bool(self._lost))
        except (dist.DistError, RuntimeError) as exc:
            raise self._lost_error({0}) from exc
        paths = {rank: outcome_path(self._folder, rank, attempt) for rank in self.ranks}
        return [Outcome.read(values[rank] if rank in values else paths[rank]) for rank in self._wanted]

    def report(self, attempt: int, exits: Sequence[WorkerExit]) -> None:
        """Publish this node's outcomes and exits, unless the run's store is lost."""
        super().report(attempt, exits)
        with _IGNORED_LOSS:
            report = self._written_outcomes(attempt), list(exits)
            self._client.set(f"{attempt}/report/{self.node_rank}", pickle.dumps(report))

    def collect_failures(self, attempt: int) -> tuple[list[Outcome], list[WorkerExit]]:
        """Return the outcomes and early exits of all nodes in a failed attempt.

        Raises:
            LaunchError: a node is lost, and no report contains another root cause.
        """
        written, exits, lost = self._failures_of(attempt)
        outcomes = [Outcome.read(each) for each in written]
        if lost and not has_root_cause(outcomes, exits):
            raise self._lost_error(lost)
        return outcomes, exits

    def require_all_nodes(self) -> None:
        """Require that every node has reported the failed attempt: a restart needs all nodes.

        Raises:
            LaunchError: a node is lost.
        """
        lost = self._failures_of(self._attempt)[2]
        if lost:
            raise self._lost_error(lost)

    def _failures_of(self, attempt: int) -> tuple[list[bytes], list[WorkerExit], set[int]]:
        """Return outcomes, exits and lost nodes of a failed attempt, which node 0 collects for all nodes."""
        if attempt not in self._failures:
            key = f"{attempt}/failures"
            with _IGNORED_LOSS:
                if self.node_rank == 0:
                    self._client.set(key, pickle.dumps(self._collect_reports(attempt)))
                self._poll_until(lambda: self._client.has(key), _REPORTS_TIMEOUT_S + _LOST_AFTER_FAILURE_S)
                if self._client.has(key):
                    self._failures[attempt] = pickle.loads(self._client.get(key))  # written by the same user's run
        if attempt not in self._failures:  # node 0 is lost
            lost = {self.node_rank if self._was_stopped else 0}
            self._failures[attempt] = (self._written_outcomes(attempt), list(self._exits[attempt]), lost)
        return self._failures[attempt]

    def _collect_reports(self, attempt: int) -> tuple[list[bytes], list[WorkerExit], set[int]]:
        """Wait until every node has reported or is lost; return all outcomes and exits, and the lost nodes."""
        keys = {rank: f"{attempt}/report/{rank}" for rank in range(self.num_nodes)}

        def all_settled() -> bool:
            return 0 in self._lost or all(rank in self._lost or self._client.has(key) for rank, key in keys.items())

        self._poll_until(all_settled, _REPORTS_TIMEOUT_S)
        if 0 in self._lost:  # the other nodes have given this one up
            return self._written_outcomes(attempt), list(self._exits[attempt]), {0}
        reports = {rank: pickle.loads(self._client.get(key)) for rank, key in keys.items() if self._client.has(key)}
        written = [each for outcomes, _ in reports.values() for each in outcomes]
        return written, [each for _, exits in reports.values() for each in exits], self._lost | (keys.keys() - reports)

    def _tick(self) -> None:
        """Send the heartbeat, judge those of all nodes on node 0, and read whether the attempt has ended."""
        now, attempt = self._check_gap(), self._attempt
        try:
            if now - self._beat_at >= _HEARTBEAT_EVERY_S:
                self._beat_at = now
                self.store.set(f"heartbeat/{self.node_rank}", str(now))
                if self.node_rank == 0:
                    self._judge(now, attempt)
            if attempt not in self._ends and self.store.check([f"{attempt}/end"]):
                self._ends[attempt] = self.store.get(f"{attempt}/end")
        finally:
            self._check_gap()

    def _check_gap(self) -> float:
        """Find out whether this process was stopped for longer than the other nodes wait; return the time."""
        now = time.monotonic()
        self._was_stopped |= now - self._ticked_at > self._heartbeat_timeout
        self._ticked_at = now
        return now

    def _judge(self, now: float, attempt: int) -> None:
        """Find the nodes without a heartbeat; if there are any, end the attempt on all nodes."""
        for rank, beat in enumerate(self.store.multi_get([f"heartbeat/{n}" for n in range(self.num_nodes)])):
            if rank not in self._last_seen or self._last_seen[rank][0] != beat:
                self._last_seen[rank] = (beat, now)
        limit = self._heartbeat_timeout
        if self._ends.get(attempt) == b"failed":
            limit = min(limit, _LOST_AFTER_FAILURE_S)
        # The other nodes have given up a node 0 that was stopped for so long.
        lost = {rank for rank, (_, since) in self._last_seen.items() if now - since > limit}
        self._lost |= {0} if self._was_stopped else lost
        if self._lost:
            self._end(attempt, "failed")

    def _lost_error(self, nodes: set[int]) -> LaunchError:
        error = None if self.node_rank in nodes else self._client.error()
        return LaunchError(
            f"node {', '.join(map(str, sorted(nodes)))} is gone",
            why=str(error or f"no heartbeat for {self._heartbeat_timeout:g} s").partition("\n")[0],
            fix="see that node's output: its process was killed or stopped, its machine failed, or the network between "
            "them did; ElasticLauncher(heartbeat_timeout=) allows longer pauses",
        )

    @staticmethod
    def _poll_until(fact: Callable[[], bool], timeout_s: float = float("inf")) -> None:
        """Poll `fact` until it is true or the timeout; waits inside the store would block signal handlers."""
        end = time.monotonic() + timeout_s
        while not fact() and time.monotonic() < end:
            time.sleep(_POLL_EVERY_S)
