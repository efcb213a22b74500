"""What an object itself counts as its state, which leaves out its caches.

An object changes when it is only read: a property keeps what it has computed, and a library keeps
what it has looked up. The object says which attributes these are, in one of four ways:

    __getstate__, __reduce__   An attribute is no part of the state with which the object is
                               pickled: the caches of OmegaConf and pandas.
    compare=False, eq=False    A field of a dataclass, or of a class of attrs, is no part of the
                               object's equality.
    a lazy attribute           The object has an attribute under the name of a descriptor of its
                               class, which has computed it: `functools.cached_property`, and
                               `lazy_property` of torch.distributions.
    its name                   A private attribute is called a cache: `_cached_x_y`, `_memo`.

Whatever else a class fills is state like any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from parallelize.call.reachable import is_a, namespace

_CACHE_WORDS = frozenset({"cache", "cached", "caches", "memo", "memos", "memoized"})


def own_attributes(item: object) -> Mapping[str, Any]:
    """Return the attributes that an object counts as its state, by name.

    Returns:
        No attributes if there are none, or if the object is pickled as something else than its
        attributes: then only the whole object can be compared.
    """
    attributes = namespace(item)
    # Arrays and tensors would be copied by their methods for pickling.
    is_data = is_a(item, (np.ndarray, torch.Tensor))
    if attributes and not is_data and _decides_how_to_pickle(type(item)):
        with contextlib.suppress(Exception):  # a user's __getstate__ may raise anything
            attributes = _attributes_in_pickle(item)
    caches = caches_of(item)
    return _without(attributes, caches) if caches else attributes


def without_caches(item: Any, reduced: Any) -> Any:
    """Return how a pickler reduces an object, without the object's caches.

    Args:
        item: the object.
        reduced: what its `__reduce_ex__` returns; NotImplemented: the pickler will call that.
    """
    caches = caches_of(item)
    if not caches:
        return reduced
    if reduced is NotImplemented:
        reduced = item.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if not (is_a(reduced, tuple) and len(reduced) > 2):
        return reduced
    make, arguments, state, *rest = reduced
    return (make, arguments, _state_without(item, state, caches), *rest)


def caches_of(item: object) -> set[str]:
    """Return the names of the attributes that the object declares to be caches."""
    item_type = type(item)
    names = set()
    for name in namespace(item):
        if _is_called_cache(name) or _is_lazy(item_type, name):
            names.add(name)
    for field in getattr(item_type, "__dataclass_fields__", {}).values():
        if not field.compare:
            names.add(field.name)
    for field in getattr(item_type, "__attrs_attrs__", ()):
        if not field.eq:
            names.add(field.name)
    return names


def _decides_how_to_pickle(item_type: type) -> bool:
    """Whether a class has its own method for that, in place of those of `object`."""
    for name in ("__getstate__", "__reduce__", "__reduce_ex__"):
        if getattr(item_type, name) is not getattr(object, name):
            return True
    return False


def _attributes_in_pickle(item: object) -> Mapping[str, Any]:
    """Return the attributes that an object's own methods for pickling keep."""
    attributes = namespace(item)
    reduced = item.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if len(reduced) < 3 or reduced[2] is None:
        # The object is made anew from arguments. What users read of it may have changed even so.
        return {name: value for name, value in attributes.items() if not name.startswith("_")}
    state: Any = reduced[2]
    if is_a(state, tuple):
        state = state[0]  # the other part has the attributes in slots
    if is_a(state, dict):
        # Pydantic keeps the attributes beside what it has noted about them.
        kept: dict[str, Any] = state.get("__dict__", state)
        if not attributes.keys().isdisjoint(kept):
            return kept
    return {}


def _is_called_cache(name: str) -> bool:
    return name.startswith("_") and not _CACHE_WORDS.isdisjoint(name.lower().split("_"))


def _is_lazy(item_type: type, name: str) -> bool:
    """Whether an attribute in an object's `__dict__` hides a descriptor that has computed it.

    A descriptor with `__set__` would be asked first, and so cannot be hidden. A hidden method is
    not computed: the user has replaced it.
    """
    for base in item_type.__mro__:
        if name in vars(base):
            hidden = vars(base)[name]
            descriptor = type(hidden)
            is_method = callable(hidden) or is_a(hidden, (classmethod, staticmethod))
            has_get, has_set = hasattr(descriptor, "__get__"), hasattr(descriptor, "__set__")
            return has_get and not has_set and not is_method
    return False


def _state_without(item: object, state: Any, names: set[str]) -> Any:
    """Return a pickled state without the attributes of these names."""
    if is_a(state, dict):
        kept = _without(state, names)
        if is_a(kept.get("__dict__"), dict):  # of pydantic
            kept["__dict__"] = _without(kept["__dict__"], names)
        return kept
    if is_a(state, tuple):
        # Of the attributes in `__dict__`, or None, and of those in slots.
        return tuple(_state_without(item, part, names) for part in state)
    if is_a(state, list) and dataclasses.is_dataclass(item):
        # A frozen dataclass with slots is pickled as the list of its fields' values.
        fields = dataclasses.fields(item)
        if len(fields) == len(state):
            state = {field.name: value for field, value in zip(fields, state, strict=True)}
            return _without(state, names)
    return state


def _without(attributes: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in names}
