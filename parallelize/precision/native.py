"""Mixed precision by torch.amp."""

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
    """Autocast of torch.amp, loss scaling by GradScaler's rules."""

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
        """Mixed precision for a block, as the level's row of the table says.

        Args:
            amp: the request.
            models: the user's own objects, already on `device`.
            optimizers: not needed: they are met when they step.
            device: the first device this process drives.
            world: this process among the others.
            sharded: whether ranks must agree on inf and nan.

        Raises:
            ConfigError: loss scaling with a parameter in fp16.
        """
        del optimizers
        amp = resolve(amp, self, device=device, world=world)
        row = TABLE[amp.level or self.default_level]
        if not row.autocast:
            return contextlib.nullcontext(Session())
        policy = Policy(
            device=device,
            autocast=amp.dtype,
            weights=amp.dtype if row.half_weights and row.master_weights else None,
            gathers=sharded and world.world_size > 1,
            storage=None if row.master_weights else amp.dtype,
            scaling=amp if row.scales_loss and amp.dtype is torch.float16 else None,
            agree=_agree if sharded else None,
            communication_dtype=amp.communication_dtype,
        )
        return mixed_precision(policy, models=models)


def _agree(flag: torch.Tensor) -> None:
    """The largest of all ranks' flags, on every rank, in place."""
    dist.all_reduce(flag, dist.ReduceOp.MAX)


PLUGIN = NativePrecision
