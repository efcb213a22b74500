"""The "fsdp" backend: fully_shard shards parameters, gradients and optimizer state over the processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from parallelize.backends.fsdp_options import FSDPOptions
from parallelize.cluster.world import World
from parallelize.plugins.base import LEVELS, Engine, Inner, LocalEngine

__all__ = ["PLUGIN", "FSDPBackend"]


@dataclass(frozen=True, kw_only=True)
class FSDPBackend(FSDPOptions):
    """One process per device, each with a shard of every parameter: for models that do not fit on one device."""

    name = "fsdp"
    process_per = "device"
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset(LEVELS)}
    shards_gradients = True
    limitations: ClassVar[Mapping[str, str]] = {
        "parameters": "each rank's shards replace its Parameter objects, also in optimizers, until the block ends",
        "block classes": "fully_shard puts FSDP before the class names of sharded submodules",
        "shallow copies": "copy.copy shares the sharded submodules, which only the model itself gathers",
        "one-rank forward": "every forward gathers parameters from all ranks",
        "state_dict": "state_dict() holds one rank's shards, unless FSDPBackend(full_state_dict=True)",
    }

    @override
    def engine(
        self,
        inner: Inner,
        *,
        world: World,
        devices: tuple[torch.device, ...],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        restore: bool = True,
    ) -> Engine:
        """Apply fully_shard to the model's blocks and to `inner`, unless the world has only one process."""
        if world.world_size == 1:
            return LocalEngine(inner)
        self.ranks_per_copy(world)  # raises before the import
        # Imported lazily, because the import takes half a second.
        from parallelize.backends.fsdp_engine import FSDPEngine

        return FSDPEngine(self, inner, world=world, device=devices[0], optimizers=optimizers, restore=restore)


PLUGIN = FSDPBackend
