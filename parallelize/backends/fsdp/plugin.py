"""The "fsdp" backend: each process keeps a shard of parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from parallelize.cluster.world import World
from parallelize.errors import ConfigError
from parallelize.plugins.base import LEVELS, Backend, Engine, Inner, LocalEngine
from parallelize.plugins.options import Parse, choice, count, either, flag, instance_of, invalid

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def _blocks(name: str, value: Any) -> tuple[type[nn.Module] | str, ...] | int:
    """Parse classes and names of modules, or a size.

    One class stands for a list of one. A text has names that commas separate.
    """
    selectors = value
    if isinstance(value, type):
        selectors = (value,)
    if isinstance(value, str):
        selectors = [part.strip() for part in value.split(",")]
    if not isinstance(selectors, (list, tuple)):
        return int(count(1)(name, value))
    if selectors and all(map(_is_selector, selectors)):
        return tuple(selectors)
    raise invalid(
        name,
        value,
        "it names no classes of modules, and no submodules",
        f"use {name}=[nn.TransformerEncoderLayer], {name}=['layers.0', 'layers.1'], or a number of "
        "parameters, or omit it",
    )


def _is_selector(value: object) -> bool:
    """Whether a value is a class of modules, or may be the name of a submodule."""
    if isinstance(value, str):
        return bool(value)
    return isinstance(value, type) and issubclass(value, nn.Module)


def _reshard(name: str, value: Any) -> bool | int:
    """Parse a bool, or a number of ranks: 1 is a number, and no bool."""
    if isinstance(value, (bool, np.bool_)):
        return flag(name, value)
    return int(count(1)(name, value))


def _policy_class() -> type:
    """Return the class of precision policies.

    Whoever has such an object has imported its module; for all others that takes half a second.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy


@dataclass(frozen=True, kw_only=True)
class FSDPBackend(Backend):
    """One process per device, each with a shard of each parameter: for models no device holds.

    The model may lie on the CPU, or on "meta" if its modules have `reset_parameters` or values are
    loaded in the block: each rank moves its shards only to its device, block by block. In the
    block, the user's Parameters stand for the full parameters: they keep their identity, shape and
    meaning in the user's code, and optimizers keep them. After it, they have full values where they
    came from, or on the CPU if that was "meta", if these fit there on all ranks, in contiguous
    memory of their own. Parameters without dimensions or elements, and frozen integers and
    booleans, are whole on every rank.

    Args:
        blocks: submodules whose parameters are all-gathered together: a list of their classes and
            of their names, as in `named_modules()`, or their minimum number of parameters; None:
            the members of the model's `nn.ModuleList`s, and those of its `nn.ModuleDict`s and
            `nn.Sequential`s that have submodules. The parameters outside of all blocks are one more
            group.
        reshard_after_forward: whether a group's full parameters are freed after its forward, and
            gathered again for backward; a number: resharded over that many ranks only; None: True
            for all but the outermost group.
        shard_over: the ranks that shard one copy of the parameters: all of the "world", those of
            each "node", or a number of them; gradients are averaged over the copies (HSDP).
        cpu_offload: keep parameters, gradients and optimizer state in CPU memory.
        mixed_precision: torch's policy: the dtypes in which parameters are gathered and gradients
            reduced; None: their own dtypes, or those that `amp=` needs.
        full_state_dict: whether the model's `state_dict()` gathers full tensors, so that all ranks
            have to call it; False: it returns tensors that are gathered when they are read.
            `parallelize.save` writes shards in both cases.
        broadcast_buffers: whether ranks keep their buffers alike (batch norm's running statistics),
            as `buffers=` of parallel_model says; False: each rank keeps its own.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    name = "fsdp"
    process_per = "device"
    amp: ClassVar[Mapping[str, frozenset[str]]] = {"native": frozenset(LEVELS)}
    places_model = True
    shards_gradients = True
    limitations: ClassVar[Mapping[str, str]] = {
        "copies": "their parameters are sharded, too, so that all ranks have to use them",
        "exceptions": "parameters stay sharded, since all ranks would be needed to gather them",
        "one-rank forward": "every forward gathers parameters from all ranks",
    }
    option_parsers: ClassVar[Mapping[str, Parse]] = {
        "blocks": _blocks,
        "reshard_after_forward": _reshard,
        "shard_over": either(choice("world", "node"), count(2)),
        "cpu_offload": flag,
        "mixed_precision": instance_of(
            _policy_class, "use torch.distributed.fsdp.MixedPrecisionPolicy(...)"
        ),
        "full_state_dict": flag,
        "broadcast_buffers": flag,
    }
    blocks: Sequence[type[nn.Module] | str] | int | None = None
    reshard_after_forward: bool | int | None = None
    shard_over: Literal["world", "node"] | int = "world"
    cpu_offload: bool = False
    mixed_precision: MixedPrecisionPolicy | None = None
    full_state_dict: bool = True
    broadcast_buffers: bool = True

    def ranks_per_copy(self, world: World) -> int:
        """Return the number of ranks that shard one copy of the parameters.

        Raises:
            ConfigError: `shard_over` does not divide the ranks of the world into groups of at least
                two, or `reshard_after_forward` does not divide the ranks of a copy.
        """
        ranks = world.world_size
        size: Any = self.shard_over
        if size == "world":
            size = ranks
        elif size == "node":
            size = world.local_world_size
            # With another number of ranks on some node, those of a node shard no equal copies.
            if size * world.num_nodes != ranks:
                size = 0
        if size < 2 or ranks % size != 0:
            raise ConfigError(
                f"FSDPBackend(shard_over={self.shard_over!r}) in a world of {ranks}, "
                f"{world.local_world_size} per node",
                why="each copy of the parameters is sharded over equally many ranks, at least two",
                fix=f"use 'world', 'node', or a divisor of {ranks} above 1",
            )
        reshard = self.reshard_after_forward
        if type(reshard) is int and size % reshard != 0:
            raise ConfigError(
                f"FSDPBackend(reshard_after_forward={reshard}), where {size} ranks shard a copy",
                why="after forward, each group of that many ranks keeps a copy of the parameters",
                fix=f"use True, False, or a divisor of {size}",
            )
        return int(size)

    def units(self, model: nn.Module) -> list[nn.Module]:
        """Return the submodules whose parameters are gathered together, inner ones first."""
        from parallelize.backends.fsdp.units import units_of

        return units_of(model, self.blocks)

    @override
    def engine(
        self,
        inner: Inner,
        *,
        world: World,
        devices: tuple[torch.device, ...],
        restore: bool = True,
    ) -> Engine:
        """Apply fully_shard to the model's blocks and to `inner`; with one process, do nothing."""
        if world.world_size == 1:
            inner.model.to(devices[0])
            return LocalEngine(inner)
        # Imported lazily, because the import takes half a second.
        from parallelize.backends.fsdp.engine import FSDPEngine

        return FSDPEngine(self, inner, world=world, device=devices[0], restore=restore)
