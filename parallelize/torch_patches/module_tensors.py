"""The parameters and buffers of a module, as torch enumerates them, whatever the class overrides.

A class may override `parameters()` or `named_parameters()`: to return only what is trained, only
the head's, or with other arguments. That is for the optimizer of its user. Averaging, broadcasts
and comparisons would leave out what an override leaves out, in silence, so that this package asks
these functions. torch's own `nn.Module.parameters` calls the override, too
(torch/nn/modules/module.py).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = [
    "all_buffers",
    "all_named_buffers",
    "all_named_parameters",
    "all_parameters",
    "without_overrides",
]

_ENUMERATING_METHODS = ("parameters", "named_parameters", "buffers", "named_buffers")


def all_named_parameters(
    module: nn.Module,
    *,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the names and parameters of a module and its submodules.

    Args:
        module: the module.
        remove_duplicate: whether a parameter that has several names comes once.
    """
    return nn.Module.named_parameters(module, remove_duplicate=remove_duplicate)


def all_parameters(module: nn.Module, *, recurse: bool = True) -> Iterator[nn.Parameter]:
    """Return the parameters of a module, each once.

    Args:
        module: the module.
        recurse: whether those of its submodules are among them.
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
        remove_duplicate: whether a buffer that has several names comes once.
    """
    return nn.Module.named_buffers(module, remove_duplicate=remove_duplicate)


def all_buffers(module: nn.Module, *, recurse: bool = True) -> Iterator[torch.Tensor]:
    """Return the buffers of a module, each once.

    Args:
        module: the module.
        recurse: whether those of its submodules are among them.
    """
    for _, buffer in nn.Module.named_buffers(module, recurse=recurse):
        yield buffer


@contextlib.contextmanager
def without_overrides(module: nn.Module) -> Iterator[None]:
    """Let torch's code in the context enumerate all tensors of a module, too.

    fully_shard asks each module for `named_parameters(recurse=False)`, and shards what it gets. A
    parameter that an override leaves out would be trained by each rank for itself.

    Args:
        module: it and its submodules answer as torch's nn.Module does.
    """
    shadowed: list[tuple[dict[str, Any], str, Any]] = []
    for part in nn.Module.modules(module):
        for name in _ENUMERATING_METHODS:
            own_method = getattr(nn.Module, name)
            attributes = vars(part)
            if getattr(type(part), name) is not own_method or name in attributes:
                shadowed.append((attributes, name, attributes.get(name)))
                attributes[name] = types.MethodType(own_method, part)
    try:
        yield
    finally:
        for attributes, name, before in shadowed:
            if before is None:
                del attributes[name]
            else:
                attributes[name] = before
