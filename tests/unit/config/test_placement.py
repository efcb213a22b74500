"""Where a call runs: as the rank a launcher placed, or in processes that this one starts."""

from __future__ import annotations

import pytest

from parallelize.cluster.devices import Hardware
from parallelize.cluster.world import Node
from parallelize.config.config import Config
from parallelize.config.placement import place
from parallelize.errors import ConfigError

CPU, EIGHT = Hardware(), Hardware("cuda", 8)

# One task per node of two, as srun sets it.
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}


def test_nobody_launched_it() -> None:
    """Without a launcher's variables this process starts what is needed, on one node."""
    placement = place(Config.parse(processes=2), CPU, {})
    assert (placement.world, placement.node, placement.layout.world_size) == (None, None, 2)


def test_seeds_variables_name_the_node() -> None:
    """MASTER_ADDR, MASTER_PORT and NODE_RANK with num_nodes: one node of several."""
    environ = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400", "NODE_RANK": "1"}
    placement = place(Config.parse(processes=2, num_nodes=2), CPU, environ)
    assert placement.node == Node("10.0.0.1", 29400, 1)
    assert placement.layout.world_size == 4


def test_seeds_variables_without_nodes_are_ignored() -> None:
    """A left-over MASTER_ADDR changes nothing for a call on one node."""
    placement = place(Config.parse(processes=2), CPU, {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"})
    assert placement.node is None


@pytest.mark.parametrize("options", [{"gpus": 8, "num_nodes": 2}, {"gpus": 8}, {}], ids=["both", "gpus", "none"])
def test_one_task_per_node_stands_for_its_eight_gpus(options: dict[str, int]) -> None:
    """srun's only task on a node of eight GPUs starts eight processes, by default too."""
    placement = place(Config.parse(**options), EIGHT, SRUN)
    assert placement.world is None
    assert placement.node == Node("10.0.0.1", 29400, 1)
    assert (placement.layout.num_nodes, placement.layout.local_world_size) == (2, 8)


def test_one_task_per_node_with_one_device_joins() -> None:
    """Where a node has work for one process only, the task is that process."""
    placement = place(Config.parse(gpus=1), EIGHT, SRUN)
    assert placement.world is not None
    assert (placement.world.rank, placement.layout.world_size) == (1, 2)


def test_torchruns_only_worker_stays_a_worker() -> None:
    """torchrun with one worker per node has decided that there is one."""
    placement = place(Config.parse(), EIGHT, TORCHRUN)
    assert placement.world is not None
    assert placement.layout.local_world_size == 1


def test_other_number_of_nodes_is_refused() -> None:
    """num_nodes=3 in a step of two nodes: both numbers are named."""
    with pytest.raises(ConfigError, match=r"nodes: 3 asked for, 2 started"):
        place(Config.parse(gpus=8, num_nodes=3), EIGHT, SRUN)
