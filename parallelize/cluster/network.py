"""Addresses of this machine, of its interfaces, and of hosts whose names may not resolve."""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from parallelize.errors import ConfigError, LaunchError

_SIOCGIFADDR = 0x8915
"""Linux's request for the address of an interface: see netdevice(7)."""

_SCONTROL_TIMEOUT_S = 20


@functools.cache
def loopback() -> str:
    """Return the address by which processes of this machine reach each other.

    It is 127.0.0.1, or ::1 on a machine without IPv4.
    """
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
        family, _, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((target[0], 0))
    except OSError:
        return False
    return True


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this address, such as "eth0"; None if it is unknown."""
    if not sys.platform.startswith("linux"):
        return None
    if ":" in address:
        return _interface_of_ipv6(address)
    for _, name in socket.if_nameindex():
        if _ipv4_address(name) == address:
            return name
    return None


def _interface_of_ipv6(address: str) -> str | None:
    packed = socket.inet_pton(socket.AF_INET6, address).hex()
    # A line of the table begins with an address, and ends with the name of its interface.
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        if line.startswith(packed):
            return line.split()[-1]
    return None


def _ipv4_address(interface: str) -> str | None:
    import fcntl  # does not exist on Windows

    # The request and the answer are a struct ifreq, with a name of up to 15 bytes and, from byte 20
    # on, the address.
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:  # an interface without an address of IPv4
            return None
    return socket.inet_ntoa(answer[20:24])


@functools.cache
def gloo_interface(address: str) -> str | None:
    """Return the interface to set as GLOO_SOCKET_IFNAME for connections to `address`.

    Gloo resolves this machine's hostname. Where that fails, it binds to 127.0.0.1, which no other
    node can reach, and which a machine without IPv4 does not have.

    Returns:
        None: gloo finds the interface itself.
    """
    if address.startswith("127."):
        return None
    for address_of_host in _addresses_of(socket.gethostname()):
        is_loopback = address_of_host.startswith("127.") or address_of_host == "::1"
        if not is_loopback and is_local_address(address_of_host):
            return None
    return interface_of(source_address_for(address))


def _addresses_of(host: str) -> set[str]:
    """Return the addresses to which a name resolves; none if it does not resolve."""
    try:
        entries = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):  # a name that is too long has no IDNA form
        return set()
    return {str(socket_address[0]) for *_, socket_address in entries}


@functools.cache
def resolvable_address(host: str) -> str:
    """Return `host` if it resolves, else the address under which Slurm knows the node of that name.

    Raises:
        LaunchError: neither resolves.

    Source: https://slurm.schedmd.com/slurm.conf.html#OPT_NodeAddr
    """
    if _addresses_of(host):
        return host
    description = ""
    with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):  # no Slurm here
        description = subprocess.run(
            ["scontrol", "show", "node", host, "--oneliner"],
            check=False,
            capture_output=True,
            text=True,
            timeout=_SCONTROL_TIMEOUT_S,
        ).stdout
    node_address = re.search(r"\bNodeAddr=(\S+)", description)
    if node_address is None or not _addresses_of(node_address[1]):
        raise LaunchError(
            f"the host {host!r}, which serves the rendezvous of this run, has no address",
            why="its name does not resolve, and `scontrol show node` lists no address that does",
            fix="export MASTER_ADDR=<address of the first node> to every process",
        )
    return node_address[1]


def require_interfaces(environ: Mapping[str, str], *, uses_nccl: bool) -> None:
    """Refuse a variable for gloo or NCCL that names no interface of this machine.

    gloo takes a list of names. NCCL takes a list of beginnings of names, "=" before it makes them
    whole names, and "^" excludes them, so that something is left.

    Args:
        environ: the variables of the ranks.
        uses_nccl: whether the ranks use NCCL, so that its variable counts.

    Raises:
        ConfigError: a variable names an interface that does not exist.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    gloo_names = environ.get("GLOO_SOCKET_IFNAME", "")
    if len(gloo_names) > 1:  # torch takes a shorter one as none
        for name in gloo_names.split(","):
            if name not in interfaces:
                raise _missing_interface("GLOO_SOCKET_IFNAME", gloo_names, interfaces)
    nccl_names = environ.get("NCCL_SOCKET_IFNAME", "")
    if not uses_nccl or not nccl_names or nccl_names.startswith("^"):
        return
    is_exact = nccl_names.startswith("=")
    wanted = nccl_names.removeprefix("=").split(",")
    for name in interfaces:
        if name in wanted or (not is_exact and name.startswith(tuple(wanted))):
            return
    raise _missing_interface("NCCL_SOCKET_IFNAME", nccl_names, interfaces)


def _missing_interface(variable: str, value: str, interfaces: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{variable}={value}",
        why=f"{socket.gethostname()} has no network interface of this name; it has "
        f"{', '.join(interfaces)}",
        fix=f"set {variable} to one of them, or unset it",
    )
