"""Layout: the number of processes per node and their devices, computed from a Config and the node's hardware."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallelize.cluster.devices import MASKS, Hardware
from parallelize.cluster.world import World
from parallelize.config.compatibility import dtype_faults, matching_backends, node_faults, use_any_of
from parallelize.config.config import Config
from parallelize.config.gpus import Gpus
from parallelize.config.options import backend_by_device_type
from parallelize.errors import ConfigError, Fault
from parallelize.plugins import registry

__all__ = ["Layout", "compute_layout"]

# Device types without collectives in torch: only a single process can run on them.
_NO_COLLECTIVES = frozenset({"mps"})


@dataclass(frozen=True)
class Layout:
    """The processes of each node, and the devices of each process.

    Args:
        config: the request, with the fallback backend if its own backend cannot run on `num_nodes`.
        num_nodes: number of machines.
        devices: devices of each local rank, numbered as the calling process sees them; never empty.
        warnings: messages for the user, such as one about the fallback backend.
        world: rank and sizes that a launcher has assigned to this process, if any; nodes may differ in size.
    """

    config: Config
    num_nodes: int
    devices: tuple[tuple[torch.device, ...], ...]
    warnings: tuple[str, ...] = ()
    world: World | None = None

    @property
    def local_world_size(self) -> int:
        """Number of processes on this node; other nodes may differ only if a launcher has started the processes."""
        return len(self.devices)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.num_nodes * self.local_world_size if self.world is None else self.world.world_size

    @property
    def device_type(self) -> str:
        """torch's name for the type of the devices: "cpu", "cuda", ..."""
        return self.devices[0][0].type

    @property
    def indices(self) -> tuple[int, ...]:
        """Indices of the node's accelerators, each once, in the order of their ranks; empty on the CPU."""
        flat = (device.index for devices in self.devices for device in devices if device.type != "cpu")
        return tuple(dict.fromkeys(flat))

    @property
    def process_group_backend(self) -> str:
        """Backend for `init_process_group`: the option if set, else chosen by device type, with gloo for the CPU."""
        if self.config.process_group_backend is not None:
            return self.config.process_group_backend
        backend = dist.Backend.default_device_backend_map.get(self.device_type, "gloo")
        return "gloo" if backend == "gloo" else f"cpu:gloo,{self.device_type}:{backend}"

    def renumbered(self) -> Layout:
        """Return a copy for a process that sees only `indices`, in this order: devices and request in its numbers."""
        kind = self.device_type
        if kind not in MASKS:  # no variable hides devices of this type from workers
            return self
        positions = {torch.device(kind, index): torch.device(kind, new) for new, index in enumerate(self.indices)}
        devices = tuple(tuple(positions.get(each, each) for each in driven) for driven in self.devices)
        gpus = self.config.gpus
        if gpus is not None and gpus.indices is not None:
            gpus = Gpus(indices=tuple(self.indices.index(each) for each in gpus.indices))
        config = dataclasses.replace(self.config, gpus=gpus, backend=self.config.backend.renumbered(positions))
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
    num_nodes = config.num_nodes or (world.num_nodes if world is not None else 1)
    config, warnings, faults = _multi_node_backend(config, num_nodes)
    device_type = "cpu" if _on_cpu(config, hardware) else hardware.device_type
    if config.gpus == Gpus.ALL and config.processes is not None:  # all GPUs, or else these processes
        config = config.changed(**({"gpus": None} if device_type == "cpu" else {"processes": None}))
    processes = _processes(config, hardware, device_type, world)
    gpu_faults = list(_gpu_faults(config, hardware, device_type, world))
    # If requested GPUs are missing, do not also report options that the CPU does not support.
    faults += gpu_faults or _device_faults(config, device_type, processes * num_nodes)
    if world is not None:
        faults += _world_faults(config, processes, num_nodes, world)
    if faults:
        raise ConfigError.of(faults)
    if config.gpus == Gpus.ALL and device_type == "cpu":
        warnings += ("gpus='auto' finds no GPU here: running on the CPU. Use processes=1 to silence this.",)
    if config.gpus is not None and config.gpus.has_duplicates:
        warnings += (f"{config.gpus.as_option} names a GPU more than once: useful for tests, but slow.",)
    devices = _devices(config, hardware, device_type, processes)
    return Layout(config, num_nodes, devices, warnings, world)


def _multi_node_backend(config: Config, num_nodes: int) -> tuple[Config, tuple[str, ...], list[Fault]]:
    """Return the config, with the fallback if its backend cannot run on `num_nodes`, and the warnings and faults."""
    backend = config.backend
    faults = list(node_faults(backend, num_nodes))
    if not faults or backend.multi_node_fallback is None:
        return config, (), faults
    other = registry.get("backends", backend.multi_node_fallback)()
    warning = (
        f"backend={backend.name!r} runs on at most {backend.max_nodes} node(s): "
        f"num_nodes={num_nodes} uses {other.name!r}. Use backend={other.name!r} to silence this."
    )
    return config.changed(backend=other), (warning,), []


def _on_cpu(config: Config, hardware: Hardware) -> bool:
    return hardware.count == 0 or config.gpus == Gpus.NONE or (config.processes is not None and config.gpus is None)


def _sees_only_own_gpu(hardware: Hardware, world: World | None) -> bool:
    # With srun --gpus-per-task=1, each task sees one GPU, as index 0; the node's other GPUs are hidden.
    return world is not None and world.local_world_size > 1 and hardware.count == 1


def _processes(config: Config, hardware: Hardware, device_type: str, world: World | None) -> int:
    """Return the number of processes on this node: as requested, else as started by the launcher."""
    if config.backend.process_per == "node":
        return 1
    if device_type == "cpu":
        return config.processes or (1 if world is None else world.local_world_size)
    if world is not None and (config.gpus is None or (config.gpus == Gpus.ALL and _sees_only_own_gpu(hardware, world))):
        return world.local_world_size
    return len((config.gpus or Gpus.ALL).indices_on(hardware.count))


def _gpu_faults(config: Config, hardware: Hardware, device_type: str, world: World | None) -> Iterator[Fault]:
    """Yield a Fault if requested GPUs do not exist, or if a launcher has started more processes than GPUs."""
    gpus, count = config.gpus, hardware.count
    if gpus in (Gpus.ALL, Gpus.NONE) or _sees_only_own_gpu(hardware, world):
        return
    if gpus is not None and count == 0:
        yield Fault(gpus.as_option, "this machine has no GPU that torch can use", "use processes=2 to run on the CPU")
    elif gpus is not None and (missing := gpus.missing_on(count)):
        yield Fault(
            gpus.as_option,
            f"this process sees {count} GPU(s), numbered from 0; missing: {missing}",
            f"use gpus={count}, or check CUDA_VISIBLE_DEVICES",
        )
    launched = 0 if world is None or config.backend.process_per == "node" else world.local_world_size
    if gpus is None and device_type != "cpu" and launched > count:
        yield Fault(
            f"{launched} processes on this node, {count} GPU(s)",
            "a launcher has started more processes here than there are GPUs, and each needs its own",
            f"start {count} per node, or use gpus=0 to run on the CPU",
        )


def _device_faults(config: Config, device_type: str, processes: int) -> list[Fault]:
    """Return a Fault for a backend, precision or process group that does not support this type of device."""
    faults: list[Fault] = []
    if device_type in _NO_COLLECTIVES:
        if processes > 1:
            why = f"torch has no collectives on {device_type}, so only one process can run there"
            faults.append(Fault(f"{processes} processes on {device_type}", why, "use processes=2 to run on the CPU"))
    elif device_type not in config.backend.device_types:
        on_cpu = device_type != "cpu" and "cpu" in config.backend.device_types
        faults.append(
            Fault(
                f"backend={config.backend.name!r} on {device_type}",
                f"it runs on: {', '.join(sorted(config.backend.device_types))}",
                use_any_of(
                    matching_backends(lambda other: device_type in other.device_types),
                    "processes=1 to run on the CPU" if on_cpu else "",
                ),
            )
        )
    if config.amp is not None:
        faults += dtype_faults(config.amp, registry.get("precision", config.amp_engine), device_type)
    group = config.process_group_backend
    if group is not None and device_type not in {*_NO_COLLECTIVES, *backend_by_device_type(group)}:
        faults.append(
            Fault(
                f"process_group_backend={group!r} on {device_type}",
                f"its collectives support: {', '.join(sorted(backend_by_device_type(group)))}",
                "omit it (the default depends on the device), or use 'gloo'",
            )
        )
    return faults


def _world_faults(config: Config, processes: int, num_nodes: int, world: World) -> Iterator[Fault]:
    launched_as = f"a launcher has started this process as rank {world.rank} of {world.world_size}"
    if processes != world.local_world_size:
        instead = f"{'processes' if config.processes else 'gpus'}={world.local_world_size}"
        if config.backend.process_per == "node":
            instead = matching_backends(lambda other: other.process_per == "device")
        yield Fault(
            f"processes per node: {processes} asked for, {world.local_world_size} started",
            f"{launched_as}, with {world.local_world_size} on this node",
            f"start {processes} per node, or {use_any_of(instead)}",
        )
    if num_nodes != world.num_nodes:
        yield Fault(
            f"nodes: {num_nodes} asked for, {world.num_nodes} started",
            f"{launched_as}, on node {world.node_rank}",
            f"start it on {num_nodes} node(s), or omit num_nodes=",
        )


def _devices(
    config: Config, hardware: Hardware, device_type: str, processes: int
) -> tuple[tuple[torch.device, ...], ...]:
    """Return the devices of each local rank."""
    if device_type == "cpu":
        return ((torch.device("cpu"),),) * processes
    gpus = config.gpus or Gpus.ALL
    if config.backend.process_per == "node":
        driven = tuple(torch.device(device_type, index) for index in gpus.indices_on(hardware.count))
        names = () if config.gpus is not None else config.backend.devices or ()
        named = {torch.device(name) for name in names} | {
            torch.device(f"{name}:0") for name in names if ":" not in name
        }
        return (tuple(each for each in driven if each in named) or driven,)
    indices = range(processes) if gpus == Gpus.ALL else gpus.indices_on(hardware.count)
    # An index above the number of visible GPUs occurs only if each process sees just its own GPU, as index 0.
    return tuple((torch.device(device_type, index if index < hardware.count else 0),) for index in indices)
