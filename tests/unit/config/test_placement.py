"""Placement of a call: as a launcher's rank, or in processes to be started."""

from __future__ import annotations

import pytest

from parallelize.cluster.devices import Hardware
from parallelize.cluster.world import Node
from parallelize.config.config import Config
from parallelize.config.layout import place
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


def test_no_launcher() -> None:
    """Without a launcher's variables this process starts the processes, on one node."""
    layout = place(Config.parse(processes=2), CPU, {})
    assert (layout.world, layout.node, layout.world_size) == (None, None, 2)


def test_variables_of_one_node() -> None:
    """MASTER_ADDR, MASTER_PORT and NODE_RANK with num_nodes=2 make this process one node of two."""
    environ = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400", "NODE_RANK": "1"}
    layout = place(Config.parse(processes=2, num_nodes=2), CPU, environ)
    assert layout.node == Node("10.0.0.1", 29400, 1)
    assert layout.world_size == 4


def test_variables_are_ignored_on_one_node() -> None:
    """A leftover MASTER_ADDR changes nothing for a call on one node."""
    layout = place(Config.parse(processes=2), CPU, {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"})
    assert layout.node is None


def test_a_request_of_the_environment_is_named() -> None:
    """A request that does not fit the machine names the variables that may have made it."""
    with pytest.raises(ConfigError, match=r"no GPU .*\(the environment has PARALLELIZE_AMP=1, PARALLELIZE_GPUS=4\)"):
        place(Config.parse(gpus=4), CPU, {"PARALLELIZE_GPUS": "4", "PARALLELIZE_AMP": "1"})


@pytest.mark.parametrize("options", [{"gpus": 8, "num_nodes": 2}, {"gpus": 8}, {}], ids=["both", "gpus", "none"])
def test_one_task_per_node_starts_eight_workers(options: dict[str, int]) -> None:
    """srun's only task on a node of eight GPUs starts eight processes, also by default."""
    layout = place(Config.parse(**options), EIGHT, SRUN)
    assert layout.world is None
    assert layout.node == Node("10.0.0.1", 29400, 1)
    assert (layout.num_nodes, layout.local_world_size) == (2, 8)


def test_one_task_per_node_with_one_device_joins() -> None:
    """If the request needs one process per node, srun's task is that process."""
    layout = place(Config.parse(gpus=1), EIGHT, SRUN)
    assert layout.world is not None
    assert (layout.world.rank, layout.world_size) == (1, 2)


def test_torchruns_only_worker_starts_no_others() -> None:
    """torchrun's only worker on a node of eight GPUs runs the call itself."""
    layout = place(Config.parse(), EIGHT, TORCHRUN)
    assert layout.world is not None
    assert layout.local_world_size == 1


def test_another_number_of_nodes_is_refused() -> None:
    """The error of num_nodes=3 in a step of two nodes has both numbers."""
    with pytest.raises(ConfigError, match=r"nodes: 3 asked for, 2 started"):
        place(Config.parse(gpus=8, num_nodes=3), EIGHT, SRUN)
