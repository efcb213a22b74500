"""Opaque inputs: objects such as caches, neither tensors nor plain values, which forward may modify.

Micro-batches share them, so an object is refused if it holds per-sample tensors or if forward changes it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import types
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

from parallelize.backends.balanced import refusals
from parallelize.backends.balanced.microbatch_split_join import named_leaves, rebuild
from parallelize.errors import ConfigError

__all__ = [
    "changed_input_error",
    "changed_inputs",
    "check_shareable",
    "copy_opaque_inputs",
    "forbid_changes",
    "opaque_inputs",
    "snapshot",
]

_PLAIN_TYPES = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, type),
    *(torch.Tensor, torch.dtype, torch.device, torch.Generator, torch.Size, nn.Module),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
)
# Maximum number of objects compared per input: enough for a cache of a hundred layers, in bounded time.
_MAX_ENTRIES = 10_000

_Contents = list[tuple[Any, Any]]  # (object, its state) of everything that an input contains


def opaque_inputs(inputs: Any) -> dict[str, Any]:
    """Return the opaque inputs by name: sets, deques, and objects with attributes that are not plain values."""
    return {name: leaf for name, leaf in named_leaves(inputs) if _is_opaque(leaf)}


def check_shareable(inputs: Any, *, samples: int, dim: int) -> None:
    """Refuse opaque inputs that hold a per-sample tensor.

    Raises:
        ConfigError: dimension `dim` of a tensor in an opaque input has the length `samples`, which is above 1.
    """
    for name, each in opaque_inputs(inputs).items():
        for thing, _ in _contents(each):
            if isinstance(thing, torch.Tensor) and thing.dim() > dim and thing.shape[dim] == samples > 1:
                raise refusals.opaque_input(name, type(each).__name__, f"holds a tensor of {tuple(thing.shape)}")


def copy_opaque_inputs(inputs: Any) -> Any:
    """Return the inputs with opaque inputs copied, so that planning does not modify the user's objects.

    Raises:
        ConfigError: an object cannot be copied, for example because it holds a tensor with an autograd graph.
    """
    if not opaque_inputs(inputs):
        return inputs
    return rebuild(inputs, [_copy(name, leaf) if _is_opaque(leaf) else leaf for name, leaf in named_leaves(inputs)])


def snapshot(inputs: Any) -> dict[str, _Contents]:
    """Return the contents of each opaque input by name, to compare with `changed_inputs`."""
    return {name: _contents(each) for name, each in opaque_inputs(inputs).items()}


def changed_inputs(inputs: Any, before: Mapping[str, _Contents]) -> list[str]:
    """Return the names of the opaque inputs whose contents differ from the snapshot `before`."""
    return [name for name, contents in snapshot(inputs).items() if not _is_same(contents, before[name])]


@contextlib.contextmanager
def forbid_changes(inputs: Any) -> Iterator[None]:
    """Check on exit that the micro-batches have not changed an opaque input.

    Raises:
        ConfigError: forward has changed an opaque input.
    """
    before = snapshot(inputs)
    cause: Exception | None = None
    try:
        yield
    except Exception as error:
        if not changed_inputs(inputs, before):
            raise
        cause = error
    for name in changed_inputs(inputs, before):
        raise changed_input_error(inputs, name) from cause


def changed_input_error(inputs: Any, name: str) -> ConfigError:
    """Build the error for an opaque input that forward has changed."""
    return refusals.opaque_input(name, type(opaque_inputs(inputs)[name]).__name__, "is changed by forward")


def _is_opaque(leaf: Any) -> bool:
    return not isinstance(leaf, _PLAIN_TYPES) and (isinstance(leaf, (set, deque)) or hasattr(leaf, "__dict__"))


def _copy(name: str, leaf: Any) -> Any:
    try:
        return copy.deepcopy(leaf)
    except (RuntimeError, TypeError) as error:
        raise refusals.opaque_input(name, type(leaf).__name__, "cannot be copied for profiling") from error


def _contents(value: Any) -> _Contents:
    return list(itertools.islice(_walk(value, set()), _MAX_ENTRIES))


def _walk(value: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, torch.Tensor):
        yield value, 0 if value.is_inference() else value._version
    elif isinstance(value, _PLAIN_TYPES):
        yield None, (type(value), repr(value) if isinstance(value, (int, float, complex, str, bytes)) else id(value))
    elif id(value) not in seen:
        seen.add(id(value))
        inner: list[Any] = []
        if isinstance(value, Mapping):
            inner = [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, deque)):
            inner = list(value)
        more = getattr(value, "__dict__", {})
        yield value, (len(inner), *more)
        for each in (*inner, *more.values()):
            yield from _walk(each, seen)


def _is_same(one: _Contents, other: _Contents) -> bool:
    pairs = itertools.zip_longest(one, other, fillvalue=(None, None))
    return all(a[0] is b[0] and a[1] == b[1] for a, b in pairs)
