"""Plug-in of backend="balanced": pipeline parallelism over the devices of one process, balanced by measured time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from typing_extensions import override

from parallelize.backends.balanced.engine import BalancedEngine
from parallelize.backends.balanced.plan import Plan, PlannerOptions
from parallelize.backends.balanced.refusals import check_supported
from parallelize.backends.ddp_engine import DDPOptions
from parallelize.cluster.world import World
from parallelize.errors import ConfigError, Fault
from parallelize.plugins.base import LEVELS, Engine, Inner

__all__ = ["PLUGIN", "BalancedBackend"]


@dataclass(frozen=True, kw_only=True)
class BalancedBackend(DDPOptions):
    """Pipeline parallelism: the model is split into stages that run different micro-batches at the same time.

    The first batch is profiled, and stages are chosen by measured time under each device's memory limit. If splitting
    does not make the model faster, the model stays on the first device and a warning gives the reason. With several
    nodes, each node runs such a pipeline, and gradients are averaged over the nodes with the options of "ddp".

    A model that no device can hold runs in the number of pipelines that is fastest: with eight GPUs and a model that
    needs two, in up to four. Micro-batch i runs in pipeline i % n. The parameters are on the devices of the first
    pipeline; each forward copies them to the others, and backward adds the gradients. Where copies would not be exact
    (activation checkpoints, buffers that forward changes), there is one pipeline, and the plan gives the reason.

    Micro-batches run through the unmodified model: on accelerators one after another, in one autograd graph; on the CPU
    in threads. For every new kind of batch (mode, arguments, outputs, hooks; the first eight texts of an argument),
    outputs and gradients are compared with the full batch. If they differ, or if forward or a hook keeps tensors or
    state outside of the output, such batches run through the stages whole, with one warning. Batch norm normalizes each
    micro-batch separately; its running statistics are updated for the full batch. Hooks of submodules run once per
    micro-batch, on its samples.

    Args:
        devices: used instead of the GPUs of `gpus=`; may list a device twice. Outputs are on the run's first device,
            which without `gpus=` is the first GPU of these, and inputs are moved there.
        microbatches: number of micro-batches per batch, even if not splitting is faster; "auto": the fastest number.
        memory: usable bytes of each device, or one number for all; None: 90 % of the free bytes on GPUs, no CPU limit.
        recompute: whether activations are recomputed in backward; "auto": only if the model does not fit otherwise.
        batch_norm: "micro": normalize each micro-batch; "full": normalize the full batch by not splitting batches.
        batch_dim: batch dimension of the inputs.
        optimizer_state: bytes of optimizer state per byte of a trained parameter: 2 for Adam, 0 for SGD.
        plan: result of an earlier `parallelize.plan(model)`, used without profiling; other options must agree with it.
            A path: the plan is read from this file if it exists, and else made and written there.
    """

    name = "balanced"
    process_per = "node"
    places_model = True
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset(LEVELS)}
    devices: tuple[str, ...] | None = None
    microbatches: int | Literal["auto"] = "auto"
    memory: int | tuple[int, ...] | None = None
    recompute: bool | Literal["auto"] = "auto"
    batch_norm: Literal["micro", "full"] = "micro"
    batch_dim: int = 0
    optimizer_state: float = 2.0
    plan: Plan | str | os.PathLike[str] | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("devices", "memory"):  # lists are not hashable
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        faults = list(_faults(self)) or list(_contradictions(self))
        if faults:
            raise ConfigError.of(faults)

    @override
    def renumbered(self, positions: Mapping[torch.device, torch.device]) -> BalancedBackend:
        """Return this backend with the names of its devices in another process."""

        def rename(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(str(positions.get(_complete(name), name)) for name in names)

        plan = self.plan
        if isinstance(plan, Plan):
            plan = replace(plan, devices=rename(plan.devices))
        return replace(self, devices=None if self.devices is None else rename(self.devices), plan=plan)

    @override
    def engine(self, inner: Inner, *, world: World, devices: tuple[torch.device, ...], **_: Any) -> Engine:
        """Return an engine that makes the plan and builds the pipeline on the first batch."""
        check_supported(inner)
        microbatches = 1 if self.batch_norm == "full" else self.microbatches
        return BalancedEngine(
            inner,
            devices=devices if self.devices is None else tuple(map(_complete, self.devices)),
            output_device=devices[0],
            options=PlannerOptions(
                microbatches=None if microbatches == "auto" else microbatches,
                recompute=self.recompute,
                optimizer_state=self.optimizer_state,
                batch_dim=self.batch_dim,
                memory=self.memory,
            ),
            given=self._given_plan,
            path=None if isinstance(self.plan, Plan) else self.plan,
            ddp_options=self if world.world_size > 1 else None,
        )

    def _given_plan(self) -> Plan | None:
        if self.plan is None or isinstance(self.plan, Plan):
            return self.plan
        return replace(self, plan=Plan.load(self.plan))._given_plan() if Path(self.plan).exists() else None


def _complete(name: str) -> torch.device:
    """Return the device with this name; a missing index is 0, but CPU devices have none."""
    device = torch.device(name)
    is_complete = device.type == "cpu" or name.find(":") >= 0
    return device if is_complete else torch.device(device.type, 0)


def _faults(options: Any) -> Iterator[Fault]:
    """Yield a fault for each option with an invalid value, of any type."""
    count = options.microbatches
    if count != "auto" and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        yield Fault(f"microbatches={count!r}", "not a positive integer or 'auto'", "use 'auto', or a number such as 4")
    if options.recompute not in {True, False, "auto"}:
        yield Fault(f"recompute={options.recompute!r}", "unknown value", "use True, False or 'auto'")
    if options.batch_norm not in {"micro", "full"}:
        yield Fault(f"batch_norm={options.batch_norm!r}", "unknown mode", "use 'micro' or 'full'")
    if options.sync_batchnorm:
        yield Fault(
            "sync_batchnorm=True under backend='balanced'",
            "each micro-batch is normalized separately, and its statistics are merged afterwards",
            "drop it; batch_norm='full' normalizes over the full batch of each rank",
        )
    for name in options.devices or ():
        try:
            torch.device(name)
        except RuntimeError as error:
            yield Fault(f"devices={[*options.devices]!r}", str(error).split("\n")[0], "use names such as 'cuda:1'")


def _contradictions(options: BalancedBackend) -> Iterator[Fault]:
    """Yield a fault for each option that disagrees with plan=, if the plan splits the model."""
    plan = options.plan
    if not isinstance(plan, Plan) or not plan.is_split:
        return
    wrong = []
    if options.microbatches not in {"auto", plan.microbatches}:
        wrong.append((f"{plan.microbatches} micro-batches", f"microbatches={options.microbatches!r}"))
    if options.batch_norm == "full" and plan.microbatches > 1:
        wrong.append((f"{plan.microbatches} micro-batches", "batch_norm='full'"))
    if options.recompute not in {"auto", plan.recompute}:
        wrong.append(("recomputing" if plan.recompute else "keeping activations", f"recompute={options.recompute!r}"))
    named = Counter(str(_complete(name)) for name in options.devices or plan.devices)
    if Counter(plan.devices) - named:
        wrong.append((f"devices {', '.join(plan.devices)}", f"devices={list(options.devices or ())!r}"))
    elif options.memory is not None and plan.memory_bytes:
        caps = options.memory if isinstance(options.memory, tuple) else (options.memory,) * len(plan.devices)
        # The order of devices is free: compare the largest stage with the largest limit, and so on.
        pairs = zip(sorted(plan.memory_bytes, reverse=True), sorted(caps, reverse=True), strict=False)
        if any(needed > cap for needed, cap in pairs):
            wrong.append((f"{max(plan.memory_bytes):.0f} bytes on a device", f"memory={options.memory!r}"))
    for planned, option in wrong:
        yield Fault(
            f"plan= is for {planned}, with {option}",
            "a plan is used unchanged, so the other option would be ignored",
            "drop the option, or plan= (if it is a path: delete the file), for a new plan",
        )


PLUGIN = BalancedBackend
