"""The key-value store through which processes find each other, served where it was asked for and nowhere else."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

__all__ = ["serve_store"]


def serve_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A store served by this process at one address only; TCPStore itself would listen on every interface.

    A host name that leads to loopback on its own host (Debian writes it so into /etc/hosts) is meant for others: then
    every interface is served, since nothing says which one they come by.

    Args:
        address: an address or name of this machine.
        port: 0: one that is free.
        timeout: of every wait on it.

    Raises:
        OSError: the address is not this machine's, or the port is taken.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.TCPStore (master_listen_fd)
    """
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    own_name_is_loopback = (
        str(where[0]).startswith("127.") and not address.startswith("127.") and address != "localhost"
    )
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("", port) if own_name_is_loopback else where)
        listening.listen(socket.SOMAXCONN)
        return dist.TCPStore(
            address,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            multi_tenant=False,
            master_listen_fd=listening.detach(),
        )
