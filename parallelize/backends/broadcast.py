"""The entry of a model's parameters and buffers into a block: all ranks start from rank 0's values.

refuse_unbroadcastable   names what cannot be sent, before anything is
place                    moves tensors to the device of the rank, which may have none yet
broadcast_from_rank_0    overwrites tensors, of any strides, with rank 0's values

message                  tensors that are sent together, as one flat tensor
"""

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
from parallelize.run.context import current
from parallelize.run.groups import GroupPurpose, group_of_data_ranks
from parallelize.run.user_line import user_stacklevel
from parallelize.torch_patches.module_tensors import (
    all_buffers,
    all_named_buffers,
    all_named_parameters,
    all_parameters,
    local_part,
)

_ALONE_BYTES = 2**20
"""A tensor of this size is sent alone and needs no copy.

A device under fsdp may have no room for a copy of a unit.
"""

_MESSAGE_BYTES = 32 * 2**20
"""Smaller tensors share messages of about this size.

The sending of such a message takes far longer than the start of a collective.
"""

_INTEGER_OF_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the dtype in which elements of a rarer dtype are copied, bit by bit."""


def refuse_unbroadcastable(model: nn.Module) -> None:
    """Refuse parameters and buffers that rank 0 cannot broadcast at the entry of a block.

    Args:
        model: already on its final device.

    Raises:
        ConfigError: a tensor that a collective cannot send, or that its values cannot overwrite.
    """
    for name, tensor in (*all_named_parameters(model), *all_named_buffers(model)):
        obstacle = _obstacle(local_part(tensor))
        if obstacle is not None:
            fault, remedy = obstacle
            raise ConfigError(
                f"{name} of {type(model).__name__} {fault}",
                why="rank 0 broadcasts parameters and buffers, which this tensor does not support",
                fix=f"{remedy}, or keep it as a plain attribute, with the same value on every rank",
            )


def _obstacle(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return (why a tensor cannot be broadcast, how to change it); None if it can be broadcast."""
    if tensor.layout is not torch.strided:
        return f"is {tensor.layout}", "use to_dense()"
    if tensor.is_quantized:
        return f"is {tensor.dtype}", "use int_repr(), with its scale beside it"
    if tensor.is_conj():
        return "is a conjugate view", "use resolve_conj()"
    if tensor.is_neg():
        return "is a negative view", "use resolve_neg()"
    if tensor.requires_grad and _expanded_dimensions(tensor):
        # No optimizer of one process could write to it either.
        return "is trained and expanded: its elements share memory", "use contiguous()"
    if _windows_overlap(tensor):
        return "has elements that share memory", "use contiguous()"
    return None


def _windows_overlap(tensor: torch.Tensor) -> bool:
    """Whether elements share memory in another way than along expanded dimensions.

    They do in the windows of `unfold`: rank 0's values for one window would overwrite those of
    the next one.
    """
    # Number of elements of memory that the dimensions with smaller strides span.
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 or size <= 1:
            continue
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def place(module: nn.Module, device: torch.device) -> None:
    """Move parameters with their gradients, and buffers, to a device, except sharded ones.

    Those on "meta" get the values of each submodule's `reset_parameters`, or else NaN until values
    are loaded.

    Args:
        module: with all of its submodules.
        device: where the tensors are afterwards; the objects stay the same.
    """
    # Children first: a parent may initialize them anew.
    for submodule in reversed(list(module.modules())):
        tensors = [
            *all_parameters(submodule, recurse=False),
            *all_buffers(submodule, recurse=False),
        ]
        # A model on "meta" has shapes and no memory.
        without_values = [tensor for tensor in tensors if tensor.is_meta]
        if without_values:
            _give_values(submodule, without_values, device)
        for tensor in tensors:
            if not hasattr(tensor, "full_tensor"):
                _move(tensor, device)


def _move(tensor: torch.Tensor, device: torch.device) -> None:
    """Move a tensor to a device, with its gradient: the object stays the same.

    An optimizer and the user's code hold the object.
    """
    tensor.data = tensor.data.to(device)
    if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
        tensor.grad = tensor.grad.to(device)


def _give_values(module: nn.Module, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Give tensors on the meta device memory and values on a device.

    Args:
        module: whose own tensors they are, not those of its submodules.
        tensors: parameters and buffers.
        device: where the values are.
    """
    swap: Any = torch.utils.swap_tensors
    for tensor in tensors:
        fill = torch.nan if tensor.is_floating_point() else 0
        values = torch.full_like(tensor, fill, device=device)
        if isinstance(tensor, nn.Parameter):
            values = nn.Parameter(values, tensor.requires_grad)
        swap(tensor, values)
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None:
        reset()
        return
    warnings.warn(
        f"a {type(module).__name__} on the meta device has no reset_parameters(): its own tensors "
        "are NaN until values are loaded in the block",
        stacklevel=user_stacklevel(),
    )


def broadcast_from_rank_0(tensors: Sequence[torch.Tensor]) -> None:
    """Overwrite tensors with rank 0's values, in place.

    This is a collective of few messages, in one order on all ranks. If models are tensor parallel
    already, the values are those of the first rank that holds the same parts.

    Args:
        tensors: of equal shapes and dtypes on all ranks, but maybe of other strides; those of other
            devices are in other messages.
    """
    group, source = _data_group()
    broadcast = functools.partial(_broadcast, group=group, source=source)
    for message in _messages([_as_sent(local_part(tensor.detach())) for tensor in tensors]):
        _send(message, broadcast)


def _data_group() -> tuple[Any, int]:
    """Return the group of the ranks that hold the same parameters, and the first of them.

    The first call is a collective.
    """
    run = current()
    data_ranks = run.data_ranks
    group: Any = dist.group.WORLD
    if not data_ranks.are_all_ranks:
        purpose = GroupPurpose.GRADIENTS
        group = group_of_data_ranks(data_ranks, run.world, run.device, purpose)
    return group, data_ranks.first_rank


def _as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view in a dtype that can be concatenated on every device.

    The bits of its elements are those of the tensor.

    On CUDA, `torch.cat` and `torch._foreach_copy_` lack some one-byte float types, unsigned
    integers and complex32.
    """
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.itemsize > 1 and tensor.dtype in differentiable.NATIVE_DTYPES:
        return tensor
    return tensor.view(_INTEGER_OF_ITEMSIZE[tensor.itemsize])


def _broadcast(contiguous: torch.Tensor, *, group: Any, source: int) -> None:
    """Broadcast from a rank, as bytes where process groups do not send the dtype.

    Args:
        contiguous: a contiguous tensor, which is overwritten on the other ranks.
        group: the ranks that take part.
        source: the rank whose values are sent.
    """
    if contiguous.dtype not in differentiable.NATIVE_DTYPES:
        contiguous = contiguous.view(torch.uint8)
    dist.broadcast(contiguous, src=source, group=group)


def _messages(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Divide tensors into messages, each of one dtype and device.

    The messages depend on shapes, dtypes and devices, but not on strides: a weight may be
    transposed on one rank only.

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
        dtype_and_device = tensor.dtype, tensor.device
        filling.setdefault(dtype_and_device, []).append(tensor)
        bytes_filled[dtype_and_device] += tensor.nbytes
        if bytes_filled[dtype_and_device] >= _MESSAGE_BYTES:
            messages.append(filling.pop(dtype_and_device))
            del bytes_filled[dtype_and_device]
    return [*messages, *filling.values()]


@torch.no_grad()
def _send(message: Sequence[torch.Tensor], collective: Callable[[torch.Tensor], object]) -> None:
    """Run a collective on a flat tensor of a message's elements, and copy its result back.

    NCCL takes contiguous tensors only. A contiguous tensor that is sent alone is overwritten by the
    collective itself.

    Args:
        message: tensors of one dtype and device, without gradients.
        collective: overwrites a flat or contiguous tensor, the same on all ranks.
    """
    # An inference tensor has no version.
    versioned = tuple([tensor for tensor in message if not tensor.is_inference()])
    # Autograd is not to know of the new values: batch norm has saved its statistics for a backward
    # that does not use them, and that would refuse a later version of them.
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(versioned):
        if len(message) == 1 and message[0].is_contiguous():
            collective(message[0])
            return
        # Without `contiguous`, the flat view of a tensor with gaps, such as x[::2], would have
        # gaps, too.
        flat_tensors = [tensor.contiguous().flatten() for tensor in message]
        flat = flat_tensors[0] if len(message) == 1 else torch.cat(flat_tensors)
        collective(flat)
        results = torch.split(flat, [tensor.numel() for tensor in message])
        # Elements that an expanded tensor has several times are written once: torch refuses to
        # write to all of them.
        targets = list[torch.Tensor]()
        values = list[torch.Tensor]()
        for tensor, result in zip(message, results, strict=True):
            expanded = _expanded_dimensions(tensor)
            targets.append(_first_along(tensor, expanded))
            values.append(_first_along(result.view(tensor.shape), expanded))
        torch._foreach_copy_(targets, values)


def _expanded_dimensions(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions along which all elements are the same memory."""
    expanded = list[int]()
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            expanded.append(dimension)
    return expanded


def _first_along(tensor: torch.Tensor, dimensions: Iterable[int]) -> torch.Tensor:
    """Return a view of the first element along each of these dimensions, which keep the size 1."""
    for dimension in dimensions:
        tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _average(contiguous: torch.Tensor, *, group: Any) -> None:
    """Overwrite a tensor with its mean over the ranks of a group.

    It is divided before the sum, which could overflow half precision.
    """
    contiguous /= dist.get_world_size(group)
    dist.all_reduce(contiguous, group=group)


class RegisteredBuffers:
    """The buffers that a model has registered, such as batch norm's running statistics.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        # A program may put another tensor in the place of a buffer.
        self._registrations: list[tuple[dict[str, torch.Tensor | None], str]] = []
        for module in model.modules():
            for name in module._buffers:
                self._registrations.append((module._buffers, name))

    def broadcast(self) -> None:
        """Overwrite the buffers with rank 0's."""
        broadcast_from_rank_0(self._present())

    def average(self) -> None:
        """Overwrite floating buffers with their mean over the ranks."""
        buffers = self._present()
        group, _ = _data_group()
        average = functools.partial(_average, group=group)
        floating = [local_part(buffer.detach()) for buffer in buffers if buffer.is_floating_point()]
        for message in _messages(floating):
            _send(message, average)

    def _present(self) -> list[torch.Tensor]:
        """Return the buffers that have values now, each once, without expanded ones."""
        present: dict[int, torch.Tensor] = {}
        for buffers, name in self._registrations:
            buffer = buffers.get(name)
            if buffer is not None and not _expanded_dimensions(buffer):
                present[id(buffer)] = buffer.detach()
        return list(present.values())
