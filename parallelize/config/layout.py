"""Which processes run, and on which devices: a Config laid over the hardware of a node and the world around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallelize.cluster.devices import Gpus, Hardware
from parallelize.cluster.world import World
from parallelize.config.compatibility import backends, dtype_faults, node_faults, use
from parallelize.config.config import Config
from parallelize.config.options import carriers
from parallelize.errors import ConfigError, Fault
from parallelize.plugins import registry

__all__ = ["Layout", "lay_out"]

# Devices on which one process runs alone, whatever the backend: torch has no collectives for them.
_ALONE = frozenset({"mps"})


@dataclass(frozen=True)
class Layout:
    """The processes of each node, and what each drives.

    Args:
        config: the request, with what was changed on the user's behalf.
        num_nodes: machines.
        devices: for each local rank the devices it drives, numbered as the calling process sees them; never empty.
        warnings: what was changed on the user's behalf, a sentence each.
        world: where a launcher has placed this process, if one has; its nodes may differ in size.
    """

    config: Config
    num_nodes: int
    devices: tuple[tuple[torch.device, ...], ...]
    warnings: tuple[str, ...] = ()
    world: World | None = None

    @property
    def local_world_size(self) -> int:
        """Processes on this node; on each node, unless a launcher has placed them otherwise."""
        return len(self.devices)

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.num_nodes * self.local_world_size if self.world is None else self.world.world_size

    @property
    def device_type(self) -> str:
        """torch's name for the kind of device: "cpu", "cuda", ..."""
        return self.devices[0][0].type

    @property
    def indices(self) -> tuple[int, ...]:
        """The node's accelerators, each once, in the order of the ranks that drive them; empty on the CPU."""
        flat = (device.index for devices in self.devices for device in devices if device.type != "cpu")
        return tuple(dict.fromkeys(flat))

    @property
    def process_group_backend(self) -> str:
        """torch's name for what carries collectives: as asked, else by device, CPU tensors always included."""
        if self.config.process_group_backend is not None:
            return self.config.process_group_backend
        carrier = dist.Backend.default_device_backend_map.get(self.device_type, "gloo")
        return "gloo" if carrier == "gloo" else f"cpu:gloo,{self.device_type}:{carrier}"

    def masked(self) -> Layout:
        """The same layout as seen by a process that only sees the devices of `indices`, in that order."""
        position = {index: new for new, index in enumerate(self.indices)}
        devices = tuple(
            tuple(each if each.type == "cpu" else torch.device(each.type, position[each.index]) for each in driven)
            for driven in self.devices
        )
        return dataclasses.replace(self, devices=devices)


def lay_out(config: Config, hardware: Hardware, world: World | None = None) -> Layout:
    """The layout that a request means on nodes of this hardware.

    Args:
        config: the request.
        hardware: what this node has.
        world: where a launcher has placed this process, if one has; the request must fit it.

    Raises:
        ConfigError: every reason why the request does not fit the hardware or the world.
    """
    num_nodes = config.num_nodes or (world.num_nodes if world is not None else 1)
    config, warnings, faults = _within_nodes(config, num_nodes)
    device_type = "cpu" if _on_cpu(config, hardware) else hardware.device_type
    processes = _processes(config, hardware, device_type, world)
    short = list(_gpu_faults(config, hardware, device_type, world))
    # Without its GPUs a request runs nowhere: what it would lack on the CPU instead is no news.
    faults += short or _device_faults(config, device_type, processes * num_nodes)
    if world is not None:
        faults += _world_faults(config, processes, num_nodes, world)
    if faults:
        raise ConfigError.of(faults)
    if config.gpus == Gpus.ALL and device_type == "cpu":
        warnings += ("gpus='auto' finds no GPU here: running on the CPU. Say processes=1 to silence this.",)
    if config.gpus is not None and config.gpus.has_duplicates:
        warnings += (f"{config.gpus.asked} shares a GPU between ranks: good for tests, not for speed.",)
    devices = _devices(config, hardware, device_type, processes)
    return Layout(config, num_nodes, devices, warnings, world)


def _within_nodes(config: Config, num_nodes: int) -> tuple[Config, tuple[str, ...], list[Fault]]:
    """The request under a backend that spans so many nodes, the warning if that is another one, else the fault."""
    backend = config.backend
    faults = list(node_faults(backend, num_nodes))
    if not faults or backend.single_node_of is None:
        return config, (), faults
    other = registry.get("backends", backend.single_node_of)()
    warning = (
        f"backend={backend.name!r} cannot leave its node: num_nodes={num_nodes} runs under {other.name!r}. "
        f"Say backend={other.name!r} to silence this."
    )
    return config.changed(backend=other), (warning,), []


def _on_cpu(config: Config, hardware: Hardware) -> bool:
    return hardware.count == 0 or config.gpus == Gpus.NONE or (config.processes is not None and config.gpus is None)


def _sees_its_own(hardware: Hardware, world: World | None) -> bool:
    # srun --gpus-per-task=1 shows each task one GPU, number 0 to all of them: which are the node's, nobody can tell.
    return world is not None and world.local_world_size > 1 and hardware.count == 1


def _processes(config: Config, hardware: Hardware, device_type: str, world: World | None) -> int:
    """Processes that the request means on this node; a launcher decides where the request leaves it open."""
    if config.backend.process_per == "node":
        return 1
    if device_type == "cpu":
        return config.processes or (1 if world is None else world.local_world_size)
    if world is not None and (config.gpus is None or (config.gpus == Gpus.ALL and _sees_its_own(hardware, world))):
        return world.local_world_size
    return len((config.gpus or Gpus.ALL).of(hardware.count))


def _gpu_faults(config: Config, hardware: Hardware, device_type: str, world: World | None) -> Iterator[Fault]:
    """GPUs that are asked for, or that a launcher's processes need, and that are not there."""
    gpus, there = config.gpus, hardware.count
    if gpus in (Gpus.ALL, Gpus.NONE) or (there > 0 and _sees_its_own(hardware, world)):
        return
    if gpus is not None and there == 0:
        yield Fault(gpus.asked, "this machine has no GPU that torch can use", "use processes=2 to run on the CPU")
    elif gpus is not None and (missing := gpus.missing(there)):
        yield Fault(
            gpus.asked,
            f"this process sees {there} GPU(s), numbered from 0; there is no {missing}",
            f"use gpus={there}, or check CUDA_VISIBLE_DEVICES",
        )
    placed = 0 if world is None or config.backend.process_per == "node" else world.local_world_size
    if gpus is None and device_type != "cpu" and placed > there:
        yield Fault(
            f"{placed} processes on this node, {there} GPU(s)",
            "a launcher has placed more processes here than there are GPUs, and each needs its own",
            f"start {there} per node, or use gpus=0 to run on the CPU",
        )


def _device_faults(config: Config, device_type: str, processes: int) -> list[Fault]:
    """What cannot run on devices of this type: the backend, the precision, the process group."""
    faults: list[Fault] = []
    if device_type in _ALONE:
        if processes > 1:
            why = f"torch has no collectives on {device_type}: one process runs there alone"
            faults.append(Fault(f"{processes} processes on {device_type}", why, "use processes=2 to run on the CPU"))
    elif device_type not in config.backend.device_types:
        on_cpu = device_type != "cpu" and "cpu" in config.backend.device_types
        faults.append(
            Fault(
                f"backend={config.backend.name!r} on {device_type}",
                f"it runs on: {', '.join(sorted(config.backend.device_types))}",
                use(
                    backends(lambda other: device_type in other.device_types),
                    "processes=1 to run on the CPU" if on_cpu else "",
                ),
            )
        )
    if config.amp is not None:
        faults += dtype_faults(config.amp, registry.get("precision", config.amp_engine), device_type)
    group = config.process_group_backend
    if group is not None and device_type not in _ALONE and device_type not in carriers(group):
        faults.append(
            Fault(
                f"process_group_backend={group!r} on {device_type}",
                f"it carries tensors of: {', '.join(sorted(carriers(group)))}",
                "leave it out (the device decides), or use 'gloo'",
            )
        )
    return faults


def _world_faults(config: Config, processes: int, num_nodes: int, world: World) -> Iterator[Fault]:
    placed_as = f"a launcher has placed this process as rank {world.rank} of {world.world_size}"
    if processes != world.local_world_size:
        instead = f"{'processes' if config.processes else 'gpus'}={world.local_world_size}"
        if config.backend.process_per == "node":
            instead = backends(lambda other: other.process_per == "device")
        yield Fault(
            f"processes per node: {processes} asked for, {world.local_world_size} started",
            f"{placed_as}, with {world.local_world_size} on this node",
            f"start {processes} per node, or {use(instead)}",
        )
    if num_nodes != world.num_nodes:
        yield Fault(
            f"nodes: {num_nodes} asked for, {world.num_nodes} started",
            f"{placed_as}, on node {world.node_rank}",
            f"start it on {num_nodes} node(s), or leave num_nodes= out",
        )


def _devices(
    config: Config, hardware: Hardware, device_type: str, processes: int
) -> tuple[tuple[torch.device, ...], ...]:
    """For each local rank the devices it drives."""
    if device_type == "cpu":
        return ((torch.device("cpu"),),) * processes
    gpus = config.gpus or Gpus.ALL
    if config.backend.process_per == "node":
        return (tuple(torch.device(device_type, index) for index in gpus.of(hardware.count)),)
    indices = range(processes) if gpus == Gpus.ALL else gpus.of(hardware.count)
    # More than there are only where each process sees a GPU of its own, as number 0.
    return tuple((torch.device(device_type, index if index < hardware.count else 0),) for index in indices)
