"""Placement inside a Slurm job, with variables recorded on a real two-node cluster (Slurm 22.05)."""

from __future__ import annotations

import pytest

from parallelize.cluster.devices import Hardware
from parallelize.cluster.slurm_allocation import Allocation, current_allocation
from parallelize.cluster.world import World
from parallelize.config.config import Config
from parallelize.config.layout import place
from parallelize.errors import ConfigError

# A batch script of `sbatch --nodes=2 --ntasks-per-node=2 --gres=gpu:2`, which runs on the first node.
BATCH = {
    "SLURM_JOB_ID": "65",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_GPUS_ON_NODE": "2",
}
# Task 2 of srun in it.
TASK = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
# `srun -N1 -n1 --pty bash` in it.
SHELL = {**BATCH, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}
# The second task of `srun --gpus-per-task=1` or `--gpu-bind=single:1` on the first node; in a cgroup its GPU is 0.
BOUND = {**TASK, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_GPUS": "1"}
ISOLATED = {**BOUND, "CUDA_VISIBLE_DEVICES": "0"}
MASKED = {**BOUND, "CUDA_VISIBLE_DEVICES": "1"}
CPU, ONE_GPU, TWO_GPUS, EIGHT_GPUS = Hardware(), Hardware("cuda", 1), Hardware("cuda", 2), Hardware("cuda", 8)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": " "}, None),
        (BATCH, Allocation("65", 2, 2)),
        (TASK, Allocation("65", 2, 2)),
        (SHELL, Allocation("65", 1, 2)),
        (ISOLATED, Allocation("65", 2, 2, has_one_gpu_of_several=True, hides_gpus=True)),
        (MASKED, Allocation("65", 2, 2, has_one_gpu_of_several=True)),
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "3"}, Allocation("7", 3, None)),
        ({"SLURM_JOB_ID": "7"}, Allocation("7", 1, None)),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_NNODES": "2-4"}, Allocation("7", 3, None)),
    ],
)
def test_the_allocation_is_read(environ: dict[str, str], expected: Allocation | None) -> None:
    """The number of nodes is the step's inside a step, else the job's."""
    assert current_allocation(environ) == expected


def test_a_range_of_nodes_is_an_error_that_names_the_variable() -> None:
    """SLURM_NNODES is an option of srun, too, which may be a range; it counts if the job's own number is missing."""
    with pytest.raises(ConfigError, match="SLURM_NNODES='2-4'"):
        current_allocation({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2-4"})


def test_the_layout_takes_nodes_and_gpus_from_the_allocation() -> None:
    """A task is a rank on all of it; a shell by `srun --pty` starts its processes, on as many GPUs as the job has."""
    layout = place(Config.parse(), TWO_GPUS, TASK)
    assert layout.world is not None
    assert (layout.world.rank, layout.num_nodes, layout.local_world_size) == (2, 2, 2)
    assert place(Config.parse(), EIGHT_GPUS, SHELL).local_world_size == 2
    layout = place(Config.parse(processes=2), CPU, SHELL)
    assert (layout.world, layout.node, layout.num_nodes) == (None, None, 1)


def test_what_a_worker_starts_is_no_task_of_its_step() -> None:
    """A program that a worker starts makes a call of its own, on this node, with the GPUs of the job."""
    world = World(rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2, master_addr="n1")
    one_per_node = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    of_worker = {"TORCHELASTIC_RUN_ID": "parallelize-1", **world.env()}
    for task in (TASK, {**TASK, **one_per_node}):
        layout = place(Config.parse(), EIGHT_GPUS, {**task, **of_worker})
        assert (layout.world, layout.node, layout.num_nodes, layout.local_world_size) == (None, None, 1, 2)


def test_hidden_gpus_are_named_once() -> None:
    """One rank of the run says which options let NCCL reach the node's other GPUs."""
    (warning,) = place(Config.parse(), ONE_GPU, ISOLATED).warnings
    assert "Slurm lets each of the 2 processes of a node open its own GPU only" in warning
    assert "--gpus-per-node=2 or --gres=gpu:2 without" in warning


@pytest.mark.parametrize(
    ("environ", "hardware"),
    [
        pytest.param({**ISOLATED, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, ONE_GPU, id="the node's first rank"),
        pytest.param({**ISOLATED, "SLURM_PROCID": "3", "SLURM_NODEID": "1"}, ONE_GPU, id="the next node"),
        pytest.param(MASKED, ONE_GPU, id="bound without cgroups"),
        pytest.param({**BOUND, "SLURM_STEP_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "0"}, ONE_GPU, id="a mask by hand"),
        pytest.param({**BOUND, "SLURM_STEP_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}, TWO_GPUS, id="not bound"),
        pytest.param({**ISOLATED, "SLURM_GPUS_ON_NODE": "1"}, ONE_GPU, id="one GPU on the node"),
        pytest.param(ISOLATED, CPU, id="a run on the CPU"),
    ],
)
def test_gpus_that_are_not_hidden(environ: dict[str, str], hardware: Hardware) -> None:
    """Other ranks, masks that leave CUDA IPC to NCCL, and steps whose tasks see all GPUs are not warned."""
    assert place(Config.parse(), hardware, environ).warnings == ()


def test_a_job_script_without_srun_is_refused_on_several_nodes() -> None:
    """The error has the job's number and the line to use; its own node, or a rendezvous of the user, is accepted."""
    message = "(?s)in one process of Slurm job 65.*start it as srun --nodes=2 --ntasks-per-node=2 python train.py"
    for options in ({}, {"num_nodes": 2}):
        with pytest.raises(ConfigError, match=message):
            place(Config.parse(processes=2, **options), CPU, BATCH)
    assert place(Config.parse(processes=2, num_nodes=1), CPU, BATCH).world_size == 2
    rendezvous = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"}
    assert place(Config.parse(processes=2, num_nodes=2), CPU, {**BATCH, **rendezvous}).node is not None


def test_a_mismatch_with_the_tasks_names_the_options_of_srun() -> None:
    """A request for four GPUs on three nodes where srun started two tasks on each of two fails with what to set."""
    with pytest.raises(ConfigError) as refused:
        place(Config.parse(gpus=4, num_nodes=3), EIGHT_GPUS, {**TASK, "SLURM_GPUS_ON_NODE": "8"})
    tasks, nodes = refused.value.faults
    assert (tasks.what, nodes.what) == ("processes per node: 4 asked for, 2 started", "nodes: 3 asked for, 2 started")
    assert "--ntasks-per-node=4" in tasks.fix
    assert "--nodes=3" in nodes.fix


def test_too_few_gpus_name_the_option_of_slurm() -> None:
    """A request for four GPUs in an allocation of two fails with the option that gives them."""
    with pytest.raises(ConfigError, match=r"this process sees 2 GPU(.|\n)*--gpus-per-node"):
        place(Config.parse(gpus=4), EIGHT_GPUS, SHELL)
