"""Opaque inputs: objects such as caches, neither tensors nor plain values, which forward may modify.

They cannot be split, and micro-batches that shared one would see what others have left in it: batches with such an
object are not split.
"""

from __future__ import annotations

import copy
import types
from collections import deque
from enum import Enum
from typing import Any

import torch
from torch import nn

from parallelize.backends.balanced.microbatch_split_join import named_leaves, rebuild
from parallelize.errors import ConfigError

__all__ = ["copy_inputs", "opaque_inputs"]

_PLAIN_TYPES = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, type),
    *(torch.Tensor, torch.dtype, torch.device, torch.Generator, torch.Size, nn.Module),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
)


def opaque_inputs(inputs: Any) -> dict[str, Any]:
    """Return the opaque inputs by name: sets, deques, and objects with attributes that are not plain values."""
    return {name: leaf for name, leaf in named_leaves(inputs) if _is_opaque(leaf)}


def copy_inputs(inputs: Any) -> Any:
    """Return copies of the inputs, without their graphs, so that planning does not modify the user's objects.

    Raises:
        ConfigError: an object cannot be copied, for example because it holds a tensor with an autograd graph.
    """
    return rebuild(inputs, [_copied(name, leaf) for name, leaf in named_leaves(inputs)])


def _copied(name: str, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return _copy(name, leaf) if _is_opaque(leaf) else leaf


def _is_opaque(leaf: Any) -> bool:
    return not isinstance(leaf, _PLAIN_TYPES) and (isinstance(leaf, (set, deque)) or hasattr(leaf, "__dict__"))


def _copy(name: str, leaf: Any) -> Any:
    try:
        return copy.deepcopy(leaf)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"argument {name} of the model, a {type(leaf).__name__}, cannot be copied",
            why="the first batch runs several times while the pipeline is planned, which could change the object",
            fix="pass a plan made from other batches, plan=; or run another batch first",
        ) from error
