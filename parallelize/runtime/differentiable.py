"""Tensors on their way between processes: in types that arrive, gradients on the way back.

For backward: L is the sum of the losses of all processes, x and y a process's own value and result, W the world size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelize.runtime import context

__all__ = ["OPS", "REDUCED_AS", "SENT_AS_THEY_ARE", "gather", "reduce", "send"]

OPS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# Type -> the one that it is reduced in: where no process group knows the type itself, and where partial sums outgrow
# it although the mean fits. Narrowed again, sums of integers wrap around as they do in torch.
REDUCED_AS = {
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

# What every process group sends as it is; the rest goes as bytes.
SENT_AS_THEY_ARE = frozenset({*REDUCED_AS.values(), torch.bool, torch.float16, torch.bfloat16, torch.complex32})


def reduce(x: Tensor, op: str) -> Tensor:
    """One tensor from those of all processes, element by element; not a number where any of them has none.

    Args:
        x: S, of a type in `REDUCED_AS`.
        op: a key of `OPS`.
    """
    # Types that are missing there can only come as gradients, of values that were gathered or sent.
    wide = REDUCED_AS.get(x.dtype, torch.float32)
    return _apply(_Reduction, x.to(_carrier(x.device), wide), op).to(x.device, x.dtype)


def gather(x: Tensor) -> Tensor:
    """The tensors of all processes in rank order: S -> (W, *S)."""
    return _apply(_Gathering, x.to(_carrier(x.device))).to(x.device)


def send(x: Tensor, src: int) -> Tensor:
    """The tensor of rank `src`."""
    return _apply(_Sending, x.to(_carrier(x.device)), src).to(x.device)


def _carrier(device: torch.device) -> torch.device:
    """The device itself if this run's processes can talk from there, else one from which they can."""
    types = [each.type for each in dist.distributed_c10d._get_default_group()._device_types]
    return device if device.type in types else context.current().device


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]  # torch has no types for it
    return result


def _values(x: Tensor) -> Tensor:
    """A contiguous copy without history, in which no conjugate and no negation is pending."""
    return x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _sendable(values: Tensor) -> Tensor:
    """The same memory in a type that is sent."""
    return values if values.dtype in SENT_AS_THEY_ARE else values.reshape(-1).view(torch.uint8)


class _Reduction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str) -> Tensor:
        y = _values(x)
        dist.all_reduce(y, OPS[op])
        if op == "mean":
            y /= dist.get_world_size()
        if op in ("max", "min") and x.is_floating_point():
            # Compared with a number, it is larger, smaller or lost: as ranks, or elements, happen to be ordered.
            has_nan = x.detach().isnan().to(torch.uint8)
            dist.all_reduce(has_nan, dist.ReduceOp.MAX)
            y.masked_fill_(has_nan.bool(), torch.nan)
        ctx.op = op
        ctx.save_for_backward(*((x, y) if op in ("max", "min") else ()))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.op in ("mean", "sum"):
            return reduce(grad, ctx.op), None
        # dL/dx goes to who holds the extremum; those who tie share it.
        x, y = ctx.saved_tensors
        holds = (x == y).to(grad.dtype)
        return reduce(grad, "sum") * holds / reduce(holds, "sum"), None


class _Gathering(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:  # S -> (W, *S)
        mine = _sendable(_values(x))
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        return torch.stack(gathered).flatten().view(x.dtype).view(len(gathered), *x.shape)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:  # (W, *S) -> S
        return reduce(grad, "sum")[dist.get_rank()]


class _Sending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, src: int) -> Tensor:
        y = _values(x)
        dist.broadcast(_sendable(y), src)
        ctx.src = src
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = reduce(grad, "sum")
        return total if dist.get_rank() == ctx.src else torch.zeros_like(total), None
