"""Slurm and other launchers: whether this process is in a job, and what it has been told."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallelize.cli.findings import Check, Finding, fault, warning
from parallelize.cluster.slurm_allocation import allocated
from parallelize.cluster.world import World, detect
from parallelize.errors import ConfigError, Fault
from parallelize.launchers.slurm.commands import query

__all__ = ["CHECK", "Cluster", "gather", "judge"]

_COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What is known of a cluster.

    Args:
        commands: Slurm's, as far as they are found.
        controller: what `scontrol ping` says; None: it does not answer.
        job_id: of the Slurm job this process is in; None: in none.
        num_nodes: nodes of that job, or of its step.
        gpus_on_node: of that job, here; None: Slurm does not count them.
        is_task: whether srun has started this process, and not the job's script or a shell.
        placed: "rank 1 of 4", where a launcher has placed this process; None: nobody has.
        contradictions: what is wrong with the variables of launchers.
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
    """Look for Slurm's commands, ask its controller, read the variables of launchers."""
    commands = tuple(name for name in _COMMANDS if shutil.which(name))
    allocation = allocated(environ)
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
    """A cluster that is there in part, or not to be reached; launchers that contradict themselves."""
    absent = [name for name in _COMMANDS if name not in facts.commands]
    if absent and (facts.commands or facts.job_id):
        yield warning(
            "slurm-commands-missing",
            f"Slurm without {', '.join(absent)}",
            why="submit, Job and the addresses of nodes are had by these commands",
            fix="module load slurm, or add their folder to PATH",
        )
    if "scontrol" in facts.commands and "UP" not in (facts.controller or ""):
        yield warning(
            "slurm-controller-down",
            f"Slurm's controller does not answer: {facts.controller or 'scontrol ping failed'}",
            why="nothing can be submitted from here",
            fix="without a cluster this does no harm; else ask its operators, or check SLURM_CONF",
        )
    if facts.job_id is not None and facts.num_nodes > 1 and not facts.is_task:
        yield warning(
            "slurm-one-of-several-nodes",
            f"Slurm job {facts.job_id} has {facts.num_nodes} nodes, and this process is on one of them alone",
            why="a call here would be refused, or use this node only",
            fix="start the script by srun; srun parallelize doctor looks at every node",
        )
    for each in facts.contradictions:
        yield fault("launcher-variables", each.what, why=each.why, fix=each.fix)


def _summary(facts: Cluster) -> str:
    placed = facts.placed or "started by no launcher"
    if facts.job_id is not None:
        gpus = "" if facts.gpus_on_node is None else f", {facts.gpus_on_node} GPU(s) here"
        return f"{placed}, in Slurm job {facts.job_id} of {facts.num_nodes} node(s){gpus}"
    return f"{placed}, {'Slurm found' if facts.commands else 'no Slurm'}, in no job"


CHECK = Check("cluster", gather, _summary, judge)
