"""Kinds of objects: stateful ones, those of the user's own code; and which variables a function reaches."""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard, TypeVar

import cloudpickle
import numpy as np
import torch
import wrapt
from torch import nn

from parallelize.cluster.code_owner import is_user_module

PROXY: Any = wrapt.CallableObjectProxy.__base__  # of decorated functions
CODE: tuple[Any, ...] = (types.FunctionType, types.BuiltinFunctionType, type, PROXY)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
# NumPy's new generators draw from a bit generator, which has their state.
GENERATORS = (torch.Generator, random.Random, np.random.BitGenerator, np.random.RandomState)
_STATEFUL = (nn.Module, *GENERATORS)
T = TypeVar("T")


def is_a(item: object, kinds: type[T] | tuple[type[T], ...]) -> TypeGuard[T]:
    """Whether an object's type is one of `kinds`.

    isinstance would ask the object's `__class__`, which a proxy may not have.
    """
    return issubclass(type(item), kinds)


def is_stateful(item: object) -> bool:
    """Whether an object has a state to read and write: state_dict, or that of a generator.

    What is iterated is left out: the position in a dataset is not the result of a call.
    """
    kind = type(item)
    has_state = hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")
    return issubclass(kind, _STATEFUL) or (has_state and not hasattr(kind, "__iter__"))


def namespace(module: object) -> Mapping[str, Any]:
    """Return a module's variables; getattr would import a lazy module, which may fail."""
    try:
        found: Mapping[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return found


def free_variables(function: types.FunctionType) -> dict[str, object]:
    """Return the variables of a function's closure."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            found[name] = cell.cell_contents
    return found


def variables_of(code: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, name, value) of each variable that a function mentions or a class has.

    The owner is a module, class or function, or None for a closure's variables and a class's bases.
    `config.lr` of a user module `config` is one of them.
    """
    if is_a(code, type):
        yield from ((None, "", base) for base in code.__bases__)
        for name, value in list(vars(code).items()):
            if is_a(value, types.FunctionType) or not name.startswith("__"):
                yield code, name, value
    if is_a(code, types.FunctionType):
        yield from ((None, name, value) for name, value in free_variables(code).items())
        yield from _global_variables(code)
        for name in ("__defaults__", "__kwdefaults__"):
            value = getattr(code, name) or ()
            if any(map(is_stateful, value.values() if is_a(value, dict) else value)):
                yield code, name, value


def _global_variables(function: types.FunctionType) -> Iterator[tuple[Any, str, Any]]:
    attributes = _names(function.__code__)
    names = cloudpickle.cloudpickle._extract_code_globals(function.__code__).keys()
    pending, seen = [function.__globals__], set[int]()
    while pending:
        variables = pending.pop(0)
        seen.add(id(variables))
        for name in sorted(names & variables.keys()):
            value = variables[name]
            yield sys.modules.get(variables.get("__name__", "")), name, value
            is_own = is_a(value, types.ModuleType) and is_user_module(value.__name__)
            if is_own and id(vars(value)) not in seen:
                pending.append(vars(value))
        names = attributes  # of the modules among them


def _names(code: types.CodeType) -> set[str]:
    """Return the names of variables and attributes that code mentions, also in functions inside."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*inner)
