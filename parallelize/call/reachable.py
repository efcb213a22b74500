"""Kinds of objects, such as stateful ones; and which variables a function or class reaches."""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard, TypeVar

import cloudpickle
import numpy as np
import torch
import wrapt
from torch import nn

from parallelize.cluster.code_owner import is_user_module

PROXY: Any = wrapt.CallableObjectProxy.__base__
"""The class of decorated functions."""
CODE: tuple[Any, ...] = (types.FunctionType, types.BuiltinFunctionType, type, PROXY)
"""Types of functions and classes."""
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
"""Types of what consists of items, which are named by their key or position."""
# NumPy's new generators draw from a bit generator, which has their state.
GENERATORS = (torch.Generator, random.Random, np.random.BitGenerator, np.random.RandomState)
"""Types of generators of random numbers."""
_STATEFUL = (nn.Module, *GENERATORS)
T = TypeVar("T")


class Variable(NamedTuple):
    """A variable that code reaches.

    Args:
        owner: the module, class or function that has it; None: a closure's, or a base of a class.
        name: its name; "" of a base.
        value: what it has in this process.
    """

    owner: Any
    name: str
    value: Any


def is_a(item: object, types_asked: type[T] | tuple[type[T], ...]) -> TypeGuard[T]:
    """Whether an object's own type is one of these types, or a subclass of one.

    isinstance would also ask the object's `__class__`: a proxy answers for what it wraps, or
    raises.
    """
    return issubclass(type(item), types_asked)


def is_stateful(item: object) -> bool:
    """Whether an object has a state to read and write: state_dict, or that of a generator.

    What is iterated is left out: the position in a dataset is not the result of a call.
    """
    item_type = type(item)
    if issubclass(item_type, _STATEFUL):
        return True
    # Asked of the type: an instance may answer a look at any attribute.
    has_state = hasattr(item_type, "state_dict") and hasattr(item_type, "load_state_dict")
    return has_state and not hasattr(item_type, "__iter__")


def namespace(module: object) -> Mapping[str, Any]:
    """Return a module's variables; getattr would import a lazy module, which may fail."""
    try:
        variables: Mapping[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return variables


def free_variables(function: types.FunctionType) -> dict[str, object]:
    """Return the variables of a function's closure."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            values[name] = cell.cell_contents
    return values


def variables_of(code: Any) -> Iterator[Variable]:
    """Yield each variable that a function mentions or a class has.

    `config.lr` of a user module `config` is one of them. Methods are not searched here: they are
    functions, which the class has as variables.
    """
    if is_a(code, type):
        for base in code.__bases__:
            yield Variable(None, "", base)
        for name, value in list(vars(code).items()):
            if is_a(value, types.FunctionType) or not name.startswith("__"):
                yield Variable(code, name, value)
    if is_a(code, types.FunctionType):
        for name, value in free_variables(code).items():
            yield Variable(None, name, value)
        yield from _global_variables(code)
        yield from _stateful_defaults(code)


def _stateful_defaults(function: types.FunctionType) -> Iterator[Variable]:
    """Yield the defaults of a function's parameters if one of them has a state."""
    positional = function.__defaults__ or ()
    if any(map(is_stateful, positional)):
        yield Variable(function, "__defaults__", positional)
    by_name = function.__kwdefaults__ or {}
    if any(map(is_stateful, by_name.values())):
        yield Variable(function, "__kwdefaults__", by_name)


def _global_variables(function: types.FunctionType) -> Iterator[Variable]:
    """Yield the variables of modules that a function mentions, as `lr` or as `config.lr`.

    Its code tells names of attributes, but not whose. So all of them are looked up in the user's
    modules that it mentions, and in those that are found there.
    """
    attributes = _names_in(function.__code__)
    # At first the names of global variables only: an attribute may have the name of one of them.
    names = cloudpickle.cloudpickle._extract_code_globals(function.__code__).keys()
    pending = [function.__globals__]
    # Ids of the modules' dictionaries: modules may import each other.
    searched: set[int] = set()
    while pending:
        variables = pending.pop(0)
        searched.add(id(variables))
        module = sys.modules.get(variables.get("__name__", ""))
        for name in sorted(names & variables.keys()):
            value = variables[name]
            yield Variable(module, name, value)
            is_users = is_a(value, types.ModuleType) and is_user_module(value.__name__)
            if is_users and id(vars(value)) not in searched:
                pending.append(vars(value))
        names = attributes


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names of variables and attributes that code mentions, also in functions inside."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names
