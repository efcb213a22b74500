"""Iteration and mapping over the leaves of nested containers, such as batches, model outputs and results."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch

__all__ = ["leaves", "map_leaves"]


def leaves(value: Any) -> list[Any]:
    """Return the leaves of `value` in a fixed order; a value that is not a container is its own leaf.

    Containers are mappings, lists, tuples (named tuples too) and dataclass instances. A tuple with a method `to`, such
    as PackedSequence, is a leaf.
    """
    items: Iterable[Any]
    if isinstance(value, torch.Tensor):  # found first: runs in every step
        return [value]
    if isinstance(value, (list, tuple)):
        if _is_tensor_like(value):
            return [value]
        items = value
    elif isinstance(value, (dict, Mapping)):
        items = value.values()
    elif _is_dataclass(value):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
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
    if is_leaf(value) or _is_tensor_like(value):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: map_leaves(change, item, is_leaf=is_leaf) for key, item in value.items()}
        return _like_mapping(value, items)
    if isinstance(value, (list, tuple)):
        return _like_sequence(value, [map_leaves(change, item, is_leaf=is_leaf) for item in value])
    if _is_dataclass(value):
        # Copying avoids a second __init__ and __post_init__; object.__setattr__ also works on frozen dataclasses.
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            item = map_leaves(change, getattr(value, field.name), is_leaf=is_leaf)
            object.__setattr__(changed, field.name, item)
        return changed
    return change(value)


def _like_sequence(value: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    kind: Any = type(value)
    if isinstance(value, tuple):
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if kind is list:
        return items
    changed = copy.copy(value)
    changed[:] = items
    return changed


def _like_mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    if isinstance(value, MutableMapping):
        # Copying keeps state other than the items: a default factory, an order, attributes.
        changed = copy.copy(value)
        for key, item in items.items():  # one by one: model outputs of Hugging Face do not support update
            changed[key] = item
        return changed
    return type(value)(items)  # type: ignore[call-arg]  # immutable mappings, such as MappingProxyType, take a dict


def _is_tensor_like(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, tuple) and hasattr(value, "to"))


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
