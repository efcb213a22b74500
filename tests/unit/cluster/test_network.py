"""Addresses of hosts whose names lead nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelize.cluster.network import reachable
from parallelize.errors import LaunchError

NOWHERE = "no-such-host.invalid"


@pytest.fixture(autouse=True)
def fresh() -> None:
    reachable.cache_clear()


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only command there is, made by the test."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "scontrol"


def says(scontrol: Path, text: str) -> None:
    scontrol.write_text(f"#!/bin/sh\necho '{text}'\n")
    scontrol.chmod(0o755)


def test_a_name_that_resolves_is_kept() -> None:
    """Nobody is asked about localhost."""
    assert reachable("localhost") == "localhost"


def test_slurm_is_asked_for_a_name_that_does_not(scontrol: Path) -> None:
    """The node's address is the one by which Slurm reaches it."""
    says(scontrol, "NodeName=n1 Arch=x86_64 NodeAddr=127.0.0.9 NodeHostName=n1")
    assert reachable(NOWHERE) == "127.0.0.9"


@pytest.mark.parametrize("text", [None, "Node not found", "NodeName=n1 NodeAddr=also-no-such-host.invalid"])
def test_a_host_that_nobody_knows_is_an_error(scontrol: Path, text: str | None) -> None:
    """No scontrol, no such node, or a node address that is another unknown name: says what to export."""
    if text is not None:
        says(scontrol, text)
    with pytest.raises(LaunchError, match="export MASTER_ADDR"):
        reachable(NOWHERE)
