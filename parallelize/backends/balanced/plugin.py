"""One model divided over several devices by measured time, which work on different micro-batches at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from typing_extensions import override

from parallelize.backends.balanced.admission import admit
from parallelize.backends.balanced.engine import BalancedEngine, Request
from parallelize.backends.balanced.plan import Plan
from parallelize.backends.balanced.planner import Wishes
from parallelize.backends.ddp_engine import Averaging
from parallelize.cluster.world import World
from parallelize.errors import ConfigError, Fault
from parallelize.plugins.base import LEVELS, Engine, Inner

__all__ = ["PLUGIN", "BalancedBackend"]


@dataclass(frozen=True, kw_only=True)
class BalancedBackend(Averaging):
    """One model over the devices of a process, in stages that work at the same time on different micro-batches.

    The stages are chosen on the first batch, by measured time, under each device's memory; where dividing the model
    does not make it faster, it is left alone on the first device, and a warning says so. Across nodes, each process has
    such a pipeline, and gradients are averaged with the options of "ddp".

    Batch norm normalises each micro-batch by itself; its running statistics are those of the whole batch.

    Args:
        devices: in place of the GPUs of `gpus=`; a device may be named twice. Outputs come to the run's first device.
        microbatches: how many a batch is cut into: a number, which is then used whether or not it gains anything, or
            "auto".
        memory: bytes that may be used of each device, or a number for each; None: 90 % of what is free on GPUs.
        recompute: compute activations again in backward instead of keeping them: True, False, or "auto": if the model
            does not fit otherwise.
        batch_norm: "micro", or "full": each batch whole, as one micro-batch.
        batch_dim: the dimension of the inputs along which samples lie.
        optimizer_state: bytes that the optimizer keeps, per byte of a trained parameter: 2 for Adam, 0 for SGD.
        plan: an earlier `parallelize.plan(model)`, used without measuring again; other options must not contradict it.
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
    plan: Plan | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("devices", "memory"):  # lists are as good, but cannot be hashed
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        faults = list(_faults(self)) or list(_contradictions(self))
        if faults:
            raise ConfigError.of(faults)

    @override
    def engine(self, inner: Inner, *, world: World, devices: tuple[torch.device, ...], **_: Any) -> Engine:
        """A pipeline that is planned when the first batch comes."""
        admit(inner)
        microbatches = 1 if self.batch_norm == "full" else self.microbatches
        request = Request(
            devices=devices if self.devices is None else tuple(map(_complete, self.devices)),
            home=devices[0],
            memory=self.memory,
            wishes=Wishes(
                microbatches=None if microbatches == "auto" else microbatches,
                recompute=self.recompute,
                optimizer_state=self.optimizer_state,
                batch_dim=self.batch_dim,
            ),
            plan=self.plan,
            averaging=self if world.world_size > 1 else None,
        )
        return BalancedEngine(inner, request)


def _complete(name: str) -> torch.device:
    """A device with its number."""
    device = torch.device(name)
    is_complete = device.type == "cpu" or name.find(":") >= 0
    return device if is_complete else torch.device(device.type, 0)


def _faults(options: BalancedBackend) -> Iterator[Fault]:
    given: dict[str, Any] = {name: getattr(options, name) for name in ("microbatches", "recompute", "batch_norm")}
    count = given["microbatches"]
    if count != "auto" and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        yield Fault(f"microbatches={count!r}", "it counts the parts of a batch", "use 'auto', or 4, say")
    if given["recompute"] not in {True, False, "auto"}:
        yield Fault(f"recompute={options.recompute!r}", "it is neither on nor off", "use True, False or 'auto'")
    if given["batch_norm"] not in {"micro", "full"}:
        yield Fault(f"batch_norm={options.batch_norm!r}", "there is no such way", "use 'micro' or 'full'")
    if options.sync_batchnorm:
        yield Fault(
            "sync_batchnorm=True under backend='balanced'",
            "micro-batches would wait for each other's statistics in the order in which threads happen to run",
            "drop it, or use batch_norm='full'",
        )
    for name in options.devices or ():
        try:
            torch.device(name)
        except RuntimeError as error:
            yield Fault(
                f"devices={list(options.devices or ())!r}", str(error).split("\n")[0], "use names such as 'cuda:1'"
            )


def _contradictions(options: BalancedBackend) -> Iterator[Fault]:
    """What was asked for besides a plan that has decided otherwise; a model that is left alone is never cut."""
    plan = options.plan
    if plan is None or not plan.is_split:
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
        # Whichever stage is on whichever device: the largest stages need the largest limits.
        pairs = zip(sorted(plan.memory_bytes, reverse=True), sorted(caps, reverse=True), strict=False)
        if any(needed > cap for needed, cap in pairs):
            wrong.append((f"{max(plan.memory_bytes):.0f} bytes on a device", f"memory={options.memory!r}"))
    for decided, asked in wrong:
        yield Fault(
            f"plan= is for {decided}, with {asked}",
            "a plan is used as it is: the other option would be ignored",
            "leave one of the two out; without plan=, another one is made",
        )


PLUGIN = BalancedBackend
