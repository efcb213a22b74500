"""Network addresses: of this machine, of its interfaces, and of hosts whose names may not resolve."""

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
    "gloo_interface",
    "interface_of",
    "is_hostname_reachable",
    "is_local_address",
    "resolvable_address",
    "source_address_for",
]

_SIOCGIFADDR = 0x8915


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
    """Return the name of the interface with this IPv4 address, such as "eth0"; None if it is unknown."""
    if not sys.platform.startswith("linux"):
        return None
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address_of(name) == address), None)


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of an interface; None if it has none or does not exist."""
    import fcntl  # does not exist on Windows

    request = struct.pack("256s", interface.encode()[:15])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None


def is_hostname_reachable() -> bool:
    """Return whether this machine's hostname resolves to one of its addresses other than loopback."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    except socket.gaierror:
        return False
    return any(not str(address).startswith("127.") and is_local_address(str(address)) for address in found)


def gloo_interface(address: str) -> str | None:
    """Return the interface to set as GLOO_SOCKET_IFNAME for connections to `address`; None: gloo finds it itself.

    Gloo resolves this machine's hostname. Where that fails it binds to loopback, which no other node can reach.
    """
    return None if is_hostname_reachable() else interface_of(source_address_for(address))


@functools.cache
def resolvable_address(host: str) -> str:
    """Return `host` if it resolves, else the address under which Slurm knows the node of that name.

    Raises:
        LaunchError: neither resolves.

    Source: https://slurm.schedmd.com/slurm.conf.html#OPT_NodeAddr
    """
    if _resolves(host):
        return host
    address = _slurm_node_address(host)
    if address is None or not _resolves(address):
        raise LaunchError(
            f"the host {host!r}, which serves the rendezvous of this run, has no address",
            why="its name does not resolve, and `scontrol show node` lists no address that does",
            fix="export MASTER_ADDR=<address of the first node> to every process",
        )
    return address


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):  # a name that is too long has no IDNA form
        return False
    return True


def _slurm_node_address(node: str) -> str | None:
    if shutil.which("scontrol") is None:
        return None
    command = ["scontrol", "show", "node", node, "--oneliner"]
    try:
        output = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20).stdout
    except subprocess.TimeoutExpired:
        return None
    found = re.search(r"\bNodeAddr=(\S+)", output)
    return None if found is None else found[1]
