"""Mixed precision by torch.amp: the native engine."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from parallelize.cluster.world import World
from parallelize.plugins.base import Amp, Precision, Session
from parallelize.precision.levels import TABLE, describe, resolve
from parallelize.precision.native_session import Policy, mixed_precision

__all__ = ["PLUGIN", "NativePrecision"]


class NativePrecision(Precision):
    """Autocast of torch.amp, with loss scaling by the rules of torch.amp.GradScaler."""

    name = "native"
    dtypes: ClassVar[Mapping[str, frozenset[torch.dtype]]] = {
        "cpu": frozenset({torch.bfloat16}),
        "cuda": frozenset({torch.bfloat16, torch.float16}),
    }
    default_level = "O1"

    @override
    def describe(self, amp: Amp, *, device_type: str) -> str:
        return describe(amp, self, device_type=device_type)

    @override
    def open(
        self,
        *,
        amp: Amp,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        device: torch.device,
        world: World,
        sharded: bool = False,
    ) -> contextlib.AbstractContextManager[Session]:
        """Return the context of mixed precision for a block, with the settings of the level's row in `TABLE`.

        Args:
            amp: the request.
            models: the user's own objects, already on `device`.
            optimizers: ignored; a global step hook is called for every optimizer.
            device: the first device this process drives.
            world: ranks and sizes of this process.
            sharded: whether ranks hold shards of gradients, so that flags of inf and nan are all-reduced.

        Raises:
            ConfigError: a parameter is in fp16 under loss scaling.
        """
        del optimizers
        amp = resolve(amp, self, device=device, world=world)
        row = TABLE[amp.level or self.default_level]
        if not row.autocast:
            return contextlib.nullcontext(Session())
        policy = Policy(
            device=device,
            autocast_dtype=amp.dtype,
            weights_dtype=amp.dtype if row.half_weights and row.master_weights else None,
            backend_casts_weights=sharded and world.world_size > 1,
            storage_dtype=None if row.master_weights else amp.dtype,
            loss_scaling=amp if row.scales_loss and amp.dtype is torch.float16 else None,
            all_reduce_flag=_all_reduce_max if sharded else None,
            communication_dtype=amp.communication_dtype,
        )
        return mixed_precision(policy, models=models)


def _all_reduce_max(flag: torch.Tensor) -> None:
    """All-reduce `flag` to the maximum over all ranks, in place."""
    dist.all_reduce(flag, dist.ReduceOp.MAX)


PLUGIN = NativePrecision
