"""Addresses: of this machine, of its interfaces, of hosts whose names may lead nowhere."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import socket
import struct
import subprocess
import sys

from parallelize.errors import LaunchError

__all__ = [
    "address_of",
    "address_towards",
    "gloo_interface",
    "interface_of",
    "is_own",
    "own_name_is_reachable",
    "reachable",
]

_SIOCGIFADDR = 0x8915


def address_towards(address: str) -> str:
    """The address of this machine from which packets to `address` leave; no packet is sent."""
    family, _, _, _, where = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def is_own(address: str) -> bool:
    """Whether `address` (or the first address of that name) is one of this machine's."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind((where[0], 0))
    except OSError:
        return False
    return True


def interface_of(address: str) -> str | None:
    """Name of the interface that has an IPv4 address, such as "eth0"; None if it cannot be told."""
    if not sys.platform.startswith("linux"):
        return None
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address_of(name) == address), None)


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; None: it has none, or there is no such interface."""
    import fcntl  # only where there is one

    request = struct.pack("256s", interface.encode()[:15])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None


def own_name_is_reachable() -> bool:
    """Whether this machine's own name leads to an address of it that other machines can reach."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    except socket.gaierror:
        return False
    return any(not str(address).startswith("127.") and is_own(str(address)) for address in found)


def gloo_interface(address: str) -> str | None:
    """The interface that gloo must be told of to meet others at `address`; None: it finds its way.

    Gloo looks up this machine's own name, and where that leads nowhere it takes loopback, which no other node reaches.
    """
    return None if own_name_is_reachable() else interface_of(address_towards(address))


@functools.cache
def reachable(host: str) -> str:
    """`host` itself if it leads somewhere, else the address by which Slurm reaches the node of that name.

    Raises:
        LaunchError: neither is known.

    Source: https://slurm.schedmd.com/slurm.conf.html#OPT_NodeAddr
    """
    if _leads_somewhere(host):
        return host
    address = _node_address(host)
    if address is None or not _leads_somewhere(address):
        raise LaunchError(
            f"the host {host!r}, where the processes of this run meet, has no address",
            why="its name resolves nowhere, and `scontrol show node` knows no other",
            fix="export MASTER_ADDR=<address of the first node> to every process",
        )
    return address


def _leads_somewhere(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):  # an over-long name has no IDNA form
        return False
    return True


def _node_address(node: str) -> str | None:
    if shutil.which("scontrol") is None:
        return None
    asked = ["scontrol", "show", "node", node, "--oneliner"]
    try:
        said = subprocess.run(asked, check=False, capture_output=True, text=True, timeout=20).stdout
    except subprocess.TimeoutExpired:
        return None
    found = re.search(r"\bNodeAddr=(\S+)", said)
    return None if found is None else found[1]
