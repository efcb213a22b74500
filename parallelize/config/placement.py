"""Placement of a call: in this process, as a rank that a launcher has started, or in new processes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass

from parallelize.cluster.devices import Hardware
from parallelize.cluster.environment import detect, detect_node, number_of_pods
from parallelize.cluster.slurm_allocation import Allocation, current_allocation, sbatch_lines
from parallelize.cluster.world import Node, World
from parallelize.config.config import Config, naming_variables
from parallelize.config.layout import Layout, compute_layout
from parallelize.errors import ConfigError, Fault

__all__ = ["RUN_ID", "Placement", "place"]

RUN_ID = "parallelize-"  # of a worker, with its process id


@dataclass(frozen=True)
class Placement:
    """The processes in which a call runs, and whether a launcher has already started them.

    Args:
        layout: processes of each node, and their devices.
        world: rank and sizes that a launcher has assigned to this process; None: the call starts its own processes.
        node: this node in a run of several nodes, on which this process starts the workers; None: a single node, or
            no address of node 0 in the environment.
    """

    layout: Layout
    world: World | None = None
    node: Node | None = None


def place(config: Config, hardware: Hardware, environ: Mapping[str, str]) -> Placement:
    """Return the placement of a request.

    If srun, mpirun or a pod has started one process per node and the request needs several, this process starts the
    workers of its node. A process that torchrun has started is always a worker itself.
    In a Slurm job, the number of nodes and the GPUs default to those of the allocation.

    Args:
        config: the request.
        hardware: accelerators of this node.
        environ: environment variables of this process; not modified.

    Raises:
        ConfigError: the request does not fit the hardware, the launcher or the allocation, or environment variables
            contradict each other.
    """
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    if run_id.startswith(RUN_ID) and run_id != f"{RUN_ID}{os.getpid()}":  # inherited from a worker: this is no rank
        environ = {name: value for name, value in environ.items() if name not in World().env()}
    allocation = current_allocation(environ)
    if allocation is not None and allocation.gpus_on_node is not None:
        # Some clusters do not hide the GPUs of other jobs.
        hardware = dataclasses.replace(hardware, count=min(hardware.count, allocation.gpus_on_node))
    try:
        placement = _place(config, hardware, environ)
    except ConfigError as error:
        faults = naming_variables(error, ("gpus", "processes", "num_nodes"), environ)
        if allocation is not None:
            faults[-1] = _with_sbatch_lines(faults[-1], config, allocation)
        raise ConfigError.of(faults) from None
    if allocation is not None and placement.world is None and placement.node is None:
        _check_nodes(config, allocation)
    return placement


def _place(config: Config, hardware: Hardware, environ: Mapping[str, str]) -> Placement:
    world = detect(environ)
    if world is None:
        layout = compute_layout(config.changed(num_nodes=config.num_nodes or number_of_pods(environ)), hardware)
        return Placement(layout, node=detect_node(environ) if layout.num_nodes > 1 else None)
    if world.local_world_size == 1 and not environ.get("LOCAL_RANK") and config.num_nodes in (None, world.num_nodes):
        layout = compute_layout(config.changed(num_nodes=world.num_nodes), hardware)
        if layout.local_world_size > 1:
            node = Node(world.master_addr, world.master_port, world.node_rank)
            return Placement(layout, node=node if world.num_nodes > 1 else None)
    return Placement(compute_layout(config, hardware, world), world)


def _check_nodes(config: Config, allocation: Allocation) -> None:
    """Raise ConfigError for several nodes if the script runs without srun, which means on the first node only."""
    num_nodes = config.num_nodes or allocation.num_nodes
    if num_nodes == 1:
        return
    fault = Fault(
        f"num_nodes={num_nodes} in one process of Slurm job {allocation.job_id}",
        f"the job has {allocation.num_nodes} node(s), and without srun the script runs on only one of them",
        "start it with srun; to use only this node, set num_nodes=1",
    )
    raise ConfigError.of([_with_sbatch_lines(fault, config, allocation)])


def _with_sbatch_lines(fault: Fault, config: Config, allocation: Allocation) -> Fault:
    gpus = config.gpus
    gpus_per_node = None if gpus is None else len(gpus.indices) if gpus.indices is not None else gpus.count
    tasks = config.processes or gpus_per_node
    if config.backend.process_per == "node":
        tasks = (gpus_per_node or 1) // (config.backend.devices_per_process or gpus_per_node or 1)
    lines = sbatch_lines(
        num_nodes=config.num_nodes or allocation.num_nodes, tasks_per_node=tasks, gpus_per_node=gpus_per_node or None
    )
    return dataclasses.replace(fault, fix=f"{fault.fix}. Job script lines that match the request:\n{lines}")
