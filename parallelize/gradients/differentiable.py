"""Differentiable all-reduce, all-gather and broadcast over the default process group, for tensors of any dtype.

Notation: x and y are this process's input and output, L is the sum of the losses of all processes, W is the world size
and S a shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelize.run import context

__all__ = ["NATIVE_DTYPES", "REDUCE_DTYPES", "REDUCE_OPS", "all_gather", "all_reduce", "broadcast"]

REDUCE_OPS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# dtype -> dtype of the reduction; they differ if process groups do not support the dtype, or if partial sums could
# overflow although the mean fits. Integer sums are cast back to the dtype and wrap around as in torch.
REDUCE_DTYPES = {
    torch.bool: torch.uint8,
    torch.uint8: torch.uint8,
    torch.int8: torch.int8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.int32: torch.int32,
    torch.uint32: torch.int64,
    torch.int64: torch.int64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex32: torch.complex64,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}

# dtypes that every process group can send; others are sent as bytes.
NATIVE_DTYPES = frozenset({*REDUCE_DTYPES.values(), torch.bool, torch.float16, torch.bfloat16, torch.complex32})


def all_reduce(x: Tensor, op: str) -> Tensor:
    """Reduce a tensor element-wise over all processes; an element is NaN if it is NaN on any process.

    Args:
        x: tensor of shape S, of a dtype in `REDUCE_DTYPES`.
        op: a key of `REDUCE_OPS`.
    """
    if op in ("max", "min"):
        return _extremum(x, op)

    def reduced(values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values / dist.get_world_size() if op == "mean" else values

    # Gradients of gathered and broadcast tensors may have dtypes that are not in REDUCE_DTYPES.
    wide = x.to(REDUCE_DTYPES.get(x.dtype, torch.float32))
    return _collective(wide, reduced, lambda gradient: all_reduce(gradient, op)).to(x.dtype)


def _extremum(x: Tensor, op: str) -> Tensor:
    is_extremum = torch.empty(0)

    def reduced(values: Tensor) -> Tensor:
        nonlocal is_extremum
        y = values.clone()
        dist.all_reduce(y, REDUCE_OPS[op])
        if x.is_floating_point():
            # The result of max and min for NaN depends on the process group and on the order of ranks.
            has_nan = values.isnan().to(torch.uint8)
            dist.all_reduce(has_nan, dist.ReduceOp.MAX)
            y.masked_fill_(has_nan.bool(), torch.nan)
        is_extremum = (values == y).to(y.dtype)
        return y

    def gradient_of_x(gradient: Tensor) -> Tensor:
        # It flows to the process that has the extremum; in a tie it is split evenly.
        return all_reduce(gradient, "sum") * is_extremum / all_reduce(is_extremum, "sum")

    return _collective(x.to(REDUCE_DTYPES[x.dtype]), reduced, gradient_of_x).to(x.dtype)


def all_gather(x: Tensor) -> Tensor:
    """Stack the tensors of all processes in rank order: S -> (W, *S)."""

    def gathered(values: Tensor) -> Tensor:
        sent = _sendable(values)
        found = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
        dist.all_gather(found, sent)
        return torch.stack(found).flatten().view(x.dtype).view(len(found), *x.shape)

    return _collective(x, gathered, lambda gradient: all_reduce(gradient, "sum")[dist.get_rank()])


def broadcast(x: Tensor, src: int) -> Tensor:
    """Return the tensor of rank `src` on every process."""

    def received(values: Tensor) -> Tensor:
        dist.broadcast(_sendable(values), src)
        return values

    return _collective(x, received, lambda gradient: all_reduce(gradient, "sum") * (dist.get_rank() == src))


def _sendable(values: Tensor) -> Tensor:
    """Return the values unchanged, or a view of their bytes if process groups do not support the dtype."""
    return values if values.dtype in NATIVE_DTYPES else values.reshape(-1).view(torch.uint8)


def _collective(x: Tensor, compute: Callable[[Tensor], Tensor], differentiate: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what a collective computes from the values of a tensor, on the tensor's device.

    Args:
        x: the tensor.
        compute: the collective; it may overwrite the values that it gets.
        differentiate: returns the gradient of L by x from that by the result.
    """
    types = [each.partition(":")[0] for each in dist.get_backend_config().split(",")]
    sent = x if x.device.type in types else x.to(context.current().device)
    result: Tensor = _Collective.apply(sent, compute, differentiate)  # type: ignore[no-untyped-call]  # torch's
    return result.to(x.device)


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, compute: Callable[[Tensor], Tensor], differentiate: Any) -> Tensor:
        ctx.differentiate = differentiate
        # A contiguous copy with lazy conjugation and negation resolved.
        return compute(x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.differentiate(gradient), None, None
