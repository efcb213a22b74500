"""torch elastic's rendezvous for a fixed set of nodes: each round gets a new store at the given address.

torch elastic's own rendezvous reuses one store for all rounds, so restarted workers read stale keys of the previous
round (https://github.com/pytorch/pytorch/issues/135712).
"""

from __future__ import annotations

import itertools
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from parallelize.cluster.store import serve_store
from parallelize.launchers.elastic.control_plane import SingleNode

__all__ = ["Rendezvous"]


class Rendezvous(RendezvousHandler):
    """Rendezvous of the agents; in each round node 0 serves a new store for the workers.

    Args:
        control_plane: the nodes of the call.
        timeout: limit of every wait on the store.
    """

    def __init__(self, control_plane: SingleNode, *, timeout: timedelta) -> None:
        self._control_plane, self._timeout = control_plane, timeout
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
        nodes, round_number = self._control_plane, next(self._rounds)
        if round_number:
            nodes.require_all_nodes()
        if nodes.node_rank == 0:
            self._worker_store = serve_store(nodes.address, 0, self._timeout)
        if nodes.store is None:
            assert self._worker_store is not None
            agent_store, port = dist.PrefixStore("agents", self._worker_store), self._worker_store.port
        else:
            agent_store = dist.PrefixStore(f"round/{round_number}", nodes.store)
            if self._worker_store is not None:
                agent_store.set("port", str(self._worker_store.port))
            port = int(agent_store.get("port"))
        return RendezvousInfo(agent_store, nodes.node_rank, nodes.num_nodes, RendezvousStoreInfo(nodes.address, port))

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
