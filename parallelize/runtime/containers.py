"""What lies inside the nested containers that batches and results come in."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

__all__ = ["leaves", "map_leaves"]


def leaves(value: Any) -> Iterator[Any]:
    """Everything in `value` that is no container, in a fixed order; `value` itself if it is none.

    Containers are mappings, lists, tuples (named ones too) and instances of dataclasses; a tuple with a method `to`, as
    PackedSequence is, is a thing of its own.
    """
    if _moves_as_one(value):
        yield value
        return
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, (list, tuple)):
        inner = list(value)
    elif _is_dataclass(value):
        inner = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        yield value
        return
    for each in inner:
        yield from leaves(each)


def map_leaves(
    change: Callable[[Any], Any], value: Any, *, is_leaf: Callable[[Any], bool] = lambda _value: False
) -> Any:
    """The same containers, of the same types, around `change` of every leaf; `value` is left as it is.

    Args:
        change: makes another leaf of one.
        value: what `leaves` takes.
        is_leaf: whether a container should be left closed, and changed itself.
    """
    if is_leaf(value) or _moves_as_one(value):
        return change(value)
    if isinstance(value, Mapping):
        inner = {key: map_leaves(change, each, is_leaf=is_leaf) for key, each in value.items()}
        return _like_mapping(value, inner)
    if isinstance(value, (list, tuple)):
        return _like_sequence(value, [map_leaves(change, each, is_leaf=is_leaf) for each in value])
    if _is_dataclass(value):
        # Neither __init__ nor __post_init__ runs again, and a frozen one is no obstacle: it is a copy, not yet shared.
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            inside = map_leaves(change, getattr(value, field.name), is_leaf=is_leaf)
            object.__setattr__(changed, field.name, inside)
        return changed
    return change(value)


def _like_sequence(value: list[Any] | tuple[Any, ...], inner: list[Any]) -> Any:
    kind: Any = type(value)
    if isinstance(value, tuple):
        return kind(*inner) if hasattr(value, "_fields") else kind(inner)
    if kind is list:
        return inner
    changed = copy.copy(value)
    changed[:] = inner
    return changed


def _like_mapping(value: Mapping[Any, Any], inner: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return inner
    if isinstance(value, MutableMapping):
        # A copy keeps what the type knows beyond its items: a default factory, an order, attributes.
        changed = copy.copy(value)
        for key, each in inner.items():  # one by one: outputs of Hugging Face's models refuse update
            changed[key] = each
        return changed
    return type(value)(inner)  # type: ignore[call-arg]  # a mapping that cannot change is made from a dict, as in types


def _moves_as_one(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "to")


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
