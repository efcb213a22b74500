"""Differentiable all-reduce, all-gather and broadcast over the default process group, for tensors of any dtype.

Notation: x and y are this process's input and output, L is the sum of the losses of all processes, W is the world size
and S a shape.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelize.runtime import context

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
    # Gradients of gathered and broadcast tensors may have dtypes that are not in REDUCE_DTYPES.
    wide = REDUCE_DTYPES.get(x.dtype, torch.float32)
    return _apply(_AllReduce, x.to(_communication_device(x.device), wide), op).to(x.device, x.dtype)


def all_gather(x: Tensor) -> Tensor:
    """Stack the tensors of all processes in rank order: S -> (W, *S)."""
    return _apply(_AllGather, x.to(_communication_device(x.device))).to(x.device)


def broadcast(x: Tensor, src: int) -> Tensor:
    """Return the tensor of rank `src` on every process."""
    return _apply(_Broadcast, x.to(_communication_device(x.device)), src).to(x.device)


def _communication_device(device: torch.device) -> torch.device:
    """Return `device` if the process group has a backend for its type, else the device of this run."""
    types = [each.partition(":")[0] for each in dist.get_backend_config().split(",")]
    return device if device.type in types else context.current().device


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]  # torch has no types for it
    return result


def _values(x: Tensor) -> Tensor:
    """Return a contiguous detached copy with lazy conjugation and negation resolved."""
    return x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _sendable(values: Tensor) -> Tensor:
    """Return the values unchanged, or a view of their bytes if process groups do not support the dtype."""
    return values if values.dtype in NATIVE_DTYPES else values.reshape(-1).view(torch.uint8)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str) -> Tensor:
        y = _values(x)
        dist.all_reduce(y, REDUCE_OPS[op])
        if op == "mean":
            y /= dist.get_world_size()
        if op in ("max", "min") and x.is_floating_point():
            # The result of max and min for NaN depends on the process group and on the order of ranks.
            has_nan = x.detach().isnan().to(torch.uint8)
            dist.all_reduce(has_nan, dist.ReduceOp.MAX)
            y.masked_fill_(has_nan.bool(), torch.nan)
        ctx.op = op
        ctx.save_for_backward(*((x, y) if op in ("max", "min") else ()))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.op in ("mean", "sum"):
            return all_reduce(grad, ctx.op), None
        # dL/dy flows to the process that has the extremum; in a tie it is split evenly.
        x, y = ctx.saved_tensors
        is_extremum = (x == y).to(grad.dtype)
        return all_reduce(grad, "sum") * is_extremum / all_reduce(is_extremum, "sum"), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:  # S -> (W, *S)
        sent = _sendable(_values(x))
        gathered = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, sent)
        return torch.stack(gathered).flatten().view(x.dtype).view(len(gathered), *x.shape)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:  # (W, *S) -> S
        return all_reduce(grad, "sum")[dist.get_rank()]


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, src: int) -> Tensor:
        y = _values(x)
        dist.broadcast(_sendable(y), src)
        ctx.src = src
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = all_reduce(grad, "sum")
        return total if dist.get_rank() == ctx.src else torch.zeros_like(total), None
