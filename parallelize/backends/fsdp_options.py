"""What a backend that keeps parameters in parts can be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from parallelize.plugins.base import Backend

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["Sharding"]


@dataclass(frozen=True, kw_only=True)
class Sharding(Backend):
    """The options of fully_shard.

    Args:
        blocks: the modules whose parameters are gathered together: a list of their classes, or the least number of
            parameters they have; None: the children of the model's `nn.ModuleList`s, as in most transformers. What
            lies outside of them is one more such group.
        reshard_after_forward: whether a group is freed after its forward and gathered again for backward; a number:
            kept in parts by that many ranks; None: all but the outermost.
        shard_size: how many ranks share one copy of the parameters, the GPUs of a node for example: the copies'
            gradients are averaged, as under ddp (HSDP); None: all ranks share one.
        cpu_offload: parameters, gradients and optimizer state wait in the memory of the CPU.
        mixed_precision: torch's policy, by which parameters are gathered and gradients are reduced in other types;
            None: in their own. `amp=` needs none.
        full_state_dict: inside the block `state_dict()` gives whole tensors, gathered on every rank, which all ranks
            have to call; False: each rank gives its part. `save` gathers nothing in one place.
        roll_call_s: how long the first forward without gradients after a training step waits for the other ranks
            before it is refused; 0: without end.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    blocks: Sequence[type[nn.Module]] | int | None = None
    reshard_after_forward: bool | int | None = None
    shard_size: int | None = None
    cpu_offload: bool = False
    mixed_precision: MixedPrecisionPolicy | None = None
    full_state_dict: bool = False
    roll_call_s: float = 60.0
