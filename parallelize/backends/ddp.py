"""The "ddp" and "ddp2" backends: a process per device or node, gradients all-reduced while backward runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import override

from parallelize.backends.ddp_engine import DDPOptions, ReplicatedEngine
from parallelize.backends.dp_engine import DPEngine, data_parallel
from parallelize.backends.logical import Parts
from parallelize.cluster.world import World
from parallelize.plugins.base import LEVELS, Engine, Inner, LocalEngine

__all__ = ["DDP2Backend", "DDPBackend"]


@dataclass(frozen=True, kw_only=True)
class DDPBackend(DDPOptions):
    """One process per device; gradients are averaged over all processes while backward runs."""

    name = "ddp"
    process_per = "device"
    divides_batches = True
    takes_tensor_parallel = True
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset(LEVELS), "apex": frozenset(LEVELS)}

    @override
    def engine(self, inner: Inner, *, world: World, devices: tuple[torch.device, ...], **_: Any) -> Engine:
        """Keep the replicas of the model alike, unless the world has only one process."""
        module = inner if inner.parts is None else Parts(inner, inner.parts, self)
        return LocalEngine(module) if world.world_size == 1 else ReplicatedEngine(self, module, inner=inner)


@dataclass(frozen=True, kw_only=True)
class DDP2Backend(DDPOptions):
    """One process per node: its devices split each batch as in "dp", and gradients are averaged over the nodes.

        node 0                          node 1
        outputs of GPUs 0..n, one loss  outputs of GPUs 0..n, one loss
                └──────── gradients averaged ────────┘

    Useful for losses that compare the samples of a batch with each other, such as NCE: they get the outputs of all
    GPUs of a node, but under "ddp" only those of one GPU.
    """

    name = "ddp2"
    process_per = "node"
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset(LEVELS)}

    @override
    def engine(self, inner: Inner, *, world: World, devices: tuple[torch.device, ...], **_: Any) -> Engine:
        """Wrap `inner` in DataParallel over the node's devices, and average over the nodes if there are several."""
        replicated = data_parallel(inner, devices=devices)
        if world.world_size == 1:
            return LocalEngine(inner) if replicated is inner else DPEngine(replicated)
        engine = ReplicatedEngine(self, replicated, inner=inner)
        engine.moves_inputs = replicated is not inner
        return engine
