"""Replicas of a model, one per rank: their options, and the engine that keeps them alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from typing_extensions import override

from parallelize.backends.broadcast import RegisteredBuffers, broadcast_from_rank_0, refuse_unbroadcastable
from parallelize.plugins.base import Backend, Engine, Inner, Reduction
from parallelize.plugins.options import Parse, flag, invalid, number
from parallelize.run.context import current
from parallelize.torch_patches.forward import SplitAtBuckets
from parallelize.torch_patches.module_tensors import all_buffers, all_parameters

__all__ = ["DTYPES", "DDPOptions", "ReplicatedEngine"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def _comm_hook(name: str, value: Any) -> str:
    """Parse the dtype in which gradients are sent."""
    if isinstance(value, str) and value in DTYPES:
        return str(value)
    raise invalid(
        name,
        value,
        "gradients are averaged at the parameter, without DistributedDataParallel's hooks",
        "use 'fp16' or 'bf16'; for other hooks, such as powerSGD_hook, return a "
        "DistributedDataParallel with register_comm_hook from wrap=",
    )


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
        comm_hook: "fp16" or "bf16": dtype in which dense real gradients are sent; None: as mixed precision's
            `communication_dtype` says.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """

    option_parsers: ClassVar[Mapping[str, Parse]] = {
        "find_unused_parameters": flag,
        "static_graph": flag,
        "gradient_as_bucket_view": flag,
        "bucket_cap_mb": number(0, is_above=True),
        "batched_grad_copy": flag,
        "broadcast_buffers": flag,
        "comm_hook": _comm_hook,
    }
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    bucket_cap_mb: float | None = None
    batched_grad_copy: bool = False
    broadcast_buffers: bool = True
    comm_hook: Literal["fp16", "bf16"] | None = None

    def reduction(self, inner: Inner) -> Reduction:
        """Return how the gradients of a model are averaged."""
        dtype = DTYPES[self.comm_hook] if self.comm_hook else inner.session.communication_dtype
        is_ordered = current().config.logical is not None
        return Reduction((self.bucket_cap_mb or 25) * 2**20, dtype, is_ordered)


class ReplicatedEngine(Engine):
    """Engine of a model that each rank holds; all start from rank 0's parameters and buffers.

    In training, the buffers are kept alike as `buffers=` says.

    Args:
        options: options of the backend.
        module: `inner`, or what runs it on the devices of this process.
        inner: calls the user's forward.

    Raises:
        ConfigError: a parameter or buffer cannot be broadcast.
    """

    def __init__(self, options: DDPOptions, module: nn.Module, *, inner: Inner) -> None:
        model = inner.model
        refuse_unbroadcastable(model)
        self.reduction = options.reduction(inner)
        self._model, self._how = model, inner.buffer_source if options.broadcast_buffers else None
        broadcast_from_rank_0(list(all_parameters(model)))
        self._known: list[torch.Tensor] = []
        self._split = SplitAtBuckets(self.reduction.bucket_bytes)
        self.local, self.module = module, self._run
        self.refresh()

    def _run(self, *inputs: Any, **kwargs: Any) -> Any:
        buffers = self._buffers if self._model.training else None
        is_divided = self.reduction is not None and self.reduction.is_ordered
        if buffers is not None and self._how == "rank0" and not is_divided:
            buffers.broadcast()
        with self._split:
            output = self.local(*inputs, **kwargs)
        if buffers is not None and self._how == "mean":
            buffers.average()
        if buffers is not None and is_divided:  # a rank may evaluate before the next one
            buffers.broadcast()
        return output

    @override
    def refresh(self) -> None:
        known, self._known = {id(each) for each in self._known}, list(all_buffers(self._model))
        broadcast_from_rank_0([each for each in self._known if id(each) not in known])
        self._buffers = RegisteredBuffers(self._model) if self._known else None

    @override
    def close(self, *, failed: bool) -> None:
        if not failed and self._how is not None:
            broadcast_from_rank_0(list(all_buffers(self._model)))
