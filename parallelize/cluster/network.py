"""Network addresses: of this machine, of its interfaces, and of hosts whose names may not resolve."""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import struct
import subprocess
import sys
from pathlib import Path

from parallelize.errors import LaunchError

_SIOCGIFADDR = 0x8915


@functools.cache
def loopback() -> str:
    """Return the address by which processes of this machine reach each other: 127.0.0.1, or ::1 without IPv4."""
    return "127.0.0.1" if is_local_address("127.0.0.1") else "::1"


def source_address_for(address: str) -> str:
    """Return the source address of packets from this machine to `address`; no packet is sent."""
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def is_local_address(address: str) -> bool:
    """Return whether `address` (or the first address of that name) belongs to this machine."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind((target[0], 0))
    except OSError:
        return False
    return True


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this address, such as "eth0"; None if it is unknown."""
    if not sys.platform.startswith("linux"):
        return None
    if ":" in address:
        packed, table = (
            socket.inet_pton(socket.AF_INET6, address).hex(),
            Path("/proc/net/if_inet6").read_text(),
        )
        return next(
            (line.split()[-1] for line in table.splitlines() if line.startswith(packed)), None
        )
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if _ipv4_address(name) == address), None)


def _ipv4_address(interface: str) -> str | None:
    import fcntl  # does not exist on Windows

    request = struct.pack("256s", interface.encode()[:15])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None


@functools.cache
def gloo_interface(address: str) -> str | None:
    """Return the interface to set as GLOO_SOCKET_IFNAME for connections to `address`; None: gloo finds it itself.

    Gloo resolves this machine's hostname. Where that fails it binds to 127.0.0.1, which no other node can reach, and
    which a machine without IPv4 does not have.
    """
    if address.startswith("127."):
        return None
    own: set[str] = set()
    with contextlib.suppress(socket.gaierror):
        own = {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)}
    if any(is_local_address(each) for each in own if not each.startswith("127.") and each != "::1"):
        return None
    return interface_of(source_address_for(address))


@functools.cache
def resolvable_address(host: str) -> str:
    """Return `host` if it resolves, else the address under which Slurm knows the node of that name.

    Raises:
        LaunchError: neither resolves.

    Source: https://slurm.schedmd.com/slurm.conf.html#OPT_NodeAddr
    """
    if _resolves(host):
        return host
    command, shown = ["scontrol", "show", "node", host, "--oneliner"], ""
    with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):  # no Slurm here
        shown = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=20
        ).stdout
    found = re.search(r"\bNodeAddr=(\S+)", shown)
    if found is None or not _resolves(found[1]):
        raise LaunchError(
            f"the host {host!r}, which serves the rendezvous of this run, has no address",
            why="its name does not resolve, and `scontrol show node` lists no address that does",
            fix="export MASTER_ADDR=<address of the first node> to every process",
        )
    return found[1]


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):  # a name that is too long has no IDNA form
        return False
    return True
