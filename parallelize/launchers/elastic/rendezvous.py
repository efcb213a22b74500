"""torch elastic's rendezvous for a fixed set of nodes: each round gets a new store at the given address.

torch elastic's own rendezvous reuses one store for all rounds, so restarted workers read stale keys of the previous
round (https://github.com/pytorch/pytorch/issues/135712).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from parallelize.cluster.store import serve_store

__all__ = ["Rendezvous"]


class Rendezvous(RendezvousHandler):
    """Rendezvous of the agents; in each round node 0 serves a new store for the workers.

    Args:
        address: address at which node 0 serves the store; reachable from all nodes.
        node_rank: rank of this node.
        num_nodes: number of nodes.
        timeout: limit of every wait on the store.
        agent_store: store shared by all agents; None: there is one node, whose agent uses the workers' store.
        before_restart: called before each round except the first; raises if a restart is impossible.
    """

    def __init__(
        self,
        address: str,
        *,
        node_rank: int = 0,
        num_nodes: int = 1,
        timeout: timedelta,
        agent_store: dist.Store | None,
        before_restart: Callable[[], None],
    ) -> None:
        self._address, self._timeout = address, timeout
        self._node_rank, self._num_nodes = node_rank, num_nodes
        self._agent_store, self._before_restart = agent_store, before_restart
        self._worker_store: dist.TCPStore | None = None
        self._rounds = itertools.count()

    def get_backend(self) -> str:
        """Return the name of this rendezvous, for torch elastic's logs."""
        return "parallelize"

    @property
    def use_agent_store(self) -> bool:
        """True: workers connect to the store of node 0's agent, which outlives the workers."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Start a round: return its new store and this node's rank."""
        round_number = next(self._rounds)
        if round_number:
            self._before_restart()
        if self._node_rank == 0:
            self._worker_store = serve_store(self._address, 0, self._timeout)
        if self._agent_store is None:
            assert self._worker_store is not None
            agent_store, port = dist.PrefixStore("agents", self._worker_store), self._worker_store.port
        else:
            agent_store = dist.PrefixStore(f"round/{round_number}", self._agent_store)
            if self._worker_store is not None:
                agent_store.set("port", str(self._worker_store.port))
            port = int(agent_store.get("port"))
        return RendezvousInfo(agent_store, self._node_rank, self._num_nodes, RendezvousStoreInfo(self._address, port))

    def is_closed(self) -> bool:
        """Return False: a run ends with its agent."""
        return False

    def set_closed(self) -> None:
        """Do nothing: a run ends with its agent."""

    def num_nodes_waiting(self) -> int:
        """Return 0: the nodes of a run are fixed."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the run, for torch elastic's logs."""
        return "parallelize"

    def shutdown(self) -> bool:
        """Close the workers' store."""
        self._worker_store = None
        return True
