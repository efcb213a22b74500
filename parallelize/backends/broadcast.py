"""Broadcast of rank 0's parameters and buffers, and checks that it is possible, before a collective would fail."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.errors import ConfigError
from parallelize.gradients import differentiable
from parallelize.run.user_line import user_stacklevel
from parallelize.torch_patches.module_tensors import (
    all_buffers,
    all_named_buffers,
    all_named_parameters,
    all_parameters,
)

__all__ = ["RegisteredBuffers", "broadcast_from_rank_0", "place", "refuse_unbroadcastable"]

_ALONE_BYTES = 2**20
"""A tensor of this size is sent alone and needs no copy: a device under fsdp may have no room for a copy of a unit."""

_MESSAGE_BYTES = 32 * 2**20
"""Smaller tensors share messages of about this size, whose sending takes far longer than the start of a collective."""


def refuse_unbroadcastable(model: nn.Module, *, accepts_expanded: bool) -> None:
    """Refuse parameters and buffers that rank 0 cannot broadcast at the entry of a block.

    Args:
        model: already on its final device.
        accepts_expanded: whether an expanded tensor, whose elements share memory, can be broadcast.

    Raises:
        ConfigError: a tensor whose layout or dtype broadcast does not support, or that broadcast cannot overwrite.
    """
    for name, each in (*all_named_parameters(model), *all_named_buffers(model)):
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
    if _expanded_dimensions(x):
        return None if accepts_expanded else ("is expanded: its elements share memory", "use contiguous()")
    if torch.empty_like(x, device="meta").stride() != x.stride():
        return "is a view with gaps between its elements", "use contiguous()"
    return None


def place(module: nn.Module, device: torch.device) -> None:
    """Move the parameters and buffers of a module to a device, except sharded ones; give values to those on "meta".

    They are those of each submodule's `reset_parameters`, or else NaN until values are loaded.
    """
    for part in reversed(list(module.modules())):  # children first: a parent may initialize them anew
        tensors = [*all_parameters(part, recurse=False), *all_buffers(part, recurse=False)]
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


def broadcast_from_rank_0(tensors: Sequence[torch.Tensor]) -> None:
    """Overwrite tensors with rank 0's values, in place; a collective of few messages, in one order on all ranks."""
    for message in _messages([_as_sent(tensor.detach()) for tensor in tensors]):
        _send(message, functools.partial(dist.broadcast, src=0))


def _as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view in a dtype that can be concatenated and sent on every device.

    On CUDA, `torch.cat` and `torch._foreach_copy_` lack some one-byte float types and complex32.
    """
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _messages(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Divide tensors into messages, each of one dtype and device.

    The messages depend on shapes, dtypes and devices, but not on strides: a weight may be transposed on one rank only.
    Small tensors share messages. A large one is sent alone, so that it need not be copied.
    """
    messages: list[list[torch.Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    bytes_filled = Counter[tuple[torch.dtype, torch.device]]()
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        if tensor.nbytes >= _ALONE_BYTES:
            messages.append([tensor])
            continue
        kind = tensor.dtype, tensor.device
        filling.setdefault(kind, []).append(tensor)
        bytes_filled[kind] += tensor.nbytes
        if bytes_filled[kind] >= _MESSAGE_BYTES:
            messages.append(filling.pop(kind))
            del bytes_filled[kind]
    return [*messages, *filling.values()]


@torch.no_grad()
def _send(tensors: Sequence[torch.Tensor], collective: Callable[[torch.Tensor], object]) -> None:
    """Run a collective on a flat tensor of the elements of all these tensors, and copy its result to the tensors.

    NCCL takes contiguous tensors only. A contiguous tensor that is sent alone is overwritten by the collective itself.

    Args:
        tensors: of one dtype and device, without gradients.
        collective: overwrites a flat or contiguous tensor, the same on all ranks.
    """
    # An inference tensor has no version.
    versioned = tuple([tensor for tensor in tensors if not tensor.is_inference()])
    # Autograd is not to know of the new values: batch norm has saved its statistics for a backward that does not use
    # them, and that would refuse a later version of them.
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(versioned):
        if len(tensors) == 1 and tensors[0].is_contiguous():
            collective(tensors[0])
            return
        # Without `contiguous`, the flat view of a tensor with gaps, such as x[::2], would have gaps, too.
        flat_parts = [tensor.contiguous().flatten() for tensor in tensors]
        flat = flat_parts[0] if len(tensors) == 1 else torch.cat(flat_parts)
        collective(flat)
        results = torch.split(flat, [tensor.numel() for tensor in tensors])
        targets, values = list[torch.Tensor](), list[torch.Tensor]()
        for tensor, value in zip(tensors, results, strict=True):
            dimensions = _expanded_dimensions(tensor)
            targets.append(_first_along(tensor, dimensions))
            values.append(_first_along(value.view(tensor.shape), dimensions))
        torch._foreach_copy_(targets, values)


def _expanded_dimensions(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions along which the elements of a tensor share memory."""
    sizes_and_strides = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return [dimension for dimension, (size, stride) in sizes_and_strides if size > 1 and stride == 0]


def _first_along(tensor: torch.Tensor, dimensions: Iterable[int]) -> torch.Tensor:
    """Return a view of the first element along each of these dimensions, which keep the size 1."""
    for dimension in dimensions:
        tensor = tensor.narrow(dimension, 0, 1)
    return tensor


class RegisteredBuffers:
    """The buffers that a model has registered, such as batch norm's running statistics.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._registrations = [(module._buffers, name) for module in model.modules() for name in module._buffers]

    def broadcast(self) -> None:
        """Overwrite the buffers with rank 0's."""
        broadcast_from_rank_0(self._present())

    def average(self) -> None:
        """Overwrite floating buffers with their mean over the ranks."""

        def mean(flat: torch.Tensor) -> None:
            flat /= dist.get_world_size()
            dist.all_reduce(flat)

        floating = [buffer.detach() for buffer in self._present() if buffer.is_floating_point()]
        for message in _messages(floating):
            _send(message, mean)

    def _present(self) -> list[torch.Tensor]:
        """Return the buffers that have values now, each once, without expanded ones."""
        buffers = [registered.get(name) for registered, name in self._registrations]
        present = {id(buffer): buffer for buffer in buffers if buffer is not None}
        return [buffer for buffer in present.values() if not _expanded_dimensions(buffer)]
