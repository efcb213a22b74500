"""Doctor check: Slurm and other launchers, and the variables that they set for this process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallelize.cli.findings import Check, Finding, fault, warning
from parallelize.cluster.environment import detect
from parallelize.cluster.slurm_allocation import current_allocation
from parallelize.cluster.world import World
from parallelize.errors import ConfigError, Fault
from parallelize.launchers.slurm.commands import query

__all__ = ["CHECK", "Cluster", "gather", "judge"]

_COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Slurm's commands and job, and the launcher of this process.

    Args:
        commands: the Slurm commands that exist on this machine.
        controller: output of `scontrol ping`; None: it failed.
        job_id: ID of the Slurm job of this process; None: it runs outside of Slurm jobs.
        num_nodes: number of nodes of that job, or of its step.
        gpus_on_node: number of GPUs of that job on this node; None: Slurm does not report it.
        is_task: whether srun started this process; false in the batch script or a shell.
        placed: "rank 1 of 4" if a launcher started this process; None: no launcher did.
        contradictions: faults in the environment variables of launchers.
    """

    commands: tuple[str, ...] = ()
    controller: str | None = None
    job_id: str | None = None
    num_nodes: int = 1
    gpus_on_node: int | None = None
    is_task: bool = False
    placed: str | None = None
    contradictions: tuple[Fault, ...] = ()


def gather(environ: Mapping[str, str]) -> Cluster:
    """Look for Slurm's commands, ping its controller, and read the environment variables of launchers."""
    commands = tuple(name for name in _COMMANDS if shutil.which(name))
    allocation = current_allocation(environ)
    world: World | None = None
    contradictions: tuple[Fault, ...] = ()
    try:
        world = detect(environ)
    except ConfigError as error:
        contradictions = error.faults
    return Cluster(
        commands=commands,
        controller=query("scontrol", "ping") if "scontrol" in commands else None,
        job_id=allocation.job_id if allocation else None,
        num_nodes=allocation.num_nodes if allocation else 1,
        gpus_on_node=allocation.gpus_on_node if allocation else None,
        is_task="SLURM_STEP_ID" in environ,
        placed=f"rank {world.rank} of {world.world_size}" if world else None,
        contradictions=contradictions,
    )


def judge(facts: Cluster) -> Iterator[Finding]:
    """Yield findings about Slurm's commands and controller, a process without srun, and launchers' variables."""
    missing = [name for name in _COMMANDS if name not in facts.commands]
    if missing and (facts.commands or facts.job_id):
        yield warning(
            "slurm-commands-missing",
            f"Slurm without {', '.join(missing)}",
            why="submit, Job and the addresses of nodes need these commands",
            fix="module load slurm, or add the folder of the commands to PATH",
        )
    if "scontrol" in facts.commands and "UP" not in (facts.controller or ""):
        yield warning(
            "slurm-controller-down",
            f"Slurm's controller does not answer: {facts.controller or 'scontrol ping failed'}",
            why="no job can be submitted from this machine",
            fix="ignore this if you do not use Slurm; else ask the cluster's administrators, or check SLURM_CONF",
        )
    if facts.job_id is not None and facts.num_nodes > 1 and not facts.is_task:
        yield warning(
            "slurm-one-of-several-nodes",
            f"Slurm job {facts.job_id} has {facts.num_nodes} nodes, and srun did not start this process",
            why="a call in this process would be refused, or use this node only",
            fix="start the script with srun; srun parallelize doctor checks every node",
        )
    for each in facts.contradictions:
        yield fault("launcher-variables", each.what, why=each.why, fix=each.fix)


def _summary(facts: Cluster) -> str:
    placed = facts.placed or "not started by a launcher"
    if facts.job_id is not None:
        gpus = "" if facts.gpus_on_node is None else f", {facts.gpus_on_node} GPU(s) on this node"
        return f"{placed}, in Slurm job {facts.job_id} of {facts.num_nodes} node(s){gpus}"
    return f"{placed}, {'Slurm found' if facts.commands else 'no Slurm'}, not in a job"


CHECK = Check("cluster", gather, _summary, judge)
