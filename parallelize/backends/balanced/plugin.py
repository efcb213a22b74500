"""Plug-in of backend="balanced": pipeline parallelism over the devices of one process, balanced by measured time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from typing_extensions import override

from parallelize.backends.balanced.engine import BalancedEngine
from parallelize.backends.balanced.plan import Plan, PlannerOptions
from parallelize.backends.ddp_engine import DDPOptions
from parallelize.cluster.world import World
from parallelize.errors import ConfigError, Fault
from parallelize.plugins.base import LEVELS, Engine, Inner

__all__ = ["BalancedBackend"]

# Names, since importing FSDP takes a second.
_UNSUPPORTED = frozenset({"DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"})
_UNSUPPORTED |= {"ScriptModule", "SyncBatchNorm"}


@dataclass(frozen=True, kw_only=True)
class BalancedBackend(DDPOptions):
    """Pipeline parallelism: the model is split into stages that run different micro-batches at the same time.

    The first batch is profiled, and stages are chosen by measured time under each device's memory limit. If splitting
    does not make the model faster, the model stays on the first device and a warning gives the reason. With several
    nodes or `devices_per_process`, each process runs such a pipeline, and gradients are averaged over the processes
    with the options of "ddp".

    One thread issues all micro-batches, one after another, through the unmodified model, in one autograd graph.
    Outputs with the batch dimension are concatenated; 0-dim losses that forward computes are averaged by the numbers of
    their targets. What cannot be joined or split, and a forward that changes state, makes such batches run whole, with
    one warning. Some batches are checked: a few samples run whole, too, and a difference is a SyncError. Batch norm
    normalizes each micro-batch separately; its running statistics are updated for the full batch.

    Args:
        devices: used instead of the GPUs of `gpus=`; may list a device twice. Stages are in this order, but the last
            one is on the first device. Outputs are on the run's first device, which without `gpus=` is the first GPU of
            these, and inputs are moved there. On the CPU, which may be listed several times, stages do not overlap:
            this is for tests.
        devices_per_process: how many devices one process drives; None: all of the node.
        microbatches: number of micro-batches per batch, even if not splitting is faster; "auto": the fastest number.
        memory: usable bytes of each device, or one number for all; None: 90 % of the free bytes on GPUs, no CPU limit.
        batch_norm: "micro": normalize each micro-batch; "full": normalize the full batch by not splitting batches.
        batch_dim: batch dimension of the inputs.
        optimizer_state: bytes of optimizer state per byte of a trained parameter: 2 for Adam, 0 for SGD.
        plan: result of an earlier `parallelize.plan(model)`, used without profiling, in place of
            `microbatches`, `memory` and `batch_norm`.
    """

    name = "balanced"
    process_per = "node"
    places_model = True
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset(LEVELS)}
    devices: tuple[str, ...] | None = None
    devices_per_process: int | None = None
    microbatches: int | Literal["auto"] = "auto"
    memory: int | tuple[int, ...] | None = None
    batch_norm: Literal["micro", "full"] = "micro"
    batch_dim: int = 0
    optimizer_state: float = 2.0
    plan: Plan | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("devices", "memory"):  # lists are not hashable
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        if faults := list(_faults(self)):
            raise ConfigError.of(faults)

    @override
    def renumbered(self, positions: Mapping[torch.device, torch.device]) -> BalancedBackend:
        """Return this backend with the names of its devices in another process."""

        def rename(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(str(positions.get(_complete(name), name)) for name in names)

        plan = self.plan and replace(self.plan, devices=rename(self.plan.devices))
        return replace(self, devices=self.devices and rename(self.devices), plan=plan)

    @override
    def engine(self, inner: Inner, *, world: World, devices: tuple[torch.device, ...], **_: Any) -> Engine:
        """Return an engine that makes the plan and builds the pipeline on the first batch."""
        _check_supported(inner)
        microbatches = 1 if self.batch_norm == "full" else self.microbatches
        named = devices if self.devices is None else tuple(map(_complete, self.devices))
        if self.devices_per_process is not None and devices[0].type != "cpu":
            named = tuple(each for each in named if each in devices)
        return BalancedEngine(
            inner=inner,
            devices=named,
            device=devices[0],
            options=PlannerOptions(
                microbatches=None if microbatches == "auto" else microbatches,
                optimizer_state=self.optimizer_state,
                batch_dim=self.batch_dim,
                memory=self.memory,
            ),
            given=self.plan,
            ddp=self if world.world_size > 1 else None,
        )


def _complete(name: str) -> torch.device:
    """Return the device with this name; a missing index is 0, but CPU devices have none."""
    device = torch.device(name)
    return device if device.type == "cpu" or ":" in name else torch.device(device.type, 0)


def _faults(options: Any) -> Iterator[Fault]:
    """Yield a fault for each option with an invalid value, of any type."""
    for name in ("microbatches", "devices_per_process"):
        count = getattr(options, name)
        if count not in {"auto", None} and (type(count) is not int or count < 1):
            yield Fault(f"{name}={count!r}", "not a positive integer", "use a number such as 4, or omit it")
    if options.batch_norm not in {"micro", "full"}:
        yield Fault(f"batch_norm={options.batch_norm!r}", "unknown mode", "use 'micro' or 'full'")
    if options.sync_batchnorm:
        yield Fault(
            "sync_batchnorm=True under backend='balanced'",
            "each micro-batch is normalized separately, and its statistics are merged afterwards",
            "drop it; batch_norm='full' normalizes over the full batch of each rank",
        )


def _check_supported(inner: Inner) -> None:
    """Check that the calls of the model's submodules can be followed.

    Raises:
        ConfigError: the model is compiled as a whole, or one of its modules is scripted or already parallel.
    """
    is_optimized = type(inner.model).__name__ == "OptimizedModule" or inner.model._compiled_call_impl is not None
    if is_optimized or not inner.is_replicable:
        raise ConfigError(
            "the model is compiled",
            why="calls of submodules inside a compiled graph cannot be followed, so it cannot be split into stages",
            fix="compile its blocks instead: for block in model.blocks: block.compile(); or use backend='ddp'",
        )
    for name, module in inner.model.named_modules():
        if any(kind.__name__ in _UNSUPPORTED and kind.__module__.startswith("torch.") for kind in type(module).__mro__):
            raise ConfigError(
                f"{name or 'the model'} is a {type(module).__name__}",
                why="it has its own threads, processes or graph, which cannot be split into stages",
                fix="use the plain module in its place, or backend='ddp'",
            )
