"""Replicas of a model, one per rank: their options, and the engine that keeps them alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from typing_extensions import override

from parallelize.backends.broadcast import (
    RegisteredBuffers,
    broadcast_from_rank_0,
    refuse_unbroadcastable,
)
from parallelize.plugins.base import Backend, Engine, Inner, Reduction
from parallelize.plugins.options import Parse, flag, invalid, number
from parallelize.run.context import current
from parallelize.torch_patches.forward import SplitAtBuckets
from parallelize.torch_patches.module_tensors import all_buffers, all_parameters

_DTYPES_SENT = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Name in the option `comm_hook` -> the dtype in which gradients are sent."""

_DEFAULT_BUCKET_MB = 25
"""Size of the buckets, in MiB, as in DistributedDataParallel."""


def _comm_hook(name: str, value: Any) -> str:
    """Parse the dtype in which gradients are sent."""
    if isinstance(value, str) and value in _DTYPES_SENT:
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
    """Options of the averaging of gradients, by their names in DistributedDataParallel.

    Args:
        find_unused_parameters: accepted, and needless: parameters that a rank has not used are
            known.
        static_graph: accepted, and needless: an iteration may use any parameters, in any order.
        gradient_as_bucket_view: accepted, and needless: no buckets are kept between backward
            passes.
        bucket_cap_mb: size in MiB of the buckets in which gradients are all-reduced; None: 25.
        batched_grad_copy: accepted, and needless: gradients are copied to each bucket by one
            kernel.
        broadcast_buffers: whether ranks keep their buffers alike (batch norm's running statistics),
            as `buffers=` of parallel_model says; False: all begin with rank 0's, and each rank
            keeps its own from then on.
        comm_hook: "fp16" or "bf16": dtype in which dense real gradients are sent; None: as mixed
            precision's `communication_dtype` says.

    Source:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
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
        dtype = inner.session.communication_dtype
        if self.comm_hook is not None:
            dtype = _DTYPES_SENT[self.comm_hook]
        bucket_bytes = (self.bucket_cap_mb or _DEFAULT_BUCKET_MB) * 2**20
        is_ordered = current().config.logical is not None
        return Reduction(bucket_bytes, dtype, is_ordered)


class ReplicatedEngine(Engine):
    """Engine of a model that each rank holds; all start from rank 0's parameters and buffers.

    In training, the buffers are kept alike as `buffers=` says:

        "rank0"                  each forward begins with rank 0's buffers
        "rank0", with logical=   they are broadcast after each forward: rank 0 may evaluate before
                                 the next one, with the buffers of one process
        "mean"                   floating buffers are averaged after each forward

    Args:
        options: options of the backend.
        module: `inner`, or what runs it on the devices of this process.
        inner: calls the user's forward.

    Raises:
        ConfigError: a parameter or buffer cannot be broadcast.
    """

    def __init__(self, options: DDPOptions, module: nn.Module, *, inner: Inner) -> None:
        refuse_unbroadcastable(inner.model)
        reduction = options.reduction(inner)
        self.reduction = reduction
        self.local = module
        self.module = self._run
        self._model = inner.model
        self._keeps_buffers_alike = options.broadcast_buffers
        self._buffer_source = inner.buffer_source
        self._is_logical = reduction.is_ordered
        self._split = SplitAtBuckets(reduction.bucket_bytes)
        # The buffers that have had rank 0's values.
        self._seen_buffers: list[torch.Tensor] = []
        # The buffers that are kept alike; None: there are none.
        self._buffers: RegisteredBuffers | None = None
        broadcast_from_rank_0(list(all_parameters(inner.model)))
        self.refresh()

    def _run(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the forward of a call with gradients; a collective if the model has buffers."""
        buffers = self._buffers if self._model.training else None
        is_from_rank_0 = self._buffer_source == "rank0"
        if buffers is not None and is_from_rank_0 and not self._is_logical:
            buffers.broadcast()
        with self._split:
            output = self.local(*inputs, **kwargs)
        if buffers is not None and not is_from_rank_0:
            buffers.average()
        if buffers is not None and self._is_logical:
            buffers.broadcast()
        return output

    @override
    def refresh(self) -> None:
        """Follow added and replaced modules: new buffers get rank 0's values."""
        ids_of_seen = {id(buffer) for buffer in self._seen_buffers}
        buffers = list(all_buffers(self._model))
        broadcast_from_rank_0([buffer for buffer in buffers if id(buffer) not in ids_of_seen])
        self._seen_buffers = buffers
        self._buffers = None
        if buffers and self._keeps_buffers_alike:
            self._buffers = RegisteredBuffers(self._model)

    @override
    def close(self, *, failed: bool) -> None:
        """Give all ranks rank 0's buffers, unless each rank keeps its own."""
        if not failed and self._keeps_buffers_alike:
            broadcast_from_rank_0(list(all_buffers(self._model)))
