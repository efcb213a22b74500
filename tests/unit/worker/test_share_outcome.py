"""Which ranks exchange outcomes with other nodes, when the function has returned."""

from __future__ import annotations

from pathlib import Path

import torch

from parallelize.call.task import Call, Task
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import Layout
from parallelize.worker.setup import held_path
from parallelize.worker.share_outcome import share_outcome


def function() -> None: ...


def test_only_the_leader_of_a_node_shares(tmp_path: Path) -> None:
    """Another rank of the node returns at once, also if it ends when the leader's outcome is already there."""
    layout = Layout(Config.parse(processes=2, num_nodes=2), 2, ((torch.device("cpu"),),) * 2)
    task = Task.of(Call(function, (), {}, layout))
    held_path(tmp_path).touch()
    share_outcome(task, World(rank=1, local_rank=1, world_size=4, local_world_size=2), tmp_path)
    assert held_path(tmp_path).exists()
