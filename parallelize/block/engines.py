"""The engine of each model of a block, of one of four kinds.

    the backend's engine    of a module
    LocalEngine             of a tensor parallel module whose parts are on all ranks of the world
    _WrapEngine             of a module, if the user has set `wrap=`
    _TensorEngine           of a tensor that is trained beside the models

An engine is built at the entry of the block, and closed at its end.
"""

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
from parallelize.run.context import Runtime, active_or
from parallelize.torch_patches.module_tensors import all_buffers, all_parameters


def build_engine(
    inner: Inner,
    *,
    run: Runtime,
    parts: PartsOfBlock | None,
    restore: bool,
    average: Average,
) -> Engine:
    """Build the engine of a model at the entry of a block.

    It is a collective: the ranks compare the structure of the model, and get rank 0's values.

    Args:
        inner: calls the user's forward.
        run: the run in this process, with the backend and `wrap=`.
        parts: what the models of the block share under `logical=`; None without `logical=`.
        restore: whether sharded parameters become full ones at the end of the block.
        average: how gradients of the ranks are averaged.

    Raises:
        ConfigError: the backend does not support the model, or the module of `wrap=` does not
            support `average`.
        SyncError: the model's structure differs between the ranks.
    """
    if run.world.world_size > 1:
        require_same_model(inner.model)
    if isinstance(inner.model, LeafTensor):
        return _TensorEngine(inner, run)
    if run.world.world_size > 1 and active_or(run).data_ranks.size == 1:
        # No other rank holds the same part, so that there is nothing to average or to shard.
        inner.model.to(run.device)
        return LocalEngine(inner)
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
    """Engine of a tensor that is trained beside the models.

    Under any backend, each rank holds the whole tensor, and the reducer averages its gradients.
    """

    def __init__(self, inner: Inner, run: Runtime) -> None:
        super().__init__(inner)
        if run.world.world_size > 1:
            self.reduction = Reduction()
            broadcast_from_rank_0(list(all_parameters(inner)))


class _WrapEngine(LocalEngine):
    """Engine of a module that the user's `wrap=` returns, which averages gradients by itself.

    Args:
        module: the module that `wrap=` has returned.
        local: calls the user's forward without other ranks, so that one rank may evaluate.
        is_verified: whether the user asks, by `verify_every=`, to compare the copies of the ranks.
    """

    local: nn.Module

    def __init__(self, module: nn.Module, *, local: nn.Module, is_verified: bool) -> None:
        super().__init__(module)
        self.local = local
        self._is_verified = is_verified

    @property
    @override
    def is_replica(self) -> bool:
        # A module of another class than torch's DistributedDataParallel may shard its parameters.
        # Copies of such a module are compared only if the user asks for it.
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
        # `reducer` is torch's object, which averages the gradients of DistributedDataParallel. Its
        # hooks on the AccumulateGrad nodes stay until it is freed
        # (torch/csrc/distributed/c10d/reducer.cpp). Until then they would average the gradients of
        # a model that is in no block.
        self.module.reducer._remove_autograd_hooks()
        # After an exception, other ranks may never come to a collective.
        if not failed and self.module.broadcast_buffers:
            broadcast_from_rank_0(list(all_buffers(self.local)))
