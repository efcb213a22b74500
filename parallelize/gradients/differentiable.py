"""Differentiable collectives over the default process group, for tensors of any dtype.

Notation: x and y are this process's input and output, L is the sum of the losses of all processes,
W is the world size and S a shape. x has an influence on the y of every process. So the gradient of
L by x is computed from the gradients g of L by y of all processes, with sum = all_reduce(g, "sum"):

    collective                      gradient of L by x
    all_reduce(x, "sum")            sum
    all_reduce(x, "mean")           sum / W
    all_reduce(x, "max" or "min")   sum / number of ties where x is the extremum, 0 elsewhere
    all_gather(x)                   the row of this process in sum
    broadcast(x, src)               sum on rank src, 0 on other ranks

So backward is a collective, too: every process has to run it, in one order. A process that does not
run it leaves the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelize.run import context

REDUCE_OPS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}

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
"""dtype of a tensor -> dtype in which it is reduced.

The two differ if process groups do not support the first one, or if partial sums could overflow in
it although the mean fits. Sums of integers are cast back, and wrap around as in torch.
"""

_SENT_AS_THEY_ARE = {torch.bool, torch.float16, torch.bfloat16, torch.complex32}
NATIVE_DTYPES = frozenset(REDUCE_DTYPES.values()) | _SENT_AS_THEY_ARE
"""dtypes that every process group can send; others are sent as bytes."""


def all_reduce(x: Tensor, op: str) -> Tensor:
    """Reduce a tensor element-wise over all processes, which must all call this.

    An element is NaN if it is NaN on any process.

    Args:
        x: tensor of shape S, of a dtype in `REDUCE_DTYPES`. S is the same on all processes.
        op: a key of `REDUCE_OPS`.
    """
    if op in ("max", "min"):
        return _extremum(x, op)

    def reduced(values: Tensor) -> Tensor:
        dist.all_reduce(values)
        if op == "mean":
            return values / dist.get_world_size()
        return values

    def gradient_of_x(gradient: Tensor) -> Tensor:
        return all_reduce(gradient, op)

    # The gradient of a gathered or broadcast tensor may have a dtype that is not in REDUCE_DTYPES.
    wide = x.to(REDUCE_DTYPES.get(x.dtype, torch.float32))
    return _collective(wide, reduced, gradient_of_x).to(x.dtype)


def _extremum(x: Tensor, op: str) -> Tensor:
    """Return the maximum or minimum over the processes; the arguments are those of `all_reduce`."""
    # `reduced` sets this mask of x, and `gradient_of_x` reads it in backward.
    is_extremum = torch.empty(0)

    def reduced(values: Tensor) -> Tensor:
        nonlocal is_extremum
        y = values.clone()
        dist.all_reduce(y, REDUCE_OPS[op])
        if x.is_floating_point():
            # A process group may return NaN or the number as the maximum of the two, by the order
            # of the ranks.
            has_nan = values.isnan().to(torch.uint8)
            dist.all_reduce(has_nan, dist.ReduceOp.MAX)
            y.masked_fill_(has_nan.bool(), torch.nan)
        is_extremum = (values == y).to(y.dtype)
        return y

    def gradient_of_x(gradient: Tensor) -> Tensor:
        # The gradient flows to the process that has the extremum. In a tie, it is split evenly.
        ties = all_reduce(is_extremum, "sum")
        return all_reduce(gradient, "sum") * is_extremum / ties

    return _collective(x.to(REDUCE_DTYPES[x.dtype]), reduced, gradient_of_x).to(x.dtype)


def all_gather(x: Tensor) -> Tensor:
    """Stack the tensors of all processes, of one shape, in rank order: S -> (W, *S)."""

    def gathered(values: Tensor) -> Tensor:
        row = _sendable(values)
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        # `_sendable` may have made bytes of the numbers. They become numbers of x's dtype again.
        numbers = torch.stack(rows).flatten().view(x.dtype)
        return numbers.view(len(rows), *x.shape)

    def gradient_of_x(gradient: Tensor) -> Tensor:
        return all_reduce(gradient, "sum")[dist.get_rank()]

    return _collective(x, gathered, gradient_of_x)


def broadcast(x: Tensor, src: int) -> Tensor:
    """Return the tensor of rank `src` on every process; all have one shape and dtype."""

    def received(values: Tensor) -> Tensor:
        # `_sendable` returns a view, so that the collective overwrites the values themselves.
        dist.broadcast(_sendable(values), src)
        return values

    def gradient_of_x(gradient: Tensor) -> Tensor:
        is_source = dist.get_rank() == src
        return all_reduce(gradient, "sum") * is_source

    return _collective(x, received, gradient_of_x)


def _sendable(values: Tensor) -> Tensor:
    """Return the values, or a view of their bytes if process groups do not support the dtype."""
    if values.dtype in NATIVE_DTYPES:
        return values
    return values.reshape(-1).view(torch.uint8)


def _collective(
    x: Tensor,
    compute: Callable[[Tensor], Tensor],
    differentiate: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return what a collective computes from the values of a tensor, on the tensor's device.

    Args:
        x: the tensor.
        compute: runs the collective on a copy of the values, which it may overwrite.
        differentiate: returns the gradient of L by x for the gradient of L by the result.
    """
    sent = x
    if not _is_device_of_group(x.device):
        sent = x.to(context.current().device)
    apply: Callable[..., Tensor] = _Collective.apply
    return apply(sent, compute, differentiate).to(x.device)


def _is_device_of_group(device: torch.device) -> bool:
    """Whether the process group sends tensors of a device; "cpu:gloo,cuda:nccl" sends of both."""
    backends = dist.get_backend_config().split(",")
    return device.type in [backend.partition(":")[0] for backend in backends]


class _Collective(torch.autograd.Function):
    """The operation that `_collective` puts into the graph; its arguments are described there."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, compute: Callable[[Tensor], Tensor], differentiate: Any
    ) -> Tensor:
        ctx.differentiate = differentiate
        # Collectives read memory as it lies, so lazy conjugation and negation are resolved first.
        values = x.detach().resolve_conj().resolve_neg()
        return compute(values.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.differentiate(gradient), None, None
