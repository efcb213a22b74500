"""Where ranks meet: a file in the folder of a call on one node, or a TCPStore, served on one address only."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

STORE_FILE = "store"
"""Name of the file in the folder of a call in which its ranks on one node meet."""


def listen(address: str, port: int) -> socket.socket:
    """Listen on one address of this machine.

    Exception: for a hostname that resolves to loopback on its own host (a Debian default in /etc/hosts) on every
    interface, because nothing tells which of them the other nodes use.

    Raises:
        OSError: the address belongs to another machine, or the port is in use.
    """
    family, *_, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    is_loopback_alias = (
        str(target[0]).startswith("127.")
        and not address.startswith("127.")
        and address != "localhost"
    )
    return socket.create_server(
        ("", port) if is_loopback_alias else target, family=family, backlog=socket.SOMAXCONN
    )


def serve_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Serve a TCPStore in this process on one address; by itself, TCPStore listens on every interface.

    Args:
        address: an address or name of this machine.
        port: port to listen on; 0: a free one.
        timeout: timeout of every wait on the store.

    Raises:
        OSError: the address belongs to another machine, or the port is in use.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.TCPStore (master_listen_fd)
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
