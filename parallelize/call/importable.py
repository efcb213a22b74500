"""Which modules another process imports, and what it finds there by "package.module:name".

importable      pickled by name: the reader imports the module
by value        everything else: `__main__`, a module that the reader lacks, a notebook's cell
"""

from __future__ import annotations

import contextlib
import pkgutil
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import cloudpickle


def leads_to(path: str, value: object) -> bool:
    """Whether a path, "package.module:name.attribute", leads to an object."""
    try:
        return pkgutil.resolve_name(path) is value
    except (AttributeError, ImportError, ValueError):
        return False


def is_importable(module: types.ModuleType | None) -> bool:
    """Whether another process with the same sys.path would import the same module by its name.

    False for `__main__`, and for a module that is still being imported: every worker that imports
    the module would repeat a call at its top level.
    """
    spec = getattr(module, "__spec__", None)
    if spec is None or module is sys.modules["__main__"] or getattr(spec, "_initializing", False):
        return False
    if spec.name in cloudpickle.list_registry_pickle_by_value():
        return False
    # A module is as importable as the package that it lies in.
    package = sys.modules.get(spec.name.rpartition(".")[0])
    if "." in spec.name and not is_importable(package):
        return False
    # importlib.util.find_spec would return the spec of the loaded module.
    search_path = getattr(package, "__path__", None)
    for finder in sys.meta_path:
        new_spec = finder.find_spec(spec.name, search_path)
        if new_spec is not None:
            return bool(new_spec.origin == spec.origin)
    return False


def pickle_by_value_unless_importable(function: Any) -> None:
    """Let cloudpickle pickle a function's module by value if workers cannot import the module."""
    module = sys.modules.get(getattr(function, "__module__", None) or "__main__")
    if module not in (None, sys.modules["__main__"]) and not is_importable(module):
        cloudpickle.register_pickle_by_value(module)


@contextlib.contextmanager
def pickled_by_value(names: Iterable[str]) -> Iterator[None]:
    """Let cloudpickle pickle the code of modules by value in the context.

    Args:
        names: names of modules; those of packages stand for all modules below them.
    """
    with contextlib.ExitStack() as registered:
        for module in [sys.modules[name] for name in names]:
            cloudpickle.register_pickle_by_value(module)
            registered.callback(cloudpickle.unregister_pickle_by_value, module)
        yield
