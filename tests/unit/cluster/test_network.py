"""Addresses of hosts whose names do not resolve."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelize.cluster.network import resolvable_address
from parallelize.errors import LaunchError

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


def test_a_name_that_resolves_is_kept() -> None:
    """localhost is returned unchanged."""
    assert resolvable_address("localhost") == "localhost"


def test_slurm_is_asked_for_a_name_that_does_not(scontrol: Path) -> None:
    """Slurm's NodeAddr is used for a name that does not resolve."""
    write_scontrol(scontrol, "NodeName=n1 Arch=x86_64 NodeAddr=127.0.0.9 NodeHostName=n1")
    assert resolvable_address(UNKNOWN_HOST) == "127.0.0.9"


@pytest.mark.parametrize("text", [None, "Node not found", "NodeName=n1 NodeAddr=also-no-such-host.invalid"])
def test_an_unknown_host_is_an_error(scontrol: Path, text: str | None) -> None:
    """Without scontrol, node or a node address that resolves, the error names the variable to export."""
    if text is not None:
        write_scontrol(scontrol, text)
    with pytest.raises(LaunchError, match="export MASTER_ADDR"):
        resolvable_address(UNKNOWN_HOST)
