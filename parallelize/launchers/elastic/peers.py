"""Exchange of failures and outcomes between the nodes of a run: `SingleNode` has no peers, `MultiNode` has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from parallelize.call.task import Outcome
from parallelize.errors import LaunchError, SyncError
from parallelize.launchers.elastic import heartbeats
from parallelize.launchers.elastic.failures import WorkerExit, is_secondary, was_stopped
from parallelize.launchers.elastic.node_coordination import NodeCoordinator
from parallelize.worker.main import outcome_path

__all__ = ["MultiNode", "SingleNode"]

T = TypeVar("T")


class SingleNode:
    """A run on one node: all outcomes are in this node's folder."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self._folder, self._world_size = folder, world_size
        self._exits: dict[int, Sequence[WorkerExit]] = {}

    def has_failed(self, attempt: int) -> bool:  # noqa: ARG002 - as MultiNode
        """Return False: no other node exists."""
        return False

    def all_done(self, attempt: int) -> bool:  # noqa: ARG002 - as MultiNode
        """Return True: no other node exists."""
        return True

    def report(self, attempt: int, exits: Sequence[WorkerExit]) -> None:
        """Keep the exits of the workers for `collect_failures`."""
        self._exits[attempt] = exits

    def collect_failures(self, attempt: int) -> tuple[list[Outcome], list[WorkerExit]]:
        """Return the outcomes and the early exits of a failed attempt."""
        paths = [outcome_path(self._folder, rank, attempt) for rank in range(self._world_size)]
        return [Outcome.read(path) for path in paths if path.exists()], list(self._exits[attempt])

    def require_all_nodes(self) -> None:
        """Do nothing: a single node can always restart."""

    def collect_outcomes(self, attempt: int, wanted: Sequence[int]) -> list[Outcome]:
        """Return the outcomes of the ranks `wanted`, in that order."""
        return [Outcome.read(outcome_path(self._folder, rank, attempt)) for rank in wanted]


class MultiNode:
    """A run on several nodes, each with its own folder, which exchange reports through a `NodeCoordinator`.

    Args:
        coordinator: coordinator of the call.
        folder: folder of this node's outcomes.
        ranks: global ranks of this node's workers.
    """

    def __init__(self, coordinator: NodeCoordinator, folder: Path, ranks: Sequence[int]) -> None:
        self._coordinator, self._folder, self._ranks = coordinator, folder, ranks
        self._file_numbers = itertools.count()
        self._store_error: Exception | None = None
        self._reported = 0

    def has_failed(self, attempt: int) -> bool:
        """Return whether another node has failed or is lost, or the run's store is lost."""
        failed = self._query(lambda: self._coordinator.has_failed(attempt))
        return self._store_error is not None or bool(failed)

    def all_done(self, attempt: int) -> bool:
        """Publish that this node's workers have returned; return whether all nodes have published this."""
        return bool(self._query(lambda: self._coordinator.all_done(attempt)))

    def report(self, attempt: int, exits: Sequence[WorkerExit]) -> None:
        """Publish this node's outcomes and exits, unless the run's store is lost."""
        self._reported = attempt
        if self._store_error is None:
            paths = [outcome_path(self._folder, rank, attempt) for rank in self._ranks]
            written = [path.read_bytes() for path in paths if path.exists()]
            self._query(lambda: self._coordinator.report(attempt, written, exits))

    def collect_failures(self, attempt: int) -> tuple[list[Outcome], list[WorkerExit]]:
        """Return the outcomes and early exits of all nodes in a failed attempt.

        Raises:
            LaunchError: a node is lost, and no report contains another root cause.
        """
        written, exits = self._require(lambda: self._coordinator.collect_reports(attempt))
        outcomes = [self._read(each) for each in written]
        with_outcome = {outcome.rank for outcome in outcomes}
        silent = [each for each in exits if each.rank not in with_outcome]
        if self._coordinator.heartbeats.lost and not silent and all(map(_is_consequence, outcomes)):
            raise _lost_error(self._coordinator.heartbeats.lost)
        return outcomes, exits

    def require_all_nodes(self) -> None:
        """Require that every node has reported the failed attempt: a restart needs all nodes.

        Raises:
            LaunchError: a node is lost.
        """
        self._require(lambda: self._coordinator.collect_reports(self._reported))
        if self._coordinator.heartbeats.lost:
            raise _lost_error(self._coordinator.heartbeats.lost)

    def collect_outcomes(self, attempt: int, wanted: Sequence[int]) -> list[Outcome]:
        """Return the outcomes of the ranks `wanted` from all nodes, in that order.

        Raises:
            LaunchError: node 0 is lost.
        """
        own = {rank: outcome_path(self._folder, rank, attempt) for rank in self._ranks}
        paths = self._require(lambda: self._coordinator.exchange_outcomes(own, wanted, self._folder))
        return [Outcome.read(paths[rank]) for rank in wanted]

    def _query(self, request: Callable[[], T]) -> T | None:
        """Return the result of a request to the run's store; None once the store is lost."""
        if self._store_error is None:
            try:
                return request()
            except (dist.DistError, RuntimeError) as exc:
                self._store_error = exc
        return None

    def _require(self, request: Callable[[], T]) -> T:
        """Return the result of a request to the run's store; raise LaunchError if the store is lost."""
        result = self._query(request)
        if self._store_error is not None:
            raise _lost_error([0], self._store_error) from self._store_error  # node 0 serves the store
        return cast("T", result)

    def _read(self, written: bytes) -> Outcome:
        path = self._folder / f"reported.{next(self._file_numbers)}"
        path.write_bytes(written)
        return Outcome.read(path)


def _is_consequence(outcome: Outcome) -> bool:
    """Return whether a rank ended because of another rank's failure."""
    return was_stopped(outcome) or is_secondary(outcome) or isinstance(outcome.error, SyncError)


def _lost_error(nodes: Sequence[int], error: Exception | None = None) -> LaunchError:
    return LaunchError(
        f"node {', '.join(map(str, nodes))} is gone",
        why=str(error).partition("\n")[0] if error is not None else f"no heartbeat for {heartbeats.LOST_AFTER_S:g} s",
        fix="see that node's output: its process was killed, its machine failed, or the network between them did",
    )
