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
        hides_gpus: whether this task cannot open the GPUs of its node's other tasks.
    """

    job_id: str
    num_nodes: int
    gpus_on_node: int | None
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
    hides_gpus = has_several_gpus and _is_gpu_renumbered(environ)
    return Allocation(job_id, _number_of_nodes(environ), gpus_on_node, hides_gpus)


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


def _is_gpu_renumbered(environ: Mapping[str, str]) -> bool:
    """Whether this task has a GPU whose number in the task is not its number on the node.

    A task that is bound to one GPU has its number on the node in SLURM_STEP_GPUS. Slurm sets
    CUDA_VISIBLE_DEVICES to the same number, or to 0 if the task's cgroup has no other GPU. Only a
    cgroup prevents CUDA IPC.
    """
    gpu_of_task = environ.get("SLURM_STEP_GPUS", "")
    is_first = gpu_of_task == "0"
    return gpu_of_task.isdecimal() and not is_first and environ.get("CUDA_VISIBLE_DEVICES") == "0"
