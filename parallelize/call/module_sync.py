"""Copying of rank 0's trained weights back into the modules that the caller passed as arguments."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["copy_weights_back", "modules_in", "named_tensors"]


def modules_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[nn.Module]:
    """Return the distinct modules among the arguments of a call, in order; searches lists, tuples and mappings."""
    seen: dict[int, Any] = {}
    queue: list[Any] = [args, kwargs]
    while queue:
        item = queue.pop(0)
        if id(item) in seen:
            continue
        if isinstance(item, (nn.Module, Mapping, list, tuple)):
            seen[id(item)] = item
        if isinstance(item, Mapping):
            queue.extend(item.values())
        elif isinstance(item, (list, tuple)):
            queue.extend(item)
    return [item for item in seen.values() if isinstance(item, nn.Module)]


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the initialized parameters and buffers of a module by name."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if not is_lazy(tensor)}


def copy_weights_back(module: nn.Module, trained: Mapping[str, torch.Tensor]) -> None:
    """Copy rank 0's parameters and buffers into the caller's module, in place; warn about those that cannot be copied.

    Args:
        module: the caller's module.
        trained: parameters and buffers of rank 0's copy of the module, by name.
    """
    targets: dict[str, Any] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name in [name for name, tensor in targets.items() if is_lazy(tensor)]:
        if name in trained:  # lazy in the caller, initialized during the call
            targets[name].materialize(trained[name].shape, dtype=trained[name].dtype)
        else:
            del targets[name]
    fitting = (name for name, tensor in trained.items() if name in targets and targets[name].shape == tensor.shape)
    copied = {name for name in fitting if _copy(targets[name], trained[name])}
    missing = sorted({*trained, *targets} - copied)
    if missing:
        warnings.warn(
            f"{type(module).__name__}: {', '.join(missing)} changed shape or name in the call, or cannot be "
            "overwritten: not copied back; return the module from the function to get its trained weights",
            stacklevel=5,
        )


def _copy(target: torch.Tensor, trained: torch.Tensor) -> bool:
    """Copy `trained` into `target` in place; return whether the copy succeeded."""
    if target.is_meta or trained.is_meta:
        return target.is_meta and trained.is_meta
    try:
        with torch.no_grad(), torch.inference_mode(target.is_inference()):
            target.copy_(trained)
    except RuntimeError:  # an expanded tensor: several elements share one memory location
        return _replace_data(target, trained.to(target.device, target.dtype))
    return True


def _replace_data(target: torch.Tensor, trained: torch.Tensor) -> bool:
    try:
        if not torch.equal(target, trained):
            target.data = trained.clone()
    except RuntimeError:
        return False
    return True
