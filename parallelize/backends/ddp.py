"""The "ddp" and "ddp2" backends: gradients are all-reduced while backward runs.

ddp     a process per device
ddp2    a process per node, which drives all devices of the node as "dp" does
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from parallelize.backends.ddp_engine import DDPOptions, ReplicatedEngine
from parallelize.backends.dp_engine import DPEngine, data_parallel
from parallelize.backends.logical import Parts
from parallelize.cluster.world import World
from parallelize.plugins.base import LEVELS, Engine, Inner, LocalEngine


@dataclass(frozen=True, kw_only=True)
class DDPBackend(DDPOptions):
    """One process per device; gradients are averaged over all processes while backward runs."""

    name = "ddp"
    process_per = "device"
    divides_batches = True
    takes_tensor_parallel = True
    amp: ClassVar[Mapping[str, frozenset[str]]] = {
        "native": frozenset(LEVELS),
        "apex": frozenset(LEVELS),
    }

    @override
    def engine(
        self,
        inner: Inner,
        *,
        world: World,
        devices: tuple[torch.device, ...],
        **_: Any,
    ) -> Engine:
        """Keep the replicas of the model alike, unless the world has only one process."""
        module: nn.Module = inner
        if inner.parts is not None:
            module = Parts(inner, inner.parts, self)
        if world.world_size == 1:
            return LocalEngine(module)
        return ReplicatedEngine(self, module, inner=inner)


@dataclass(frozen=True, kw_only=True)
class DDP2Backend(DDPOptions):
    """One process per node: its devices split each batch as in "dp".

    Gradients are averaged over the nodes:

        node 0                          node 1
        outputs of GPUs 0..n, one loss  outputs of GPUs 0..n, one loss
                └──────── gradients averaged ────────┘

    Useful for losses that compare the samples of a batch with each other, such as NCE: they get the
    outputs of all GPUs of a node, but under "ddp" only those of one GPU.
    """

    name = "ddp2"
    process_per = "node"
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset(LEVELS)}

    @override
    def engine(
        self,
        inner: Inner,
        *,
        world: World,
        devices: tuple[torch.device, ...],
        **_: Any,
    ) -> Engine:
        """Wrap `inner` in DataParallel over the node's devices, and average over the nodes.

        With one device, there is no DataParallel; with one node, nothing is averaged.
        """
        module = data_parallel(inner, devices=devices)
        has_replicas = module is not inner
        if world.world_size > 1:
            engine = ReplicatedEngine(self, module, inner=inner)
            # DataParallel moves the inputs to its devices itself.
            engine.moves_inputs = has_replicas
            return engine
        if has_replicas:
            return DPEngine(module)
        return LocalEngine(inner)
