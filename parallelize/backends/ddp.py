"""The "ddp" backend: one process per device, gradients all-reduced while backward runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import override

from parallelize.backends.ddp_engine import DDPOptions, ReplicatedEngine
from parallelize.cluster.world import World
from parallelize.plugins.base import LEVELS, Engine, Inner, LocalEngine

__all__ = ["DDPBackend"]


@dataclass(frozen=True, kw_only=True)
class DDPBackend(DDPOptions):
    """One process per device; gradients are averaged over all processes while backward runs."""

    name = "ddp"
    process_per = "device"
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset(LEVELS), "apex": frozenset(LEVELS)}

    @override
    def engine(self, inner: Inner, *, world: World, devices: tuple[torch.device, ...], **_: Any) -> Engine:
        """Keep the replicas of the model alike, unless the world has only one process."""
        if world.world_size == 1:
            return LocalEngine(inner)
        return ReplicatedEngine(self, inner, inner=inner, device=devices[0])
