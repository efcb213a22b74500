"""Models and optimizers that a function reaches through modules which the workers import.

Importing a module again makes new objects: other weights than the caller's. So the caller's global variables and class
attributes that hold models or optimizers are sent along, and replace those that the import has made.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

from parallelize.call.reachable import global_variables, holds_state, is_a, is_user_code

__all__ = ["Binding", "find_imported_state", "install_imported_state"]

Binding = tuple[str, str]  # (module, dotted name in it)


def find_imported_state(
    reached: Iterable[tuple[str, object]], *, is_importable: Callable[[types.ModuleType], bool]
) -> dict[Binding, object]:
    """Return the reachable variables of importable modules that hold models or optimizers.

    Args:
        reached: (name, object): what `walk` yields for the function and its arguments.
        is_importable: whether a worker can import a module.

    Returns:
        (module, dotted name) -> value.
    """
    imports = functools.cache(lambda name: name in sys.modules and is_importable(sys.modules[name]))
    found: dict[Binding, object] = {}
    for _, item in reached:
        for module, name, value in _variables(item):
            is_data = not is_a(value, (type, types.ModuleType, types.BuiltinFunctionType))
            if (module, name) not in found and is_data and imports(module) and holds_state(value):
                found[module, name] = value
    return found


def _variables(item: object) -> Iterator[tuple[str, str, object]]:
    """Yield (module, dotted name, value): the globals and defaults of a function, the attributes of a class."""
    if isinstance(item, types.FunctionType):
        for name, value, module in global_variables(item):
            yield module, name.rpartition(".")[2], value
        if "<locals>" not in item.__qualname__:
            for attribute in ("__defaults__", "__kwdefaults__"):
                yield item.__module__, f"{item.__qualname__}.{attribute}", getattr(item, attribute)
    elif isinstance(item, type) and is_user_code(item.__module__) and "<locals>" not in item.__qualname__:
        for name, value in vars(item).items():
            if not (name.startswith("__") or is_a(value, (types.FunctionType, classmethod, staticmethod))):
                yield item.__module__, f"{item.__qualname__}.{name}", value


def install_imported_state(state: Mapping[Binding, object]) -> None:
    """Set the variables of modules, which are imported, to the caller's values."""
    for (module, qualname), value in state.items():
        *path, name = qualname.split(".")
        owner: Any = import_module(module)
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, name, value)
