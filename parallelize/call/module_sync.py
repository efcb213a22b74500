"""The modules among a call's arguments: their tensors travel back and are put into the caller's."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["bring_back", "modules_in", "tensors_of"]


def modules_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[nn.Module]:
    """Every module among the arguments of a call, in lists, tuples and dicts too; each once, in order."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [args, kwargs]
    while waiting:
        item = waiting.pop(0)
        if id(item) in found:
            continue
        if isinstance(item, (nn.Module, Mapping, list, tuple)):
            found[id(item)] = item
        if isinstance(item, Mapping):
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple)):
            waiting.extend(item)
    return [item for item in found.values() if isinstance(item, nn.Module)]


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a module by name."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if not is_lazy(tensor)}


def bring_back(module: nn.Module, trained: Mapping[str, torch.Tensor]) -> None:
    """Copy rank 0's weights and buffers into the caller's module, tensor by tensor: references to them hold.

    Args:
        module: the caller's.
        trained: tensors of the worker's copy of it, by name.
    """
    mine: dict[str, Any] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name in [name for name, tensor in mine.items() if is_lazy(tensor)]:
        if name in trained:  # it got its size in the call
            mine[name].materialize(trained[name].shape, dtype=trained[name].dtype)
        else:
            del mine[name]
    shaped = (name for name, tensor in trained.items() if name in mine and mine[name].shape == tensor.shape)
    back = {name for name in shaped if _is_filled(mine[name], trained[name])}
    lost = sorted({*trained, *mine} - back)
    if lost:
        warnings.warn(
            f"{type(module).__name__}: {', '.join(lost)} changed shape or name in the call, or cannot be written to, "
            "and did not come back; return the module to get it as it is in the worker",
            stacklevel=5,
        )


def _is_filled(mine: torch.Tensor, trained: torch.Tensor) -> bool:
    """Whether a tensor of the caller's has the trained values now; the call's value is not to be lost over one."""
    if mine.is_meta or trained.is_meta:
        return mine.is_meta and trained.is_meta
    try:
        with torch.no_grad(), torch.inference_mode(mine.is_inference()):
            mine.copy_(trained)
    except RuntimeError:  # an expanded one: several elements are one place in memory
        return _is_replaced(mine, trained.to(mine.device, mine.dtype))
    return True


def _is_replaced(mine: torch.Tensor, trained: torch.Tensor) -> bool:
    try:
        if not torch.equal(mine, trained):
            mine.data = trained.clone()
    except RuntimeError:
        return False
    return True
