"""Options of the "fsdp" backend, importable without torch.distributed.fsdp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from parallelize.cluster.world import World
from parallelize.errors import ConfigError
from parallelize.plugins.base import Backend

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["FSDPOptions"]


@dataclass(frozen=True, kw_only=True)
class FSDPOptions(Backend):
    """Options of fully_shard.

    Optimizers hold shards. Whole-matrix operations of their steps (Muon, Shampoo, LBFGS) gather what they need, so that
    each rank computes what one process would.

    Args:
        blocks: submodules whose parameters are all-gathered together: a list of their classes, or their minimum
            number of parameters; None: the children of the model's `nn.ModuleList`s, as in most transformers. The
            parameters outside of all blocks are one more group.
        reshard_after_forward: whether a group's full parameters are freed after its forward, and gathered again for
            backward; a number: resharded over that many ranks only; None: True for all but the outermost group.
        shard_over: the ranks that shard one copy of the parameters: all of the "world", those of each "node", or a
            number of them; gradients are averaged over the copies (HSDP).
        cpu_offload: keep parameters, gradients and optimizer state in CPU memory.
        mixed_precision: torch's policy: the dtypes in which parameters are gathered and gradients reduced; None: their
            own dtypes, or those that `amp=` needs.
        full_state_dict: whether the model's `state_dict()` gathers full tensors, so that all ranks have to call it;
            False: it returns each rank's shards. `parallelize.save` writes shards in both cases.
        broadcast_buffers: broadcast rank 0's buffers (batch norm's running statistics) before each training forward and
            after the block.
        roll_call_s: timeout in seconds within which all ranks must begin the first forward without gradients after a
            training step; 0: no timeout.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    blocks: Sequence[type[nn.Module]] | int | None = None
    reshard_after_forward: bool | int | None = None
    shard_over: Literal["world", "node"] | int = "world"
    cpu_offload: bool = False
    mixed_precision: MixedPrecisionPolicy | None = None
    full_state_dict: bool = False
    broadcast_buffers: bool = True
    roll_call_s: float = 60.0

    def ranks_per_copy(self, world: World) -> int:
        """Return the number of ranks that shard one copy of the parameters.

        Raises:
            ConfigError: `shard_over` does not divide the ranks of the world into groups of at least two.
        """
        given: Any = self.shard_over
        is_even = world.num_nodes * world.local_world_size == world.world_size
        sizes = {"world": world.world_size, "node": world.local_world_size if is_even else 0}
        size: Any = sizes.get(given) if isinstance(given, str) else given
        if type(size) is int and size > 1 and world.world_size % size == 0:
            return size
        ranks = f" ({world.local_world_size} on this node)" if given == "node" else ""
        raise ConfigError(
            f"FSDPBackend(shard_over={given!r}){ranks} in a world of {world.world_size}",
            why="each copy of the parameters is sharded over equally many ranks, at least two",
            fix=f"use 'world', 'node', or a divisor of {world.world_size} above 1",
        )
