"""Layout: the number of processes per node and their devices, computed from a Config and the node's hardware."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from parallelize.cluster.devices import MASKS, Hardware
from parallelize.cluster.world import World
from parallelize.config.config import Config, dtype_faults, matching_backends, node_faults, use_any_of
from parallelize.config.options import Gpus, backend_by_device_type
from parallelize.errors import ConfigError, Fault

__all__ = ["Epochs", "Layout", "compute_layout"]

# Device types without collectives in torch: only a single process can run on them.
_NO_COLLECTIVES = frozenset({"mps"})


class Epochs(dict[str, int]):
    """The epoch in which the next loader begins that a line of code makes; it comes back from calls."""

    def state_dict(self) -> Epochs:
        """Return a copy."""
        return Epochs(self)

    load_state_dict = dict.update


@dataclass(frozen=True)
class Layout:
    """The processes of each node, and the devices of each process.

    Args:
        config: the request, with the fallback backend if its own backend cannot run on `num_nodes`.
        num_nodes: number of machines.
        devices: devices of each local rank, numbered as the calling process sees them; never empty.
        warnings: messages for the user, such as one about the fallback backend.
        world: rank and sizes that a launcher has assigned to this process, if any; nodes may differ in size.
        epochs: where the loaders of the function begin.
    """

    config: Config
    num_nodes: int
    devices: tuple[tuple[torch.device, ...], ...]
    warnings: tuple[str, ...] = ()
    world: World | None = None
    epochs: Epochs = field(default_factory=Epochs, compare=False, repr=False)

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
    num_nodes = config.num_nodes or (1 if world is None else world.num_nodes)
    faults, warnings = list(node_faults(config.backend, num_nodes)), list[str]()
    if faults and config.backend.multi_node_fallback is not None:
        name, other = config.backend.name, config.backend.multi_node_fallback
        most = f"backend={name!r} runs on at most {config.backend.max_nodes} node(s)"
        warnings.append(f"{most}: num_nodes={num_nodes} uses {other!r}. Use backend={other!r} to silence this.")
        config, faults = config.changed(backend=other), []
    asks_for_cpu = config.gpus == Gpus.NONE or (config.processes is not None and config.gpus is None)
    device_type = "cpu" if hardware.count == 0 or asks_for_cpu else hardware.device_type
    if config.gpus == Gpus.ALL and config.processes is not None:  # all GPUs, or else these processes
        config = config.changed(**({"gpus": None} if device_type == "cpu" else {"processes": None}))
    devices = _devices(config, hardware, device_type, world)
    # If requested GPUs are missing, do not also report options that the CPU does not support.
    found = list(_gpu_faults(config, hardware, device_type, world))
    faults += found or _device_faults(config, device_type, len(devices) * num_nodes)
    if world is not None:
        faults += _world_faults(config, len(devices), num_nodes, world)
    if faults:
        raise ConfigError.of(faults)
    if config.gpus == Gpus.ALL and device_type == "cpu":
        warnings.append("gpus='auto' finds no GPU here: running on the CPU. Use processes=1 to silence this.")
    if config.gpus is not None and config.gpus.has_duplicates:
        warnings.append(f"{config.gpus.as_option} names a GPU more than once: useful for tests, but slow.")
    return Layout(config, num_nodes, devices, tuple(warnings), world)


def _sees_only_own_gpu(hardware: Hardware, world: World | None) -> bool:
    # With srun --gpus-per-task=1, each task sees one GPU, as index 0; the node's other GPUs are hidden.
    return world is not None and world.local_world_size > 1 and hardware.count == 1


def _devices(
    config: Config, hardware: Hardware, device_type: str, world: World | None
) -> tuple[tuple[torch.device, ...], ...]:
    """Return the devices of each local rank: as requested, else of as many as a launcher has started."""
    backend, gpus, launched = config.backend, config.gpus or Gpus.ALL, 1 if world is None else world.local_world_size
    is_per_node = backend.process_per == "node"
    if device_type == "cpu":
        is_one = is_per_node and backend.devices_per_process is None
        return ((torch.device("cpu"),),) * (1 if is_one else config.processes or launched)
    indices = gpus.indices_on(hardware.count)
    if is_per_node:
        return _shares_of_node(config, tuple(torch.device(device_type, index) for index in indices))
    if world is not None and gpus == Gpus.ALL and (config.gpus is None or _sees_only_own_gpu(hardware, world)):
        indices = range(launched)
    # An index above the number of visible GPUs occurs only if each process sees just its own GPU, as index 0.
    return tuple((torch.device(device_type, index if index < hardware.count else 0),) for index in indices)


def _shares_of_node(config: Config, devices: tuple[torch.device, ...]) -> tuple[tuple[torch.device, ...], ...]:
    names = () if config.gpus is not None else config.backend.devices or ()
    named = {torch.device(name) for each in names for name in ([each] if ":" in each else [each, f"{each}:0"])}
    devices = tuple(each for each in devices if each in named) or devices
    count = config.backend.devices_per_process or len(devices)
    if len(devices) % count:
        raise ConfigError(
            f"devices_per_process={count} with {len(devices)} devices",
            why="every process drives as many devices",
            fix=f"use a multiple of {count} devices, or devices_per_process={len(devices)}",
        )
    return tuple(devices[first : first + count] for first in range(0, len(devices), count))


def _gpu_faults(config: Config, hardware: Hardware, device_type: str, world: World | None) -> Iterator[Fault]:
    """Yield a Fault if requested GPUs do not exist, or if a launcher has started more processes than GPUs."""
    gpus, count = config.gpus, hardware.count
    if _sees_only_own_gpu(hardware, world):
        return
    launched = 0 if world is None or config.backend.process_per == "node" else world.local_world_size
    missing = [] if gpus is None else [index for index in gpus.indices_on(count) if index >= count]
    if gpus is not None and missing and count == 0:
        yield Fault(gpus.as_option, "this machine has no GPU that torch can use", "use processes=2 to run on the CPU")
    elif gpus is not None and missing:
        why = f"this process sees {count} GPU(s), numbered from 0; the first that is missing: {missing[0]}"
        yield Fault(gpus.as_option, why, f"use gpus={count}, or check CUDA_VISIBLE_DEVICES")
    elif gpus is None and device_type != "cpu" and launched > count:
        yield Fault(
            f"{launched} processes on this node, {count} GPU(s)",
            "a launcher has started more processes here than there are GPUs, and each needs its own",
            f"start {count} per node, or use gpus=0 to run on the CPU",
        )


def _device_faults(config: Config, device_type: str, processes: int) -> Iterator[Fault]:
    """Yield a Fault for a backend, precision or process group that does not support this type of device."""
    backend, group = config.backend, config.process_group_backend
    if device_type in _NO_COLLECTIVES:
        if processes > 1:
            why = f"torch has no collectives on {device_type}, so only one process can run there"
            yield Fault(f"{processes} processes on {device_type}", why, "use processes=2 to run on the CPU")
    elif device_type not in backend.device_types:
        others = matching_backends(lambda other: device_type in other.device_types)
        on_cpu = "processes=1 to run on the CPU" if "cpu" in backend.device_types else ""
        why = f"it runs on: {', '.join(sorted(backend.device_types))}"
        yield Fault(f"backend={backend.name!r} on {device_type}", why, use_any_of(others, on_cpu))
    yield from dtype_faults(config, device_type)
    if group is not None and device_type not in {*_NO_COLLECTIVES, *backend_by_device_type(group)}:
        yield Fault(
            f"process_group_backend={group!r} on {device_type}",
            f"its collectives support: {', '.join(sorted(backend_by_device_type(group)))}",
            "omit it (the default depends on the device), or use 'gloo'",
        )


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
