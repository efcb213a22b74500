"""Iteration and mapping over the leaves of nested containers, such as batches, model outputs and results."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch

__all__ = ["leaves", "map_leaves", "with_leaves"]


def leaves(value: Any) -> list[Any]:
    """Return the leaves of `value` in a fixed order; a value that is not a container is its own leaf.

    Containers are mappings, lists, tuples (named tuples too) and dataclass instances. A tuple with a method `to`, such
    as PackedSequence, is a leaf.
    """
    items = _items(value)
    if items is None:
        return [value]
    found: list[Any] = []
    for item in items:
        found += [item] if isinstance(item, torch.Tensor) else leaves(item)
    return found


def map_leaves(
    change: Callable[[Any], Any], value: Any, *, is_leaf: Callable[[Any], bool] = lambda _value: False
) -> Any:
    """Return a copy of `value` with `change` applied to every leaf; containers keep their types.

    Args:
        change: function from a leaf to its new value.
        value: nested containers, as in `leaves`.
        is_leaf: returns whether a container is treated as a leaf.
    """
    items = None if is_leaf(value) else _items(value)
    if items is None:
        return change(value)
    changed = [map_leaves(change, item, is_leaf=is_leaf) for item in items]
    return _like(value, changed)


def with_leaves(value: Any, new: Iterable[Any]) -> Any:
    """Return a copy of `value` with other leaves, in the order of `leaves`."""
    values = iter(new)
    return map_leaves(lambda _: next(values), value)


def _items(value: Any) -> Iterable[Any] | None:
    """Return what a container holds; None: it is a leaf."""
    if isinstance(value, torch.Tensor):  # found first: runs in every step
        return None
    if isinstance(value, (list, tuple)):
        return None if isinstance(value, tuple) and hasattr(value, "to") else value
    if isinstance(value, Mapping):
        return value.values()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def _like(value: Any, items: list[Any]) -> Any:
    """Return a container of the same type with other items."""
    if isinstance(value, tuple):
        kind: Any = type(value)
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        # Immutable mappings, such as MappingProxyType, take a dict.
        return type(value)(dict(zip(value, items, strict=True)))  # type: ignore[call-arg]  # see above
    # Copying keeps a default factory, an order and attributes, and avoids a second __init__ of a dataclass.
    changed: Any = copy.copy(value)
    if isinstance(value, list):
        changed[:] = items
    elif isinstance(value, Mapping):
        for key, item in zip(value, items, strict=True):  # model outputs of Hugging Face do not support update
            changed[key] = item
    else:
        for field, item in zip(dataclasses.fields(value), items, strict=True):
            object.__setattr__(changed, field.name, item)  # also of a frozen one
    return changed
