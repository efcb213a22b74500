"""Where a call runs: in this process as a rank that a launcher placed, or in processes that this one starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from parallelize.cluster.devices import Hardware
from parallelize.cluster.slurm_allocation import Allocation, allocated, sbatch_lines
from parallelize.cluster.world import Node, World, detect, detect_node
from parallelize.config.config import Config
from parallelize.config.layout import Layout, lay_out
from parallelize.errors import ConfigError, Fault

__all__ = ["Placement", "place"]


@dataclass(frozen=True)
class Placement:
    """A request laid over this machine and the world around this process.

    Args:
        layout: the processes of each node, and what they drive.
        world: the rank that a launcher has made this process; None: nobody has, it starts what is needed.
        node: with several nodes, which of them this process stands for; None: there is one, or nobody says.
    """

    layout: Layout
    world: World | None = None
    node: Node | None = None


def place(config: Config, hardware: Hardware, environ: Mapping[str, str]) -> Placement:
    """The placement of a request.

    A process that srun or mpirun has started alone on its node stands for the node if there is more to do there than
    one process can: it starts the processes itself. (torchrun's processes are workers, and stay what they are.)

    In a Slurm job, nodes and GPUs that the request leaves open are those of the allocation.

    Args:
        config: the request.
        hardware: what this node has.
        environ: variables of this process; only read.

    Raises:
        ConfigError: the request does not fit the hardware, the world or the allocation, or variables contradict each
            other.
    """
    allocation = allocated(environ)
    if allocation is None:
        return _place(config, hardware, environ)
    if allocation.gpus_on_node is not None:
        # Not every cluster hides the GPUs of other jobs.
        hardware = dataclasses.replace(hardware, count=min(hardware.count, allocation.gpus_on_node))
    try:
        placement = _place(config, hardware, environ)
    except ConfigError as error:
        raise ConfigError.of([*error.faults[:-1], _with_lines(error.faults[-1], config, allocation)]) from None
    if placement.world is None and placement.node is None:
        _check_nodes(config, allocation)
    return placement


def _place(config: Config, hardware: Hardware, environ: Mapping[str, str]) -> Placement:
    world = detect(environ)
    if world is None:
        layout = lay_out(config, hardware)
        return Placement(layout, node=detect_node(environ) if layout.num_nodes > 1 else None)
    if world.local_world_size == 1 and "RANK" not in environ and config.num_nodes in (None, world.num_nodes):
        whole = lay_out(config.changed(num_nodes=world.num_nodes), hardware)
        if whole.local_world_size > 1:
            return Placement(whole, node=Node(world.master_addr, world.master_port, world.node_rank))
    return Placement(lay_out(config, hardware, world), world)


def _check_nodes(config: Config, allocation: Allocation) -> None:
    """Several nodes need a process on each; a job script itself runs on the first alone."""
    num_nodes = config.num_nodes or allocation.num_nodes
    if num_nodes == 1:
        return
    fault = Fault(
        f"num_nodes={num_nodes} in one process of Slurm job {allocation.job_id}",
        f"the job has {allocation.num_nodes} node(s), and without srun the script runs on one of them alone",
        "start it by srun; for this node alone say num_nodes=1",
    )
    raise ConfigError.of([_with_lines(fault, config, allocation)])


def _with_lines(fault: Fault, config: Config, allocation: Allocation) -> Fault:
    gpus = config.gpus
    gpus_per_node = None if gpus is None else len(gpus.indices) if gpus.indices is not None else gpus.count
    tasks = 1 if config.backend.process_per == "node" else config.processes or gpus_per_node
    lines = sbatch_lines(
        num_nodes=config.num_nodes or allocation.num_nodes, tasks_per_node=tasks, gpus_per_node=gpus_per_node or None
    )
    return dataclasses.replace(fault, fix=f"{fault.fix}. Lines of a job script that match the request:\n{lines}")
