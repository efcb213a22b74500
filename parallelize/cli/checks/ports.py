"""Free ports, and the one at which nodes meet."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from parallelize.cli.findings import Check, Finding, fault, warning
from parallelize.cluster.network import is_own

__all__ = ["CHECK", "Ports", "gather", "judge"]

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FEW = 1000


@dataclass(frozen=True, kw_only=True)
class Ports:
    """What may be listened at.

    Args:
        first: the lowest port that the system hands out; 0: it does not say.
        last: the highest.
        error: why it hands out none; None: it does.
        master_port: MASTER_PORT; None: not set.
        taken_by_another: whether another program listens at MASTER_PORT of this machine.
    """

    first: int = 0
    last: int = 0
    error: str | None = None
    master_port: str | None = None
    taken_by_another: bool = False


def gather(environ: Mapping[str, str]) -> Ports:
    """Listen for a moment."""
    text = environ.get("MASTER_PORT", "").strip()
    number = int(text) if text.isdecimal() and 0 < int(text) < 65536 else 0
    master = environ.get("MASTER_ADDR", "").strip() or "127.0.0.1"
    first, last = map(int, _RANGE.read_text().split()) if _RANGE.exists() else (0, 0)
    return Ports(
        first=first,
        last=last,
        error=_listen_error("127.0.0.1", 0),
        master_port=text or None,
        taken_by_another=bool(number) and is_own(master) and _listen_error(master, number) is not None,
    )


def _listen_error(address: str, port: int) -> str | None:
    with contextlib.suppress(socket.gaierror):  # a name that leads nowhere is another check's
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        try:
            with socket.create_server((address, port), family=family):
                return None
        except OSError as error:
            return str(error)
    return None


def judge(facts: Ports) -> Iterator[Finding]:
    """Ports that cannot be had."""
    if facts.error is not None:
        yield fault(
            "no-free-port",
            f"no free port: {facts.error}",
            why="the processes of a call meet at one",
            fix="end what holds them: ss -s counts sockets",
        )
    if facts.last and facts.last - facts.first < _FEW:
        yield warning(
            "few-ports",
            f"the system hands out ports {facts.first} to {facts.last} only",
            why="every pair of processes needs some, and each stays taken for a minute after its use",
            fix="sysctl net.ipv4.ip_local_port_range='32768 60999'",
        )
    if facts.master_port is not None and not (facts.master_port.isdecimal() and 0 < int(facts.master_port) < 65536):
        yield fault(
            "master-port-invalid",
            f"MASTER_PORT={facts.master_port}",
            why="a port is a number from 1 to 65535",
            fix="export MASTER_PORT=29400, or any free port, the same on every node; or unset it",
        )
    if facts.taken_by_another:
        yield fault(
            "master-port-taken",
            f"MASTER_PORT={facts.master_port} is taken on this machine, which MASTER_ADDR names",
            why="node 0 of a run must listen there",
            fix="export another MASTER_PORT to all nodes; `ss -ltnp` names the program that has this one",
        )


def _summary(facts: Ports) -> str:
    handed_out = f"{facts.first} to {facts.last} are handed out" if facts.last else "handed out by the system"
    return handed_out + (f", MASTER_PORT={facts.master_port}" if facts.master_port else "")


CHECK = Check("ports", gather, _summary, judge)
