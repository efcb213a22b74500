"""fully_shard: weights, gradients and optimizer state in parts, one per process; whole only while they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from parallelize.backends.fsdp_options import Sharding
from parallelize.cluster.world import World
from parallelize.errors import ConfigError
from parallelize.plugins.base import LEVELS, Engine, Inner, LocalEngine

__all__ = ["PLUGIN", "FSDPBackend"]


@dataclass(frozen=True, kw_only=True)
class FSDPBackend(Sharding):
    """One process per device, each keeping a part of every parameter: for models that do not fit on one device."""

    name = "fsdp"
    process_per = "device"
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset(LEVELS)}
    shards_gradients = True
    cannot_keep: ClassVar[Mapping[str, str]] = {
        "parameters": "they are replaced by each rank's part; the model's own Parameter objects return after the block",
        "block classes": "the classes of sharded submodules get FSDP before their name",
        "copies": "it would hold one rank's part of the parameters",
        "one-rank forward": "every forward gathers parameters from all ranks",
        "state_dict": "it holds one rank's part, unless FSDPBackend(full_state_dict=True)",
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
        """fully_shard on the blocks of the model and on `inner`; in a world of one, `inner` itself."""
        if world.world_size == 1:
            return LocalEngine(inner)
        if self.shard_size is not None and (self.shard_size < 2 or world.world_size % self.shard_size):
            raise ConfigError(
                f"shard_size={self.shard_size} in a world of {world.world_size}",
                why="ranks are divided into groups of that size, each with one copy of the parameters",
                fix=f"use a divisor of {world.world_size} above 1, or None",
            )
        # Half a second to import: only for those who use it.
        from parallelize.backends.fsdp_engine import ShardingEngine

        return ShardingEngine(self, inner, world=world, device=devices[0], optimizers=optimizers, restore=restore)


PLUGIN = FSDPBackend
