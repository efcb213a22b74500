"""Nodes and GPUs that Slurm has allocated to this process's job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["STOP_FILE_VARIABLE", "Allocation", "current_allocation"]

STOP_FILE_VARIABLE = "_PARALLELIZE_STOP_FILE"
"""Environment variable with the path of the stop file: the run should stop once the file exists."""


@dataclass(frozen=True)
class Allocation:
    """Resources of a Slurm job, as seen by a process in it.

    Args:
        job_id: the job's number.
        num_nodes: nodes of this process's job step, else of the job.
        gpus_on_node: GPUs of this node that belong to the job; None: Slurm does not count GPUs here.
    """

    job_id: str
    num_nodes: int
    gpus_on_node: int | None


def current_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of this process; None outside of a Slurm job.

    Args:
        environ: variables of this process, as in os.environ; only read.

    Source: https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    """
    job_id = environ.get("SLURM_JOB_ID", "").strip()
    if not job_id:
        return None
    # A one-task step inside a large job (an interactive shell) has one node, however many the job has.
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    return Allocation(job_id, int(nodes), int(gpus) if gpus.isdecimal() else None)
