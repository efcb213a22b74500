"""How a process becomes a node of a call.

node 0       serves the store at MASTER_ADDR:MASTER_PORT ──> takes rank 0
other node   connects, again until somebody listens      ──> takes its NODE_RANK, or any free rank
               └── if all of these are taken, again for some seconds: the store may be that of the
                   call before, which is about to end
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from parallelize.cluster.network import is_local_address
from parallelize.cluster.store import join_store, serve_store
from parallelize.cluster.world import Node
from parallelize.errors import ConfigError, LaunchError

_TRY_EVERY_S = 0.1
_REFUSED_FOR_S = 10.0
_STORE_TIMEOUT = timedelta(minutes=1)
"""For the connection to a store that listens: a busy machine needs some seconds."""


def serve(node: Node) -> dist.TCPStore | None:
    """Return the store that this process serves, if it is node 0.

    Raises:
        LaunchError: it is node 0, and cannot listen.
    """
    if node.node_rank or (node.node_rank is None and not is_local_address(node.master_addr)):
        return None
    try:
        return serve_store(node.master_addr, node.master_port, _STORE_TIMEOUT)
    except OSError as error:
        # Another process of this machine is node 0.
        if node.node_rank is None:
            return None
        raise LaunchError(
            f"node 0 cannot listen at {node.master_addr}:{node.master_port}",
            why=str(error),
            fix="set MASTER_ADDR to an address of node 0 and MASTER_PORT to a free port, the same "
            "on every node",
        ) from error


def join(
    node: Node,
    served_store: dist.TCPStore | None,
    num_nodes: int,
    timeout: timedelta,
    is_leaving: Callable[[], bool],
) -> tuple[int, dist.TCPStore]:
    """Return the rank of this node and the store, once it is a node of the call.

    Args:
        node: the address of node 0, and the rank of this node, if it has been given one.
        served_store: the store, if this is node 0.
        num_nodes: number of nodes.
        timeout: longest time to try.
        is_leaving: whether to give up.

    Raises:
        LaunchError: node 0 was not reached in time, or this node leaves.
        ConfigError: all ranks that this node could have are taken.
    """
    if served_store is not None:
        ranks: Sequence[int] = [0]
    elif node.node_rank is None:
        ranks = range(1, num_nodes)
    else:
        # Empty for a rank that the call does not have: it is refused.
        ranks = range(node.node_rank, min(node.node_rank + 1, num_nodes))
    reason = "it does not answer"
    end_s = time.monotonic() + timeout.total_seconds()
    refused_until_s = float("inf")
    while True:
        try:
            store = served_store or join_store(node, _STORE_TIMEOUT)
            rank = _take_rank(store, ranks)
            if rank is not None:
                return rank, store
            refused_until_s = min(refused_until_s, time.monotonic() + _REFUSED_FOR_S)
        except (OSError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
        if time.monotonic() > refused_until_s:
            raise _refused_error(node, num_nodes)
        if time.monotonic() > end_s or is_leaving():
            raise unreachable_error(node, timeout, reason)
        time.sleep(_TRY_EVERY_S)


def _take_rank(store: dist.TCPStore, ranks: Sequence[int]) -> int | None:
    """Make this process a node; return its rank, None: all of these are taken."""
    token = secrets.token_hex(16)
    for rank in ranks:
        if store.compare_set(f"nodes/rank/{rank}", "", token) == token.encode():
            return rank
    return None


def _refused_error(node: Node, num_nodes: int) -> ConfigError:
    return ConfigError(
        f"NODE_RANK={node.node_rank} with num_nodes={num_nodes}",
        why="another node has the same NODE_RANK, or more nodes were started than num_nodes",
        fix="give every node its own NODE_RANK from 0, or set it on none of them",
    )


def unreachable_error(node: Node, timeout: timedelta, reason: str) -> LaunchError:
    """Return the error for a node that has not reached node 0 in time."""
    return LaunchError(
        f"no node 0 at {node.master_addr}:{node.master_port} within {timeout.total_seconds():g} s",
        why=reason,
        fix="start the script on node 0, with the same MASTER_ADDR and MASTER_PORT on all nodes",
    )
