"""What a function refers to, and what kinds of objects there are: stateful ones, those of the user's own code."""

from __future__ import annotations

import contextlib
import functools
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

from parallelize.config.layout import Epochs

__all__ = [
    "CODE",
    "CONTAINERS",
    "PROXY",
    "free_variables",
    "global_variables",
    "is_a",
    "is_stateful",
    "is_user_code",
    "namespace",
]

CODE: tuple[Any, ...] = (types.FunctionType, types.BuiltinFunctionType, type)
PROXY: Any = wrapt.CallableObjectProxy.__base__  # of decorated functions
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_STATEFUL = (nn.Module, Epochs, torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
T = TypeVar("T")


def is_a(item: object, kinds: type[T] | tuple[type[T], ...]) -> TypeGuard[T]:
    """Whether an object's type is one of `kinds`; isinstance would ask its `__class__`, which a proxy may not have."""
    return issubclass(type(item), kinds)


def is_stateful(item: object) -> bool:
    """Whether an object has a state to read and write: state_dict and load_state_dict, or that of a generator.

    What is iterated is left out: the position in a dataset is not the result of a call.
    """
    kind = type(item)
    has_state = hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")
    return issubclass(kind, _STATEFUL) or (has_state and not hasattr(kind, "__iter__"))


@functools.cache
def is_user_code(module: object) -> bool:
    """Whether the module with this name is the user's own: not Python's, not installed, not this package."""
    if not isinstance(module, str):  # built-in functions have none
        return False
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("", "parallelize"):
        return False
    # Modules in compiled code, such as those in torch._C, have no file of their own.
    paths = (namespace(sys.modules.get(name)).get("__file__") for name in (module, top))
    path = next(filter(None, paths), "")
    return "site-packages" not in path and "dist-packages" not in path


def namespace(module: object) -> Mapping[str, Any]:
    """Return a module's variables; getattr would import a lazy module, which may fail."""
    try:
        found: Mapping[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return found


def free_variables(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of the variables of a function's closure."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            yield name, cell.cell_contents


def global_variables(function: types.FunctionType) -> Iterator[tuple[str, object, str]]:
    """Yield (name, value, module) of the global variables that a function mentions.

    `state.model` of a user module `state` is one of them, with the module "state".
    """
    names = _names(function.__code__)
    found = cloudpickle.cloudpickle._extract_code_globals(function.__code__)  # without names of attributes
    for name in sorted(found.keys() & function.__globals__.keys()):
        value = function.__globals__[name]
        yield name, value, function.__globals__.get("__name__", "")
        yield from _module_variables(name, value, names, seen=())


def _module_variables(
    name: str, module: object, names: set[str], *, seen: tuple[object, ...]
) -> Iterator[tuple[str, object, str]]:
    """Yield the variables of a user module with one of the names, and of its submodules."""
    if not isinstance(module, types.ModuleType) or module in seen or not is_user_code(module.__name__):
        return
    for attribute in sorted(names & vars(module).keys()):
        value = vars(module)[attribute]
        yield f"{name}.{attribute}", value, module.__name__
        yield from _module_variables(f"{name}.{attribute}", value, names, seen=(*seen, module))


def _names(code: types.CodeType) -> set[str]:
    """Return the names of global variables and attributes that code mentions, also in functions inside it."""
    return set(code.co_names).union(*(_names(each) for each in code.co_consts if isinstance(each, types.CodeType)))
