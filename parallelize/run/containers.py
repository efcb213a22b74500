"""The leaves of nested containers, such as batches, model outputs and results."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch.distributions import Distribution, Transform

_MANY = 1_000_000
"""Number of leaves that a walk reaches in a second or two."""


def leaves(value: Any, *, once: bool = False) -> list[Any]:
    """Return the leaves of `value` in a fixed order.

    A value that is not a container is its own leaf. Containers are mappings, lists, tuples (named
    tuples too) and dataclass instances. A tuple with a method `to`, such as PackedSequence, is a
    leaf.

    Args:
        value: nested containers.
        once: whether the leaves of a container that is in several places are returned once. If
            not, they are returned for each place, which may take forever: ten lists, each of which
            holds the next list ten times, have 10^10 leaves.

    Raises:
        RecursionError: a container contains itself, or hundreds of containers are nested.
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


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors among the leaves of `value`, in a fixed order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def _collect_once(value: Any, collected: list[Any], is_complete: dict[int, bool]) -> None:
    """Append the leaves of a value to `collected`, those of each container once.

    Args:
        value: nested containers.
        collected: gets the leaves.
        is_complete: id of a container that was met -> whether all of its leaves are collected;
            False while the walk is inside the container.
    """
    items = _items(value)
    if items is None:
        collected.append(value)
        return
    is_inside_itself = is_complete.get(id(value)) is False
    if is_inside_itself:
        raise RecursionError(f"a {type(value).__name__} contains itself")
    if id(value) not in is_complete:
        is_complete[id(value)] = False
        for item in items:
            _collect_once(item, collected, is_complete)
        is_complete[id(value)] = True


def tensors_of_distribution(distribution: Distribution | Transform) -> list[torch.Tensor]:
    """Return the tensors of a distribution, in a fixed order.

    A distribution may be made of other distributions and of transforms, which have tensors, too.
    It is no container, because its tensors are computed from each other: most operations on leaves,
    such as a sum over ranks, would leave it inconsistent.
    """
    tensors: list[torch.Tensor] = []
    for value in leaves(vars(distribution)):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (Distribution, Transform)):
            tensors += tensors_of_distribution(value)
    return tensors


def is_entangled(value: Any) -> bool:
    """Return whether containers are in so many places that a walk to each place takes too long.

    Checkpoints refuse such a state before torch walks through it, which would seem to hang.

    Raises:
        RecursionError: a container contains itself, or hundreds of containers are nested.
    """
    leaves_once = len(leaves(value, once=True))
    # A state of many leaves takes long anyway: up to a hundred places for each are let through.
    return _count_at_all_places(value, {}) > _MANY + 100 * leaves_once


def _count_at_all_places(value: Any, count_by_id: dict[int, int]) -> int:
    """Return the length of `leaves(value)` without that walk: each container is counted once.

    Args:
        value: nested containers.
        count_by_id: id of a container -> number of its leaves.
    """
    items = _items(value)
    if items is None:
        return 1
    if id(value) not in count_by_id:
        total = 0
        for item in items:
            total += _count_at_all_places(item, count_by_id)
        count_by_id[id(value)] = total
    return count_by_id[id(value)]


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
        once: whether a container that is in several places gets one copy, which is in all these
            places. If not, it gets a copy for each place.

    Raises:
        RecursionError: as for `leaves`.
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
    """Return a changed copy, as `map_leaves` does.

    Args:
        change: as for `map_leaves`.
        value: nested containers.
        is_leaf: as for `map_leaves`.
        copies: id of a container -> its copy; None: a container gets a copy for each place.
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
    """Return `value` with changed leaves; a container in which no leaf changes is not copied.

    This moves the inputs of a forward to another device. A forward may fill a list or a dict that
    it gets, such as a cache, and the caller looks for the new items in the container that it has
    passed. A container in which a leaf changes is copied, and the original is left as it is.

    Args:
        change: function from a leaf to its new value, or to the leaf itself.
        value: nested containers, as in `leaves`.
    """
    items = _items(value)
    if items is None:
        return change(value)
    replaced = [replace_leaves(change, item) for item in items]
    is_unchanged = all(map(operator.is_, replaced, items))
    if is_unchanged:
        return value
    return _like(value, replaced)


def with_leaves(value: Any, new: Iterable[Any]) -> Any:
    """Return a copy of `value` with new leaves, as many as `leaves(value)` has, in that order."""
    new_leaves = iter(new)
    return map_leaves(lambda _: next(new_leaves), value)


def _items(value: Any) -> Iterable[Any] | None:
    """Return the items of a container; None: the value is a leaf."""
    # Tensors come first, because this runs for every tensor of every step.
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
    """Return a container of the same type with new items, in the order of `_items`."""
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
