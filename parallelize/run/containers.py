"""Iteration and mapping over the leaves of nested containers, such as batches, model outputs and results."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch

__all__ = ["is_entangled", "leaves", "map_leaves", "replace_leaves", "with_leaves"]

_MANY = 1_000_000  # leaves


def leaves(value: Any, *, once: bool = False) -> list[Any]:
    """Return the leaves of `value` in a fixed order; a value that is not a container is its own leaf.

    Containers are mappings, lists, tuples (named tuples too) and dataclass instances. A tuple with a method `to`, such
    as PackedSequence, is a leaf.

    Args:
        value: nested containers.
        once: whether a container that is in several places counts once; else it counts at each.
            Ten lists, each of which holds the next one ten times, have 10^10 leaves.

    Raises:
        RecursionError: a container contains itself, or hundreds contain each other.
    """
    if once:
        found_once: list[Any] = []
        _collect_once(value, found_once, {})
        return found_once
    items = _items(value)
    if items is None:
        return [value]
    found: list[Any] = []
    for item in items:
        found += [item] if isinstance(item, torch.Tensor) else leaves(item)
    return found


def _collect_once(value: Any, found: list[Any], is_done: dict[int, bool]) -> None:
    """Add the leaves of a value; `is_done` has, by the ids of containers, whether all is added."""
    items = _items(value)
    if items is None:
        found.append(value)
        return
    if not is_done.get(id(value), True):
        raise RecursionError(f"a {type(value).__name__} contains itself")
    if id(value) not in is_done:
        is_done[id(value)] = False
        for item in items:
            _collect_once(item, found, is_done)
        is_done[id(value)] = True


def is_entangled(value: Any) -> bool:
    """Return whether containers are in so many places that a walk to each place does not end in time.

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
        once: whether a container that is in several places is copied once, and its copy is in all of
            them; else it is copied for each place.
    """
    return _mapped(change, value, is_leaf, {} if once else None)


def _mapped(
    change: Callable[[Any], Any],
    value: Any,
    is_leaf: Callable[[Any], bool],
    copies: dict[int, Any] | None,
) -> Any:
    items = None if is_leaf(value) else _items(value)
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
