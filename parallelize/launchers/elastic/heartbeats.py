"""Heartbeats of the nodes of a run: a node whose heartbeat does not change for LOST_AFTER_S is lost."""

from __future__ import annotations

import time

from parallelize.launchers.elastic.store_client import StoreClient

__all__ = ["LOST_AFTER_S", "NodeHeartbeats"]

LOST_AFTER_S = 10.0
_CHECK_EVERY_S = 1.0


class NodeHeartbeats:
    """The heartbeats of all nodes during one call: a key per node in the run's store.

    Args:
        client: client of the run's store; its thread sends this node's heartbeat.
        prefix: prefix of the keys, before the node rank.
        node_rank: rank of this node.
        num_nodes: number of nodes.

    Attributes:
        lost: ranks of the nodes that were lost at the last check.
    """

    def __init__(self, client: StoreClient, prefix: str, *, node_rank: int, num_nodes: int) -> None:
        self._client, self._node_rank = client, node_rank
        self._keys = [f"{prefix}/{rank}" for rank in range(num_nodes)]
        self._checked_at = 0.0
        self._last_seen: dict[int, tuple[bytes, float]] = {}  # last heartbeat, and when it changed
        self.lost: list[int] = []

    def start(self) -> None:
        """Start sending this node's heartbeat, once a second."""
        self._client.heartbeat_key = self._keys[self._node_rank]

    def stop(self) -> None:
        """Stop sending this node's heartbeat."""
        self._client.heartbeat_key = ""

    def check_if_due(self) -> None:
        """Update `lost` if the last check was more than a second ago."""
        if time.monotonic() - self._checked_at > _CHECK_EVERY_S:
            self.check()

    def check(self) -> None:
        """Read the heartbeats of all nodes and update `lost`."""
        now = self._checked_at = time.monotonic()
        for rank, key in enumerate(self._keys):
            heartbeat = self._client.get(key) if self._client.check([key]) else b""
            if rank not in self._last_seen or self._last_seen[rank][0] != heartbeat:
                self._last_seen[rank] = (heartbeat, now)
        self.lost = [rank for rank, (_, since) in self._last_seen.items() if now - since > LOST_AFTER_S]
