"""The only node of a call, with the functions of `Nodes`: it has nobody to talk to."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from parallelize.call.outcome import Outcome
from parallelize.cluster.network import loopback
from parallelize.cluster.store import free_port, serve_store
from parallelize.errors import LaunchError


class Meeting(NamedTuple):
    """What a node knows when all nodes have joined.

    Args:
        node_rank: rank of this node.
        address: address of node 0.
        port: port of the store, where the ranks meet.
        stamp: a name for this call, by its time, the same on all nodes.
    """

    node_rank: int
    address: str
    port: int
    stamp: str


def new_stamp() -> str:
    """Return a name for a call, by the time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns()}"


class OneNode:
    """The only node of a call.

    Args:
        timeout: of waits on the store.
        serves_store: whether the ranks meet in a TCPStore; else they meet in a file, and the port
            is a free one.
    """

    def __init__(self, timeout: timedelta, *, serves_store: bool) -> None:
        self._store: dist.TCPStore | None = None
        if serves_store:
            self._store = serve_store(loopback(), 0, timeout)

    def start(self) -> Meeting:
        """Return what `Nodes.start` does, at once."""
        port = free_port(loopback())
        if self._store is not None:
            port = self._store.port
        return Meeting(0, loopback(), port, new_stamp())

    def has_failed(self) -> bool:
        """Return False: no other node can fail."""
        return False

    def is_interrupted(self) -> bool:
        """Return False: no other node gets Ctrl-C."""
        return False

    def say(self, event: str, value: Any = None) -> None:
        """Do nothing."""

    def exchange(self, _outcomes: Iterable[Outcome]) -> dict[int, Sequence[Outcome]]:
        """Return nothing: there are no other nodes."""
        return {}

    def lost_error(self) -> LaunchError:
        """Return the error for a rank without an outcome, which no node explains."""
        return LaunchError(
            "a rank has ended without an outcome",
            why="neither its process nor its file says how",
            fix="report this, with the output of the rank",
        )

    def close(self) -> None:
        """Stop to serve the store.

        A process that is forked later lacks its thread, and would crash when it frees the store.
        """
        self._store = None
