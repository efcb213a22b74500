"""Plug-in of backend="balanced": a pipeline over the devices of one process, balanced by time."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from typing_extensions import override

from parallelize.backends.balanced.engine import BalancedEngine
from parallelize.backends.balanced.plan import Plan
from parallelize.backends.ddp_engine import DDPOptions
from parallelize.cluster.world import World
from parallelize.errors import ConfigError
from parallelize.plugins.base import LEVELS, Engine, Inner
from parallelize.plugins.options import (
    Parse,
    bytes_of_device,
    choice,
    count,
    device_names,
    either,
    instance_of,
    invalid,
    number,
)

_UNSUPPORTED = (
    "DataParallel",
    "DistributedDataParallel",
    "FSDPModule",
    "FullyShardedDataParallel",
    "ScriptModule",
    "SyncBatchNorm",
)
"""Names of torch's classes, since importing FSDP takes a second."""


def _bytes_of_devices(name: str, value: Any) -> int | tuple[int, ...]:
    """Parse bytes: one number for all devices, or a list with one for each."""
    if not isinstance(value, (list, tuple)):
        return bytes_of_device(name, value)
    if not value:
        fix = f"use {name}=8 * 2**30, or one number for each device"
        raise invalid(name, value, "it has no device", fix)
    return tuple(bytes_of_device(f"{name}[{index}]", size) for index, size in enumerate(value))


@dataclass(frozen=True, kw_only=True)
class BalancedBackend(DDPOptions):
    """Pipeline parallelism: the model is split into stages that run different micro-batches.

    The first batch is profiled: each submodule is timed once, and stages are chosen by these times
    under each device's memory limit. If splitting is not predicted to make the model at least 5 %
    faster, the model stays on the first device, and a warning gives the reason. With several nodes
    or `devices_per_process`, each process runs such a pipeline, and gradients are averaged over the
    processes with the options of "ddp".

    One thread issues all micro-batches, one after another, through the unmodified model, in one
    autograd graph. Outputs with the batch dimension are concatenated; 0-dim losses that forward
    computes are averaged by the numbers of their targets. What cannot be joined or split, and a
    forward that changes state, makes such batches run whole, with one warning. Of the first
    batch of each kind, two micro-batches are compared with the whole of their samples. Batch norm
    normalizes each micro-batch separately; its running statistics are updated for the full batch.

    Args:
        devices: used instead of the GPUs of `gpus=`; may list a device twice. Stages are in this
            order, but the last one is on the first device, unless the first one there makes the
            step shorter. Outputs are on the run's first device, which without `gpus=` is the first
            GPU of these, and inputs are moved there. On the CPU, which may be listed several times,
            stages do not overlap: this is for tests.
        devices_per_process: how many devices one process drives; None: all of the node.
        microbatches: number of micro-batches per batch, even if not splitting is faster; "auto":
            four for each device; 1: no batch is split, and batch norm normalizes all of it.
        memory: usable bytes of each device, or one number for all; None: 90 % of the free bytes on
            GPUs, no CPU limit.
        batch_dim: batch dimension of the inputs.
        optimizer_state: bytes of optimizer state per byte of a trained parameter: 2 for Adam, 0 for
            SGD.
        plan: result of an earlier `parallelize.plan(model)`, used without profiling, in place of
            `microbatches` and `memory`.
    """

    name = "balanced"
    process_per = "node"
    places_model = True
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset(LEVELS)}
    option_parsers: ClassVar[Mapping[str, Parse]] = {
        **DDPOptions.option_parsers,
        "devices": device_names,
        "devices_per_process": count(1),
        "microbatches": either(choice("auto"), count(1)),
        "memory": _bytes_of_devices,
        "batch_dim": count(0),
        "optimizer_state": number(0),
        "plan": instance_of(lambda: Plan, "pass what parallelize.plan(model) has returned"),
    }
    devices: tuple[str, ...] | None = None
    devices_per_process: int | None = None
    microbatches: int | Literal["auto"] = "auto"
    memory: int | tuple[int, ...] | None = None
    batch_dim: int = 0
    optimizer_state: float = 2.0
    plan: Plan | None = None

    @override
    def renumbered(self, positions: Mapping[torch.device, torch.device]) -> BalancedBackend:
        """Return this backend with the names of its devices in another process."""

        def rename(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(str(positions.get(_complete(name), name)) for name in names)

        plan = self.plan and replace(self.plan, devices=rename(self.plan.devices))
        return replace(self, devices=self.devices and rename(self.devices), plan=plan)

    @override
    def engine(
        self, inner: Inner, *, world: World, devices: tuple[torch.device, ...], **_: Any
    ) -> Engine:
        """Return an engine that makes the plan and builds the pipeline on the first batch."""
        _refuse_compiled(inner)
        _refuse_unsupported_modules(inner)
        named = devices
        if self.devices is not None:
            named = tuple(map(_complete, self.devices))
        if self.devices_per_process is not None and devices[0].type != "cpu":
            named = tuple(device for device in named if device in devices)
        return BalancedEngine(
            inner=inner,
            devices=named,
            device=devices[0],
            options=self,
            is_alone=world.world_size == 1,
        )


def _complete(name: str) -> torch.device:
    """Return the device with this name; a missing index is 0, but CPU devices have none."""
    device = torch.device(name)
    if device.type == "cpu" or ":" in name:
        return device
    return torch.device(device.type, 0)


def _refuse_compiled(inner: Inner) -> None:
    """Refuse a model that is compiled as a whole.

    Raises:
        ConfigError: the model, or a method of it, is compiled.
    """
    is_compiled = type(inner.model).__name__ == "OptimizedModule"
    if inner.model._compiled_call_impl is not None:
        is_compiled = True
    for method in inner.original_methods.values():
        # What torch.compile(model.forward) returns is a function. Any other callable runs in stages
        # as a method does.
        if not inspect.ismethod(method) and hasattr(method, "get_compiler_config"):
            is_compiled = True
    if is_compiled:
        raise ConfigError(
            "the model is compiled",
            why="calls of submodules inside a compiled graph cannot be followed, so it cannot be "
            "split into stages",
            fix="compile its blocks instead: for block in model.blocks: block.compile(); or use "
            "backend='ddp'",
        )


def _refuse_unsupported_modules(inner: Inner) -> None:
    """Refuse a model whose calls of submodules cannot be followed.

    Raises:
        ConfigError: one of its modules is scripted or already parallel.
    """
    for name, module in inner.model.named_modules():
        for base in type(module).__mro__:
            if base.__name__ in _UNSUPPORTED and base.__module__.startswith("torch."):
                raise ConfigError(
                    f"{name or 'the model'} is a {type(module).__name__}",
                    why="it has its own threads, processes or graph, which cannot be split into "
                    "stages",
                    fix="use the plain module in its place, or backend='ddp'",
                )
