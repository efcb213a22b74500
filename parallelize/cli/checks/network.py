"""The interfaces by which processes reach each other, on this machine and across nodes."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallelize.cli.findings import Check, Finding, fault
from parallelize.cluster.network import address_of, address_towards, interface_of, own_name_is_reachable, reachable
from parallelize.errors import LaunchError

__all__ = ["CHECK", "Network", "gather", "judge"]

# A documentation address (RFC 5737): nobody has it, and the way there is the way to everywhere.
_ELSEWHERE = "192.0.2.254"


@dataclass(frozen=True, kw_only=True)
class Network:
    """Addresses and names, as this machine knows them.

    Args:
        interfaces: name -> IPv4 address, of those that have one.
        host: this machine's name.
        name_is_reachable: whether that name leads to an address that other machines can reach.
        outward: the interface by which other nodes are reached: MASTER_ADDR if it is set; None: there is none.
        loopback_error: why nothing can listen at 127.0.0.1; None: it can.
        gloo_names: GLOO_SOCKET_IFNAME; None: not set.
        nccl_names: NCCL_SOCKET_IFNAME; None: not set.
        master: MASTER_ADDR; None: not set.
        master_error: why MASTER_ADDR leads nowhere; None: it leads somewhere, or is not set.
    """

    interfaces: Mapping[str, str]
    host: str = ""
    name_is_reachable: bool = True
    outward: str | None = None
    loopback_error: str | None = None
    gloo_names: str | None = None
    nccl_names: str | None = None
    master: str | None = None
    master_error: str | None = None


def gather(environ: Mapping[str, str]) -> Network:
    """Ask the system; nothing is sent, but names may be looked up."""
    addresses = {name: address_of(name) for _, name in socket.if_nameindex()}
    master = environ.get("MASTER_ADDR")
    error = _master_error(master) if master else None
    return Network(
        interfaces={name: address for name, address in addresses.items() if address is not None},
        host=socket.gethostname(),
        name_is_reachable=own_name_is_reachable(),
        outward=_outward(master if master and error is None else _ELSEWHERE),
        loopback_error=_loopback_error(),
        gloo_names=environ.get("GLOO_SOCKET_IFNAME") or None,
        nccl_names=environ.get("NCCL_SOCKET_IFNAME") or None,
        master=master or None,
        master_error=error,
    )


def _master_error(master: str) -> str | None:
    try:
        reachable(master)
    except LaunchError as error:
        return error.faults[0].why
    return None


def _outward(address: str) -> str | None:
    try:
        return interface_of(address_towards(address))
    except OSError:  # there is no way out of this machine
        return None


def _loopback_error() -> str | None:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return None
    except OSError as error:
        return str(error)


def judge(facts: Network) -> Iterator[Finding]:
    """Names and addresses by which processes would not find each other."""
    known = ", ".join(facts.interfaces) or "none"
    if facts.loopback_error is not None:
        yield fault(
            "loopback-down",
            f"nothing can listen at 127.0.0.1: {facts.loopback_error}",
            why="the processes of one machine meet there",
            fix="ip link set lo up",
        )
    strange = [name for name in _listed(facts.gloo_names) if name not in facts.interfaces]
    if strange:
        yield fault(
            "gloo-interface-unknown",
            f"GLOO_SOCKET_IFNAME={facts.gloo_names}",
            why=f"no interface of this machine with an address is called {', '.join(strange)}; it has: {known}",
            fix="unset GLOO_SOCKET_IFNAME, or name one of those",
        )
    if facts.nccl_names is not None and not _nccl_matches(facts.nccl_names, list(facts.interfaces)):
        yield fault(
            "nccl-interface-unknown",
            f"NCCL_SOCKET_IFNAME={facts.nccl_names}",
            why=f"it leaves NCCL no interface of this machine; it has: {known}",
            fix="unset NCCL_SOCKET_IFNAME, or let it match one of those",
        )
    if facts.master_error is not None:
        yield fault(
            "master-unreachable",
            f"MASTER_ADDR={facts.master}",
            why=facts.master_error,
            fix="export MASTER_ADDR=<address of the first node>, the same on every node, or unset it",
        )


def _listed(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def _nccl_matches(names: str, interfaces: list[str]) -> bool:
    """Whether NCCL finds an interface: names are beginnings, after "=" whole, after "^" what it must not take.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    rest = names.lstrip("^=")
    listed, is_whole, is_not = _listed(rest), "=" in names[:2], names.startswith("^")
    matching = {each for each in interfaces for name in listed if (each == name if is_whole else each.startswith(name))}
    return len(matching) < len(interfaces) if is_not else bool(matching)


def _summary(facts: Network) -> str:
    outward = facts.outward and f"{facts.outward} ({facts.interfaces.get(facts.outward, '?')})"
    if outward is None:
        return f"{facts.host}: alone, no way to other nodes"
    told = not facts.name_is_reachable and facts.gloo_names is None
    how = f"; gloo is told so, for {facts.host!r} leads elsewhere" if told else ""
    return f"to other nodes by {outward}{how}"


CHECK = Check("network", gather, _summary, judge)
