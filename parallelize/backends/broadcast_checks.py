"""Buffers, and frozen parameters, that no process can send to another: refused before a collective meets them."""

from __future__ import annotations

import torch
from torch import nn

from parallelize.errors import ConfigError
from parallelize.runtime import differentiable

__all__ = ["refuse_unsendable"]


def refuse_unsendable(model: nn.Module, *, takes_expanded: bool) -> None:
    """Name what rank 0 cannot send at the entry of a block, to make the model the same on every rank.

    Args:
        model: on the device where it will be.
        takes_expanded: whether a tensor whose elements share memory is sent.

    Raises:
        ConfigError: a tensor whose layout or type no process group knows, or whose memory cannot be written to.
    """
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        odd = _oddity(each, takes_expanded=takes_expanded)
        if odd is not None:
            raise ConfigError(
                f"{name} of {type(model).__name__} {odd[0]}",
                why="parameters and buffers are sent from rank 0 to all others, and it cannot be",
                fix=f"{odd[1]}, or keep it as an attribute that is neither, made alike on every rank",
            )


def _oddity(x: torch.Tensor, *, takes_expanded: bool) -> tuple[str, str] | None:
    """Why a tensor cannot be sent, and the nearest that can."""
    if x.layout is not torch.strided:
        return f"is {x.layout}", "use to_dense()"
    # Float types of one byte are known to NCCL.
    if x.dtype not in differentiable.SENT_AS_THEY_ARE and not (x.dtype.itemsize == 1 and x.device.type != "cpu"):
        return f"is {x.dtype}", "use int32, int64 or a float type of 16 bits or more"
    if x.is_conj():
        return "is a conjugate that is not yet computed", "use resolve_conj()"
    if not takes_expanded and any(size > 1 and not stride for size, stride in zip(x.shape, x.stride(), strict=True)):
        return "is expanded: several of its elements are one in memory", "use contiguous()"
    return None
