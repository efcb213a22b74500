"""Where ranks meet: a file in the folder of a call on one node, or a TCPStore on one address."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from parallelize.cluster.world import Node

STORE_FILE = "store"
"""Name of the file in the folder of a call in which its ranks on one node meet."""
_REACH_TIMEOUT_S = 1.0


def listen(address: str, port: int) -> socket.socket:
    """Listen on one address of this machine.

    Exception: for a hostname that resolves to loopback on its own host (a Debian default in
    /etc/hosts) on every interface, because nothing tells which of them the other nodes use.

    Raises:
        OSError: the address belongs to another machine, or the port is in use.
    """
    family, *_, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    is_name = not address.startswith("127.") and address != "localhost"
    if is_name and str(target[0]).startswith("127."):
        target = ("", port)
    return socket.create_server(target, family=family, backlog=socket.SOMAXCONN)


def free_port(address: str) -> int:
    """Return a port on which nobody listens at an address of this machine."""
    with listen(address, 0) as listener:
        return int(listener.getsockname()[1])


def serve_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Serve a TCPStore in this process on one address.

    By itself, TCPStore listens on every interface.

    Args:
        address: an address or name of this machine.
        port: port to listen on; 0: a free one.
        timeout: timeout of every wait on the store.

    Raises:
        OSError: the address belongs to another machine, or the port is in use.

    Source: https://docs.pytorch.org/docs/stable/distributed.html, at TCPStore (master_listen_fd)
    """
    with listen(address, port) as listener:
        return dist.TCPStore(
            address,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )


def join_store(node: Node, timeout: timedelta) -> dist.TCPStore:
    """Connect to the store that node 0 serves.

    Args:
        node: has the address.
        timeout: timeout of every wait on the store.

    Raises:
        OSError: nobody listens there yet. TCPStore would write a C++ stack to stderr about that.
        RuntimeError: who listens there serves no store, or ends just now.
    """
    address = (node.master_addr, node.master_port)
    socket.create_connection(address, _REACH_TIMEOUT_S).close()
    return dist.TCPStore(*address, is_master=False, timeout=timeout)
