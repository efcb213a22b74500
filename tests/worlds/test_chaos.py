"""Faults on two hosts: each ends in the documented error within the documented time, and no checkpoint is lost.

A node without a heartbeat for LOST_AFTER_S (10 s by default, less here) is lost; then its workers and those of the
other node are ended, with at most STOP_GRACE_S for their `finally` blocks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ranks import running_pids, wait_for
from worlds.two_hosts import Host, two_hosts

from parallelize import load
from parallelize.launchers.local.workers import STOP_GRACE_S

# Two hosts start torch twice each, in some tests for two runs.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(240)]

LOST_AFTER_S = 4.0
MARGIN_S = 10.0  # for a busy machine

SCRIPT = f"""
import json, os, pathlib, sys, time
import torch, torch.distributed as dist
from parallelize import checkpoints, distributed, rank
from parallelize.launchers.local.launcher import LocalLauncher

folder, options, last = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])

launcher = LocalLauncher(heartbeat_timeout={LOST_AFTER_S})

@distributed(**dict(processes=1, num_nodes=2, timeout=30, launcher=launcher) | options)
def train():
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    with checkpoints(folder / "saved", every=5, model=model) as saved:
        first = saved.steps
        while saved.steps < last:
            gradient = torch.ones(1, 1)
            dist.all_reduce(gradient)
            model.weight.data += gradient / 2
            saved.step()
            (folder / f"now.{{rank()}}").write_text(f"{{os.getpid()}} {{saved.steps}}")
            os.replace(folder / f"now.{{rank()}}", folder / f"at.{{rank()}}")
            time.sleep(0.005)
        dist.barrier()
    return [first, model.weight.item()]

result = {{}}
try:
    result["value"] = train()
except BaseException as error:
    result["error"] = type(error).__name__
    result["text"] = "\\n".join([str(error), *getattr(error, "__notes__", [])])
result["at"] = time.time()
print(json.dumps(result), flush=True)
"""


@dataclass
class Run:
    """The same script on two hosts, training."""

    hosts: tuple[Host, Host]
    folder: Path
    nodes: list[subprocess.Popen[str]]
    workers: list[int]
    family: list[psutil.Process]

    def result(self, node: int, *, within_s: float) -> dict[str, Any]:
        out, err = self.nodes[node].communicate(timeout=within_s + MARGIN_S)
        assert out.strip(), err
        result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return result

    def assert_gone(self) -> None:
        """Wait until no process of the run is left."""
        wait_for(lambda: not running_pids(each.pid for each in self.family), timeout_s=90)

    def link(self, state: str) -> None:
        host = self.hosts[0]
        subprocess.run(["ip", "-n", host.namespace, "link", "set", host.interface, state], check=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@contextlib.contextmanager
def training(hosts: tuple[Host, Host], folder: Path, **options: Any) -> Iterator[Run]:
    """Start a run that trains forever, and wait for two checkpoints."""
    with _started(hosts, folder, options, last=10**9) as nodes:
        files = [folder / f"at.{rank}" for rank in range(2)]
        wait_for(lambda: all(each.exists() for each in files), timeout_s=90)
        wait_for(lambda: len(list((folder / "saved").glob("step-*.pt"))) >= 2, timeout_s=90)
        workers = [int(each.read_text().split()[0]) for each in files]
        family = [each for node in nodes for each in psutil.Process(node.pid).children(recursive=True)]
        try:
            yield Run(hosts, folder, nodes, workers, family)
        finally:
            for each in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


@contextlib.contextmanager
def _started(
    hosts: tuple[Host, Host], folder: Path, options: dict[str, Any], last: int
) -> Iterator[list[subprocess.Popen[str]]]:
    (folder / "script.py").write_text(SCRIPT)
    environ = {**os.environ, "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
    command = [sys.executable, str(folder / "script.py"), str(folder), json.dumps(options), str(last)]
    nodes = [
        subprocess.Popen(host.command(*command), env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for host in hosts
    ]
    try:
        yield nodes
    finally:
        for each in nodes:
            each.kill()
            each.communicate()


def assert_saved(folder: Path) -> int:
    """Check that the last checkpoint loads with the weights of its step; return the step."""
    saved = max((folder / "saved").glob("step-*.pt"))
    model = torch.nn.Linear(1, 1)
    steps: int = load(saved, model=model, rng=False)["_checkpoints"]["steps"]
    assert model.weight.item() == steps
    return steps


ENDED_S = LOST_AFTER_S + STOP_GRACE_S


def test_a_cut_link_ends_both_and_loses_nothing(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Each host raises LaunchError for the other one; the last checkpoint loads, and no process is left."""
    with training(hosts, tmp_path) as run:
        cut_at = time.time()
        run.link("down")
        try:
            for node in range(2):
                result = run.result(node, within_s=2 * ENDED_S)
                assert (result["error"], f"node {1 - node} is gone" in result["text"]) == ("LaunchError", True)
                assert result["at"] - cut_at < 2 * ENDED_S + MARGIN_S
        finally:
            run.link("up")
        run.assert_gone()
    assert_saved(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_worker_fails_the_run_at_the_timeout(hosts: tuple[Host, Host], tmp_path: Path, rank: int) -> None:
    """After SIGSTOP to a worker both hosts wait for `timeout`, since it may continue, then raise."""
    with training(hosts, tmp_path, timeout=4) as run:
        stopped_at = time.time()
        os.kill(run.workers[rank], signal.SIGSTOP)
        for node in range(2):
            result = run.result(node, within_s=4 + ENDED_S)
            assert result["error"] in ("SyncError", "RuntimeError", "DistBackendError"), result
            assert f"rank {1 - rank} of 2 on node-{2 - rank}" in result["text"]
            assert f"the others: rank {rank}: stopped" in result["text"]
            assert 3 < result["at"] - stopped_at < 4 + ENDED_S + MARGIN_S
        run.assert_gone()
