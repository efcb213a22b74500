"""Objects among the inputs that are neither tensors nor plain values: a forward may write to them, as to a cache.

They cannot be cut, so that all micro-batches would share them.
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
from parallelize.backends.balanced.microbatch_split_join import named, rebuild
from parallelize.backends.balanced.segment import version
from parallelize.errors import ConfigError

__all__ = ["carriers", "changed", "divisible", "fresh", "snapshot", "unchanged", "written_to"]

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, type),
    *(torch.Tensor, torch.dtype, torch.device, torch.Generator, torch.Size, nn.Module),
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
)
# Enough for a cache of a hundred layers; an object from which everything can be reached is not followed to its end.
_FACTS = 10_000

_Facts = list[tuple[Any, Any]]


def carriers(inputs: Any) -> dict[str, Any]:
    """By name, the objects among the inputs that have attributes, and other containers that can change."""
    return {name: leaf for name, leaf in named(inputs) if _is_carrier(leaf)}


def divisible(inputs: Any, *, samples: int, dim: int) -> None:
    """Make sure that no object holds tensors of the samples.

    Raises:
        ConfigError: one does.
    """
    for name, each in carriers(inputs).items():
        for thing, _ in _facts(each):
            if isinstance(thing, torch.Tensor) and thing.dim() > dim and thing.shape[dim] == samples > 1:
                raise refusals.carrier(name, type(each).__name__, f"holds a tensor of {tuple(thing.shape)}")


def fresh(inputs: Any) -> Any:
    """The inputs, with copies of such objects: what is tried out must not be seen in them.

    Raises:
        ConfigError: one cannot be copied, since it holds a part of a graph of autograd.
    """
    if not carriers(inputs):
        return inputs
    return rebuild(inputs, [_copied(name, leaf) if _is_carrier(leaf) else leaf for name, leaf in named(inputs)])


def snapshot(inputs: Any) -> dict[str, _Facts]:
    """What such objects hold."""
    return {name: _facts(each) for name, each in carriers(inputs).items()}


def changed(inputs: Any, before: Mapping[str, _Facts]) -> list[str]:
    """Names of the objects that hold something else now."""
    return [name for name, facts in snapshot(inputs).items() if not _is_same(facts, before[name])]


@contextlib.contextmanager
def unchanged(inputs: Any) -> Iterator[None]:
    """While micro-batches run: none may write to what all share.

    Raises:
        ConfigError: one did.
    """
    before = snapshot(inputs)
    cause: Exception | None = None
    try:
        yield
    except Exception as error:
        if not changed(inputs, before):
            raise
        cause = error
    for name in changed(inputs, before):
        raise written_to(inputs, name) from cause


def written_to(inputs: Any, name: str) -> ConfigError:
    """What there is to say of an object that forward has changed."""
    return refusals.carrier(name, type(carriers(inputs)[name]).__name__, "is changed by forward")


def _is_carrier(leaf: Any) -> bool:
    return not isinstance(leaf, _PLAIN) and (isinstance(leaf, (set, deque)) or hasattr(leaf, "__dict__"))


def _copied(name: str, leaf: Any) -> Any:
    try:
        return copy.deepcopy(leaf)
    except (RuntimeError, TypeError) as error:
        raise refusals.carrier(name, type(leaf).__name__, "cannot be copied to try the model out") from error


def _facts(value: Any) -> _Facts:
    return list(itertools.islice(_walk(value, set()), _FACTS))


def _walk(value: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, torch.Tensor):
        yield value, version(value)
    elif isinstance(value, _PLAIN):
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


def _is_same(one: _Facts, other: _Facts) -> bool:
    pairs = itertools.zip_longest(one, other, fillvalue=(None, None))
    return all(a[0] is b[0] and a[1] == b[1] for a, b in pairs)
