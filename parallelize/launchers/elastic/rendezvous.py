"""How the nodes of a run meet: a fresh store for every round, on the one address that was given.

torch elastic's own rendezvous shares one store across rounds, whose keys go stale: a restarted group then joins the
old one's (https://github.com/pytorch/pytorch/issues/135712).
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
    """A round: a fresh store for the workers, served by node 0, and the place where its agents agree on ranks.

    Args:
        address: on which node 0 serves the store; reached by all nodes.
        node_rank: this node.
        num_nodes: nodes in all.
        timeout: of every wait on the store.
        agents: a store of all agents; None: one node, which meets itself in the workers' store.
        before_again: called before each round but the first; raises where there cannot be one.
    """

    def __init__(
        self,
        address: str,
        *,
        node_rank: int = 0,
        num_nodes: int = 1,
        timeout: timedelta,
        agents: dist.Store | None,
        before_again: Callable[[], None],
    ) -> None:
        self._address, self._timeout = address, timeout
        self._node_rank, self._num_nodes = node_rank, num_nodes
        self._agents, self._before_again = agents, before_again
        self._served: dist.TCPStore | None = None
        self._rounds = itertools.count()

    def get_backend(self) -> str:
        """A name for torch elastic's logs."""
        return "parallelize"

    @property
    def use_agent_store(self) -> bool:
        """Workers join the store that node 0's agent serves: it outlives each of them."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """A fresh store, and this node's rank in the round."""
        number = next(self._rounds)
        if number:
            self._before_again()
        if self._node_rank == 0:
            self._served = serve_store(self._address, 0, self._timeout)
        if self._agents is None:
            assert self._served is not None
            agents, port = dist.PrefixStore("agents", self._served), self._served.port
        else:
            agents = dist.PrefixStore(f"round/{number}", self._agents)
            if self._served is not None:
                agents.set("port", str(self._served.port))
            port = int(agents.get("port"))
        return RendezvousInfo(agents, self._node_rank, self._num_nodes, RendezvousStoreInfo(self._address, port))

    def is_closed(self) -> bool:
        """Never: a run ends with its agent."""
        return False

    def set_closed(self) -> None:
        """Nothing to tell anybody."""

    def num_nodes_waiting(self) -> int:
        """None: the nodes of a run are fixed."""
        return 0

    def get_run_id(self) -> str:
        """A name for torch elastic's logs."""
        return "parallelize"

    def shutdown(self) -> bool:
        """Close the store."""
        self._served = None
        return True
