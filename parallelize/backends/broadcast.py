"""Broadcast of rank 0's parameters and buffers, and checks that it is possible, before a collective would fail."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.errors import ConfigError
from parallelize.runtime import differentiable
from parallelize.runtime.user_line import user_stacklevel

__all__ = ["RegisteredBuffers", "broadcast_from_rank_0", "place", "refuse_unbroadcastable"]


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
    if _is_expanded(x):
        return None if accepts_expanded else ("is expanded: its elements share memory", "use contiguous()")
    if torch.empty_like(x, device="meta").stride() != x.stride():
        return "is a view with gaps between its elements", "use contiguous()"
    return None


def place(module: nn.Module, device: torch.device) -> None:
    """Move the parameters and buffers of a module to a device, except sharded ones; give values to those on "meta".

    They are those of each submodule's `reset_parameters`, or else NaN until values are loaded.
    """
    for part in reversed(list(module.modules())):  # children first: a parent may initialize them anew
        tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        missing = [each for each in tensors if each.is_meta]
        for each in missing:
            value = torch.full_like(each, torch.nan if each.is_floating_point() else 0, device=device)
            is_parameter = isinstance(each, nn.Parameter)
            swap: Any = torch.utils.swap_tensors
            swap(each, nn.Parameter(value, each.requires_grad) if is_parameter else value)
        reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
        if missing and reset is not None:
            reset()
        elif missing:
            warnings.warn(
                f"a {type(part).__name__} on the meta device has no reset_parameters(): its own tensors are NaN until "
                "values are loaded in the block",
                stacklevel=user_stacklevel(),
            )
        for each in tensors:
            if not hasattr(each, "full_tensor"):
                each.data = each.data.to(device)


def broadcast_from_rank_0(tensors: list[torch.Tensor]) -> None:
    """Overwrite tensors with rank 0's values, in place; one collective per tensor, in the same order on every rank."""
    with torch.no_grad():
        works: list[Any] = [dist.broadcast(tensor.detach(), src=0, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()


class RegisteredBuffers:
    """The buffers that a model has registered, such as batch norm's running statistics.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._registrations = [(module._buffers, name) for module in model.modules() for name in module._buffers]

    def broadcast(self) -> None:
        """Overwrite the buffers with rank 0's; one collective per dtype and device."""
        self._send(self._present(), functools.partial(dist.broadcast, src=0))

    def average(self) -> None:
        """Overwrite floating buffers with their mean over the ranks; one collective per dtype and device."""
        floating = [each for each in self._present() if each.is_floating_point()]

        def mean(flat: torch.Tensor) -> None:
            flat /= dist.get_world_size()
            dist.all_reduce(flat)

        self._send(floating, mean)

    def _present(self) -> list[torch.Tensor]:
        buffers = [registered.get(name) for registered, name in self._registrations]
        return list({id(each): each for each in buffers if each is not None and not _is_expanded(each)}.values())

    @staticmethod
    @torch.no_grad()
    def _send(buffers: list[torch.Tensor], collective: Callable[[torch.Tensor], object]) -> None:
        for _, group in itertools.groupby(sorted(buffers, key=_kind), key=_kind):
            tensors = [each.detach() for each in group]
            flat = torch.cat([each.flatten() for each in tensors])
            collective(flat)
            values = torch.split(flat, [each.numel() for each in tensors])
            # Batch norm has saved its statistics for a backward that does not use them.
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(tensors)):
                for each, value in zip(tensors, values, strict=True):
                    each.copy_(value.view(each.shape))


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tensor.device}"


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
