"""Layout of a call, its processes and their devices: from a Config, the hardware, and what has started this process."""

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
from parallelize.cluster.slurm_allocation import current_allocation
from parallelize.cluster.world import Node, World
from parallelize.config.config import NO_COLLECTIVES, Config, contradictions, naming_variables, use
from parallelize.config.options import ALL_GPUS, gpus_text
from parallelize.errors import ConfigError, Fault

RUN_ID = "parallelize-"  # of a worker, with its process id

_Devices = tuple[tuple[torch.device, ...], ...]  # of each local rank


@dataclass(frozen=True)
class Layout:
    """The processes of each node, and the devices of each process.

    Args:
        config: the request, with the fallback backend if its own backend cannot run on `num_nodes`.
        num_nodes: number of machines.
        devices: devices of each local rank, numbered as the calling process sees them; never empty.
        warnings: messages for the user, such as one about the fallback backend.
        world: rank and sizes that a launcher has assigned to this process; None: the call starts its own processes.
            Nodes may differ in size.
        node: this node in a run of several nodes, on which this process starts the workers; None: a single node, or
            no address of node 0 in the environment.
    """

    config: Config
    num_nodes: int
    devices: _Devices
    warnings: tuple[str, ...] = ()
    world: World | None = None
    node: Node | None = None

    @property
    def local_world_size(self) -> int:
        """Number of processes on this node; other nodes may differ only if a launcher has started the processes."""
        return len(self.devices)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return (
            self.num_nodes * self.local_world_size if self.world is None else self.world.world_size
        )

    @property
    def device_type(self) -> str:
        """torch's name for the type of the devices: "cpu", "cuda", ..."""
        return self.devices[0][0].type

    @property
    def indices(self) -> tuple[int, ...]:
        """Indices of the node's accelerators, each once, in the order of their ranks; empty on the CPU."""
        flat = (
            device.index for devices in self.devices for device in devices if device.type != "cpu"
        )
        return tuple(dict.fromkeys(flat))

    @property
    def process_group_backend(self) -> str:
        """Backend for `init_process_group`: the option if set, else chosen by device type, with gloo for the CPU."""
        kind = self.device_type
        backend = dist.Backend.default_device_backend_map.get(kind, "gloo")
        default = "gloo" if backend == "gloo" else f"cpu:gloo,{kind}:{backend}"
        return self.config.process_group_backend or default

    def renumbered(self) -> Layout:
        """Return a copy for a process that sees only `indices`, in this order: devices and request in its numbers."""
        kind = self.device_type
        if kind not in MASKS:  # no variable hides devices of this type from workers
            return self
        positions = {
            torch.device(kind, index): torch.device(kind, new)
            for new, index in enumerate(self.indices)
        }
        devices = tuple(tuple(positions[each] for each in driven) for driven in self.devices)
        gpus = self.config.gpus
        if isinstance(gpus, tuple):
            gpus = tuple(map(self.indices.index, gpus))
        config = dataclasses.replace(
            self.config, gpus=gpus, backend=self.config.backend.renumbered(positions)
        )
        return dataclasses.replace(self, config=config, devices=devices)


def compute_layout(config: Config, hardware: Hardware, world: World | None = None) -> Layout:
    """Return the layout of a request on nodes with this hardware.

    Args:
        config: the request.
        hardware: accelerators of this node.
        world: rank and sizes that a launcher has assigned to this process, if any; the request must match them.

    Raises:
        ConfigError: the request does not fit the hardware or the launcher; the error lists all reasons.
    """
    num_nodes, warnings = config.num_nodes or (1 if world is None else world.num_nodes), list[str]()
    backend = config.backend
    if backend.multi_node_fallback and num_nodes > (backend.max_nodes or num_nodes):
        other = backend.multi_node_fallback
        most = f"backend={backend.name!r} runs on at most {backend.max_nodes} node(s)"
        warnings.append(
            f"{most}: num_nodes={num_nodes} uses {other!r}. Use backend={other!r} to silence this."
        )
        config = config.changed(backend=other)
    device_type = "cpu" if hardware.count == 0 or config.is_for_cpu else hardware.device_type
    if (
        config.gpus == ALL_GPUS and config.processes is not None
    ):  # all GPUs, or else these processes
        config = config.changed(**({"gpus": None} if device_type == "cpu" else {"processes": None}))
    indices = _indices(config, hardware, world)
    devices = _devices(config, device_type, indices, world)
    # If requested GPUs are missing, do not also report options that the CPU does not support.
    missing = _missing_gpus(config, hardware.count, indices)
    faults = [missing] if missing else list(contradictions(config, num_nodes, device_type))
    size = len(devices) * num_nodes
    if device_type in NO_COLLECTIVES and size > 1:
        why = f"torch has no collectives on {device_type}, so only one process can run there"
        faults.append(
            Fault(f"{size} processes on {device_type}", why, "use processes=2 to run on the CPU")
        )
    of_all = size if world is None else world.world_size
    share, rest = divmod(config.logical or of_all, of_all)
    if rest or share & (share - 1):
        faults.append(
            Fault(
                f"logical={config.logical} on {of_all} processes",
                "each process computes 1, 2, 4, 8, ... parts of a batch: other numbers would round otherwise",
                f"use logical={of_all} or {2 * of_all}, or another number of processes",
            )
        )
    if world is not None:
        faults += _mismatches(config, len(devices), num_nodes, world)
    if faults:
        raise ConfigError.of(faults)
    if config.gpus == ALL_GPUS and device_type == "cpu":
        warnings.append(
            "gpus='auto' finds no GPU here: running on the CPU. Use processes=1 to silence this."
        )
    if isinstance(config.gpus, tuple) and len(set(config.gpus)) < len(config.gpus):
        warnings.append(
            f"{gpus_text(config.gpus)} names a GPU more than once: useful for tests, but slow."
        )
    return Layout(config, num_nodes, devices, tuple(warnings), world)


def _indices(config: Config, hardware: Hardware, world: World | None) -> Sequence[int]:
    """Return the indices of the node's GPUs, as requested, else as many as a launcher has started processes."""
    gpus, count = config.gpus, hardware.count
    launched = (
        0 if world is None or config.backend.process_per == "node" else world.local_world_size
    )
    # With srun --gpus-per-task=1, each task sees one GPU, as index 0; the node's other GPUs are hidden.
    sees_only_own = launched > 1 and count == 1
    if config.is_for_cpu:
        return ()
    if launched and count and (gpus is None or (gpus == ALL_GPUS and sees_only_own)):
        count = launched
    if not isinstance(gpus, tuple):
        gpus = tuple(range(count if gpus is None or gpus == ALL_GPUS else gpus))
    return (0,) * len(gpus) if sees_only_own else gpus


def _devices(
    config: Config, device_type: str, indices: Sequence[int], world: World | None
) -> _Devices:
    backend = config.backend
    if device_type == "cpu":
        is_one = backend.process_per == "node" and backend.devices_per_process is None
        launched = 1 if world is None else world.local_world_size
        return ((torch.device("cpu"),),) * (1 if is_one else config.processes or launched)
    devices = tuple(torch.device(device_type, index) for index in indices)
    if backend.process_per == "device":
        return tuple((each,) for each in devices)
    names = () if config.gpus is not None else backend.devices or ()
    named = {
        torch.device(name)
        for each in names
        for name in ([each] if ":" in each else [each, f"{each}:0"])
    }
    devices = tuple(each for each in devices if each in named) or devices
    count = backend.devices_per_process or len(devices) or 1
    if len(devices) % count:
        raise ConfigError(
            f"devices_per_process={count} with {len(devices)} devices",
            why="every process drives as many devices",
            fix=f"use a multiple of {count} devices, or devices_per_process={len(devices)}",
        )
    return tuple(devices[first : first + count] for first in range(0, len(devices), count))


def _missing_gpus(config: Config, count: int, indices: Sequence[int]) -> Fault | None:
    """Return the Fault of GPUs that do not exist; they are requested, or a launcher has started as many processes."""
    missing = [index for index in indices if index >= count]
    if not missing:
        return None
    if config.gpus is None:
        return Fault(
            f"{len(indices)} processes on this node, {count} GPU(s)",
            "a launcher has started more processes here than there are GPUs, and each needs its own",
            f"start {count} per node, or use gpus=0 to run on the CPU",
        )
    what = gpus_text(config.gpus)
    if count == 0:
        return Fault(
            what, "this machine has no GPU that torch can use", "use processes=2 to run on the CPU"
        )
    why = f"this process sees {count} GPU(s), numbered from 0; the first that is missing: {missing[0]}"
    return Fault(
        what, why, f"use gpus={count}, or check CUDA_VISIBLE_DEVICES, or Slurm's --gpus-per-node"
    )


def _mismatches(config: Config, processes: int, num_nodes: int, world: World) -> Iterator[Fault]:
    launched_as = f"a launcher has started this process as rank {world.rank} of {world.world_size}"
    if processes != world.local_world_size:
        is_per_node = config.backend.process_per == "node"
        same = f"{'processes' if config.processes else 'gpus'}={world.local_world_size}"
        yield Fault(
            f"processes per node: {processes} asked for, {world.local_world_size} started",
            f"{launched_as}, with {world.local_world_size} on this node",
            f"start {processes} per node (Slurm: --ntasks-per-node={processes}), or "
            + use(
                "" if is_per_node else same,
                lambda other: is_per_node and other.process_per == "device",
            ),
        )
    if num_nodes != world.num_nodes:
        yield Fault(
            f"nodes: {num_nodes} asked for, {world.num_nodes} started",
            f"{launched_as}, on node {world.node_rank}",
            f"start it on {num_nodes} node(s) (Slurm: --nodes={num_nodes}), or omit num_nodes=",
        )


def place(config: Config, hardware: Hardware, environ: Mapping[str, str]) -> Layout:
    """Return the layout of a call, with the rank or the node that this process is in it.

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
    allocation = current_allocation(environ)
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    # A worker has started this process, which is no rank, and has inherited the variables.
    is_of_worker = run_id.startswith(RUN_ID) and run_id != f"{RUN_ID}{os.getpid()}"
    if is_of_worker:
        environ = without_launcher(environ)
    if allocation is not None and allocation.gpus_on_node is not None:
        # Some clusters do not hide the GPUs of other jobs.
        hardware = Hardware(hardware.device_type, min(hardware.count, allocation.gpus_on_node))
    try:
        layout = _place(config, hardware, environ)
    except ConfigError as error:
        raise naming_variables(error, environ) from None
    if allocation is not None and allocation.hides_gpus and _warns_for_its_node(layout, hardware):
        layout = dataclasses.replace(
            layout, warnings=(*layout.warnings, _hidden_gpus_warning(layout))
        )
    has_place = layout.world is not None or layout.node is not None
    if allocation is None or has_place or is_of_worker:
        return layout
    num_nodes = config.num_nodes or allocation.num_nodes
    if num_nodes > 1:
        raise ConfigError(
            f"num_nodes={num_nodes} in one process of Slurm job {allocation.job_id}",
            why=f"the job has {allocation.num_nodes} node(s), and without srun the script runs on only one of them",
            fix=f"start it as srun --nodes={num_nodes} --ntasks-per-node={layout.local_world_size} python train.py; "
            "to use only this node, set num_nodes=1",
        )
    return layout


def _warns_for_its_node(layout: Layout, hardware: Hardware) -> bool:
    """Return whether this rank, of those that see one GPU each, warns of the hidden ones.

    It is the second rank of the first node: the first one's GPU often has the number 0 on the node as well as in its
    cgroup, which shows nothing.
    """
    world = layout.world
    is_second = world is not None and world.node_rank == 0 and world.local_rank == 1
    return is_second and hardware.count == 1 and layout.device_type != "cpu"


def _hidden_gpus_warning(layout: Layout) -> str:
    size = layout.local_world_size
    return (
        f"Slurm lets each of the {size} processes of a node open its own GPU only (--gpus-per-task, --gpu-bind): NCCL "
        f"cannot use NVLink between them, and copies through the host. Ask for --gpus-per-node={size} or "
        f"--gres=gpu:{size} without --gpus-per-task and --gpu-bind, or start the tasks by srun --gpu-bind=none."
    )


def _place(config: Config, hardware: Hardware, environ: Mapping[str, str]) -> Layout:
    world = detect(environ)
    if world is None:
        layout = compute_layout(
            config.changed(num_nodes=config.num_nodes or number_of_pods(environ)), hardware
        )
        return dataclasses.replace(
            layout, node=detect_node(environ) if layout.num_nodes > 1 else None
        )
    is_alone = world.local_world_size == 1 and not environ.get(
        "LOCAL_RANK"
    )  # on its node, and not by torchrun
    if is_alone and config.num_nodes in (None, world.num_nodes):
        layout = compute_layout(config.changed(num_nodes=world.num_nodes), hardware)
        if layout.local_world_size > 1:
            node = Node(world.master_addr, world.master_port, world.node_rank)
            return dataclasses.replace(layout, node=node if world.num_nodes > 1 else None)
    return compute_layout(config, hardware, world)
