"""A run on two nodes that loses a worker resumes on both from its last checkpoint."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, signal, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from parallelize import checkpoints, distributed, parallel_model, rank, shard_loader

def train(folder, kill):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1))
    first = None
    with parallel_model(model):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        loader = shard_loader(DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=2, shuffle=True))
        with checkpoints(folder, every=2, model=model, optimizer=optimizer, loader=loader) as saved:
            first = saved.steps
            for _ in range(loader.epoch, 2):
                for (x,) in loader:
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
                    saved.step()
                    if kill and first == 0 and saved.steps == 5 and rank() == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
    return first, [each.tolist() for each in model.parameters()]

folder, options = sys.argv[1], json.loads(sys.argv[2])
print(json.dumps(distributed(seed=1, max_restarts=1, **options)(train)(folder, "num_nodes" in options)))
"""


@pytest.mark.soak
def test_both_nodes_resume_from_the_last_file(tmp_path: Path) -> None:
    """After a kill on node 1 after step 5, both resume from step 4 and end with the weights of a run on one node."""
    (tmp_path / "script.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def start(folder: str, options: dict[str, int], node: int) -> subprocess.Popen[str]:
        command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / folder), json.dumps(options)]
        # A single node needs no rendezvous address.
        variables = {**environ, "NODE_RANK": str(node)} if "num_nodes" in options else dict(os.environ)
        return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)

    nodes = [start("two", {"num_nodes": 2, "processes": 1}, node) for node in range(2)]
    results = [json.loads(each.communicate(timeout=240)[0]) for each in nodes]
    single = json.loads(start("one", {"processes": 2}, 0).communicate(timeout=240)[0])
    assert [first for first, _ in results] == [4, 4]
    assert single[0] == 0
    assert results[0][1] == results[1][1] == single[1]
