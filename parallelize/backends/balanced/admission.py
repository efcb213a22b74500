"""Which models can be divided: what can be told without running them."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from parallelize.backends.balanced import refusals
from parallelize.plugins.base import Inner

__all__ = ["admit"]

_UNSUPPORTED = (
    DataParallel,
    DistributedDataParallel,
    FSDPModule,
    FullyShardedDataParallel,
    nn.SyncBatchNorm,
    torch.jit.ScriptModule,
)


def admit(inner: Inner) -> None:
    """Make sure that a model's operations can be seen.

    Raises:
        ConfigError: it is compiled, scripted, or parallel in parts.
    """
    if not inner.is_replicable:
        raise refusals.compiled("")
    for name, module in inner.model.named_modules():
        if isinstance(module, _UNSUPPORTED):
            raise refusals.unsupported(name, type(module).__name__)
        is_optimized = type(module).__name__ == "OptimizedModule"
        if is_optimized or getattr(module, "_compiled_call_impl", None) is not None:
            raise refusals.compiled(name)
