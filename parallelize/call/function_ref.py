"""Reference to a function for another process: by module and name if it can be imported there, else by value."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import cloudpickle

from parallelize.errors import ConfigError

__all__ = ["FunctionRef", "check_is_plain_function", "is_importable", "pickling_module_by_value"]


@dataclass(frozen=True)
class FunctionRef:
    """A reference to a function: its module and qualified name, or the function itself if workers cannot import it.

    The name of a decorated function refers to its wrapper; `depth` is the number of `__wrapped__` links to follow.
    """

    module: str | None
    qualname: str
    depth: int = 0
    value: Callable[..., Any] | None = None

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionRef:
        """Return a reference by name if importing that name returns this same object, else a reference by value."""
        module, qualname = _module_of(function), getattr(function, "__qualname__", "")
        if module is not None and is_importable(module):
            for depth, candidate in enumerate(_unwrap_chain(module, qualname)):
                if candidate is function:
                    return cls(module.__name__, qualname, depth)
        return cls(None, qualname, value=function)

    def resolve(self) -> Callable[..., Any]:
        """Return the function; imports the module of a reference by name."""
        if self.module is None:
            assert self.value is not None
            return self.value
        function: Callable[..., Any] = list(_unwrap_chain(import_module(self.module), self.qualname))[self.depth]
        return function


def _module_of(function: Callable[..., Any]) -> ModuleType | None:
    return sys.modules.get(getattr(function, "__module__", None) or "")


def is_importable(module: ModuleType) -> bool:
    """Whether another process with the same sys.path would import the same module under this name.

    False for `__main__`, and for a module that is still being imported: every worker that imports the module would
    repeat a call at its top level.
    """
    current, spec, path = getattr(module, "__spec__", None), None, None
    if current is None or module.__name__ == "__main__":
        return False
    parts = current.name.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        spec = _find_spec(name, path)
        if spec is None or _is_being_imported(name):
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin == current.origin


def _is_being_imported(name: str) -> bool:
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)


def _find_spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Return a module's spec from the finders; importlib.util.find_spec would return the spec of the loaded module."""
    finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next(filter(None, (finder.find_spec(name, path) for finder in finders)), None)


_by_value_lock = threading.Lock()  # all threads share cloudpickle's registry of modules


@contextlib.contextmanager
def pickling_module_by_value(function: Callable[..., Any]) -> Iterator[None]:
    """Make cloudpickle pickle the globals of a function's module by value if workers cannot import the module."""
    module = _module_of(function)
    if module is None or module.__name__ == "__main__" or is_importable(module):  # cloudpickle handles __main__
        yield
        return
    with _by_value_lock:
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            cloudpickle.unregister_pickle_by_value(module)


def _unwrap_chain(module: object, qualname: str) -> Iterator[Any]:
    """Yield the object that a dotted name refers to, then its `__wrapped__`, and so on."""
    item: Any = module
    for part in qualname.split("."):
        item = getattr(item, part, None)
    while item is not None:
        yield item
        item = getattr(item, "__wrapped__", None)


def check_is_plain_function(function: object) -> None:
    """Raise ConfigError for an object whose call returns no value from another process: a class, a generator, ..."""
    inner = inspect.unwrap(function) if callable(function) else function
    inner = inner.__func__ if isinstance(inner, (classmethod, staticmethod)) else inner
    kinds = {
        "an async function": inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner),
        "a generator function": inspect.isgeneratorfunction(inner),
        "a class": inspect.isclass(inner),
        f"a {type(inner).__name__}": not callable(inner),
    }
    for kind, is_so in kinds.items():
        if is_so:
            raise ConfigError(
                f"@distributed on {kind}: {getattr(inner, '__qualname__', inner)!r}",
                why="a call must run to completion in another process and return one value",
                fix="decorate a plain function (def) that returns its result",
            )
