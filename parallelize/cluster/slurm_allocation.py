"""What Slurm has allocated to the job this process is in, and the job script lines that allocate something else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["STOP_FILE", "Allocation", "allocated", "sbatch_lines"]

STOP_FILE = "_PARALLELIZE_STOP_FILE"
"""Variable that names the file by which a run is told to stop: it should when the file is there."""


@dataclass(frozen=True)
class Allocation:
    """The share of a cluster that a Slurm job has, as a process in it sees it.

    Args:
        job_id: the job's number.
        num_nodes: nodes of the step this process is a task of, else of the whole job.
        gpus_on_node: GPUs of this node that belong to the job; None: Slurm does not count GPUs here.
    """

    job_id: str
    num_nodes: int
    gpus_on_node: int | None


def allocated(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation this process is in; None: it is in no Slurm job.

    Args:
        environ: variables of this process, as in os.environ; only read.

    Source: https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    """
    job_id = environ.get("SLURM_JOB_ID", "").strip()
    if not job_id:
        return None
    # A step of one task inside a large job (an interactive shell) has one node, whatever the job has.
    of_step = ("SLURM_STEP_NUM_NODES",) if environ.get("SLURM_STEP_ID") else ()
    nodes = _first_number(environ, *of_step, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    return Allocation(job_id, nodes or 1, _first_number(environ, "SLURM_GPUS_ON_NODE"))


def _first_number(environ: Mapping[str, str], *names: str) -> int | None:
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), None)


def sbatch_lines(*, num_nodes: int, tasks_per_node: int | None, gpus_per_node: int | None) -> str:
    """The lines of a job script that allocate what a request needs, and start it.

    Args:
        num_nodes: nodes of the job.
        tasks_per_node: processes that srun starts on each; None: the script already says.
        gpus_per_node: GPUs of each; None: the script already says.
    """
    wanted = {"nodes": num_nodes, "ntasks-per-node": tasks_per_node, "gpus-per-node": gpus_per_node}
    lines = [f"#SBATCH --{name}={value}" for name, value in wanted.items() if value is not None]
    return "\n".join(f"    {line}" for line in [*lines, "srun python train.py"])
