"""Doctor check: the range of ephemeral ports, and whether processes can listen on one of them and on MASTER_PORT."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from parallelize.cli.findings import Check, Finding, fault, warning
from parallelize.cluster.network import is_local_address

__all__ = ["CHECK", "Ports", "gather", "judge"]

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FEW_PORTS = 1000


@dataclass(frozen=True, kw_only=True)
class Ports:
    """The ephemeral ports and MASTER_PORT of this machine.

    Args:
        first: lowest ephemeral port; 0: unknown.
        last: highest ephemeral port; 0: unknown.
        error: errno of listening on an ephemeral port of 127.0.0.1; None: it works.
        master_port: value of MASTER_PORT; None: not set.
        master_error: errno of listening on MASTER_PORT; None: it works, or is not for this machine to do.
    """

    first: int = 0
    last: int = 0
    error: int | None = None
    master_port: str | None = None
    master_error: int | None = None


def gather(environ: Mapping[str, str]) -> Ports:
    """Read the range of ephemeral ports, and try to listen on a port of it and on MASTER_PORT."""
    text = environ.get("MASTER_PORT", "").strip()
    port = int(text) if text.isdecimal() and 0 < int(text) < 65536 else 0
    master = environ.get("MASTER_ADDR", "").strip() or "127.0.0.1"
    first, last = map(int, _EPHEMERAL_RANGE.read_text().split()) if _EPHEMERAL_RANGE.exists() else (0, 0)
    return Ports(
        first=first,
        last=last,
        error=_listen_error("127.0.0.1", 0),
        master_port=text or None,
        master_error=_listen_error(master, port) if port and is_local_address(master) else None,
    )


def _listen_error(address: str, port: int) -> int | None:
    with contextlib.suppress(socket.gaierror):  # the network check reports this error
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        try:
            with socket.create_server((address, port), family=family):
                return None
        except OSError as error:
            return error.errno
    return None


def judge(facts: Ports) -> Iterator[Finding]:
    """Yield a finding if no port can be listened on, the range is small, or MASTER_PORT is invalid or unusable."""
    if facts.error == errno.EADDRINUSE:
        yield fault(
            "no-free-port",
            f"no free port: {os.strerror(facts.error)}",
            why="the processes of a call connect through a port",
            fix="end programs with many sockets; ss -s shows their number",
        )
    elif facts.error is not None:
        yield fault(
            "loopback-down",
            f"cannot listen on 127.0.0.1: {os.strerror(facts.error)}",
            why="the processes of one machine connect there",
            fix="ip link set lo up",
        )
    if facts.last and facts.last - facts.first < _FEW_PORTS:
        yield warning(
            "few-ports",
            f"only ports {facts.first} to {facts.last} are ephemeral",
            why="every pair of processes uses several, and each stays in TIME_WAIT for a minute after use",
            fix="sysctl net.ipv4.ip_local_port_range='32768 60999'",
        )
    if facts.master_port is not None and not (facts.master_port.isdecimal() and 0 < int(facts.master_port) < 65536):
        yield fault(
            "master-port-invalid",
            f"MASTER_PORT={facts.master_port}",
            why="a port is a number from 1 to 65535",
            fix="export MASTER_PORT=29400, or any free port, the same on every node; or unset it",
        )
    if facts.master_error == errno.EADDRINUSE:
        yield fault(
            "master-port-taken",
            f"MASTER_PORT={facts.master_port} is in use on this machine (MASTER_ADDR)",
            why="node 0 of a run must listen on it",
            fix="export another MASTER_PORT on all nodes; `ss -ltnp` shows the program that uses this one",
        )
    elif facts.master_error is not None:
        yield fault(
            "master-port-refused",
            f"cannot listen on MASTER_PORT={facts.master_port}: {os.strerror(facts.master_error)}",
            why="node 0 of a run must listen on it; ports below 1024 are for root",
            fix="export MASTER_PORT=29400, or any free port above 1023, the same on every node; or unset it",
        )


def _summary(facts: Ports) -> str:
    ephemeral = f"ephemeral ports {facts.first} to {facts.last}" if facts.last else "ephemeral ports unknown"
    return ephemeral + (f", MASTER_PORT={facts.master_port}" if facts.master_port else "")


CHECK = Check("ports", gather, _summary, judge)
