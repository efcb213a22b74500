"""Broadcast of rank 0's parameters and buffers, and checks that it is possible, before a collective would fail."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from parallelize.errors import ConfigError
from parallelize.runtime import differentiable

__all__ = ["broadcast_buffers", "broadcast_from_rank_0", "refuse_unbroadcastable"]


def refuse_unbroadcastable(model: nn.Module, *, accepts_expanded: bool) -> None:
    """Refuse parameters and buffers that rank 0 cannot broadcast at the entry of a block.

    Args:
        model: already on its final device.
        accepts_expanded: whether an expanded tensor, whose elements share memory, can be broadcast.

    Raises:
        ConfigError: a tensor whose layout or dtype broadcast does not support, or that broadcast cannot overwrite.
    """
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        obstacle = _obstacle(each, accepts_expanded=accepts_expanded)
        if obstacle is not None:
            raise ConfigError(
                f"{name} of {type(model).__name__} {obstacle[0]}",
                why="parameters and buffers are broadcast from rank 0, which this tensor does not support",
                fix=f"{obstacle[1]}, or keep it as a plain attribute, with the same value on every rank",
            )


def _obstacle(x: torch.Tensor, *, accepts_expanded: bool) -> tuple[str, str] | None:
    """Return (why a tensor cannot be broadcast, how to change it); None if it can be broadcast."""
    if x.layout is not torch.strided:
        return f"is {x.layout}", "use to_dense()"
    # NCCL supports one-byte float types.
    if x.dtype not in differentiable.NATIVE_DTYPES and not (x.dtype.itemsize == 1 and x.device.type != "cpu"):
        return f"is {x.dtype}", "use int32, int64 or a float type of 16 bits or more"
    if x.is_conj():
        return "is a conjugate view", "use resolve_conj()"
    if not accepts_expanded and any(size > 1 and not stride for size, stride in zip(x.shape, x.stride(), strict=True)):
        return "is expanded: its elements share memory", "use contiguous()"
    return None


def broadcast_from_rank_0(tensors: list[torch.Tensor]) -> None:
    """Overwrite tensors with rank 0's values, in place; one collective per tensor, in the same order on every rank."""
    with torch.no_grad():
        for work in [dist.broadcast(tensor.detach(), src=0, async_op=True) for tensor in tensors]:
            work.wait()


def broadcast_buffers(module: nn.Module) -> None:
    """Overwrite a module's buffers with rank 0's values, in place; one collective per dtype."""
    buffers_of_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for each in module.buffers():
        buffers_of_dtype.setdefault(each.dtype, []).append(each.detach())
    for buffers in buffers_of_dtype.values():
        joined = torch.cat([each.reshape(-1) for each in buffers])
        dist.broadcast(joined, src=0)
        for each, values in zip(buffers, torch.split(joined, [each.numel() for each in buffers]), strict=True):
            each.copy_(values.view_as(each))
