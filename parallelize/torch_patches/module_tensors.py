"""All parameters and buffers of a module, also those that an override of its class leaves out.

A user's class may override `parameters()` or `named_parameters()` for its optimizer, to return only
the trained parameters, or to take other arguments. Averaging, broadcasts and comparisons need all
tensors. This package therefore calls the functions below, and never a method of the module. Even
`nn.Module.parameters(module)` calls an override of `named_parameters`
(torch/nn/modules/module.py).
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_ENUMERATING_METHODS = ("parameters", "named_parameters", "buffers", "named_buffers")


def all_named_parameters(
    module: nn.Module,
    *,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the names and parameters of a module and its submodules.

    Args:
        module: the module.
        remove_duplicate: whether a parameter with several names is returned only with the first.
    """
    return nn.Module.named_parameters(module, remove_duplicate=remove_duplicate)


def all_parameters(module: nn.Module, *, recurse: bool = True) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module, each once.

    Args:
        module: the module.
        recurse: whether to yield the parameters of its submodules, too.
    """
    for _, parameter in nn.Module.named_parameters(module, recurse=recurse):
        yield parameter


def all_named_buffers(
    module: nn.Module,
    *,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the names and buffers of a module and its submodules.

    Args:
        module: the module.
        remove_duplicate: whether a buffer with several names is returned only with the first.
    """
    return nn.Module.named_buffers(module, remove_duplicate=remove_duplicate)


def all_buffers(module: nn.Module, *, recurse: bool = True) -> Iterator[torch.Tensor]:
    """Yield the buffers of a module, each once.

    Args:
        module: the module.
        recurse: whether to yield the buffers of its submodules, too.
    """
    for _, buffer in nn.Module.named_buffers(module, recurse=recurse):
        yield buffer


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, of which this rank holds a part.

    The tensors of fsdp in a block, which have the attributes of a DTensor, are none.
    """
    # Whoever has a DTensor has imported its class. The import takes half a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Any) -> Any:
    """Return the part of a DTensor that this rank holds, which shares memory with it.

    Any other tensor is returned as it is. The part has no gradient: autograd does not know that
    both are one.
    """
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


@contextlib.contextmanager
def without_overrides(module: nn.Module) -> Iterator[None]:
    """In the context, replace overrides of `parameters` and the like, also for torch's own code.

    fully_shard calls `named_parameters(recurse=False)` of each module, and shards the result. A
    parameter that an override leaves out would be trained by each rank for itself.

    Args:
        module: this module and its submodules get the methods of torch's nn.Module.
    """
    # (attributes of an instance, name of a method, the attribute before; None: there was none)
    shadowed: list[tuple[dict[str, Any], str, Any]] = []
    for part in nn.Module.modules(module):
        for name in _ENUMERATING_METHODS:
            torch_method = getattr(nn.Module, name)
            attributes = vars(part)
            if getattr(type(part), name) is not torch_method or name in attributes:
                shadowed.append((attributes, name, attributes.get(name)))
                attributes[name] = types.MethodType(torch_method, part)
    try:
        yield
    finally:
        for attributes, name, before in shadowed:
            if before is None:
                del attributes[name]
            else:
                attributes[name] = before
