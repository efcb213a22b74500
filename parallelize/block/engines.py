"""The engine of each model of a block: the backend's, that of the user's `wrap=`, or a tensor's."""

from __future__ import annotations

import contextlib

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from parallelize.agreement.fingerprint import require_same_model
from parallelize.backends.broadcast import broadcast_from_rank_0
from parallelize.backends.logical import PartsOfBlock
from parallelize.block.models import LeafTensor
from parallelize.errors import ConfigError
from parallelize.gradients.averaging import Average
from parallelize.plugins.base import Engine, Inner, LocalEngine, Reduction
from parallelize.run.context import Runtime
from parallelize.torch_patches.module_tensors import all_buffers, all_parameters


def build_engine(
    inner: Inner,
    *,
    run: Runtime,
    parts: PartsOfBlock | None,
    restore: bool,
    average: Average,
) -> Engine:
    """Build the engine of a model; it is a collective, since engines begin with rank 0's values.

    Args:
        inner: calls the user's forward.
        run: runtime of this process, with the backend and `wrap=`.
        parts: what the models of the block share under `logical=`.
        restore: whether sharded parameters become full ones at the end of the block.
        average: how gradients of the ranks are averaged.

    Raises:
        ConfigError: the backend does not support the model, or `average` what `wrap=` returns.
        SyncError: the model differs between the ranks.
    """
    if run.world.world_size > 1:
        require_same_model(inner.model)
    if isinstance(inner.model, LeafTensor):
        return _TensorEngine(inner, run)
    inner.parts = parts
    wrap = run.config.wrap
    if wrap is None:
        backend = run.config.backend
        return backend.engine(inner, world=run.world, devices=run.devices, restore=restore)
    module = wrap(inner, run.world)
    if average != "ranks" and not isinstance(module, DistributedDataParallel):
        raise ConfigError(
            f"average={average!r} with a wrap= that returns a {type(module).__name__}",
            why="only DistributedDataParallel is known to average gradients over the ranks with "
            "equal weights",
            fix="return a DistributedDataParallel, or drop average=",
        )
    return _WrapEngine(module, local=inner, is_verified=bool(run.config.verify_every))


class _TensorEngine(LocalEngine):
    """Engine of a tensor that is trained beside the models, under any backend."""

    def __init__(self, inner: Inner, run: Runtime) -> None:
        super().__init__(inner)
        if run.world.world_size > 1:
            self.reduction = Reduction()
            broadcast_from_rank_0(list(all_parameters(inner)))


class _WrapEngine(LocalEngine):
    """Engine of a module that the user's `wrap` returns, which averages gradients by itself.

    A DistributedDataParallel is known to keep replicas, which are compared at the end of the block;
    those of another module are if `verify_every` asks for it.
    """

    local: nn.Module

    def __init__(self, module: nn.Module, *, local: nn.Module, is_verified: bool) -> None:
        super().__init__(module)
        self.local = local
        self._is_verified = is_verified

    @property
    @override
    def is_replica(self) -> bool:
        return self._is_verified or isinstance(self.module, DistributedDataParallel)

    @override
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        no_sync = getattr(self.module, "no_sync", None)
        if no_sync is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = no_sync()
        return context

    @override
    def close(self, *, failed: bool) -> None:
        if not isinstance(self.module, DistributedDataParallel):
            return
        # This reducer is torch's own. Its hooks on the AccumulateGrad nodes stay until the reducer
        # is freed (torch/csrc/distributed/c10d/reducer.cpp). Until then they would average the
        # gradients of a model that is in no block.
        self.module.reducer._remove_autograd_hooks()
        # After an exception there is no collective, because other ranks may not come to it.
        if not failed and self.module.broadcast_buffers:
            broadcast_from_rank_0(list(all_buffers(self.local)))
