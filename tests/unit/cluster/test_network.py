"""Addresses of hosts whose names do not resolve."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from parallelize.cluster.network import gloo_interface, interface_of, require_interfaces, resolvable_address
from parallelize.errors import ConfigError, LaunchError

UNKNOWN_HOST = "no-such-host.invalid"


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    resolvable_address.cache_clear()


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a fake scontrol, the only command on PATH; it does not exist yet."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "scontrol"


def write_scontrol(scontrol: Path, text: str) -> None:
    scontrol.write_text(f"#!/bin/sh\necho '{text}'\n")
    scontrol.chmod(0o755)


def test_slurm_is_asked_for_a_name_that_does_not_resolve(scontrol: Path) -> None:
    """Its NodeAddr is used; localhost is returned unchanged."""
    assert resolvable_address("localhost") == "localhost"
    write_scontrol(scontrol, "NodeName=n1 Arch=x86_64 NodeAddr=127.0.0.9 NodeHostName=n1")
    assert resolvable_address(UNKNOWN_HOST) == "127.0.0.9"


@pytest.mark.parametrize("text", [None, "Node not found", "NodeName=n1 NodeAddr=also-no-such-host.invalid"])
def test_an_unknown_host_is_an_error(scontrol: Path, text: str | None) -> None:
    """Without scontrol, node or a node address that resolves, the error names the variable to export."""
    if text is not None:
        write_scontrol(scontrol, text)
    with pytest.raises(LaunchError, match="export MASTER_ADDR"):
        resolvable_address(UNKNOWN_HOST)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="needs IPv6")
def test_interfaces_are_found_by_addresses_of_both_kinds() -> None:
    """The loopback has one of each; gloo needs no interface for it, unless the machine has no IPv4."""
    found = [interface_of(address) for address in ("127.0.0.1", "::1", "192.0.2.1", "2001:db8::1")]
    assert found == ["lo", "lo", None, None]
    assert gloo_interface("127.0.0.1") is None


RANK = """
import torch
import torch.distributed as dist
from parallelize import distributed

@distributed(timeout=60)
def add():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()

print(f"{add()}\\n", end="")  # in one write: both ranks share the pipe
"""
WITHOUT_IPV4 = """
ip link set lo up && ip addr del 127.0.0.1/8 dev lo
for rank in 0 1; do
    OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank "$@" &
done
wait
"""


@pytest.mark.slow
@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
    reason="needs root on Linux to make a network namespace",
)
@pytest.mark.parametrize("address", ["", "[::1]"])
def test_ranks_on_a_machine_without_ipv4(tmp_path: Path, address: str) -> None:
    """Two ranks of mpirun meet at ::1, with and without a MASTER_ADDR in brackets."""
    (tmp_path / "script.py").write_text(RANK)
    sizes = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": address}
    command = ["unshare", "--net", "bash", "-c", WITHOUT_IPV4, "bash", sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(
        command, env={**os.environ, **sizes}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.split() == ["2.0", "2.0"], done.stderr


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GLOO_SOCKET_IFNAME", "nosuch9"),
        ("GLOO_SOCKET_IFNAME", "lo,nosuch9"),
        ("NCCL_SOCKET_IFNAME", "nosuch9"),
        ("NCCL_SOCKET_IFNAME", "=l"),
    ],
)
def test_an_interface_that_does_not_exist_is_named(variable: str, value: str) -> None:
    """With those that do, so that it can be corrected."""
    with pytest.raises(ConfigError, match=variable) as caught:
        require_interfaces({variable: value}, uses_nccl=True)
    for _, name in socket.if_nameindex():
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"GLOO_SOCKET_IFNAME": ""},
        {"GLOO_SOCKET_IFNAME": "lo"},
        {"NCCL_SOCKET_IFNAME": "nosuch9,l"},
        {"NCCL_SOCKET_IFNAME": "=lo"},
        {"NCCL_SOCKET_IFNAME": "^docker"},
    ],
)
def test_interfaces_that_exist_are_accepted(environ: dict[str, str]) -> None:
    """Of NCCL, the beginning of a name is enough; it may also exclude some."""
    require_interfaces(environ, uses_nccl=True)


def test_the_variable_of_a_library_that_is_not_used_does_not_count() -> None:
    """A cluster sets NCCL's for all its machines, also for those without a GPU."""
    require_interfaces({"NCCL_SOCKET_IFNAME": "nosuch9"}, uses_nccl=False)
