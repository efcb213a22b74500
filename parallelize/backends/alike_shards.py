"""Element-wise calls on shards that are alike, as in an optimizer's step: run on this rank's local tensors directly."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from parallelize.backends.function_kinds import EXPORTS, is_in_place

__all__ = ["run_on_alike"]

_NUMBERS = (float, int, bool)


def run_on_alike(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Any, *, forms: Container[int], takes_scalars: bool
) -> Any:
    """Return the result; NotImplemented if the arguments are not shards of one shape and placement, and numbers.

    Args:
        func: an element-wise function, or a torch._foreach_* function.
        args: its arguments.
        kwargs: its keyword arguments.
        forms: ids of parameters that stand for others.
        takes_scalars: whether plain tensors without dimensions may be used as they are.
    """
    first = args[0]
    is_list = type(first) is list
    likes: Any = first if is_list else (first,)
    if torch.is_grad_enabled() or any(type(each) not in _NUMBERS for each in kwargs.values()):
        return NotImplemented
    if func.__name__ in EXPORTS or any(_is_partial(each) for each in likes):
        return NotImplemented
    local = [
        each if takes_scalars and _is_scalar(each) else _to_local(each, likes=likes, is_list=is_list, forms=forms)
        for each in args
    ]
    if any(each is None for each in local):
        return NotImplemented
    result = func(*local, **kwargs)
    if is_in_place(func):
        increment_version(first)
        return None if result is None else first
    outputs = result if is_list else (result,)
    wrapped = [_like(one, other) for one, other in zip(outputs, likes, strict=False)]
    if len(wrapped) != len(outputs) or any(each is None for each in wrapped):
        return NotImplemented
    return wrapped if is_list else wrapped[0]


def _is_partial(value: Any) -> bool:
    return type(value) is not DTensor or any(each.is_partial() for each in value.placements)


def _is_scalar(value: Any) -> bool:
    return type(value) is torch.Tensor and value.ndim == 0


def _to_local(value: Any, *, likes: Sequence[Any], is_list: bool, forms: Container[int]) -> Any:
    """Return an argument with local tensors; None if it is not like the first one."""
    if type(value) in _NUMBERS:
        return value
    if type(value) is DTensor and not is_list:
        return value.to_local() if _is_alike(value, likes[0], forms) else None
    if type(value) is not list or not is_list or len(value) != len(likes):
        return None
    if type(value[0]) is DTensor:
        are_alike = all(_is_alike(one, other, forms) for one, other in zip(value, likes, strict=True))
        return [each.to_local() for each in value] if are_alike else None
    return value if all(type(each) in _NUMBERS for each in value) else None


def _is_alike(value: Any, other: Any, forms: Container[int]) -> bool:
    if type(value) is not DTensor or id(value) in forms:
        return False
    return value is other or (
        value.placements == other.placements and value.shape == other.shape and value.device_mesh == other.device_mesh
    )


def _like(local: Any, other: Any) -> Any:
    """Return the shard that has a local tensor and is otherwise like another; None if it is not."""
    former = other.to_local()
    if local is former:
        return other
    if not isinstance(local, torch.Tensor) or local.shape != former.shape:
        return None
    if local.dtype == former.dtype and local.stride() == former.stride():
        build: Any = DTensor
        return build(local, other._spec, requires_grad=False)
    mesh, placements = other.device_mesh, other.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=other.shape, stride=other.stride())
