"""Doctor check: the network interfaces and addresses that processes use, on this machine and between nodes."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallelize.cli.findings import Check, Finding, fault
from parallelize.cluster import network
from parallelize.errors import LaunchError

__all__ = ["CHECK", "Network", "gather", "judge"]

# A documentation address (RFC 5737): no host has it, so its route is the default route.
_OUTSIDE_ADDRESS = "192.0.2.254"


@dataclass(frozen=True, kw_only=True)
class Network:
    """Network interfaces and host names, as this machine resolves them.

    Args:
        interfaces: interface name -> IPv4 address, for interfaces that have an address.
        host: host name of this machine.
        name_is_reachable: whether the host name resolves to an address that other machines can reach.
        outward: interface of the route to MASTER_ADDR or, if not set, of the default route; None: no route.
        gloo_names: value of GLOO_SOCKET_IFNAME; None: not set.
        nccl_names: value of NCCL_SOCKET_IFNAME; None: not set.
        master: value of MASTER_ADDR; None: not set.
        master_error: why MASTER_ADDR cannot be resolved; None: it can, or is not set.
    """

    interfaces: Mapping[str, str]
    host: str = ""
    name_is_reachable: bool = True
    outward: str | None = None
    gloo_names: str | None = None
    nccl_names: str | None = None
    master: str | None = None
    master_error: str | None = None


def gather(environ: Mapping[str, str]) -> Network:
    """Read interfaces and routes; only host name look-ups use the network."""
    addresses = {name: network.address_of(name) for _, name in socket.if_nameindex()}
    master = environ.get("MASTER_ADDR")
    error = _master_error(master) if master else None
    return Network(
        interfaces={name: address for name, address in addresses.items() if address is not None},
        host=socket.gethostname(),
        name_is_reachable=network.is_hostname_reachable(),
        outward=_outward_interface(master if master and error is None else _OUTSIDE_ADDRESS),
        gloo_names=environ.get("GLOO_SOCKET_IFNAME") or None,
        nccl_names=environ.get("NCCL_SOCKET_IFNAME") or None,
        master=master or None,
        master_error=error,
    )


def _master_error(master: str) -> str | None:
    try:
        network.resolvable_address(master)
    except LaunchError as error:
        return error.faults[0].why
    return None


def _outward_interface(address: str) -> str | None:
    try:
        return network.interface_of(network.source_address_for(address))
    except OSError:  # no route
        return None


def judge(facts: Network) -> Iterator[Finding]:
    """Yield a fault for each interface name or address with which processes could not connect."""
    known = ", ".join(facts.interfaces) or "none"
    unknown = [name for name in _split_names(facts.gloo_names) if name not in facts.interfaces]
    if unknown:
        yield fault(
            "gloo-interface-unknown",
            f"GLOO_SOCKET_IFNAME={facts.gloo_names}",
            why=f"no interface with an address is named {', '.join(unknown)}; this machine has: {known}",
            fix="unset GLOO_SOCKET_IFNAME, or set it to one of those",
        )
    if facts.nccl_names is not None and not _nccl_matches(facts.nccl_names, list(facts.interfaces)):
        yield fault(
            "nccl-interface-unknown",
            f"NCCL_SOCKET_IFNAME={facts.nccl_names}",
            why=f"it matches no interface; this machine has: {known}",
            fix="unset NCCL_SOCKET_IFNAME, or set it so that it matches one of those",
        )
    if facts.master_error is not None:
        yield fault(
            "master-unreachable",
            f"MASTER_ADDR={facts.master}",
            why=facts.master_error,
            fix="export MASTER_ADDR=<address of the first node>, the same on every node, or unset it",
        )


def _split_names(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def _nccl_matches(names: str, interfaces: list[str]) -> bool:
    """Return whether names of NCCL_SOCKET_IFNAME match: they are prefixes, exact after "=", and excluded after "^".

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    listed, is_exact, is_negated = _split_names(names.lstrip("^=")), "=" in names[:2], names.startswith("^")
    matching = {each for each in interfaces for name in listed if (each == name if is_exact else each.startswith(name))}
    return len(matching) < len(interfaces) if is_negated else bool(matching)


def _summary(facts: Network) -> str:
    outward = facts.outward and f"{facts.outward} ({facts.interfaces.get(facts.outward, '?')})"
    if outward is None:
        return f"{facts.host}: no route to other nodes"
    needs_override = not facts.name_is_reachable and facts.gloo_names is None
    how = f"; gloo uses it too, because {facts.host!r} resolves to another address" if needs_override else ""
    return f"route to other nodes by {outward}{how}"


CHECK = Check("network", gather, _summary, judge)
