"""The leaves of nested containers, such as batches, model outputs and results."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch

_MANY = 1_000_000
"""Leaves that a walk reaches in a second or two."""


def leaves(value: Any, *, once: bool = False) -> list[Any]:
    """Return the leaves of `value` in a fixed order.

    A value that is not a container is its own leaf. Containers are mappings, lists, tuples (named
    tuples too) and dataclass instances. A tuple with a method `to`, such as PackedSequence, is a
    leaf.

    Args:
        value: nested containers.
        once: whether a container that is in several places counts once; else it counts at each.
            Ten lists, each of which holds the next one ten times, have 10^10 leaves.

    Raises:
        RecursionError: a container contains itself, or hundreds contain each other.
    """
    if once:
        collected: list[Any] = []
        _collect_once(value, collected, {})
        return collected
    items = _items(value)
    if items is None:
        return [value]
    all_leaves: list[Any] = []
    for item in items:
        # Most items are tensors, and a call for each would be seen in every step.
        if isinstance(item, torch.Tensor):
            all_leaves.append(item)
        else:
            all_leaves += leaves(item)
    return all_leaves


def _collect_once(value: Any, collected: list[Any], is_complete: dict[int, bool]) -> None:
    """Add the leaves of a value to those that are collected.

    Args:
        value: nested containers.
        collected: gets the leaves.
        is_complete: id of a container -> whether all of its leaves are collected; False while they
            are being so.
    """
    items = _items(value)
    if items is None:
        collected.append(value)
        return
    if not is_complete.get(id(value), True):
        raise RecursionError(f"a {type(value).__name__} contains itself")
    if id(value) not in is_complete:
        is_complete[id(value)] = False
        for item in items:
            _collect_once(item, collected, is_complete)
        is_complete[id(value)] = True


def is_entangled(value: Any) -> bool:
    """Return whether containers are in so many places that a walk to each takes too long.

    Raises:
        RecursionError: a container contains itself, or hundreds contain each other.
    """
    distinct = len(leaves(value, once=True))
    return _count(value, {}) > _MANY + 100 * distinct


def _count(value: Any, counts: dict[int, int]) -> int:
    """Return the number of places of leaves, in a time of the number of containers."""
    items = _items(value)
    if items is None:
        return 1
    if id(value) not in counts:
        total = 0
        for item in items:
            total += _count(item, counts)
        counts[id(value)] = total
    return counts[id(value)]


def map_leaves(
    change: Callable[[Any], Any],
    value: Any,
    *,
    is_leaf: Callable[[Any], bool] = lambda _value: False,
    once: bool = False,
) -> Any:
    """Return a copy of `value` with `change` applied to every leaf; containers keep their types.

    Args:
        change: function from a leaf to its new value.
        value: nested containers, as in `leaves`.
        is_leaf: returns whether a container is treated as a leaf.
        once: whether a container that is in several places is copied once, and its copy is in all
            of them; else it is copied for each place.
    """
    copies: dict[int, Any] | None = None
    if once:
        copies = {}
    return _mapped(change, value, is_leaf, copies)


def _mapped(
    change: Callable[[Any], Any],
    value: Any,
    is_leaf: Callable[[Any], bool],
    copies: dict[int, Any] | None,
) -> Any:
    """Return the copy of a value.

    Args:
        change: as for `map_leaves`.
        value: nested containers.
        is_leaf: as for `map_leaves`.
        copies: id of a container -> its copy; None: a container is copied for each place.
    """
    if is_leaf(value):
        return change(value)
    items = _items(value)
    if items is None:
        return change(value)
    if copies is not None and id(value) in copies:
        return copies[id(value)]
    copied = _like(value, [_mapped(change, item, is_leaf, copies) for item in items])
    if copies is not None:
        copies[id(value)] = copied
    return copied


def replace_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with other leaves; a container in which no leaf changes is the same object.

    A forward may fill a list or a dict that it gets, such as a cache: the caller sees that only in
    its own container. Containers with a leaf that changes are copied, and stay as they are.

    Args:
        change: function from a leaf to its new value, or to the leaf itself.
        value: nested containers, as in `leaves`.
    """
    items = _items(value)
    if items is None:
        return change(value)
    replaced = [replace_leaves(change, item) for item in items]
    if all(map(operator.is_, replaced, items)):
        return value
    return _like(value, replaced)


def with_leaves(value: Any, new: Iterable[Any]) -> Any:
    """Return a copy of `value` with other leaves, in the order of `leaves`."""
    values = iter(new)
    return map_leaves(lambda _: next(values), value)


def _items(value: Any) -> Iterable[Any] | None:
    """Return what a container holds; None: it is a leaf."""
    # First, because this runs for every tensor of every step.
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, tuple) and hasattr(value, "to"):
        return None
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def _like(value: Any, items: list[Any]) -> Any:
    """Return a container of the same type with other items."""
    if isinstance(value, tuple):
        tuple_type: Any = type(value)
        if hasattr(value, "_fields"):
            return tuple_type(*items)
        return tuple_type(items)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        # Immutable mappings, such as MappingProxyType, take a dict.
        mapping_type: Any = type(value)
        return mapping_type(dict(zip(value, items, strict=True)))
    # Copying keeps a default factory, an order and attributes, and avoids a second __init__ of a
    # dataclass.
    changed: Any = copy.copy(value)
    if isinstance(value, list):
        changed[:] = items
    elif isinstance(value, Mapping):
        # Model outputs of Hugging Face do not support `update`.
        for key, item in zip(value, items, strict=True):
            changed[key] = item
    else:
        for field, item in zip(dataclasses.fields(value), items, strict=True):
            # A frozen dataclass refuses `setattr`.
            object.__setattr__(changed, field.name, item)
    return changed
