"""A run is private: it listens on loopback only, and other users cannot read its files."""

from __future__ import annotations

import ipaddress
import os
import socket
import tempfile
from pathlib import Path

import psutil

from parallelize import barrier, distributed


def listening() -> list[str]:
    """Return the addresses on which this process and its parents, up to the caller of the run, listen."""
    me = psutil.Process()
    found = []
    for process in (me, *me.parents()):
        found += [each.laddr.ip for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
        if process.pid == int(os.environ["CALLER"]):
            break
    return found


def test_a_run_on_one_node_listens_on_loopback_only(monkeypatch):
    """Neither the store, nor the process group of a worker, nor the agent can be reached from another machine."""
    monkeypatch.setenv("CALLER", str(os.getpid()))

    @distributed(processes=2)
    def run():
        barrier()
        found = listening()
        barrier()
        return found

    addresses = [each for of_rank in run.all_ranks() for each in of_rank]
    assert addresses
    assert [each for each in addresses if not ipaddress.ip_address(each).is_loopback] == []


def test_the_check_sees_what_listens(monkeypatch):
    """Meta-test: the check above finds a port that is open on every interface."""
    monkeypatch.setenv("CALLER", str(os.getpid()))
    with socket.create_server(("0.0.0.0", 0)):
        assert "0.0.0.0" in listening()


def test_the_files_of_a_run_are_private(monkeypatch, tmp_path):
    """Other users can neither read nor write the folder of tasks and outcomes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    @distributed(processes=2)
    def run(folder):
        return [(each.name, oct(each.stat().st_mode & 0o777)) for each in Path(folder).iterdir()]

    found = run(tmp_path)
    assert found
    assert [each for each in found if each[1] != "0o700"] == []
    assert list(tmp_path.iterdir()) == []
