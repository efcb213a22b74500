"""Replicas of a model, one per rank: their options, and the engine that keeps them alike."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from parallelize.backends.broadcast import RegisteredBuffers, broadcast_from_rank_0, refuse_unbroadcastable
from parallelize.errors import ConfigError
from parallelize.plugins.base import Backend, Engine, Inner, Reduction, Traffic
from parallelize.torch_patches.forward import SplitAtBuckets

__all__ = ["DTYPES", "DDPOptions", "ReplicatedEngine"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class DDPOptions(Backend):
    """Options of the averaging of gradients, by the names that they have in DistributedDataParallel.

    Args:
        find_unused_parameters: accepted, and needless: parameters that a rank has not used are known.
        static_graph: accepted, and needless: an iteration may use any parameters, in any order.
        gradient_as_bucket_view: accepted, and needless: no buckets are kept between backward passes.
        bucket_cap_mb: size in MiB of the buckets in which gradients are all-reduced; None: 25.
        batched_grad_copy: accepted, and needless: gradients are copied to each bucket by one kernel.
        broadcast_buffers: whether ranks keep their buffers alike (batch norm's running statistics), as `buffers=` of
            parallel_model says; False: each rank keeps its own.
        sync_batchnorm: compute batch norm's statistics over the batches of all ranks; GPUs only.
        comm_hook: how gradients are compressed that are sent: "fp16" or "bf16" (dense real ones are sent in that
            dtype), or a pair (state, hook) as for `DistributedDataParallel.register_comm_hook`, such as
            (PowerSGDState(None, 2, 1000), powerSGD_hook); None: as mixed precision's `communication_dtype` says.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html,
        https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
    """

    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    bucket_cap_mb: float | None = None
    batched_grad_copy: bool = False
    broadcast_buffers: bool = True
    sync_batchnorm: bool = False
    comm_hook: Literal["fp16", "bf16"] | tuple[object, Callable[..., Any]] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.comm_hook, str) and self.comm_hook not in DTYPES:
            raise ConfigError(
                f"comm_hook={self.comm_hook!r}",
                why="no compression has that name",
                fix="use 'fp16', 'bf16', or a pair such as (PowerSGDState(None, 2, 1000), powerSGD_hook)",
            )

    def reduction(self, inner: Inner) -> Reduction:
        """Return how the gradients of a model are averaged."""
        size = (self.bucket_cap_mb or 25) * 2**20
        if isinstance(self.comm_hook, tuple):
            state, hook = self.comm_hook
            return Reduction(size, hook=functools.partial(hook, state))
        return Reduction(size, DTYPES[self.comm_hook] if self.comm_hook else inner.session.communication_dtype)


class ReplicatedEngine(Engine):
    """Engine of a model that each rank holds; all start from rank 0's parameters and buffers.

    In training, the buffers are kept alike as `buffers=` says.

    Args:
        options: options of the backend.
        module: `inner`, or what runs it on the devices of this process.
        inner: calls the user's forward.
        device: device of the parameters.

    Raises:
        ConfigError: the device or a parameter does not support the options.
    """

    def __init__(self, options: DDPOptions, module: nn.Module, *, inner: Inner, device: torch.device) -> None:
        model = inner.model
        refuse_unbroadcastable(model, accepts_expanded=False)
        self.reduction = options.reduction(inner)
        self._changes = contextlib.ExitStack()
        if options.sync_batchnorm:
            self._changes.enter_context(_sync_batchnorm(model, device=device))
        self._model, self._how = model, inner.buffer_source if options.broadcast_buffers else None
        broadcast_from_rank_0(list(model.parameters()))
        self._known: list[torch.Tensor] = []
        self._split = SplitAtBuckets(self.reduction.bucket_bytes)
        self.local, self.module = module, self._run
        self.refresh()

    def _run(self, *inputs: Any, **kwargs: Any) -> Any:
        buffers = self._buffers if self._model.training else None
        if buffers is not None and self._how == "rank0":
            buffers.broadcast()
        with self._split:
            output = self.local(*inputs, **kwargs)
        if buffers is not None and self._how == "mean":
            buffers.average()
        return output

    @override
    def refresh(self) -> None:
        known, self._known = {id(each) for each in self._known}, list(self._model.buffers())
        broadcast_from_rank_0([each for each in self._known if id(each) not in known])
        self._buffers = RegisteredBuffers(self._model) if self._known else None

    @override
    def traffic(self) -> Traffic:
        averaged = [each for each in self._model.parameters() if each.requires_grad]
        how: Any = self.reduction
        if how.dtype is not None:
            name = {dtype: name for name, dtype in DTYPES.items()}.get(how.dtype, how.dtype)
            return Traffic(how.dtype.itemsize * sum(each.numel() for each in averaged), f"all-reduced as {name}")
        operation = "all-reduced" if how.hook is None else "passed to a comm hook"
        return Traffic(sum(each.nbytes for each in averaged), operation)

    @override
    def close(self, *, failed: bool) -> None:
        self._changes.close()
        if not failed and self._how is not None:
            broadcast_from_rank_0(list(self._model.buffers()))


@contextlib.contextmanager
def _sync_batchnorm(model: nn.Module, *, device: torch.device) -> Iterator[None]:
    """Compute batch norm over all ranks inside the context: change the class of its modules to SyncBatchNorm."""
    if device.type == "cpu":
        raise ConfigError(
            "sync_batchnorm=True on cpu",
            why="torch.nn.SyncBatchNorm computes on GPUs only",
            fix="drop sync_batchnorm=, or use group or layer norm, which compute no batch statistics",
        )
    changed: list[tuple[nn.Module, type]] = []
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            changed.append((module, type(module)))
            module.__class__ = nn.SyncBatchNorm
            module.__dict__["process_group"] = None  # the default group
    try:
        yield
    finally:
        for module, original_class in changed:
            module.__class__ = original_class
            del module.__dict__["process_group"]
