"""The objects that are pickled in another way than cloudpickle's, in one table: `CASES`.

Each row says which types it is about, how an object is reduced, and which programs need it. The
first row that reduces an object decides; an object that no row reduces is left to cloudpickle.

    reduction       what pickle calls so: a function, the arguments by which the reader calls it,
                    and possibly a state and a function that sets it (see `object.__reduce__`)
    path            "package.module:name.attribute", by which the reader finds an object of its own
    by value        an object that the reader builds anew, from what it consists of
    reader          the process that unpickles
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import io
import pickle
import pkgutil
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import cloudpickle
import numpy as np
import torch
from torch.optim import Optimizer

from parallelize.call.arrays import Mappings, reduce_array, reduce_memmap
from parallelize.call.importable import is_importable, leads_to
from parallelize.call.reachable import PROXY, is_a, namespace
from parallelize.cluster.code_owner import CodeOwner, is_user_module, owner_of_module

Reduction = tuple[Any, ...]


@dataclass(frozen=True)
class Reader:
    """What is known of the process that reads a pickle.

    Args:
        has_same_main: whether it is another rank of this program: its `__main__` has the same
            functions and classes.
        maps_arrays: whether it maps large arrays, which are pickled as tensors for torch.save.
        mappings: the files that this process has mapped, for a reader on the same machine; None:
            arrays of files are pickled by value.
    """

    has_same_main: bool = False
    maps_arrays: bool = False
    mappings: Mappings | None = None


class Context:
    """One pickle that is being made.

    Args:
        reader: the process that reads it.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    @functools.cached_property
    def paths_of_variables(self) -> Mapping[int, str]:
        """Id -> path of the locks, thread-locals and ContextVars that modules have as variables."""
        paths: dict[int, str] = {}
        for name, module in list(sys.modules.items()):
            if name == "__main__" or not is_user_module(name):
                continue
            for variable, value in list(namespace(module).items()):
                if type(value) in _OF_PROCESS:
                    paths.setdefault(id(value), f"{name}:{variable}")
        return paths


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Args:
        needed_by: the programs that need it.
        has_type: whether the row is about objects of a type.
        reduce: returns the reduction of such an object; None: the next rows decide.
    """

    needed_by: str
    has_type: Callable[[type[Any]], bool]
    reduce: Callable[[Any, Context], Reduction | None]


# Functions, classes and modules


class DecoratedFunction(Protocol):
    """A function with @distributed."""

    def reduce_for_worker(self) -> Reduction:
        """Return how the function is pickled for a process that may have another `__main__`."""


def _is_decorated(object_type: type[Any]) -> bool:
    return issubclass(object_type, PROXY) and hasattr(object_type, "reduce_for_worker")


def _reduce_decorated(function: DecoratedFunction, _context: Context) -> Reduction:
    """Reduce a function with @distributed.

    cloudpickle would take it for the plain function, whose class it pretends to have.
    """
    return function.reduce_for_worker()


def _reduce_module(module: types.ModuleType, _context: Context) -> Reduction | None:
    """Reduce a module of a class of its own, such as `torch.backends.cudnn`, by its name."""
    name = module.__name__
    return (pkgutil.resolve_name, (name,)) if leads_to(name, module) else None


def _reduce_operator(operator: Any, _context: Context) -> Reduction | None:
    """Reduce an operator, such as `torch.ops.aten.add`, by its name."""
    path = f"torch.ops.{operator}"
    return (pkgutil.resolve_name, (path,)) if leads_to(path, operator) else None


# Each decorator's function has the one below it as `__wrapped__`; a cycle of them has an end here.
_MAX_DECORATORS = 9
_LRU_CACHED: Any = type(functools.lru_cache(id))


def _is_function_or_class(object_type: type[Any]) -> bool:
    return issubclass(object_type, (types.FunctionType, type, _LRU_CACHED))


def _reduce_code(code: Any, context: Context) -> Reduction | None:
    """Reduce a function or class by a path that cloudpickle does not find.

    These are functions below decorators, and those of `__main__` if the reader has the same.
    """
    module = sys.modules.get(code.__module__)
    if module is None:
        return None
    name = f"{code.__module__}:{getattr(code, '__qualname__', '')}"
    path = _path_below_decorators(code, name)
    is_shared = context.reader.has_same_main and code.__module__ == "__main__"
    is_hidden = path not in (None, name) and is_importable(module)
    if path is None or not (is_shared or is_hidden):
        return None
    return pkgutil.resolve_name, (path,)


def _path_below_decorators(code: Any, name: str) -> str | None:
    """Return the path of a function that decorators may have wrapped; None: there is none."""
    path = name
    for _ in range(_MAX_DECORATORS):
        if leads_to(path, code):
            return path
        path += ".__wrapped__"
    return None


def _reduce_lru_cached(function: Any, context: Context) -> Reduction | None:
    """Reduce a function with functools.lru_cache, whose own reduction is its name.

    The reader begins with an empty cache.
    """
    inner = function.__wrapped__
    module = sys.modules.get(getattr(inner, "__module__", ""))
    is_shared = context.reader.has_same_main and inner.__module__ == "__main__"
    if is_importable(module) or is_shared:
        return None
    return _cached_function, (function.cache_parameters(), inner)


def _cached_function(parameters: dict[str, Any], function: Callable[..., Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_code_object(code: types.CodeType, _context: Context) -> Reduction:
    """Reduce the code of a function with its file, which tracebacks name.

    cloudpickle leaves the file out (`_code_reduce`), so that equal functions have equal pickles.
    """
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    index = arguments.index("<dynamic-code>")
    return make, (*arguments[:index], code.co_filename, *arguments[index + 1 :])


# Objects that a process has once


_REENTRANT_LOCK: type[Any] = type(threading.RLock())
LOCKS: tuple[type[Any], ...] = (type(threading.Lock()), _REENTRANT_LOCK, threading.Condition)
"""Types of locks, which make the threads of one process wait for each other."""
# A copy would be another object: a module of the user and the script would share it no more.
_OF_PROCESS = (*LOCKS, threading.local, contextvars.ContextVar)


def _reduce_object_of_process(unique: Any, context: Context) -> Reduction:
    """Reduce a lock, a thread-local or a ContextVar.

    A module of the reader may have it as a variable. Else the reader gets a new one: a lock that is
    free, and a variable with the value that it has here.
    """
    path = context.paths_of_variables.get(id(unique))
    if path is not None and not is_importable(sys.modules.get(path.partition(":")[0])):
        path = None
    object_type = type(unique)
    if object_type is threading.Condition:
        return _find_or_make, (path, object_type, unique._lock)
    if object_type is threading.local:
        attributes = dict(vars(unique))
        return _find_or_make, (path, object_type), attributes, None, None, _set_attributes
    if object_type is contextvars.ContextVar:
        return _reduce_context_var(unique, path)
    is_reentrant = object_type is _REENTRANT_LOCK
    return _find_or_make, (path, threading.RLock if is_reentrant else threading.Lock)


def _reduce_context_var(variable: contextvars.ContextVar[Any], path: str | None) -> Reduction:
    """Reduce a ContextVar with its default, and with the value that it has in this context."""
    options: dict[str, Any] = {}
    # A ContextVar does not tell its default, but a context in which nothing is set returns it.
    with contextlib.suppress(LookupError):
        options["default"] = contextvars.Context().run(variable.get)
    make: Any = functools.partial(contextvars.ContextVar, variable.name, **options)
    if variable not in contextvars.copy_context():
        return _find_or_make, (path, make)
    value = (variable.get(),)
    return _find_or_make, (path, make), value, None, None, _set_context_var


def _set_context_var(variable: contextvars.ContextVar[Any], value: tuple[Any]) -> None:
    variable.set(*value)


def _find_or_make(path: str | None, make: Callable[..., Any], *arguments: Any) -> Any:
    """Return the object that this process has under a path, or else a new one.

    The reader calls it. An object of another type under the path is not taken: the reader's module
    may be another version of the sender's.

    Args:
        path: of a variable of a module; None: no module has the object.
        make: makes a new object.
        *arguments: of `make`.
    """
    new = make(*arguments)
    if path is not None:
        with contextlib.suppress(AttributeError, ImportError):
            present = pkgutil.resolve_name(path)
            if type(present) is type(new):
                return present
    return new


# Modules whose classes use locks to share objects between threads.
_OF_THREADS = frozenset({"concurrent", "logging", "queue", "threading"})


def _may_hold_locks(object_type: type[Any]) -> bool:
    """Whether objects of a type may have a lock of a library, and are pickled as any object."""
    if issubclass(object_type, type) or object_type in cloudpickle.Pickler.dispatch_table:
        return False
    for name in ("__reduce_ex__", "__reduce__", "__getstate__"):
        if getattr(object_type, name) is not getattr(object, name):
            return False
    if is_user_module(object_type.__module__):
        packages = {base.__module__.partition(".")[0] for base in object_type.__mro__}
        return not packages.isdisjoint(_OF_THREADS)
    # An Event, Semaphore or Barrier gets new locks, as cached_property does.
    if object_type.__module__ == "threading":
        return issubclass(object_type, threading.Thread)
    # What this package sends has values of the user, which are looked at by themselves.
    package = object_type.__module__.partition(".")[0]
    return package not in ("functools", __name__.partition(".")[0])


def _refuse_with_lock(holder: Any, _context: Context) -> None:
    """Refuse an object of a library that has a lock: a thread, a handler of logging, a queue.

    It belongs to the threads of this process: a copy would look alive, and do nothing.

    Raises:
        TypeError: the object has a lock.
    """
    # It may have no __dict__, but __slots__.
    for value in namespace(holder).values():
        if is_a(value, (*LOCKS, threading.Event)):
            raise TypeError(
                f"cannot pickle {type(holder).__name__!r} object: its lock is of this process"
            )


def _reduce_weak_dictionary(dictionary: Any, _context: Context) -> Reduction:
    """Reduce a weak dictionary with its entries; the reader drops those that nothing else has.

    functools.singledispatch has one, too. Its weak references cannot be pickled.
    """
    return type(dictionary), (), None, None, iter(list(dictionary.items()))


# Objects of libraries


def _is_of_library(object_type: type[Any]) -> bool:
    """Whether a type is an installed package's; objects of NumPy are pickled by NumPy."""
    module = object_type.__module__
    if owner_of_module(module) is not CodeOwner.INSTALLED:
        return False
    return module.partition(".")[0] != "numpy"


def _reduce_by_path_in_library(instance: object, _context: Context) -> Reduction | None:
    """Reduce an object that its library makes on import, such as `loguru.logger`, by its path.

    Only if it cannot be pickled: a copy of another one has what the program has set.
    """
    object_type = type(instance)
    library = object_type.__module__.partition(".")[0]
    variables = dict(namespace(sys.modules.get(library)))
    names = [name for name, value in variables.items() if value is instance]
    if not names:
        return None
    with contextlib.suppress(Exception):  # a library's __reduce__ may raise anything
        cloudpickle.dumps(instance)
        return None
    return _from_library, (f"{library}:{names[0]}", object_type)


def _from_library(path: str, object_type: type) -> object:
    """Return the object that a library has made in this process.

    Raises:
        TypeError: the library has made an object of another type, as by another environment.
    """
    instance = pkgutil.resolve_name(path)
    if type(instance) is not object_type:
        raise TypeError(
            f"{path} is a {type(instance).__name__} in a worker: make the {object_type.__name__} "
            "in the function"
        )
    return instance


def _refuse_open_file(file: io.TextIOWrapper, _context: Context) -> None:
    """Refuse an open file: cloudpickle would send a copy of its content.

    Raises:
        TypeError: the file is not one of the standard streams.
    """
    if file not in (sys.stdout, sys.stderr):
        raise TypeError(f"cannot pickle {type(file).__name__!r} object: an open file")


def _drops_attributes(object_type: type[Any]) -> bool:
    """Whether a type is an optimizer's, which does not say itself how it is pickled."""
    return issubclass(object_type, Optimizer) and object_type.__getstate__ is Optimizer.__getstate__


def _reduce_optimizer(optimizer: Optimizer, _context: Context) -> Reduction:
    """Reduce an optimizer with the attributes of its subclass.

    `Optimizer.__getstate__` drops them. Hooks, and `step` as a scheduler has replaced it, belong to
    this process.
    """
    attributes = dict(vars(optimizer))
    for name in vars(optimizer):
        if name == "step" or name.endswith(("pre_hooks", "post_hooks")):
            del attributes[name]
    return object.__new__, (type(optimizer),), attributes


def _reduce_generator(generator: torch.Generator, _context: Context) -> Reduction | None:
    """Reduce a generator of an accelerator for the reader's own device, which `load` sets."""
    kind = torch.Generator
    if generator.device.type == "cpu":
        return None
    state = generator.get_state()
    return kind, (generator.device.type,), state, None, None, kind.set_state


def _reduce_numpy_array(array: Any, context: Context) -> Reduction | None:
    """Reduce an array of a file by the file's path, and a large one in memory by a tensor."""
    reader = context.reader
    if reader.mappings is not None:
        by_path = reduce_memmap(array, reader.mappings)
        if by_path is not None:
            return by_path
    return reduce_array(array) if reader.maps_arrays else None


# Objects whose own reduction cannot be unpickled


def _takes_other_arguments(object_type: type[Any]) -> bool:
    """Whether a type is an exception's, which does not say itself how it is pickled."""
    if not issubclass(object_type, BaseException):
        return False
    is_same: bool = object_type.__reduce__ is _builtin_base(object_type).__reduce__
    return is_same


def _builtin_base(error_type: type[BaseException]) -> Any:
    """Return the nearest built-in base of an exception class, such as OSError with its filename."""
    for base in error_type.__mro__:
        if base.__module__ == "builtins":
            return base
    return BaseException


def _reduce_exception(error: BaseException, _context: Context) -> Reduction:
    """Reduce an exception whose `__init__` may take other arguments than its `args`."""
    reduction: Any = error.__reduce__()
    return _make_exception, (type(error), reduction[1]), *reduction[2:]


def _make_exception(error_type: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Return an exception that only its built-in base has initialized."""
    base = _builtin_base(error_type)
    error: BaseException = base.__new__(error_type, *args)
    base.__init__(error, *args)
    return error


def _has_getattr(object_type: type[Any]) -> bool:
    """Whether objects of a type answer a look at any attribute, `__setstate__` included."""
    is_class = issubclass(object_type, type)
    has_setstate = hasattr(object_type, "__setstate__")
    return hasattr(object_type, "__getattr__") and not is_class and not has_setstate


def _reduce_with_getattr(instance: Any, _context: Context) -> Reduction:
    """Reduce an object with `__getattr__` so that it gets its attributes without a call of that.

    pickle would ask for `__setstate__`, and `__getattr__` may need attributes that are not set yet.
    """
    reduction: Any = instance.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if len(reduction) < 3 or type(reduction[2]) is not dict:
        return tuple(reduction)
    items = (*reduction, None, None)[3:5]
    return *reduction[:3], *items, _set_attributes


def _set_attributes(instance: Any, attributes: dict[str, Any]) -> None:
    vars(instance).update(attributes)


# The table


def _is_one_of(*types_of_row: type[Any]) -> Callable[[type[Any]], bool]:
    """Return whether a type is one of these, and not of their subclasses."""
    return types_of_row.__contains__


def _extends(base: type[Any]) -> Callable[[type[Any]], bool]:
    """Return whether a type is a class or one of its subclasses."""
    return lambda object_type: issubclass(object_type, base)


def _is_of_module_class(object_type: type[Any]) -> bool:
    """Whether a type is a class of modules, such as those by which torch replaces modules."""
    return issubclass(object_type, types.ModuleType) and object_type is not types.ModuleType


def _is_operator(object_type: type[Any]) -> bool:
    return object_type.__module__ == "torch._ops"


CASES: tuple[Case, ...] = (
    Case("functions with @distributed that call each other", _is_decorated, _reduce_decorated),
    Case("torch.backends.cudnn, torch.ops.aten", _is_of_module_class, _reduce_module),
    Case("torch.ops.aten.add, custom operators", _is_operator, _reduce_operator),
    Case("train.__wrapped__, ranks of one script", _is_function_or_class, _reduce_code),
    Case("loguru.logger, fsspec, wandb", _is_of_library, _reduce_by_path_in_library),
    Case("lru_cache in a script", _is_one_of(_LRU_CACHED), _reduce_lru_cached),
    Case("tracebacks, hang reports", _is_one_of(types.CodeType), _reduce_code_object),
    Case("cached_property, ContextVar", _is_one_of(*_OF_PROCESS), _reduce_object_of_process),
    Case("logging handlers, threads, queues", _may_hold_locks, _refuse_with_lock),
    Case(
        "singledispatch, registries of a script",
        _is_one_of(weakref.WeakKeyDictionary, weakref.WeakValueDictionary),
        _reduce_weak_dictionary,
    ),
    Case("log files that are open", _extends(io.TextIOWrapper), _refuse_open_file),
    Case("optimizers of users: SAM, Lookahead", _drops_attributes, _reduce_optimizer),
    Case("generators of CUDA", _is_one_of(torch.Generator), _reduce_generator),
    Case("large arrays, memmaps of a dataset", _extends(np.ndarray), _reduce_numpy_array),
    Case("exceptions of users", _takes_other_arguments, _reduce_exception),
    Case("OmegaConf, configurations by attribute", _has_getattr, _reduce_with_getattr),
)


def cases_of(object_type: type[Any]) -> tuple[Case, ...]:
    """Return the rows that are about objects of a type, in the order of the table."""
    return tuple(case for case in CASES if case.has_type(object_type))
