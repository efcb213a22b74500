"""Two hosts on one machine: network namespaces joined by a veth pair, each with its own host name."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

__all__ = ["Host", "two_hosts"]


@dataclass(frozen=True)
class Host:
    """A network namespace with an address and a host name that does not resolve, as on many clusters."""

    namespace: str
    name: str
    address: str
    interface: str

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs a command on this host."""
        # No name server: name lookups, such as torch's, fail at once instead of timing out.
        inside = f'hostname {self.name}; mount --bind /dev/null /etc/resolv.conf; exec "$@"'
        enter = ["nsenter", f"--net=/var/run/netns/{self.namespace}", "unshare", "--uts", "--mount"]
        return [*enter, "sh", "-c", inside, "sh", *command]


def _missing() -> str | None:
    """Return what this machine lacks to create hosts; None: nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux to make network namespaces"
    for tool in ("ip", "nsenter", "unshare"):
        if shutil.which(tool) is None:
            return f"needs the command {tool!r} (iproute2, util-linux)"
    probe = f"plz-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], check=False, capture_output=True).returncode:
        return "may not make network namespaces here"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Create two hosts that reach each other and nothing else, or skip the test; remove them at the end."""
    if reason := _missing():
        pytest.skip(reason)
    tag = f"plz{os.getpid() % 100000}"
    hosts = tuple(Host(f"{tag}-{n}", f"node-{n}", f"10.78.0.1{n}", f"e{n}") for n in (1, 2))
    first, second = hosts
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
        _run("ip", "link", "add", first.interface, "netns", first.namespace, "type", "veth",
             "peer", "name", second.interface, "netns", second.namespace)  # fmt: skip
        for host in hosts:
            inside = ("ip", "-n", host.namespace)
            _run(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _run(*inside, "link", "set", host.interface, "up")
            _run(*inside, "link", "set", "lo", "up")
        yield first, second
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
