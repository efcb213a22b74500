"""Layout of a call: its processes and their devices, from a Config and what surrounds the process.

    place             what has started this process?  ->  its rank, or the node of its workers
    compute_layout    the request on this hardware    ->  devices of each local rank, or all faults

Both are pure: they read the hardware and the variables that they get, and start nothing.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallelize.cluster.devices import MASKS, Hardware
from parallelize.cluster.environment import detect, detect_node, number_of_pods
from parallelize.cluster.launcher_variables import without_launcher
from parallelize.cluster.slurm_allocation import current_allocation, without_hidden_gpus
from parallelize.cluster.world import Node, World
from parallelize.config.config import (
    NO_COLLECTIVES,
    Config,
    contradictions,
    fix_by_backend,
    naming_variables,
)
from parallelize.config.options import ALL_GPUS, gpus_text
from parallelize.errors import ConfigError, Fault

# TORCHELASTIC_RUN_ID of a worker begins with this, and ends with the worker's process id.
RUN_ID = "parallelize-"

# The devices of each local rank.
_Devices = tuple[tuple[torch.device, ...], ...]


@dataclass(frozen=True)
class Layout:
    """The processes of each node, and the devices of each process.

    Args:
        config: the request, with the fallback backend if its own cannot run on `num_nodes`.
        num_nodes: number of machines.
        devices: devices of each local rank, as the calling process numbers them; never empty.
        warnings: messages for the user, such as one about the fallback backend.
        world: rank and sizes that a launcher has assigned to this process, where nodes may differ
            in size; None: the call starts its own processes.
        node: this node in a run of several nodes, on which this process starts the workers; None:
            a single node, or no address of node 0 in the environment.
    """

    config: Config
    num_nodes: int
    devices: _Devices
    warnings: tuple[str, ...] = ()
    world: World | None = None
    node: Node | None = None

    @property
    def local_world_size(self) -> int:
        """Number of processes on this node.

        Other nodes may have more or fewer only if a launcher has started the processes.
        """
        return len(self.devices)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        if self.world is not None:
            return self.world.world_size
        return self.num_nodes * self.local_world_size

    @property
    def device_type(self) -> str:
        """torch's name for the type of the devices: "cpu", "cuda", ..."""
        return self.devices[0][0].type

    @property
    def indices(self) -> tuple[int, ...]:
        """Indices of the node's accelerators, each once, by rank; empty on the CPU."""
        indices: list[int] = []
        for devices_of_rank in self.devices:
            for device in devices_of_rank:
                if device.type != "cpu" and device.index not in indices:
                    indices.append(device.index)
        return tuple(indices)

    @property
    def process_group_backend(self) -> str:
        """Backend for `init_process_group`: the option, or else torch's with gloo for the CPU."""
        if self.config.process_group_backend is not None:
            return self.config.process_group_backend
        backend = dist.Backend.default_device_backend_map.get(self.device_type, "gloo")
        if backend == "gloo":
            return "gloo"
        return f"cpu:gloo,{self.device_type}:{backend}"

    def renumbered(self) -> Layout:
        """Return a copy for a process that sees only the devices `indices`, in this order.

        Devices and request have the numbers of that process.
        """
        if self.device_type not in MASKS:
            # No variable hides devices of this type from workers, which see the caller's numbers.
            return self
        positions = {}
        for position, index in enumerate(self.indices):
            device = torch.device(self.device_type, index)
            positions[device] = torch.device(self.device_type, position)
        devices = tuple(
            tuple(map(positions.__getitem__, devices_of_rank)) for devices_of_rank in self.devices
        )
        gpus = self.config.gpus
        if isinstance(gpus, tuple):
            gpus = tuple(self.indices.index(index) for index in gpus)
        backend = self.config.backend.renumbered(positions)
        config = dataclasses.replace(self.config, gpus=gpus, backend=backend)
        return dataclasses.replace(self, config=config, devices=devices)


def compute_layout(config: Config, hardware: Hardware, world: World | None = None) -> Layout:
    """Return the layout of a request on nodes with this hardware.

    Args:
        config: the request.
        hardware: accelerators of this node.
        world: rank and sizes that a launcher has assigned to this process, which the request must
            match; None: no launcher has started it.

    Raises:
        ConfigError: the request does not fit the hardware or the launcher; it lists all reasons.
    """
    num_nodes = config.num_nodes or 1
    if world is not None and config.num_nodes is None:
        num_nodes = world.num_nodes
    warnings: list[str] = []
    backend = config.backend
    has_too_many_nodes = backend.max_nodes is not None and num_nodes > backend.max_nodes
    if has_too_many_nodes and backend.multi_node_fallback:
        fallback = backend.multi_node_fallback
        warnings.append(
            f"backend={backend.name!r} runs on at most {backend.max_nodes} node(s): "
            f"num_nodes={num_nodes} uses {fallback!r}. Use backend={fallback!r} to silence this."
        )
        config = config.changed(backend=fallback)
    device_type = hardware.device_type
    if hardware.count == 0 or config.is_for_cpu:
        device_type = "cpu"
    if config.gpus == ALL_GPUS and config.processes is not None:
        # All GPUs, or else these processes on the CPU.
        needless = "gpus" if device_type == "cpu" else "processes"
        config = config.changed(**{needless: None})
    indices = _indices(config, hardware, world)
    devices = _devices(config, device_type, indices, world)
    missing = _missing_gpus(config, hardware.count, indices)
    if missing is not None:
        # The request is for GPUs, so what the CPU does not support is no fault of it.
        faults = [missing]
    else:
        faults = list(contradictions(config, num_nodes, device_type))
    faults += _faults_of_sizes(config, device_type, len(devices), num_nodes, world)
    if faults:
        raise ConfigError.of(faults)
    warnings += _warnings_about_gpus(config, device_type)
    return Layout(config, num_nodes, devices, tuple(warnings), world)


def _warnings_about_gpus(config: Config, device_type: str) -> Iterator[str]:
    """Yield a warning if gpus= finds no GPU, or names one several times."""
    if config.gpus == ALL_GPUS and device_type == "cpu":
        yield "gpus='auto' finds no GPU here: running on the CPU. Use processes=1 to silence this."
    if isinstance(config.gpus, tuple) and len(set(config.gpus)) < len(config.gpus):
        yield f"{gpus_text(config.gpus)} names a GPU more than once: useful for tests, but slow."


def _indices(config: Config, hardware: Hardware, world: World | None) -> Sequence[int]:
    """Return the indices of this node's GPUs; empty: it runs on the CPU.

    They are those of the request, or else as many as a launcher has started processes, or else all.

    Args:
        config: the request.
        hardware: the GPUs that this process sees.
        world: rank and sizes that a launcher has assigned to this process; None: there are none.
    """
    if config.is_for_cpu:
        return ()
    # Processes of which each needs a GPU.
    launched = 0
    if world is not None and config.backend.process_per == "device":
        launched = world.local_world_size
    # With srun --gpus-per-task=1, a task sees its own GPU as index 0, and no other of the node.
    sees_one_of_several = launched > 1 and hardware.count == 1
    gpus = config.gpus
    if isinstance(gpus, tuple):
        indices: Sequence[int] = gpus
    elif gpus is not None and gpus != ALL_GPUS:
        indices = range(gpus)
    elif launched and hardware.count and (gpus is None or sees_one_of_several):
        indices = range(launched)
    else:
        indices = range(hardware.count)
    if sees_one_of_several:
        return (0,) * len(indices)
    return indices


def _devices(
    config: Config, device_type: str, indices: Sequence[int], world: World | None
) -> _Devices:
    """Return the devices of each local rank.

    Args:
        config: the request.
        device_type: torch's name for the type of the devices.
        indices: of the GPUs, if the type is not "cpu".
        world: rank and sizes that a launcher has assigned to this process; None: there are none.

    Raises:
        ConfigError: the processes of a node cannot drive the same number of devices.
    """
    backend = config.backend
    if device_type == "cpu":
        processes = config.processes or (1 if world is None else world.local_world_size)
        if backend.process_per == "node" and backend.devices_per_process is None:
            processes = 1
        return ((torch.device("cpu"),),) * processes
    devices = [torch.device(device_type, index) for index in indices]
    if backend.process_per == "device":
        return tuple((device,) for device in devices)
    if config.gpus is None:
        devices = _devices_of_backend(backend.devices or (), devices)
    count = backend.devices_per_process or len(devices) or 1
    if len(devices) % count:
        raise ConfigError(
            f"devices_per_process={count} with {len(devices)} devices",
            why="every process drives the same number of devices",
            fix=f"use a multiple of {count} devices, or devices_per_process={len(devices)}",
        )
    starts = range(0, len(devices), count)
    return tuple(tuple(devices[start : start + count]) for start in starts)


def _devices_of_backend(names: Sequence[str], devices: list[torch.device]) -> list[torch.device]:
    """Return the devices that an option of the backend names; all of them if it names none."""
    named = set()
    for name in names:
        device = torch.device(name)
        # A name without an index, such as "cuda", stands for the first GPU.
        named.add(torch.device(device.type, device.index or 0))
    return [device for device in devices if device in named] or devices


def _missing_gpus(config: Config, count: int, indices: Sequence[int]) -> Fault | None:
    """Return the Fault of GPUs that this node lacks.

    Args:
        config: the request.
        count: number of GPUs that this process sees.
        indices: of the GPUs that are requested, or that a launcher's processes need.
    """
    missing = [index for index in indices if index >= count]
    if not missing:
        return None
    if config.gpus is None:
        return Fault(
            f"{len(indices)} processes on this node, {count} GPU(s)",
            "a launcher has started more processes here than there are GPUs, and each needs one",
            f"start {count} per node, or use gpus=0 to run on the CPU",
        )
    if count == 0:
        return Fault(
            gpus_text(config.gpus),
            "this machine has no GPU that torch can use",
            "use processes=2 to run on the CPU",
        )
    return Fault(
        gpus_text(config.gpus),
        f"this process sees {count} GPU(s), numbered from 0; the first that is missing: "
        f"{missing[0]}",
        f"use gpus={count}, or check CUDA_VISIBLE_DEVICES, or Slurm's --gpus-per-node",
    )


def _faults_of_sizes(
    config: Config, device_type: str, local_world_size: int, num_nodes: int, world: World | None
) -> Iterator[Fault]:
    """Yield a Fault if the number of processes does not fit the device, the parts, the launcher.

    Args:
        config: the request.
        device_type: torch's name for the type of the devices.
        local_world_size: number of processes that the request makes on this node.
        num_nodes: number of nodes of the request.
        world: rank and sizes that a launcher has assigned to this process; None: there are none.
    """
    requested = local_world_size * num_nodes
    if device_type in NO_COLLECTIVES and requested > 1:
        yield Fault(
            f"{requested} processes on {device_type}",
            f"torch has no collectives on {device_type}, so only one process can run there",
            "use processes=2 to run on the CPU",
        )

    # Under logical=, all processes together compute so many parts of a batch. A mean over a power
    # of two of them is exact, so that it does not depend on who computes which part.
    world_size = requested if world is None else world.world_size
    parts, rest = divmod(config.logical or world_size, world_size)
    is_power_of_two = parts > 0 and parts & (parts - 1) == 0
    if rest or not is_power_of_two:
        yield Fault(
            f"logical={config.logical} on {world_size} processes",
            "each process computes 1, 2, 4, 8, ... parts of a batch: other numbers would round "
            "otherwise",
            f"use logical={world_size} or {2 * world_size}, or another number of processes",
        )

    if world is not None:
        yield from _mismatches(config, local_world_size, num_nodes, world)


def _mismatches(
    config: Config, local_world_size: int, num_nodes: int, world: World
) -> Iterator[Fault]:
    """Yield a Fault for each size of the request that is not that of the launcher.

    Args:
        config: the request.
        local_world_size: number of processes that the request makes on this node.
        num_nodes: number of nodes of the request.
        world: what the launcher has started.
    """
    launched_as = f"a launcher has started this process as rank {world.rank} of {world.world_size}"
    if local_world_size != world.local_world_size:
        if config.backend.process_per == "node":
            alternative = fix_by_backend("", lambda backend: backend.process_per == "device")
        else:
            option = "processes" if config.processes else "gpus"
            alternative = f"use {option}={world.local_world_size}"
        yield Fault(
            f"processes per node: {local_world_size} asked for, {world.local_world_size} started",
            f"{launched_as}, with {world.local_world_size} on this node",
            f"start {local_world_size} per node (Slurm: --ntasks-per-node={local_world_size}), "
            f"or {alternative}",
        )

    if num_nodes != world.num_nodes:
        yield Fault(
            f"nodes: {num_nodes} asked for, {world.num_nodes} started",
            f"{launched_as}, on node {world.node_rank}",
            f"start it on {num_nodes} node(s) (Slurm: --nodes={num_nodes}), or omit num_nodes=",
        )


def place(config: Config, hardware: Hardware, environ: Mapping[str, str]) -> Layout:
    """Return the layout of a call, with the rank or the node that this process is in it.

        what has started this process       the request              this process
        nothing                             one node                 starts all workers
        a pod, or a script for each node    several nodes            starts those of its `node`
        srun or mpirun, one for each node   several local ranks      starts those of its `node`
        torchrun, or one for each rank      fits what has started    is a rank of `world`

    In a Slurm job, the number of nodes and the GPUs default to those of the allocation.

    Args:
        config: the request.
        hardware: accelerators of this node.
        environ: environment variables of this process; not modified.

    Raises:
        ConfigError: the request does not fit the hardware, the launcher or the allocation, or
            environment variables contradict each other.
    """
    allocation = current_allocation(environ)
    is_started_by_worker = _is_started_by_worker(environ)
    if is_started_by_worker:
        environ = without_launcher(environ)
    if allocation is not None and allocation.gpus_on_node is not None:
        # Some clusters do not hide the GPUs of other jobs.
        count = min(hardware.count, allocation.gpus_on_node)
        hardware = Hardware(hardware.device_type, count)
    try:
        layout = _layout_by_launcher(config, hardware, environ)
    except ConfigError as error:
        raise naming_variables(error, environ) from None
    if allocation is None or is_started_by_worker:
        return layout

    if allocation.hides_gpus and _warns_for_its_node(layout, hardware):
        warnings = (*layout.warnings, _hidden_gpus_warning(layout))
        layout = dataclasses.replace(layout, warnings=warnings)
    num_nodes = config.num_nodes or allocation.num_nodes
    if layout.world is None and layout.node is None and num_nodes > 1:
        raise ConfigError(
            f"num_nodes={num_nodes} in one process of Slurm job {allocation.job_id}",
            why=f"the job has {allocation.num_nodes} node(s), and without srun the script runs on "
            "only one of them",
            fix=f"start it as srun --nodes={num_nodes} "
            f"--ntasks-per-node={layout.local_world_size} python train.py; "
            "to use only this node, set num_nodes=1",
        )
    return layout


def _is_started_by_worker(environ: Mapping[str, str]) -> bool:
    """Whether a worker has started this program, which inherits its variables, and is no rank."""
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    return run_id.startswith(RUN_ID) and run_id != f"{RUN_ID}{os.getpid()}"


def _warns_for_its_node(layout: Layout, hardware: Hardware) -> bool:
    """Return whether this rank, of those that see one GPU each, warns of the hidden ones.

    It is the second rank of the first node. The first rank's GPU often has the number 0 on the node
    as well as in its cgroup, which shows nothing.
    """
    world = layout.world
    is_second = world is not None and world.node_rank == 0 and world.local_rank == 1
    return is_second and hardware.count == 1 and layout.device_type != "cpu"


def _hidden_gpus_warning(layout: Layout) -> str:
    size = layout.local_world_size
    return (
        f"Slurm lets each of the {size} processes of a node open its own GPU only "
        "(--gpus-per-task, --gpu-bind): NCCL cannot use NVLink between them, and copies through "
        f"the host. To avoid that, {without_hidden_gpus(size)}."
    )


def _layout_by_launcher(config: Config, hardware: Hardware, environ: Mapping[str, str]) -> Layout:
    """Return the layout by what the launcher's variables say; `place` draws the cases."""
    world = detect(environ)
    if world is None:
        num_nodes = config.num_nodes or number_of_pods(environ)
        layout = compute_layout(config.changed(num_nodes=num_nodes), hardware)
        if layout.num_nodes > 1:
            layout = dataclasses.replace(layout, node=detect_node(environ))
        return layout
    # torchrun sets LOCAL_RANK. What it has started is always a worker itself.
    is_alone_on_node = world.local_world_size == 1 and not environ.get("LOCAL_RANK")
    if is_alone_on_node and config.num_nodes in (None, world.num_nodes):
        layout = compute_layout(config.changed(num_nodes=world.num_nodes), hardware)
        if layout.local_world_size > 1:
            return dataclasses.replace(layout, node=_node_of(world))
    return compute_layout(config, hardware, world)


def _node_of(world: World) -> Node | None:
    """Return the node of a process that is alone on it; None: it is the only node."""
    if world.num_nodes == 1:
        return None
    return Node(world.master_addr, world.master_port, world.node_rank)
