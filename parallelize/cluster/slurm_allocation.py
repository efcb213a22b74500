"""Nodes and GPUs that Slurm has allocated to this process's job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallelize.cluster.world import read_integer

STOP_FILE_VARIABLE = "_PARALLELIZE_STOP_FILE"
"""Environment variable with the path of the stop file: the run should stop once the file exists.

The script of a submitted job sets it, and `should_stop` reads it in each rank.
"""


@dataclass(frozen=True)
class Allocation:
    """Resources of a Slurm job, as seen by a process in it.

    Args:
        job_id: the job's number.
        num_nodes: nodes of this process's job step, else of the job.
        gpus_on_node: GPUs of this node that belong to the job; None: Slurm counts no GPUs here.
        has_one_gpu_of_several: whether this task is bound to one of them, by --gpus-per-task or
            --gpu-bind.
        hides_gpus: whether this task cannot open the GPUs of its node's other tasks. The variables
            of the task with the first GPU do not show it.
    """

    job_id: str
    num_nodes: int
    gpus_on_node: int | None
    has_one_gpu_of_several: bool = False
    hides_gpus: bool = False


def current_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of this process; None outside of a Slurm job.

    Args:
        environ: variables of this process, as in os.environ; only read.

    Raises:
        ConfigError: a number of nodes is no integer.

    Source: https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES,
        https://slurm.schedmd.com/srun.html#OPT_SLURM_STEP_GPUS
    """
    job_id = environ.get("SLURM_JOB_ID", "").strip()
    if not job_id:
        return None
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    gpus_on_node = int(gpus) if gpus.isdecimal() else None
    has_several_gpus = gpus_on_node is not None and gpus_on_node > 1
    # Of a task that is bound to one GPU, this is the number that the GPU has on the node.
    gpu_of_task = environ.get("SLURM_STEP_GPUS", "")
    return Allocation(
        job_id,
        _number_of_nodes(environ),
        gpus_on_node,
        has_one_gpu_of_several=has_several_gpus and gpu_of_task.isdecimal(),
        hides_gpus=has_several_gpus and _is_renumbered(gpu_of_task, environ),
    )


def without_hidden_gpus(size: int) -> str:
    """Return what to write for tasks that can open each other's GPUs.

    Args:
        size: number of GPUs of a node.
    """
    return (
        f"ask for --gpus-per-node={size} or --gres=gpu:{size} without --gpus-per-task and "
        "--gpu-bind, or start the tasks by srun --gpu-bind=none"
    )


def _number_of_nodes(environ: Mapping[str, str]) -> int:
    """Return the number of nodes of this process's job step, else of the job."""
    # A one-task step inside a large job (an interactive shell) has one node, however many the job
    # has. SLURM_NNODES is also an option of srun, which users set to a range such as 2-4.
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if environ.get(name, "").strip():
            return read_integer(
                environ,
                name,
                fix=f"unset {name}, or set it to the number of nodes that the job has",
            )
    return 1


def _is_renumbered(gpu_of_task: str, environ: Mapping[str, str]) -> bool:
    """Whether a task has a GPU whose number in the task is not its number on the node.

    Slurm sets CUDA_VISIBLE_DEVICES to the number on the node, or to 0 if the task's cgroup has no
    other GPU. Only a cgroup prevents CUDA IPC.

    Args:
        gpu_of_task: the number on the node; other texts: the task is not bound to one GPU.
        environ: variables of the task.
    """
    is_first = gpu_of_task == "0"
    return gpu_of_task.isdecimal() and not is_first and environ.get("CUDA_VISIBLE_DEVICES") == "0"
